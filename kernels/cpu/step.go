package cpu

import (
	"errors"
	"fmt"
	"math"

	"github.com/xpyd/xpyd/kernels"
)

// soloMACs is the size of a step, in multiply-adds, below which waking and meeting other
// threads costs more than they save.
const soloMACs = 4 << 20

// headTile is how many rows of logits exist at once.
const headTile = 48

// stepState is the scratch of a step. It grows to the largest step seen and is
// reused, so a steady state allocates nothing. Activations are
// [token of the batch][width], widths padded to 16 or 32 floats with zeros.
type stepState struct {
	step   *kernels.Step
	tokens []token
	items  []item
	finals []final
	states []int // rows whose hidden states are wanted
	fused  bool  // an item's attention needs no other item's rows

	hidden, qkvRow, attRow, ffRow int       // padded widths
	x                             []float32 // residual stream
	xn                            []float32 // normed input of a projection
	qkv                           []float32
	att                           []float32
	ff                            []float32 // silu(gate)*up
	delta                         []float32 // output of o and down
	cosSin, windowCosSin          []float32 // of each row; the latter of windowed layers
	mixing                        mixing
	latents                       latents
	last                          []float32 // [final, then state] normed
	logits                        []float32 // [headTile][padded vocab]

	members []member

	results []kernels.Result
	samples []kernels.Sampled
	prompts []kernels.PromptLogprob
	tops    []kernels.TokenLogprob
	raw     []float32   // Result.Logits
	hiddens [][]float32 // Result.Hidden
}

// token is one row of the batch.
type token struct {
	id  int32
	pos int
}

// item is the unit of the attention phases: some tokens of one sequence, one
// KV head of one rank. Items never share a (rank, block, head), which makes appending safe.
type item struct {
	seq     int
	rank    int
	kv      int // KV head, of the model
	own     int // the same head, among the rank's
	q       int // first of the rank's query heads for it
	queries int // how many
	row, n  int // rows of the batch
	index   int // of the first token in the sequence's part
}

// final is a row whose logits are wanted.
type final struct {
	seq, row, index int
	last            bool // the sequence's last row
	first, end      int  // of its Samples: those drawn here
	tops            int  // first entry in stepState.tops
}

// member is one thread's own scratch.
type member struct {
	scores []float32 // [pvRows][row]
	ropes  []float32 // [row]: scores of rotated keys, of latent attention
	row    int       // floats from row to row
	inv    [4]float32
	gated  []float32 // panels of gate and up before they are combined
	score  scoreArgs
	rope   scoreArgs
	pv     pvArgs
	draw   *sampler
	*seat
	_ [64]byte
}

// gatedPanels is how many panels of gate and up a member takes at a time, at
// most.
const gatedPanels = 32

func (s *stepState) init(b *Backend) {
	a := b.arch
	s.hidden = roundUp(a.Hidden, panelRows)
	s.qkvRow = b.layers[0].qkv.outRows()
	s.attRow = a.Heads * a.HeadDim
	if l := b.layers[0].latent; l != nil {
		s.attRow, s.latents.qRow = a.Heads*a.ValueDim, l.queries.outRows()
	}
	for i := range b.layers {
		l := &b.layers[i]
		s.ffRow = max(s.ffRow, l.gated.panels*guRows)
		if l.experts != nil {
			s.ffRow = max(s.ffRow, l.experts.sharedGated.panels*guRows)
			s.mixing.init(l.experts)
		}
	}
	s.members = make([]member, b.team.size)
	context := min(a.MaxPositions, b.blocks*b.layout.BlockTokens)
	for i := range s.members {
		m := &s.members[i]
		m.seat = &b.team.seats[i]
		m.row = roundUp(context, 16) + 16
		m.scores = allocFloats(b.pvRows * m.row)
		if a.KVRank > 0 {
			m.ropes = allocFloats(m.row)
		}
		m.draw = newSampler(a.Vocab, b.ops)
	}
}

// grow makes room for n tokens.
func (s *stepState) grow(b *Backend, n int) {
	have := len(s.x) / s.hidden
	if n <= have {
		return
	}
	n = max(roundUp(n, 8), min(2*have, 512))
	s.x = allocFloats(n * s.hidden)
	s.xn = allocFloats(n * s.hidden)
	s.delta = allocFloats(n * s.hidden)
	s.qkv = allocFloats(n * s.qkvRow)
	s.att = allocFloats(n * s.attRow)
	s.ff = allocFloats(n * s.ffRow)
	s.cosSin = allocFloats(n * b.arch.Rotated())
	if b.arch.KVRank > 0 {
		s.latents.grow(&b.arch, n)
	}
	if b.arch.Window > 0 {
		s.windowCosSin = allocFloats(n * b.arch.HeadDim)
	}
	if b.arch.Experts > 0 {
		s.mixing.grow(&b.arch, n, s.hidden)
	}
	for i := range s.members {
		s.members[i].gated = allocFloats(max(n, gatedPanels*len(b.ops.gemm[0])) * panelRows)
	}
}

