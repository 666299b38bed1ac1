package engine

import (
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// When a sequence gets its blocks, its Source begins to fill those that the index did not have,
// and it is stepped at once. Its steps name the arrival: the device computes each layer when that
// layer has arrived, so most of the move is hidden behind computing. Until a step is settled
// nobody knows whether the rows were right, so its results stay here:
//
//	tokens     are drawn by the step and delivered when it is settled
//	the index  hears of the step's rows then
//	OnBlocks   hears of no block, of the prefix or computed, before
//
// A step is settled when everything that it waited for has arrived and was verified. If rows were
// wrong, the sequence goes back to the last right token (void) and computes on from there. The
// results of steps launched meanwhile are dropped, and it is in no step until they have ended.
// Other sequences in those steps never read the wrong rows. If blocks are lost with the rows,
// because a peer may still write to them, the sequence gets others (preempt).
//
// A step is not made to wait if others are in it or wait for its end (holdsUp).

// Source has KV rows below the pool, as engine/tier.Tiers has.
type Source interface {
	// Bring begins to move rows of a prompt, from token from on and at most up to upto, into
	// table, which is the prompt's; chain covers upto. Nil: nothing is on its way. Busy: another
	// request has begun the same, and the index will have it. It is called on the engine's
	// goroutine and must not wait. ended is called, from anywhere, when what has begun ends.
	Bring(chain kvcache.Chain, tokens, table []int32, from, upto int, ended func()) (a Arriving, busy bool)
}

// Arriving is a prefix on its way into the pool. Until it ends, its Source keeps the blocks from
// being reused. Then it indexes the rows that are right.
type Arriving interface {
	// Move is what steps wait for.
	Move() kernels.Arrival
	// Upto is how many tokens of the prompt have rows at its end.
	Upto() int
	// Begun reports whether a step may be launched that waits for it. ended is called when
	// that changes.
	Begun() bool
	// Over reports whether Good is known. It is also known once a step that named Move has been
	// awaited.
	Over() bool
	// Good is how many tokens, from the first, have right rows, and whether the blocks of the
	// others are lost because somebody may still write to them.
	Good() (tokens int, lost bool)
}

// bring starts to move what the request's source has after the first hit tokens. It returns false
// if another request has begun the same.
func (e *Engine) bring(q *sequence, table []int32, hit, reusable int) (upto int, ok bool) {
	r := q.h.req
	if r.Source == nil || hit >= reusable || q.h.prompted {
		return hit, true
	}
	upto = reusable
	ended := e.brought.Load()
	a, busy := r.Source.Bring(q.chain.Fork(upto), q.tokens, table, hit, upto, e.onBrought)
	if q.behind = 0; busy {
		q.behind = 1 + ended
	}
	if a == nil {
		return hit, !busy
	}
	q.arriving, q.asked = a, e.now()
	return a.Upto(), true
}

// onBrought is called when a prefix has arrived, or so far that it can be stepped.
func (e *Engine) onBrought() {
	e.brought.Add(1)
	e.signal()
}

// isBehind reports whether a sequence's prefix is still on its way for another request.
func (e *Engine) isBehind(q *sequence) bool { return q.behind > e.brought.Load() }

// holdsUp reports whether others would wait for a sequence's arriving prefix in a step with so
// many of its tokens: the rest takes longer to arrive, at the rate so far, than the tokens take to
// compute. Others are the sequences that are planned, and those in steps under way, whose next
// step comes after this one.
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
	left := e.now().Sub(q.asked).Seconds() * float64(e.layers-n) / float64(n)
	return left > float64(tokens)/e.pace.rate(tokens)
}

// othersFly reports whether a step under way carries another sequence than q.
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

// judge checks what had to arrive for a step that has been awaited.
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

// look judges a sequence that is in no step, if its prefix has arrived. One that lost its blocks
// goes back to get others.
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

// sitsOut reports whether its prefix keeps a sequence out of the next step.
func (q *sequence) sitsOut() bool {
	return q.lost || q.void > 0 || q.arriving != nil && !q.arriving.Begun()
}

// void takes a sequence back to its first good tokens. Nothing computed since counts, nor do the
// steps under way.
func (e *Engine) void(q *sequence, good int) {
	e.metrics.voided.Inc()
	q.computed, q.indexed, q.told, q.void = good, min(q.indexed, good), 0, q.flights
	q.h.mu.Lock()
	q.h.cached = good
	q.h.mu.Unlock()
}

// voided reports whether a flight of the sequence does not count, and counts it off.
func (q *sequence) voided() bool {
	was := q.void > 0
	q.void = max(q.void-1, 0)
	return was
}

// tellLate tells OnBlocks what a step did not because it was not judged then.
func (e *Engine) tellLate(f *flight) {
	for _, t := range f.buf.tells {
		if !t.late || !t.q.running || t.q.told == 0 {
			continue
		}
		if err := e.tellAll(t.onBlocks, t.ready); err != nil {
			e.finish(t.q.h, err)
		}
	}
}
