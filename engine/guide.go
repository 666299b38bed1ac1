package engine

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// A request's output may be bound by a Guide. Which tokens a draw may yield depends on the token before
// it, so a plain Launcher's step with such a draw is not launched before that token is known. A Holder
// is launched all the same: its draws wait, and the masks are made while the device computes
// (Engine.release). Draws of one step get their masks side by side.

// Guide is where one choice's output stands in what binds it. What it allows depends on the tokens
// accepted and on nothing else. One is not for concurrent use; different ones, forks too, may be used
// at once.
type Guide interface {
	// Fork returns another one that stands at the same place.
	Fork() Guide
	// Mask writes all of bits: which tokens may come next, as kernels.Sample.Mask has them. None
	// means that the output cannot go on. What ends it is among them only where it may end.
	Mask(bits []uint32)
	// Accept moves behind a token. It reports false, and stays, if that may not come.
	Accept(token int32) bool
}

// GuideError ends a request whose output cannot go on as it is bound to: no token may come next, or one
// came that may not.
type GuideError struct {
	Position int   // of the token
	Token    int32 // that may not come; kernels.NoToken: none may
}

func (e *GuideError) Error() string {
	if e.Token == kernels.NoToken {
		return fmt.Sprintf("no token of the vocabulary can follow at position %d as the output is bound to", e.Position)
	}
	return fmt.Sprintf("token %d at position %d is not what the output is bound to", e.Token, e.Position)
}

// guided is a sequence of a step whose draws its guide binds.
type guided struct {
	q     *sequence
	mask  []uint32
	only  []uint32 // of the tokens that the request allows; nil: any
	draft int      // drafts before the draw, which is bound as behind them
	ban   []int32  // that may not come unless nothing else may: what ends the output too early
	at    int      // position of the draw
	dead  bool     // nothing may come
}

// maxMaskers bounds the goroutines that make a step's masks, the loop among them.
const maxMaskers = 8

// guideOf returns a choice's guide, behind what another worker drew; nil: nothing binds it.
func (h *Handle) guideOf(choice int) Guide {
	if h.req.Guide == nil {
		return nil
	}
	g := h.req.Guide.Fork()
	for _, id := range h.given(choice) {
		g.Accept(id) // checkGiven has seen that it does
	}
	return g
}

// checkGuided returns which of these tokens a guide refuses; -1: none.
func (r *Request) checkGuided(tokens []int32) int {
	if r.Guide == nil {
		return -1
	}
	g := r.Guide.Fork()
	return slices.IndexFunc(tokens, func(id int32) bool { return !g.Accept(id) })
}

// guides lists the draws of the batch that guides bind, with room for their masks.
func (e *Engine) guides(b *stepBuffers) {
	clear(b.guided)
	b.guided = b.guided[:0]
	n := 0
	for _, q := range e.batch {
		if q.guide != nil {
			n += 1 + len(q.drafting.tokens)
		}
	}
	words := kernels.MaskWords(e.vocab)
	if n *= words; cap(b.masks) < n {
		b.masks = make([]uint32, n+n/4)
	}
	b.words = words
}

// guide has a sequence's draw in the step bound, the one behind so many of its drafts, and returns its
// mask; nil: nothing binds it.
func (e *Engine) guide(b *stepBuffers, q *sequence, drafts int) []uint32 {
	if q.guide == nil {
		return nil
	}
	n := len(b.guided) * b.words
	g := guided{q: q, mask: b.masks[n : n+b.words : n+b.words], at: q.length() + drafts, ban: q.early(drafts), only: q.h.shape().allowed, draft: drafts}
	b.guided = append(b.guided, g)
	b.behind = b.behind || q.draw > 0
	return g.mask
}

