package engine

import (
	"fmt"
	"time"
)

// With Config.ShedLate a prompt that is too late for what is promised of its first token is ended with
// ErrLate before anything is computed of it: that would cost those which can be in time theirs, and its
// client learns at once what it would only wait for.
//
// What has begun, here or elsewhere, is never shed.
//
// What a prompt takes is predicted from steps that were measured, and without steps nothing is measured
// any more: while no other prompt can be in time, or is begun, the oldest whose time is not up is
// computed all the same. So a device that was slow once does not shed for ever, and one that is idle
// computes a prompt that is too long for the promise.

// shed ends the prompts that are late.
func (e *Engine) shed() {
	if !e.shedding() {
		return
	}
	now, others := e.now(), false
	late := func(q *sequence, n int) bool {
		return e.tooLate(q, now.Add(min(e.overrun, q.h.promise.TTFT/mostOverrun)), n)
	}
	e.behind = e.behind[:0]
	for _, list := range [][]*sequence{e.running, e.waiting} {
		for _, q := range list {
			switch {
			case q.isFresh() && late(q, q.missing()) && (q.table != nil || late(q, e.leastMissing(q))):
				e.behind = append(e.behind, q)
			case q.isPrompt() && q.h.req.Prefilled == nil:
				others = true
			}
		}
	}
	for _, q := range e.behind {
		waited, ttft := now.Sub(q.h.arrived), q.h.promise.TTFT
		if !others && waited <= ttft {
			others = true
			continue
		}
		e.finish(q.h, fmt.Errorf("%w: a prompt of %d tokens has waited for %v of %v", ErrLate, len(q.h.req.Prompt),
			waited.Round(time.Millisecond), ttft))
	}
	clear(e.behind) // what has ended is not ours to keep alive
	e.behind = e.behind[:0]
}

func (e *Engine) shedding() bool {
	return e.cfg.ShedLate && (e.cfg.Promise.TTFT > 0 || e.own > 0)
}

// isFresh reports whether it is a prompt of which nothing was computed, here or elsewhere, and that may
// be shed.
func (q *sequence) isFresh() bool {
	return !q.h.stepped && q.isPrompt() && q.h.req.Prefilled == nil && !q.h.req.Urgent && !q.h.req.Keep
}

const (
	// mostOverrun is the part of the promise that prompts which can be in time are to have left at most.
	mostOverrun = 4
	// overruns is the part of prompts that take longer than predicted and allowed for.
	overruns = 0.05
)

// foretell notes when a prompt that is about to be begun should have its first token.
func (e *Engine) foretell(q *sequence) {
	if e.shedding() && e.pace.measured() && q.isFresh() {
		q.h.due = e.now().Add(e.soonest(q, q.missing()))
	}
}

// overran learns from a prompt's first token how much longer than foretold most take: others go with it,
// and the last of it has to wait for one more step.
func (e *Engine) overran(h *Handle) {
	if h.due.IsZero() {
		return
	}
	by := max(e.target()/16, time.Millisecond)
	if e.now().Sub(h.due) > e.overrun {
		e.overrun += time.Duration((1 - overruns) * float64(by))
	} else {
		e.overrun = max(0, e.overrun-time.Duration(overruns*float64(by)))
	}
}

// leastMissing is how many tokens of a prompt without blocks have to be computed at least: some may be in
// the prefix cache, and any may be what its Source or another request brings.
func (e *Engine) leastMissing(q *sequence) int {
	switch {
	case q.computesAll():
		return q.missing()
	case q.h.req.Source != nil || e.isBehind(q):
		return 1
	}
	return q.missing() - e.cache.Reach(&q.chain, len(q.tokens)-1)
}

// untilLate is how long the loop may sleep until a prompt that waits for memory is to be shed; false: as
// long as it likes.
func (e *Engine) untilLate() (d time.Duration, ok bool) {
	if !e.shedding() {
		return 0, false
	}
	now := e.now()
	for _, list := range [][]*sequence{e.running, e.waiting} {
		for _, q := range list {
			if ttft := q.h.promise.TTFT; ttft > 0 && q.isFresh() {
				if left := ttft - now.Sub(q.h.arrived); !ok || left < d {
					d, ok = left, true
				}
			}
		}
	}
	return max(d+1, 1), ok
}

// sleep waits for a signal, or until a prompt is to be shed.
func (e *Engine) sleep() {
	d, ok := e.untilLate()
	if !ok {
		<-e.wake
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-e.wake:
	case <-timer.C:
	}
}