// Step implements kernels.Backend.
func (b *Backend) Step(st *kernels.Step) ([]kernels.Result, error) {
	s := &b.step
	if err := b.plan(st); err != nil {
		return nil, &kernels.Error{Call: "step", Err: err}
	}
	if len(s.tokens) == 0 {
		return s.results, nil
	}
	n := b.team.size
	if len(b.ranks) > 1 {
		if err := b.team.runWatched(b.work); err != nil {
			return nil, &kernels.Error{Call: "step", Err: err}
		}
		s.step = nil
		return s.results, nil
	}
	if len(s.tokens)*b.tokenMACs+len(s.finals)*b.arch.Vocab*b.arch.Hidden < soloMACs {
		n = 1
	}
	b.team.run(n, b.work)
	s.step = nil
	return s.results, nil
}

// Gate implements kernels.Gated.
func (b *Backend) Gate() (kernels.Gate, error) { return kernels.NewHostGate(b.arch.Layers), nil }

// plan checks the step, so that nothing later can go out of bounds, and lays
// out its rows, items and results.
func (b *Backend) plan(st *kernels.Step) error {
	s := &b.step
	if b.team.closed {
		return errors.New("backend is closed")
	}
	if err := b.team.failed(); err != nil {
		return err
	}
	for _, a := range st.Arrivals {
		if _, ok := a.(*kernels.HostGate); !ok {
			return fmt.Errorf("a step cannot wait for a %T", a)
		}
	}
	s.step = st
	s.tokens, s.items, s.finals, s.states = s.tokens[:0], s.items[:0], s.finals[:0], s.states[:0]
	var samples, prompts, tops, raw int
	for i := range st.Seqs {
		q := &st.Seqs[i]
		if err := q.Check(&b.arch, b.layout.BlockTokens, b.blocks); err != nil {
			return fmt.Errorf("sequence %d: %w", i, err)
		}
		b.planSeq(i, q)
		samples += len(q.Samples)
		prompts += len(q.Targets)
		if q.WantLogits {
			raw += b.arch.Vocab
		}
	}
	for i := range s.finals {
		f := &s.finals[i]
		f.tops = tops
		q := &st.Seqs[f.seq]
		if q.Targets != nil && q.Targets[f.index] >= 0 {
			tops += min(max(q.TargetLogprobs, 0), b.arch.Vocab)
		}
		for j := f.first; j < f.end; j++ {
			tops += min(max(q.Samples[j].Logprobs, 0), b.arch.Vocab)
		}
	}
	b.planItems(st)
	s.results = resize(s.results, len(st.Seqs))
	s.samples = resize(s.samples, samples)
	s.prompts = resize(s.prompts, prompts)
	s.tops = resize(s.tops, tops)
	s.raw = resize(s.raw, raw)
	samples, prompts, raw = 0, 0, 0
	for i := range st.Seqs {
		q, r := &st.Seqs[i], &s.results[i]
		*r = kernels.Result{}
		if n := len(q.Samples); n > 0 {
			r.Samples = s.samples[samples : samples+n : samples+n]
			samples += n
		}
		if n := len(q.Targets); n > 0 {
			r.Prompt = s.prompts[prompts : prompts+n : prompts+n]
			clear(r.Prompt)
			prompts += n
		}
		if q.WantLogits {
			r.Logits = s.raw[raw : raw+b.arch.Vocab : raw+b.arch.Vocab]
			raw += b.arch.Vocab
		}
	}
	s.grow(b, len(s.tokens))
	if n := len(s.finals) + len(s.states); n > 0 {
		s.last = growFloats(s.last, n*s.hidden)
	}
	s.hand(b)
	if n := len(s.finals); n > 0 {
		s.logits = growFloats(s.logits, min(n, headTile)*b.head.outRows())
	}
	return nil
}

// hand points results to the hidden states, which finish writes.
func (s *stepState) hand(b *Backend) {
	s.hiddens = resize(s.hiddens, len(s.states))
	for i := range s.hiddens {
		at := (len(s.finals) + i) * s.hidden
		s.hiddens[i] = s.last[at : at+b.arch.Hidden : at+b.arch.Hidden]
	}
	left := s.hiddens
	for i := range s.results {
		q := &s.step.Seqs[i]
		if n := q.Hidden.Rows(len(q.Tokens)); n > 0 {
			s.results[i].Hidden, left = left[:n:n], left[n:]
		}
	}
}

