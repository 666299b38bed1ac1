package cpu

import (
	"math"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// experts are the weights of a layer that is a mixture.
type experts struct {
	router      matrix
	gated, down []matrix
	bias        []float32 // of choosing; nil: there is none

	sharedGated, sharedDown matrix // of every row; without panels: there are none
}

// pick is one expert that a row chose, and its part in the sum.
type pick struct {
	expert int32
	part   float32
	at     int32 // its row among the gathered ones
}

// group is an expert that some rows chose: lo..hi-1 of the gathered ones.
type group struct{ expert, lo, hi int }

// mixing is a mixture's scratch. Gathered rows lie expert by expert, an expert's in the order of
// the batch, so that each expert is read once in a step.
type mixing struct {
	row       int       // padded experts
	choiceRow int       // experts and groups
	ffRow     int       // padded width of an expert
	logits    []float32 // [row of the batch][row]
	choice    []float32 // [row of the batch][choiceRow]: what experts are chosen by, if not logits
	picks     []pick    // [row of the batch][experts a token], by expert
	groups    []group
	counts    []int     // of rows, by expert
	in        []float32 // [gathered][hidden]
	ff        []float32 // [gathered][ffRow]
	out       []float32 // [gathered][hidden]
	shared    []float32 // [row of the batch][hidden]
}

func loadExperts(a *arch.Config, get func(r arch.Role, expert int) kernels.Tensor) *experts {
	e := &experts{router: pack(a.Hidden, source{get(arch.Router, 0), a.Experts})}
	for i := range a.Experts {
		e.gated = append(e.gated, packGated(a.Hidden, a.ExpertWidth, get(arch.Gate, i), get(arch.Up, i)))
		e.down = append(e.down, pack(a.ExpertWidth, source{get(arch.Down, i), a.Hidden}))
	}
	return e
}

// loadShared takes what a SharedMixture has beside a Mixture's.
func (e *experts) loadShared(a *arch.Config, get func(r arch.Role) kernels.Tensor) {
	if a.Routing == arch.SigmoidBias {
		e.bias = vector(get(arch.RouterBias), a.Experts)[:a.Experts]
	}
	if width := a.SharedExperts * a.ExpertWidth; width > 0 {
		e.sharedGated = packGated(a.Hidden, width, get(arch.SharedGate), get(arch.SharedUp))
		e.sharedDown = pack(width, source{get(arch.SharedDown), a.Hidden})
	}
}

func (x *mixing) init(e *experts) {
	x.row, x.ffRow = e.router.outRows(), e.gated[0].panels*guRows
	x.counts = make([]int, len(e.gated))
	x.groups = make([]group, 0, len(e.gated))
}

// grow makes room for n rows of the batch.
func (x *mixing) grow(a *arch.Config, n, hidden int) {
	perToken := a.ExpertsPerToken
	if a.Routing != "" {
		x.choiceRow = a.Experts + a.ExpertGroups
		x.choice = allocFloats(n * x.choiceRow)
		x.shared = allocFloats(n * hidden)
	}
	x.logits = allocFloats(n * x.row)
	x.picks = make([]pick, n*perToken)
	x.in = allocFloats(n * perToken * hidden)
	x.ff = allocFloats(n * perToken * x.ffRow)
	x.out = allocFloats(n * perToken * hidden)
}

// mix computes a mixture for all rows: xn to delta. A row's result depends on the row alone.
func (b *Backend) mix(m *member, e *experts) {
	s, t, x := &b.step, b.team, &b.step.mixing
	n, per := len(s.tokens), b.arch.ExpertsPerToken
	if e.sharedGated.panels > 0 {
		b.gate(m, &e.sharedGated, false)
		t.barrier(m.seat)
		b.project(m, &e.sharedDown, s.ff, s.ffRow, x.shared, s.hidden, n)
		t.barrier(m.seat)
	}
	b.project(m, &e.router, s.xn, s.hidden, x.logits, x.row, n)
	t.barrier(m.seat)
	for r := range t.items(m.seat, n, t.share(n)) {
		logits, picks := x.logits[r*x.row:][:x.row], x.picks[r*per:][:per]
		if b.arch.Routing != "" {
			b.route(e, logits, x.choice[r*x.choiceRow:][:x.choiceRow], picks)
		} else {
			b.choose(logits, picks)
		}
		byNumber(picks)
	}
	t.barrier(m.seat)
	if m.seat == &t.seats[0] {
		x.gather(n * per)
	}
	t.barrier(m.seat)
	for i := range t.items(m.seat, n*per, t.share(n*per)) {
		at := int(x.picks[i].at) * s.hidden
		copy(x.in[at:at+s.hidden], s.xn[i/per*s.hidden:])
	}
	t.barrier(m.seat)
	b.ofGroups(m, &e.gated[0], func(g group, lo, hi int) {
		b.gatePanels(m, &e.gated[g.expert], false, x.in[g.lo*s.hidden:], x.ff[g.lo*x.ffRow:], x.ffRow, g.hi-g.lo, lo, hi)
	})
	t.barrier(m.seat)
	b.ofGroups(m, &e.down[0], func(g group, lo, hi int) {
		e.down[g.expert].mul(b.ops, m.seat, x.ff[g.lo*x.ffRow:], x.ffRow, x.out[g.lo*s.hidden+lo*panelRows:], s.hidden, g.hi-g.lo, lo, hi)
	})
	t.barrier(m.seat)
	for r := range t.items(m.seat, n, t.share(n)) {
		x.sum(s.delta[r*s.hidden:][:s.hidden], x.picks[r*per:][:per])
		if e.sharedGated.panels > 0 {
			for i, v := range x.shared[r*s.hidden:][:s.hidden] {
				s.delta[r*s.hidden+i] += v
			}
		}
	}
}

// ofGroups shares out the panels of all groups' experts, each a matrix like w.
func (b *Backend) ofGroups(m *member, w *matrix, do func(g group, lo, hi int)) {
	t, groups, panels := b.team, b.step.mixing.groups, w.panels
	total := len(groups) * panels
	chunk := min(t.share(total), t.mostPanels(w.k, len(b.step.tokens)))
	for lo, hi := t.claim(m.seat, total, chunk); lo < hi; lo, hi = t.claim(m.seat, total, chunk) {
		for lo < hi {
			g, first := lo/panels, lo%panels
			end := min(panels, first+hi-lo)
			do(groups[g], first, end)
			lo += end - first
			m.progress()
		}
	}
}

// choose fills in the experts of the greatest logits, with their parts of the softmax. Padding
// of logits is overwritten.
func (b *Backend) choose(logits []float32, picks []pick) {
	a := &b.arch
	for i := a.Experts; i < len(logits); i++ {
		logits[i] = float32(math.Inf(-1))
	}
	greatest(logits[:a.Experts], picks)
	total := b.ops.softmax(&logits[0], len(logits))
	if a.NormExperts {
		total = 0
		for _, p := range picks {
			total += logits[p.expert]
		}
	}
	for j := range picks {
		picks[j].part = logits[picks[j].expert] / total
	}
}

// greatest picks those of the greatest values, the greatest first, and the lower in number first among equals.
func greatest(values []float32, picks []pick) {
	last := float32(math.Inf(1))
	for j := range picks {
		// The next below the last one chosen, or equal to it and higher in number. What is no
		// number is chosen last.
		best, prev := -1, -1
		if j > 0 {
			prev = int(picks[j-1].expert)
		}
		for i, v := range values {
			if (v < last || v == last && i > prev) && (best < 0 || v > values[best]) {
				best = i
			}
		}
		if best < 0 {
			best = lacking(picks[:j])
		} else {
			last = values[best]
		}
		picks[j] = pick{expert: int32(best)}
	}
}

// byNumber sorts picks by their experts.
func byNumber(picks []pick) {
	for j := range picks { // few: by insertion
		for i := j; i > 0 && picks[i].expert < picks[i-1].expert; i-- {
			picks[i], picks[i-1] = picks[i-1], picks[i]
		}
	}
}

// lacking is the lowest expert that is not among picks.
func lacking(picks []pick) int {
	for e := 0; ; e++ {
		taken := false
		for _, p := range picks {
			taken = taken || int(p.expert) == e
		}
		if !taken {
			return e
		}
	}
}

// gather gives the first n picks their places among the gathered rows, and lists the groups.
func (x *mixing) gather(n int) {
	clear(x.counts)
	for _, p := range x.picks[:n] {
		x.counts[p.expert]++
	}
	x.groups = x.groups[:0]
	at := 0
	for e, c := range x.counts {
		if c > 0 {
			x.groups = append(x.groups, group{e, at, at + c})
		}
		x.counts[e] = at // where its next row goes
		at += c
	}
	for i := range x.picks[:n] {
		p := &x.picks[i]
		p.at = int32(x.counts[p.expert])
		x.counts[p.expert]++
	}
}

// sum adds up what a row's experts gave, by number.
func (x *mixing) sum(out []float32, picks []pick) {
	clear(out)
	for _, p := range picks {
		from := x.out[int(p.at)*len(out):][:len(out)]
		for i, v := range from {
			out[i] += float32(p.part * v) // rounded before it is added, on every machine
		}
	}
}
