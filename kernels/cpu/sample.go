package cpu

import (
	"math"
	"slices"

	"github.com/xpyd/xpyd/kernels"
)

// sampler draws tokens for one thread. Its buffers are reused.
//
// Filters are cuts: the set they keep is the tokens at or above a (weight, id)
// in the order "weight descending, then id ascending". So top-k keeps exactly
// k tokens, the lower ids among equals, and no vocabulary is ever sorted: a
// histogram over the leading bits of the weights finds the one bin in which
// the cut lies, and only that bin is sorted.
type sampler struct {
	argmax  func(x *float32, n int) int
	softmax func(s *float32, n8 int) float32

	logits []float32 // after bias, ban and penalties; later the weights
	count  []int32   // occurrences in the output, zero between draws
	seen   []bool    // in prompt or output, false between draws
	bin    []int32   // candidates of one bin
	sums   [weightBins]float64
}

// weightBins covers all non-negative floats: sign 0, 8 bits of exponent, 3 of
// mantissa.
const weightBins = 1 << 11

func newSampler(vocab int, o *ops) *sampler {
	return &sampler{
		argmax:  o.argmax,
		softmax: o.softmax,
		logits:  allocFloats(roundUp(vocab, 8)),
		count:   make([]int32, vocab),
		seen:    make([]bool, vocab),
	}
}

// token draws one token from raw logits, which it leaves unchanged. If none that the mask allows is
// above -inf it returns the first of them that is -inf, or NoToken if all are NaN.
func (s *sampler) token(raw []float32, p *kernels.Sample) int32 {
	x := raw
	if shapes(p) {
		x = s.logits[:len(raw)]
		copy(x, raw)
		s.adjust(x, p)
	}
	top := s.argmax(&x[0], len(x))
	if inf := float32(math.Inf(-1)); !(x[top] > inf) { // nothing is
		first := slices.Index(x, inf)
		if p.Mask != nil && first < 0 || !slices.ContainsFunc(raw, func(v float32) bool { return v == v }) {
			return kernels.NoToken
		}
		return int32(max(first, 0))
	}
	if p.Temperature == 0 || p.TopK == 1 {
		return int32(top)
	}
	w := s.weights(x, x[top], p.Temperature)
	keep := everything
	if p.TopK > 0 && p.TopK < len(w) {
		keep = s.topK(w, p.TopK)
	}
	if p.TopP < 1 {
		keep = s.topP(w, keep, float64(p.TopP))
	}
	if p.MinP > keep.weight {
		keep = cut{p.MinP, math.MaxInt32} // the top weight is 1
	}
	return s.pick(w, keep, uniform(p.Seed, p.Choice, p.Position), top)
}

// shapes reports whether the draw changes logits at all.
func shapes(p *kernels.Sample) bool {
	return len(p.Bias) > 0 || len(p.Ban) > 0 || p.Mask != nil || p.Repetition != 1 || p.Presence != 0 || p.Frequency != 0
}

// adjust applies bias, ban, penalties and mask. A zero Repetition means off. What the mask forbids
// becomes NaN, which is never drawn.
func (s *sampler) adjust(x []float32, p *kernels.Sample) {
	s.penalise(x, p)
	if p.Mask == nil {
		return
	}
	nan := float32(math.NaN())
	for w, word := range p.Mask {
		ids := x[32*w : min(32*w+32, len(x))]
		switch word {
		case math.MaxUint32:
		case 0:
			for i := range ids {
				ids[i] = nan
			}
		default:
			for i := range ids {
				if word>>i&1 == 0 {
					ids[i] = nan
				}
			}
		}
	}
}

func (s *sampler) penalise(x []float32, p *kernels.Sample) {
	in := func(id int32) bool { return uint(id) < uint(len(x)) }
	for _, b := range p.Bias {
		if in(b.ID) {
			x[b.ID] += b.Value
		}
	}
	for _, id := range p.Ban {
		if in(id) {
			x[id] = float32(math.Inf(-1))
		}
	}
	if r := p.Repetition; r != 1 && r != 0 {
		for _, ids := range [2][]int32{p.Prompt, p.Output} {
			for _, id := range ids {
				if !in(id) || s.seen[id] {
					continue
				}
				s.seen[id] = true
				if x[id] > 0 {
					x[id] /= r
				} else {
					x[id] *= r
				}
			}
		}
		for _, ids := range [2][]int32{p.Prompt, p.Output} {
			for _, id := range ids {
				if in(id) {
					s.seen[id] = false
				}
			}
		}
	}
	if p.Presence == 0 && p.Frequency == 0 {
		return
	}
	for _, id := range p.Output {
		if in(id) {
			s.count[id]++
		}
	}
	for _, id := range p.Output {
		if in(id) && s.count[id] > 0 {
			x[id] -= float32(p.Frequency * float32(s.count[id]))
			x[id] -= p.Presence
			s.count[id] = 0
		}
	}
}

