package engine

import (
	"slices"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// Speculation: a step computes a decoding sequence's next row and the rows of drafts behind it, and
// draws behind each of them as it would have one by one (kernels.Seq.Verify). A draft that is what was
// drawn in its place spares a step. Those behind the first that is not were computed in vain: their rows
// lie behind computed, where nobody looks (DESIGN.md). So drafts decide when a token comes, never which.

// Speculation says who guesses, and how much.
type Speculation struct {
	Drafter Drafter // nil: only tokens that a guide forces are drafts
	Depth   int     // drafts of a sequence in one step, at most; 0: no drafts, forced ones neither
	// Fixed has each sequence drafted as deep as it goes. Otherwise measured steps decide: drafts that
	// cost more than they bring are left out.
	Fixed bool
}

// DefaultDepth is how many drafts a sequence has in a step at most.
const DefaultDepth = 4

// Drafter guesses how sequences go on. It belongs to the engine's loop, which waits for it. A guess, where
// there is one, is a function of what it is asked, so that it is the same on every worker. One that needs more of the
// target than its tokens, as a head behind the target's layers does, has an Ask of its own to find it in.
type Drafter interface {
	// Name labels its metrics.
	Name() string
	// Draft fills in the Drafts of each of these: Most tokens, fewer or none.
	Draft([]Ask)
	// Forget says that no more will be asked about a sequence.
	Forget(id uint64)
	// Slow says that a guess takes time: it is not asked for more than may be used.
	Slow() bool
}

// Ask is a sequence whose next tokens are to be guessed.
type Ask struct {
	ID     uint64  // of the sequence
	Tokens []int32 // all of it: prompt and output
	Most   int     // drafts, at least 1
	// Sample is how the token behind Tokens is drawn, but for what depends on the tokens before.
	Sample kernels.Sample

	Drafts []int32 // what it guesses
	Class  int     // of guesses that turn out right about as often: 0 .. classes-1
	// Caught says that it took time for what is needed once, which is no guess's.
	Caught bool
}

// classes is how many kinds of guesses a Drafter can tell apart.
const classes = 4

// forcedBy labels the drafts that a guide forces in metrics.
const forcedBy = "grammar"

// Forcer is a Guide that may know that only one token can come next.
type Forcer interface {
	Guide
	Forced() (token int32, ok bool)
}

// drafting is a sequence's part of speculation.
type drafting struct {
	id     uint64  // given at its first Ask; 0: none yet
	tokens []int32 // drafts of the step that is planned or under way
	guides []Guide // where the output stands behind each of them
	forced int     // leading ones that its guide forces
	by     string  // whose the others are
	class  int     // theirs
	score  score
	dead   int // of the step under way: the draw for which no token may come, from 1; 0: there is none
}

// clear forgets the drafts of a step.
func (d *drafting) clear() {
	clear(d.guides)
	d.tokens, d.guides, d.forced, d.dead = d.tokens[:0], d.guides[:0], 0, 0
}

// drafts reports whether sequences are ever drafted.
func (e *Engine) drafts() bool { return e.cfg.Speculation.Depth > 0 && e.verifies }

// draftable reports whether a planned sequence's step can carry drafts: it decodes, and its next token
// is known.
func (q *sequence) draftable() bool {
	return q.chunk == 1 && q.draw == 0 && q.draws == 1 && q.h.prompted && q.arriving == nil && q.missing() == 1 && q.h.req.Pooling == PoolNone && !q.h.req.PrefillOnly
}

// speculate gives the sequences of the planned step drafts: what guides force, and in a step that only
// decodes what the Drafter guesses, as far as that pays.
func (e *Engine) speculate() {
	if !e.drafts() {
		return
	}
	rows, decodes := 0, true
	for _, q := range e.batch {
		q.drafting.clear()
		rows += q.chunk
		decodes = decodes && q.chunk == 1
	}
	left := e.cfg.MostTokens() - rows
	e.asks, e.asked = e.asks[:0], e.asked[:0]
	free := e.cache.Stats().Available() - len(e.running) // each keeps a block to grow
	guesses := e.guesses(decodes, rows)
	for _, q := range e.batch {
		if !q.draftable() {
			continue
		}
		most := min(e.cfg.Speculation.Depth, q.left()-1, e.cfg.MaxBacklog-q.h.unreadOf(q.choice), left)
		if most <= 0 {
			continue
		}
		e.force(q, most)
		left -= len(q.drafting.tokens)
		if most -= len(q.drafting.tokens); guesses && most > 0 && q.drafting.forced == 0 {
			if q.drafting.id == 0 {
				e.draftIDs++
				q.drafting.id = e.draftIDs
			}
			e.asks = append(e.asks, Ask{ID: q.drafting.id, Tokens: q.tokens, Most: most, Sample: q.plainSample()})
			e.asked = append(e.asked, q)
			left -= most
		}
	}
	if len(e.asks) > 0 {
		e.guess(rows)
	}
	for _, q := range e.batch {
		free = e.growDrafts(q, free)
	}
}

// plainSample is how a sequence's next token is drawn, without what depends on the tokens before it.
func (q *sequence) plainSample() kernels.Sample {
	r := q.h.req
	return kernels.Sample{
		Seed: r.Seed, Choice: uint32(q.choice), Position: q.length(),
		Temperature: r.Temperature, TopK: r.TopK, TopP: r.TopP, MinP: r.MinP, Repetition: 1, Bias: r.Bias, Logprobs: -1,
	}
}

// force drafts what a sequence's guide forces.
func (e *Engine) force(q *sequence, most int) {
	g, ok := q.guide.(Forcer)
	if !ok {
		return
	}
	for range most {
		id, forced := int32(0), false
		if err := guard(func() error { id, forced = g.Forced(); return nil }); err != nil || !forced || !e.draft(q, id) {
			return
		}
		q.drafting.forced++
		g = q.drafting.guides[len(q.drafting.guides)-1].(Forcer)
	}
}

// draft adds a draft, unless it cannot come, or nothing can behind it.
func (e *Engine) draft(q *sequence, id int32) bool {
	d := &q.drafting
	if id < 0 || int(id) >= e.vocab || e.finishOf(q.h.req, id, len(q.output())+len(d.tokens)+1) != FinishNone {
		return false
	}
	if q.guide != nil {
		g := q.guide
		if n := len(d.guides); n > 0 {
			g = d.guides[n-1]
		}
		may := false
		if err := guard(func() error { g = g.Fork(); may = g.Accept(id); return nil }); err != nil || !may {
			return false
		}
		d.guides = append(d.guides, g)
	}
	d.tokens = append(d.tokens, id)
	return true
}

// guesses reports whether the Drafter may be asked for a step of so many rows without drafts.
func (e *Engine) guesses(decodes bool, rows int) bool {
	s := &e.cfg.Speculation
	return s.Drafter != nil && decodes && (s.Fixed || e.deep.worth(rows, s.Depth, e.longest))
}

// guess asks the Drafter, and takes what pays.
func (e *Engine) guess(rows int) {
	s := &e.cfg.Speculation
	if s.Drafter.Slow() && !s.Fixed {
		for i, n := range e.depths(rows, func(i int) int { return e.asks[i].Most }) {
			e.asks[i].Most = n
		}
		for i := len(e.asks) - 1; i >= 0; i-- {
			if e.asks[i].Most == 0 {
				e.asks, e.asked = slices.Delete(e.asks, i, i+1), slices.Delete(e.asked, i, i+1)
			}
		}
		if len(e.asks) == 0 {
			return
		}
	}
	began := e.now()
	if err := guard(func() error { s.Drafter.Draft(e.asks); return nil }); err != nil {
		e.log.Error("engine: no more drafts", "by", s.Drafter.Name(), "error", err)
		s.Drafter = nil
		return
	}
	e.deep.asked(e.now().Sub(began), e.asks)
	depth := func(i int) int { return len(e.asks[i].Drafts) }
	var depths []int
	if !s.Fixed {
		depths = e.depths(rows, depth)
	}
	for i, q := range e.asked {
		a := &e.asks[i]
		n := min(depth(i), a.Most)
		if depths != nil {
			n = min(n, depths[i])
		}
		q.drafting.by, q.drafting.class = s.Drafter.Name(), a.Class
		for _, id := range a.Drafts[:n] {
			if !e.draft(q, id) {
				break
			}
		}
	}
}

// depths is how many drafts pay of each Ask that has so many.
func (e *Engine) depths(rows int, have func(int) int) []int {
	e.chances = e.chances[:0]
	for i, q := range e.asked {
		e.chances = append(e.chances, chance{right: e.deep.chance(&q.drafting, e.asks[i].Class), most: have(i)})
	}
	for _, q := range e.batch { // forced ones are there in any case
		rows += q.drafting.forced
	}
	return e.deep.deepen(rows, len(e.batch), e.chances, e.longest)
}

// growDrafts makes sure of blocks for the rows of drafts: of those that are free beyond what running
// sequences need, or there are fewer drafts.
func (e *Engine) growDrafts(q *sequence, free int) int {
	d := &q.drafting
	if len(d.tokens) == 0 {
		return free
	}
	for want := e.cache.BlocksFor(q.length() + len(d.tokens)); len(q.table) < want; free-- {
		if free <= 0 {
			break
		}
		ids, err := e.cache.Alloc(1, q.h.owner)
		if err != nil {
			break
		}
		q.table = append(q.table, ids...)
	}
	if room := len(q.table)*e.blockToks - q.length(); room < len(d.tokens) {
		d.tokens = d.tokens[:max(room, 0)]
		d.guides = d.guides[:min(len(d.guides), len(d.tokens))]
		d.forced = min(d.forced, len(d.tokens))
	}
	return free
}

// undraft takes the drafts of the planned step back, and reports whether it had any.
func (e *Engine) undraft() (had bool) {
	for _, q := range e.batch {
		had = had || len(q.drafting.tokens) > 0
		q.drafting.clear()
	}
	return had
}

// awaitsDrafts reports whether the next step is to be planned when the one under way has ended: drafts
// go behind a token that is known, and are worth more than what the device idles meanwhile.
func (e *Engine) awaitsDrafts() bool {
	if !e.drafts() || e.cfg.Speculation.Drafter == nil || e.depth < 2 || !slices.ContainsFunc(e.flights, func(f *flight) bool { return f.decodes() }) {
		return false
	}
	return e.guesses(!e.prefilling(), len(e.flights[0].members))
}

// buildDrafts describes the drafts of a sequence behind its token.
func (e *Engine) buildDrafts(b *stepBuffers, q *sequence, s *kernels.Seq) {
	d := &q.drafting
	from := len(b.drafted)
	b.drafted = append(append(b.drafted, s.Tokens...), d.tokens...)
	s.Tokens, s.Verify = b.drafted[from:len(b.drafted):len(b.drafted)], true
	output, n, reads := q.output(), len(q.output()), q.h.req.readsOutput()
	if reads {
		output = slices.Concat(output, d.tokens)
	}
	for i := range d.tokens {
		so := output
		if reads {
			so = output[:n+i+1]
		}
		b.samples = append(b.samples, q.sample(0, i+1, so, e.guide(b, q, i+1)))
	}
}

// deliverDrafts hands out what was drawn up to the first draft that was not. The rows of those that
// were count from now on.
func (e *Engine) deliverDrafts(q *sequence, res *kernels.Result) {
	d := &q.drafting
	right, n := 0, len(d.tokens)
	for i := range res.Samples {
		if i > 0 {
			q.computed++
			e.index(q)
		}
		if d.dead > 0 && i >= d.dead { // no token can follow, which the next step finds out
			break
		}
		s := own(q.h.req, res.Samples[i])
		e.accept(q, s)
		if i == n || s.Token != d.tokens[i] {
			break
		}
		right++
		if !q.running {
			break
		}
	}
	e.verified(d, n, right)
}

// verified counts drafts and how many of them were right.
func (e *Engine) verified(d *drafting, n, right int) {
	if f := d.forced; f > 0 {
		e.metrics.drafts(forcedBy, f, min(f, right))
		n, right = n-f, max(right-f, 0)
	}
	if n > 0 {
		e.metrics.drafts(d.by, n, right)
		e.deep.verified(d, n, right)
	}
	d.clear()
}

// forget tells the Drafter that a sequence has ended.
func (e *Engine) forget(q *sequence) {
	if q.drafting.id != 0 && e.cfg.Speculation.Drafter != nil {
		e.cfg.Speculation.Drafter.Forget(q.drafting.id)
		q.drafting.id = 0
	}
}

// measureRows learns what a step that only decoded took.
func (e *Engine) measureRows(took time.Duration, f *flight) {
	rows := 0
	for _, m := range f.members {
		if m.chunk != 1 {
			return
		}
		rows += 1 + m.drafts
	}
	if e.depth > 1 && rows > len(f.members) { // the device waited for it to be planned
		took += f.launch
	}
	e.deep.measure(rows, took)
}