// early is what must not be drawn yet. An end that is not allowed is an early one: the guide has the
// output end when nothing that is allowed can go on.
func (q *sequence) early(drafts int) []int32 {
	r := q.h.req
	switch {
	case q.length()+drafts-len(r.Prompt) < r.MinTokens:
		return q.h.allBanned
	case r.IgnoreEOS:
		return q.h.e.cfg.EOS
	case len(r.Allowed) > 0:
		return q.h.shape().unlisted
	}
	return nil
}

// holds reports whether a step's draws are to wait for their masks.
func (e *Engine) holdsDraws(b *stepBuffers) bool {
	return e.holder != nil && len(b.guided) > 0 && len(b.targets) == 0
}

// release gives the oldest step under way its masks, if its draws wait: the tokens that they depend on
// are known.
func (e *Engine) release() {
	if len(e.flights) == 0 || !e.flights[0].held {
		return
	}
	e.draw(e.flights[0])
}

// draw gives a held step its masks.
func (e *Engine) draw(f *flight) {
	f.held = false
	e.masks(f.buf.guided)
	if err := guard(func() error { e.holder.Draw(); return nil }); err != nil { // Await tells what else went wrong
		e.log.Error("engine draw", "error", err)
	}
	e.endDead(f.buf.guided)
}

// masks makes the masks of a step.
func (e *Engine) masks(list []guided) {
	if len(list) == 0 {
		return
	}
	begin := e.now()
	var next atomic.Int64
	work := func() {
		for i := next.Add(1) - 1; i < int64(len(list)); i = next.Add(1) - 1 {
			list[i].fill()
		}
	}
	var wg sync.WaitGroup
	for range min(len(list), maxMaskers, runtime.GOMAXPROCS(0)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	e.metrics.maskSeconds.Observe(e.now().Sub(begin).Seconds())
	e.metrics.masked.Add(float64(len(list)))
}

// fill makes one mask. A sequence that has ended gets any: what it draws is dropped, as is that of one
// whose output cannot go on.
func (g *guided) fill() {
	defer func() {
		if recover() != nil { // the request's, not the worker's
			g.dead = true
		}
		if g.dead || !g.q.running {
			for i := range g.mask {
				g.mask[i] = 1<<32 - 1
			}
		}
	}()
	if !g.q.running {
		return
	}
	guide := g.q.guide
	if g.draft > 0 {
		guide = g.q.drafting.guides[g.draft-1]
	}
	guide.Mask(g.mask)
	may := func() bool { return slices.ContainsFunc(g.mask, func(w uint32) bool { return w != 0 }) }
	var had []int32
	for _, id := range g.ban {
		if bit := uint32(1) << (id % 32); g.mask[id/32]&bit != 0 {
			g.mask[id/32] &^= bit
			had = append(had, id)
		}
	}
	if g.only != nil {
		for i := range g.mask {
			g.mask[i] &= g.only[i]
		}
	}
	if had != nil && !may() { // the output's end is all that is left
		for _, id := range had {
			if bit := uint32(1) << (id % 32); g.only == nil || g.only[id/32]&bit != 0 || slices.Contains(g.q.h.e.cfg.EOS, id) {
				g.mask[id/32] |= bit
			}
		}
	}
	g.dead = !may()
}

// endDead ends requests whose output cannot go on.
func (e *Engine) endDead(list []guided) {
	for i := range list {
		g := &list[i]
		if d := &g.q.drafting; g.dead && g.draft > 0 { // it is, if the drafts before it are right
			if d.dead == 0 || g.draft < d.dead {
				d.dead = g.draft
			}
			continue
		}
		if g.dead && g.q.running {
			e.metrics.deadEnds.Inc()
			e.finish(g.q.h, &GuideError{Position: g.at, Token: kernels.NoToken})
		}
	}
}

// maskBuckets are of the time that a step's masks take.
func maskBuckets() []float64 {
	const least = 20 * time.Microsecond
	list := make([]float64, 14)
	for i := range list {
		list[i] = (least << i).Seconds()
	}
	return list
}