// weights turns logits into exp((x-max)/temperature): 1 for the top token. A NaN logit
// weighs 0; infinite ones share everything.
func (s *sampler) weights(x []float32, top, temperature float32) []float32 {
	w := s.logits[:roundUp(len(x), 8)]
	inf := float32(math.Inf(1))
	for i, v := range x {
		switch {
		case v == top:
			w[i] = 0
		case v < top:
			w[i] = (v - top) / temperature
		default:
			w[i] = -inf
		}
	}
	for i := len(x); i < len(w); i++ {
		w[i] = -inf
	}
	s.softmax(&w[0], len(w))
	return w[:len(x)]
}

// cut keeps the tokens of greater weight, and those of equal weight with an id
// up to id.
type cut struct {
	weight float32
	id     int32
}

var everything = cut{0, math.MaxInt32}

func (c cut) keeps(w float32, id int) bool {
	return w > c.weight || w == c.weight && int32(id) <= c.id
}

func weightBin(w float32) uint32 { return math.Float32bits(w) >> 20 }

// topK returns the cut that keeps k tokens, 0 < k < len(w).
func (s *sampler) topK(w []float32, k int) cut {
	clear(s.sums[:])
	for _, v := range w {
		s.sums[weightBin(v)]++
	}
	bin, need := weightBins-1, float64(k)
	for s.sums[bin] < need {
		need -= s.sums[bin]
		bin--
	}
	ids := s.sorted(w, everything, uint32(bin))
	id := ids[int(need)-1]
	return cut{w[id], id}
}

// topP returns the cut that keeps the fewest tokens of c whose weights add up
// to at least p of all of c's.
func (s *sampler) topP(w []float32, c cut, p float64) cut {
	clear(s.sums[:])
	for i, v := range w {
		if c.keeps(v, i) {
			s.sums[weightBin(v)] += float64(v)
		}
	}
	var total float64
	for bin := weightBins - 1; bin >= 0; bin-- {
		total += s.sums[bin]
	}
	need, below := p*total, 0.0
	bin := weightBins - 1
	for ; bin > 0 && below+s.sums[bin] < need; bin-- {
		below += s.sums[bin]
	}
	ids := s.sorted(w, c, uint32(bin))
	for _, id := range ids {
		below += float64(w[id])
		if below >= need {
			return cut{w[id], id}
		}
	}
	if len(ids) == 0 { // lost to rounding: everything is needed
		return c
	}
	id := ids[len(ids)-1]
	return cut{w[id], id}
}

// sorted returns the ids of one bin within c, by weight descending, then id.
func (s *sampler) sorted(w []float32, c cut, bin uint32) []int32 {
	s.bin = s.bin[:0]
	for i, v := range w {
		if weightBin(v) == bin && c.keeps(v, i) {
			s.bin = append(s.bin, int32(i))
		}
	}
	slices.SortFunc(s.bin, func(a, b int32) int {
		switch {
		case w[a] > w[b]:
			return -1
		case w[a] < w[b]:
			return 1
		}
		return int(a - b)
	})
	return s.bin
}

// pickBlock is the length of a partial sum in pick.
const pickBlock = 128

// pick inverts the cumulative weights of the kept tokens, in order of id, at
// u of their total. The total is the sum of the sums of blocks of 128 ids.
func (s *sampler) pick(w []float32, c cut, u float64, top int) int32 {
	block := func(lo int) (sum float64) {
		for i := lo; i < min(lo+pickBlock, len(w)); i++ {
			if c.keeps(w[i], i) {
				sum += float64(w[i])
			}
		}
		return sum
	}
	var total float64
	for lo := 0; lo < len(w); lo += pickBlock {
		total += block(lo)
	}
	target, sum := u*total, 0.0
	choice := top
	for lo := 0; lo < len(w); lo += pickBlock {
		next := sum + block(lo)
		if next <= target {
			sum = next
			continue
		}
		for i := lo; i < min(lo+pickBlock, len(w)); i++ {
			if w[i] > 0 && c.keeps(w[i], i) {
				choice = i
				sum += float64(w[i])
				if sum > target {
					break
				}
			}
		}
		break
	}
	return int32(choice)
}
