package engine

import (
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// When a sequence gets its blocks, its Source begins to fill those that the index
// had nothing for, and it is stepped at once. Its steps name the arrival: the device computes each layer when
// that layer is there, so most of the way is hidden behind computing. Until a
// step has been settled nobody knows whether the rows were right, so what comes
// of them stays here:
//
//	tokens     are drawn by the step, and delivered when it is settled
//	the index  hears of the step's rows then
//	OnBlocks   hears of no block, of the prefix or computed, before
//
// A step is settled when everything that it waited for has arrived and was
// verified. If rows were wrong, the sequence goes back to the last right token
// (void) and computes on from there: steps that were launched meanwhile run into
// nothing, and it sits out until they have ended. The rows it shares a step with
// are other sequences' and never saw the wrong ones. If blocks are lost with them,
// because who was to write there may still do so, it gets others (preempt).
//
// A step that others are in, or wait for the end of, is not made to wait (holdsUp).

// Source has KV rows below the pool; engine/tier.Tiers is one.
type Source interface {
	// Bring begins to move what it has of a prompt, from token from on and at most
	// up to upto, into blocks of table, which is the prompt's; chain covers upto.
	// Nil: nothing is on its way. Busy: another request has begun the same, and
	// the index will have it. It is called on the engine's goroutine and must not
	// wait. ended is called at the end of what has begun, from anywhere.
	Bring(chain kvcache.Chain, tokens, table []int32, from, upto int, ended func()) (a Arriving, busy bool)
}

// Arriving is a prefix on its way into the pool. Its Source keeps the blocks from
// being reused until its end, and tells the index of what is right.
type Arriving interface {
	// Move is what steps wait for.
	Move() kernels.Arrival
	// Upto is how many tokens of the prompt have rows at its end.
	Upto() int
	// Begun says that a step may be launched that waits for it; ended is called when
	// that becomes so.
	Begun() bool
	// Over says that Good is known, which it also is once a step that named Move has
	// been awaited.
	Over() bool
	// Good is how many tokens, from the first, have right rows; and whether the blocks
	// of the others may be written no more.
	Good() (tokens int, lost bool)
}

// bring starts what the request's source has of a prompt behind the first hit
// tokens; false: another request has begun the same.
func (e *Engine) bring(q *sequence, table []int32, hit, reusable int) (upto int, ok bool) {
	r := q.h.req
	if r.Source == nil || hit >= reusable || q.h.prompted {
		return hit, true
	}
	upto = min(reusable, len(r.Prompt))
	ended := e.brought.Load()
	a, busy := r.Source.Bring(q.chain.Fork(upto), r.Prompt, table, hit, upto, e.onBrought)
	if q.behind = 0; busy {
		q.behind = 1 + ended
	}
	if a == nil {
		return hit, !busy
	}
	q.arriving, q.asked = a, time.Now()
	return a.Upto(), true
}

// onBrought is called when something has come to the end of its way, or so far that it
// can be stepped.
func (e *Engine) onBrought() {
	e.brought.Add(1)
	e.signal()
}

// isBehind says of a sequence that its prefix is still on its way for another request.
func (e *Engine) isBehind(q *sequence) bool { return q.behind > e.brought.Load() }

// holdsUp says of a sequence whose prefix is arriving that others would wait for it
// in a step with so many of its tokens: what is left to come takes longer, at the rate
// so far, than they take to compute. Others are those that are planned, and those of
// steps under way: what they do next comes behind this step.
func (e *Engine) holdsUp(q *sequence, tokens int) bool {
	if q.arriving == nil || len(e.batch) == 0 && !e.othersFly(q) {
		return false
	}
	n := q.arriving.Move().Layers()
	switch {
	case n == e.layers:
		return false
	case n == 0 || !e.pace.measured():
		return true
	}
	left := time.Since(q.asked).Seconds() * float64(e.layers-n) / float64(n)
	return left > float64(tokens)/e.pace.rate(tokens)
}

// othersFly says that a step under way carries another sequence than q.
func (e *Engine) othersFly(q *sequence) bool {
	for _, f := range e.flights {
		for _, m := range f.members {
			if m.q != q && m.q.running {
				return true
			}
		}
	}
	return false
}

// judge looks at what had to arrive for a step that has been awaited.
func (e *Engine) judge(f *flight) {
	for _, m := range f.members {
		if q := m.q; q.arriving != nil && q.running {
			e.judgeOne(q)
		}
	}
}

func (e *Engine) judgeOne(q *sequence) {
	good, lost := q.arriving.Good()
	q.arriving, q.lost = nil, lost
	if good < q.computed {
		e.void(q, good)
	}
}

// look judges a sequence that is in no step, if what had to arrive is there already;
// one that has lost its blocks goes back to get others.
func (e *Engine) look(q *sequence) {
	if !q.running || q.flights > 0 {
		return
	}
	if q.arriving != nil && q.arriving.Over() {
		e.judgeOne(q)
	}
	if q.lost {
		e.preempt(q)
	}
}

// sitsOut says that its prefix, which is arriving or was, keeps a sequence out of the
// next step.
func (q *sequence) sitsOut() bool {
	return q.lost || q.void > 0 || q.arriving != nil && !q.arriving.Begun()
}

// void takes a sequence back to its first good tokens. Nothing that was computed
// since counts, in the steps under way neither.
func (e *Engine) void(q *sequence, good int) {
	e.metrics.voided.Inc()
	q.computed, q.indexed, q.told, q.void = good, min(q.indexed, good), 0, q.flights
	q.h.mu.Lock()
	q.h.cached = good
	q.h.mu.Unlock()
}

// voided counts a flight of a voided sequence off.
func (q *sequence) voided() bool {
	if q.void == 0 {
		return false
	}
	q.void--
	return true
}

// tellLate makes up for what a step did not tell because it was not judged.
func (e *Engine) tellLate(f *flight) {
	for _, t := range f.buf.tells {
		if !t.late || !t.q.running || t.q.told == 0 {
			continue
		}
		err := guard(func() error {
			for layer := range e.layers {
				t.onBlocks(layer, t.ready)
			}
			return nil
		})
		if err != nil {
			e.finish(t.q.h, err)
		}
	}
}
