package engine

import (
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// A prompt's prefix may still be on its way into the pool when the sequence is
// placed on it. Its steps name the arrival: the device computes each layer when
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
// are other sequences' and never saw the wrong ones.
//
// A step that others are in is not made to wait (holdsUp).

// Arriving is a prefix on its way into the pool; internal/tier.Arrival is one.
type Arriving interface {
	// Hold calls f with the block table of the prefix's first tokens, which stay
	// held until f has returned. False, without calling: it is over, and the
	// prefix index has what came of it.
	Hold(f func(table []int32, tokens int)) bool
	// Move is what steps wait for.
	Move() kernels.Arrival
	// Good is how many of those tokens, from the first, have right rows; it is
	// known once a step that named Move has been awaited.
	Good() int
}

// placeBehind is place for a sequence whose prefix is arriving; not ok: it is not.
func (e *Engine) placeBehind(q *sequence, reusable, blocks, active int) (table []int32, hit int, ok bool, err error) {
	a := q.h.req.Arriving
	if a == nil || reusable == 0 || q.h.prompted {
		return nil, 0, false, nil
	}
	ok = a.Hold(func(held []int32, tokens int) {
		if hit = tokens; hit <= reusable {
			table, err = e.cache.ReserveBehind(held, blocks, active, q.h.arrived, q.h.owner)
		}
	})
	return table, hit, ok && hit <= reusable, err
}

// holdsUp says of a sequence whose prefix is arriving that a step with the
// others that are planned, and so many of its tokens, would wait for it: what
// is left to come takes longer, at the rate so far, than they take to compute.
func (e *Engine) holdsUp(q *sequence, tokens int) bool {
	if q.arriving == nil || len(e.batch) == 0 {
		return false
	}
	n := q.arriving.Move().Layers()
	switch {
	case n == e.layers:
		return false
	case n == 0 || e.pace.rate == 0:
		return true
	}
	left := time.Since(q.h.arrived).Seconds() * float64(e.layers-n) / float64(n)
	return left > float64(tokens)/e.pace.rate
}

// judge looks at what had to arrive for a step that has been awaited.
func (e *Engine) judge(f *flight) {
	for _, m := range f.members {
		q := m.q
		if q.arriving == nil || !q.running {
			continue
		}
		good := q.arriving.Good()
		if q.arriving = nil; good < q.computed {
			e.void(q, good)
		}
	}
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
