package engine

import (
	"errors"
	"time"
)

// Promise is what operators promise of each request; 0: nothing.
type Promise struct {
	// TTFT is when a request's first token is there, counted from Submit. While more prompts wait
	// than can be in time, those that still can be go first.
	TTFT time.Duration
	// TPOT is the mean of the times between its tokens, and so of steps beside which others decode.
	TPOT time.Duration
}

func (p *Promise) validate() error {
	if p.TTFT < 0 || p.TPOT < 0 {
		return errors.New("engine: a promise is negative")
	}
	return nil
}

const (
	// promptness is the part of TPOT that steps may take in the mean: its events take some time to go out,
	// and some steps take longer than predicted.
	promptness = 0.95
	// hopeless is how many times TTFT a prompt may have waited to be left behind those that can be
	// in time.
	hopeless = 10
)

// target is how long a step may take beside which others decode, in the mean where gaps are promised.
func (e *Engine) target() time.Duration {
	if e.promisesGaps() {
		return time.Duration(promptness * float64(e.cfg.Promise.TPOT))
	}
	return e.cfg.MaxStepTime
}

// promisesGaps reports whether the promised mean, rather than MaxStepTime, is what steps keep to.
func (e *Engine) promisesGaps() bool {
	limit := promptness * float64(e.cfg.Promise.TPOT)
	return limit > 0 && (e.cfg.MaxStepTime == 0 || limit <= float64(e.cfg.MaxStepTime))
}

// spend counts a step beside which others decoded.
func (e *Engine) spend(took time.Duration) {
	if e.promisesGaps() {
		e.saved = max(-e.target()/4, min(e.saved+e.target()-took, e.target()/2))
	}
}

// room is how much longer than the target the next step may take where prompts wait that are not
// computed in patience: what is promised of gaps is their mean, and some were shorter.
func (e *Engine) room() (patience, room time.Duration) {
	room = e.saved
	if e.cfg.MaxStepTime > 0 {
		room = min(room, e.cfg.MaxStepTime-e.target())
	}
	if e.cfg.Promise.TTFT == 0 {
		return e.cfg.QueueTime, room
	}
	return e.cfg.Promise.TTFT / 4, room
}

// byPromise puts prompts that are too late for their promise behind those that can be in time:
// serving the former first would make the latter late as well.
func (e *Engine) byPromise(prefills []*sequence) []*sequence {
	if e.cfg.Promise.TTFT == 0 || len(prefills) < 2 {
		return prefills
	}
	now := e.now()
	inTime, late := prefills[:0], []*sequence(nil)
	for _, q := range prefills {
		if e.late(q, now) {
			late = append(late, q)
		} else {
			inTime = append(inTime, q)
		}
	}
	return append(inTime, late...)
}

// late reports whether a prompt is to be left behind those that can be in time. One that has waited
// for long enough is not.
func (e *Engine) late(q *sequence, now time.Time) bool {
	waited := now.Sub(q.h.arrived)
	return q.isPrompt() && !q.h.req.Urgent && waited < hopeless*e.cfg.Promise.TTFT && waited+e.soonest(q) > e.cfg.Promise.TTFT
}

// soonest is how long a prompt takes if no other goes first: the step under way, and its own.
func (e *Engine) soonest(q *sequence) time.Duration {
	if !e.pace.measured() {
		return 0
	}
	n := q.missing()
	return e.target()/2 + time.Duration(e.pace.seconds(n, positions(n, q.next()))*float64(time.Second))
}
