package steptable

import (
	"cmp"
	"slices"
)

// fit is a table's four parts (see the package's comment), in seconds.
type fit struct {
	dense     line  // by tokens
	attention sheet // of a piece's token, by the piece's tokens and position
	draws     line  // by their number
	rest      sheet // of decodes, by batch and mean context
	noise     line  // spread as a part of the time, by the time
}

func (f *fit) seconds(l *Load) float64 {
	tokens, draws := l.Decodes, l.Decodes
	s := 0.0
	for i := range l.Pieces {
		p := &l.Pieces[i]
		tokens += p.Tokens
		draws += p.Draws
		s += f.piece(float64(p.Tokens), float64(p.Position))
	}
	if tokens == 0 {
		return 0
	}
	s += f.dense.at(float64(tokens)) + f.draws.at(float64(draws))
	if b := float64(l.Decodes); b > 0 {
		s += f.rest.at(b, float64(l.Context)/b) * max(1, b/f.rest.last())
	}
	return max(s, 0)
}

// piece is the attention of n tokens after some others. Each token of a larger piece than any that
// was measured costs as much as one of the largest at the position where it sees as many others.
func (f *fit) piece(n, at float64) float64 {
	of := n
	if len(f.attention.x) > 0 {
		of = min(n, f.attention.last())
	}
	return n * f.attention.at(of, at+(n-of)/2)
}

// Fit checks the measured steps and derives from them what Step needs.
func (t *Table) Fit() error {
	if err := t.validate(); err != nil {
		return err
	}
	prefill, decode := slices.Clone(t.Prefill), slices.Clone(t.Decode)
	slices.SortFunc(prefill, func(a, b Prefill) int {
		return cmp.Or(cmp.Compare(a.Tokens, b.Tokens), cmp.Compare(a.Position, b.Position))
	})
	slices.SortFunc(decode, func(a, b Decode) int {
		return cmp.Or(cmp.Compare(a.Batch, b.Batch), cmp.Compare(a.Context, b.Context))
	})
	t.fit = fit{}
	t.fit.prefill(prefill)
	t.fit.decode(decode, t.Undrawn)
	t.fit.spread(t)
	return nil
}

// prefill derives dense and attention.
func (f *fit) prefill(all []Prefill) {
	const most = 0.9 // of a piece at position 0: its attention; beyond it is noise
	for row := range chunks(all, func(p *Prefill) int { return p.Tokens }) {
		if len(row) == 1 {
			continue
		}
		n, base := float64(row[0].Tokens), row[0].Seconds
		// A token sees as many positions of its own piece, on average, as of half a piece before it.
		each := (row[1].Seconds - base) / (n * float64(row[1].Position))
		own := min(max(each, 0)*n/2, most*base/n)
		var cost line
		cost.add(0, own)
		for _, p := range row[1:] {
			cost.add(float64(p.Position), max(own+(p.Seconds-base)/n, 0))
		}
		cost.rise()
		f.attention.add(n, cost)
	}
	for row := range chunks(all, func(p *Prefill) int { return p.Tokens }) {
		n := float64(row[0].Tokens)
		f.dense.add(n, max(row[0].Seconds-f.piece(n, 0), 0))
	}
	f.dense.rise()
}

// decode derives draws and rest. It needs dense.
func (f *fit) decode(all, undrawn []Decode) {
	var whole sheet
	for row := range chunks(all, func(d *Decode) int { return d.Batch }) {
		var l line
		for _, d := range row {
			l.add(float64(d.Context), d.Seconds)
		}
		l.rise()
		whole.add(float64(row[0].Batch), l)
	}
	f.draws.add(0, 0)
	undrawn = slices.Clone(undrawn)
	slices.SortFunc(undrawn, func(a, b Decode) int { return cmp.Compare(a.Batch, b.Batch) })
	for _, d := range undrawn {
		f.draws.add(float64(d.Batch), max(whole.at(float64(d.Batch), float64(d.Context))-d.Seconds, 0))
	}
	f.draws.rise()
	for i, b := range whole.x {
		row := whole.rows[i]
		for j := range row.y {
			row.y[j] -= f.dense.at(b) + f.draws.at(b)
		}
		f.rest.add(b, row)
	}
}

// spread derives noise: for each eighth of the measured times, from short to long, their median spread.
func (f *fit) spread(t *Table) {
	all := t.times()
	slices.SortFunc(all, func(a, b Time) int { return cmp.Compare(a.Seconds, b.Seconds) })
	for some := range slices.Chunk(all, (len(all)+7)/8) {
		at := some[len(some)/2].Seconds
		var parts []float64
		for _, m := range some {
			parts = append(parts, m.Spread/m.Seconds)
		}
		if n := len(f.noise.x); n == 0 || at > f.noise.x[n-1] {
			f.noise.add(at, median(parts))
		}
	}
}

// chunks yields the runs of a sorted list that have the same key.
func chunks[T any](all []T, key func(*T) int) func(func([]T) bool) {
	return func(yield func([]T) bool) {
		for from := 0; from < len(all); {
			to := from + 1
			for to < len(all) && key(&all[to]) == key(&all[from]) {
				to++
			}
			if !yield(all[from:to]) {
				return
			}
			from = to
		}
	}
}