// planSeq appends the rows, finals and states of one sequence.
func (b *Backend) planSeq(seq int, q *kernels.Seq) {
	s := &b.step
	row, n := len(s.tokens), len(q.Tokens)
	for i, id := range q.Tokens {
		s.tokens = append(s.tokens, token{id, q.Pos + i})
		f := final{seq: seq, row: row + i, index: i, last: i == n-1}
		switch {
		case q.Verify:
			f.first, f.end = i, i+1
		case f.last:
			f.end = len(q.Samples)
		}
		if f.end > 0 || f.last && q.WantLogits || len(q.Targets) > 0 && q.Targets[i] >= 0 {
			s.finals = append(s.finals, f)
		}
	}
	for i := n - q.Hidden.Rows(n); i < n; i++ {
		s.states = append(s.states, row+i)
	}
}

// planItems lists the items, those of a rank together: claim gives each rank its own.
func (b *Backend) planItems(st *kernels.Step) {
	s := &b.step
	s.fused = st.OnLayer == nil
	// Runs end where a multiple of align, hence a block, ends.
	align := roundUp(16, b.layout.BlockTokens)
	for rank, p := range b.ranks {
		heads := &p.areas[0]
		queries := b.arch.Heads / len(b.ranks) / heads.Heads
		for seq, row := 0, 0; seq < len(st.Seqs); seq++ {
			q := &st.Seqs[seq]
			n := len(q.Tokens)
			for i := 0; i < n; {
				run := min(align-(q.Pos+i)%align, n-i)
				for own := range heads.Heads {
					s.items = append(s.items, item{seq: seq, rank: rank, kv: heads.FirstHead + own, own: own,
						q: (rank*heads.Heads + own) * queries, queries: queries, row: row + i, n: run, index: i})
				}
				if i += run; i < n {
					s.fused = false
				}
			}
			row += n
		}
	}
	if b.arch.KVRank > 0 {
		s.latents.plan(s.items, b.pvRows)
	}
}

func resize[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n, n+n/2)
	}
	return s[:n]
}

func growFloats(s []float32, n int) []float32 {
	if len(s) < n {
		return allocFloats(n)
	}
	return s
}

// member is one thread's part of a step. All members pass the same barriers;
// between two of them those of a rank share out its part of one operation.
func (b *Backend) member(id int) {
	s, t := &b.step, b.team
	m := &s.members[id]
	b.embedRows(m)
	t.barrier(m.seat)
	for i := range b.layers {
		l := &b.layers[i]
		if len(s.step.Arrivals) > 0 {
			if id == 0 {
				b.awaitArrivals(m, i)
			}
			t.barrier(m.seat)
		}
		b.project(m, &l.qkv, s.xn, s.hidden, s.qkv, s.qkvRow, len(s.tokens))
		t.barrier(m.seat)
		switch {
		case l.latent != nil:
			b.attendLatent(m, i)
		case s.fused:
			b.appendAttend(m, i)
		default:
			b.appendRows(m, i)
			t.barrier(m.seat)
			if id == 0 && s.step.OnLayer != nil {
				s.step.OnLayer(i)
			}
			b.attend(m, i)
		}
		t.barrier(m.seat)
		b.project(m, &l.o, s.att, s.attRow, s.delta, s.hidden, len(s.tokens))
		t.barrier(m.seat)
		b.addNorm(m, l.attnPost, l.mlpNorm)
		t.barrier(m.seat)
		if l.experts != nil {
			b.mix(m, l.experts)
		} else {
			b.gate(m, &l.gated, l.gelu)
			t.barrier(m.seat)
			b.project(m, &l.down, s.ff, s.ffRow, s.delta, s.hidden, len(s.tokens))
		}
		t.barrier(m.seat)
		if i+1 < len(b.layers) {
			b.addNorm(m, l.mlpPost, b.layers[i+1].attnNorm)
			t.barrier(m.seat)
		}
	}
	b.finish(m)
}

// awaitArrivals waits for a layer of what the step waits for. A peer's pace is no rank's fault.
func (b *Backend) awaitArrivals(m *member, layer int) {
	m.rest()
	defer m.resume()
	for _, a := range b.step.step.Arrivals {
		a.(*kernels.HostGate).AwaitLayer(layer)
	}
}

// embedRows writes each token's embedding, rotary table and first norm.
func (b *Backend) embedRows(m *member) {
	s := &b.step
	dim := b.arch.Rotated()
	for r := range b.team.items(m.seat, len(s.tokens), b.team.share(len(s.tokens))) {
		x := s.x[r*s.hidden : (r+1)*s.hidden]
		b.embedding(int(s.tokens[r].id), x)
		clear(x[b.arch.Hidden:])
		b.rope.row(s.cosSin[r*dim:(r+1)*dim], s.tokens[r].pos)
		if b.arch.Window > 0 {
			b.windowRope.row(s.windowCosSin[r*dim:(r+1)*dim], s.tokens[r].pos)
		}
		b.rmsNorm(s.xn[r*s.hidden:], x, b.layers[0].attnNorm, b.ops.sumSq(&x[0], s.hidden))
	}
}

