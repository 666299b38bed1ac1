package stepbench

import (
	"math"
	"math/bits"

	"github.com/xpyd/xpyd/internal/steptable"
)

// tile is how many tokens a GPU's projections compute at once.
const tile = 128

// rank says how coarse a grid is that has n, of 1 to most: 0 for powers of four and both ends, 1 for
// powers of two, 2 for what is between them, for few, and past a tile's edge, 3 for quarters; 4 for
// the rest, which no grid has.
func rank(n, most int) int {
	odd := n >> bits.TrailingZeros(uint(n))
	switch {
	case n == 1 || n == most || odd == 1 && bits.TrailingZeros(uint(n))%2 == 0:
		return 0
	case odd == 1:
		return 1
	case odd == 3 || n <= 12 || n > tile && n%tile == 1 && rank(n-1, most) < 3:
		return 2
	case odd == 5 || odd == 7:
		return 3
	}
	return 4
}

// prefill are pieces of one prompt: of every size at its beginning, of some later on.
func (m *meter) prefill() (list []*point) {
	most := min(m.cfg.StepTokens, m.cfg.MaxContext)
	for n := 1; n <= most; n++ {
		r := rank(n, most)
		if r > 3 {
			continue
		}
		list = append(list, piece(n, 0, r))
		last := m.cfg.MaxContext - n
		if r < 2 && last > 0 {
			list = append(list, piece(n, last, r))
			if last >= 8 {
				list = append(list, piece(n, last/4, r+1))
			}
		}
	}
	return list
}

func piece(n, at, rank int) *point {
	return &point{load: steptable.Load{Pieces: []steptable.Piece{{Tokens: n, Position: at}}}, rank: rank}
}

// decode are batches that decode, each at every context that the pool has room for. The shortest is
// measured without draws too.
func (m *meter) decode() (list []*point) {
	most := min(m.cfg.MaxBatch, m.b.Blocks())
	for n := 1; n <= most; n++ {
		r := rank(n, most)
		if r > 2 {
			continue
		}
		last := min(m.cfg.MaxContext, m.b.Blocks()/n*m.blockTokens)
		first := min(leastContext, last)
		undrawn := batch(n, first, r)
		undrawn.undrawn = true
		list = append(list, batch(n, first, r), undrawn)
		for c := 2 * first; c < last; c *= 2 {
			list = append(list, batch(n, c, r+1+bits.TrailingZeros(uint(c/first))%2))
		}
		if last > first {
			list = append(list, batch(n, last, r))
		}
	}
	return list
}

func batch(n, context, rank int) *point {
	p := &point{rank: rank}
	for range n {
		p.add(context)
	}
	return p
}

// add adds a sequence that decodes.
func (p *point) add(context int) {
	p.contexts = append(p.contexts, context)
	p.load.Decodes++
	p.load.Context += context
}

// random is a step to check the table with: of four, one only decodes, one only computes prompts,
// and two do both. Sizes and contexts are as often small as large.
func (m *meter) random(i int) *point {
	p := &point{held: true}
	left := m.b.Blocks()
	fits := func(positions int) bool {
		left -= m.needs(positions)
		return left >= 0
	}
	most := m.cfg.MaxBatch // sequences
	if i%4 != 1 {
		longest := m.between(2*leastContext, m.cfg.MaxContext)
		for range m.between(1, min(most, m.cfg.StepTokens)) {
			c := m.between(leastContext, longest)
			if !fits(c) {
				break
			}
			p.add(c)
		}
	}
	if room := m.cfg.StepTokens - len(p.contexts); i%4 != 0 && room > 0 && left > 0 {
		tokens := m.between(1, room)
		for pieces := min(1+m.rng.IntN(3), most-len(p.contexts)); pieces > 0 && tokens > 0; pieces-- {
			n := min(tokens, m.cfg.MaxContext)
			if pieces > 1 {
				n = m.between(1, n)
			}
			tokens -= n
			at := m.rng.IntN(m.cfg.MaxContext - n + 1)
			if !fits(at + n) {
				break
			}
			p.load.Pieces = append(p.load.Pieces, steptable.Piece{Tokens: n, Position: at, Draws: m.rng.IntN(2)})
		}
	}
	if len(p.contexts)+len(p.load.Pieces) == 0 {
		p.add(leastContext)
	}
	return p
}

// between draws a number from low to high, its logarithm evenly.
func (m *meter) between(low, high int) int {
	return min(int(float64(low)*math.Pow(float64(high+1)/float64(low), m.rng.Float64())), high)
}