func (b *Backend) embedding(id int, dst []float32) {
	k := b.arch.Hidden
	if b.embed.Data == nil {
		b.head.row(id, dst)
	} else {
		for i := range dst[:k] {
			dst[i] = kernels.Widen(b.embed.DType, b.embed.Data, id*k+i)
		}
	}
	if s := b.arch.EmbedScale; s != 0 {
		for i := range dst[:k] {
			dst[i] *= s
		}
	}
}

// rmsNorm writes x/rms(x)*w, given the sum of squares.
func (b *Backend) rmsNorm(out, x, w []float32, sumSq float32) {
	b.ops.scaleMul(&out[0], &x[0], &w[0], rsqrtMean(sumSq, b.arch.Hidden, b.arch.NormEps), len(w))
}

func rsqrtMean(sumSq float32, n int, eps float32) float32 {
	return float32(1 / math.Sqrt(float64(sumSq/float32(n)+eps)))
}

// addNorm adds the last projection, normed by post if that is not nil, to the residual stream and
// norms the sum.
func (b *Backend) addNorm(m *member, post, w []float32) {
	s := &b.step
	for r := range b.team.items(m.seat, len(s.tokens), b.team.share(len(s.tokens))) {
		at := r * s.hidden
		b.rmsNorm(s.xn[at:], s.x[at:], w, b.addRow(at, post))
	}
}

// addRow adds the last projection's row at a place to that of the residual stream, and returns the sum of
// squares there.
func (b *Backend) addRow(at int, post []float32) float32 {
	s := &b.step
	if post != nil {
		b.rmsNorm(s.delta[at:], s.delta[at:], post, b.ops.sumSq(&s.delta[at], s.hidden))
	}
	return b.ops.addSumSq(&s.x[at], &s.delta[at], s.hidden)
}

// project computes out = w*x for n rows.
func (b *Backend) project(m *member, w *matrix, x []float32, xs int, out []float32, os, n int) {
	chunk := min(b.team.share(w.panels), b.team.mostPanels(w.k, n))
	for lo, hi := b.team.claim(m.seat, w.panels, chunk); lo < hi; lo, hi = b.team.claim(m.seat, w.panels, chunk) {
		w.mul(b.ops, m.seat, x, xs, out[lo*panelRows:], os, n, lo, hi)
	}
}

// gate computes silu(gate*x)*(up*x), or gelu's.
func (b *Backend) gate(m *member, gated *matrix, gelu bool) {
	s := &b.step
	n := len(s.tokens)
	panels := min(b.team.share(gated.panels), b.team.mostPanels(gated.k, n))
	for lo, hi := b.team.claim(m.seat, gated.panels, panels); lo < hi; lo, hi = b.team.claim(m.seat, gated.panels, panels) {
		b.gatePanels(m, gated, gelu, s.xn, s.ff, s.ffRow, n, lo, hi)
	}
}

// gatePanels is gate of some panels for n rows: the two products go to the member's own
// scratch and leave it combined.
func (b *Backend) gatePanels(m *member, w *matrix, gelu bool, x, ff []float32, ffRow, n, first, end int) {
	for panels := min(max(len(m.gated)/(n*panelRows), 1), gatedPanels); first < end; first += panels {
		lo, hi := first, min(first+panels, end)
		row := (hi - lo) * panelRows
		w.mul(b.ops, m.seat, x, b.step.hidden, m.gated, row, n, lo, hi)
		for r := range n {
			if gelu {
				geluAsSilu(m.gated[r*row : (r+1)*row])
			}
			b.ops.siluMul(&ff[r*ffRow+lo*guRows], &m.gated[r*row], hi-lo)
			if r%64 == 63 {
				m.progress()
			}
		}
	}
}

// geluAsSilu changes panels of gate and up so that silu(gate)*up is what gelu(gate)*up was, GELU by its
// approximation with tanh: gelu(x) = x sigmoid(x s) with s = 2 sqrt(2/pi) (1 + 0.044715 x^2), and
// silu(x s) = x s sigmoid(x s).
func geluAsSilu(panels []float32) {
	for ; len(panels) > 0; panels = panels[panelRows:] {
		gate, up := panels[:guRows], panels[guRows:panelRows]
		for i, x := range gate {
			s := float32(1.5957691216057308 * float32(1+float32(0.044715*float32(x*x))))
			gate[i] = x * s
			up[i] /= s
		}
	}
}
