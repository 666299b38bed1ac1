package engine

import (
	"cmp"
	"errors"
	"slices"
	"time"
)

// Promise is what operators promise of each request, or of one; 0: nothing.
type Promise struct {
	// TTFT is when a request's first token is there, counted from Submit. While more prompts wait
	// than can be in time, those that still can be go first: the one whose time is up first.
	TTFT time.Duration
	// TPOT is the mean of the times between its tokens, and so of steps beside which others decode.
	TPOT time.Duration
	// ITL is the longest of the times between its tokens, and so of steps beside which it decodes.
	ITL time.Duration
}

// Or fills in what p leaves out.
func (p Promise) Or(other Promise) Promise {
	return Promise{TTFT: cmp.Or(p.TTFT, other.TTFT), TPOT: cmp.Or(p.TPOT, other.TPOT), ITL: cmp.Or(p.ITL, other.ITL)}
}

func (p *Promise) validate() error {
	if p.negative() {
		return errors.New("engine: a promise is negative")
	}
	return nil
}

func (p *Promise) negative() bool { return min(p.TTFT, p.TPOT, p.ITL) < 0 }

const (
	// promptness is the part of TPOT that steps may take in the mean, and of ITL that one may: its events take
	// some time to go out, and some steps take longer than predicted.
	promptness = 0.95
	// hopeless is how many times TTFT a prompt may have waited to be left behind those that can be
	// in time. One without a promise is served as if it were promised so many times the shortest.
	hopeless = 10
)

// strictest is the shortest TPOT promised of what decodes; the engine's if nothing does. Who sits a
// step out counts too: its next token waits for that step as well.
func (e *Engine) strictest() (tpot time.Duration) {
	if e.own == 0 { // mostly: all have the engine's
		return e.cfg.Promise.TPOT
	}
	decodes := false
	for _, q := range e.running {
		t := q.h.promise.TPOT
		if decodes && (t == 0 || tpot > 0 && t >= tpot) || q.missing() > 1 || q.h.req.PrefillOnly || q.paused() {
			continue
		}
		decodes = true
		if t > 0 {
			tpot = t
		}
	}
	if !decodes {
		return e.cfg.Promise.TPOT
	}
	return tpot
}

// target is how long a step may take beside which others decode, in the mean where gaps are promised.
func (e *Engine) target() time.Duration {
	if e.promisesGaps() {
		return time.Duration(promptness * float64(e.tpot))
	}
	return e.cfg.MaxStepTime
}

// promisesGaps reports whether the promised mean, rather than MaxStepTime, is what steps keep to.
func (e *Engine) promisesGaps() bool {
	limit := promptness * float64(e.tpot)
	return limit > 0 && (e.cfg.MaxStepTime == 0 || limit <= float64(e.cfg.MaxStepTime))
}

// spend counts a step beside which others decoded, and its target then. Targets differ from step to
// step with who decodes; who is promised more than the strictest has saved more than is counted, and
// what steps with a longer target have saved counts no more than one of this target could have.
func (e *Engine) spend(target, took time.Duration) {
	if target > 0 {
		e.saved = max(-target/4, min(e.saved+target-took, target/2))
	}
}

// room is how much longer than the target the next step may take where prompts wait that are not
// computed in patience: what is promised of gaps is their mean, and some were shorter.
func (e *Engine) room(prefills []*sequence) (patience, room time.Duration) {
	room = min(e.saved, e.target()/2)
	if e.cfg.MaxStepTime > 0 {
		room = min(room, e.cfg.MaxStepTime-e.target())
	}
	ttft := e.cfg.Promise.TTFT
	if e.own > 0 {
		ttft = cmp.Or(shortestTTFT(prefills), ttft)
	}
	if ttft == 0 {
		return e.cfg.QueueTime, room
	}
	return ttft / 4, room
}

// shortestTTFT is the shortest that is promised of prompts; 0: nothing is.
func shortestTTFT(prefills []*sequence) (ttft time.Duration) {
	for _, q := range prefills {
		if t := q.h.promise.TTFT; t > 0 && (ttft == 0 || t < ttft) && q.isPrompt() {
			ttft = t
		}
	}
	return ttft
}

// byPromise puts prompts that are too late for their promise behind those that can be in time:
// serving the former first would make the latter late as well. These go by their deadlines, which is
// their age where all are promised the same.
func (e *Engine) byPromise(prefills []*sequence) []*sequence {
	if e.cfg.Promise.TTFT == 0 && e.own == 0 || len(prefills) < 2 {
		return prefills
	}
	var shortest time.Duration
	if e.own > 0 {
		if shortest = shortestTTFT(prefills); shortest == 0 {
			return prefills
		}
	}
	now := e.now()
	inTime := prefills[:0]
	e.behind = e.behind[:0]
	for _, q := range prefills {
		if e.late(q, now) {
			e.behind = append(e.behind, q)
		} else {
			inTime = append(inTime, q)
		}
	}
	if e.own > 0 {
		slices.SortStableFunc(inTime, func(a, b *sequence) int {
			return a.deadline(shortest).Compare(b.deadline(shortest))
		})
	}
	return append(inTime, e.behind...)
}

// deadline is when a prompt's first token is due, where the shortest that is promised is so much. It
// is long over for streams that stand still and for urgent requests.
func (q *sequence) deadline(shortest time.Duration) time.Time {
	if !q.isPrompt() || q.h.req.Urgent {
		return time.Time{}
	}
	return q.h.arrived.Add(cmp.Or(q.h.promise.TTFT, hopeless*shortest))
}

// late reports whether a prompt is to be left behind those that can be in time. One that has waited
// for long enough is not.
func (e *Engine) late(q *sequence, now time.Time) bool {
	return now.Sub(q.h.arrived) < hopeless*q.h.promise.TTFT && e.tooLate(q, now, q.missing())
}

// tooLate reports whether a prompt cannot be in time any more if its last n tokens are to be computed.
func (e *Engine) tooLate(q *sequence, now time.Time, n int) bool {
	ttft := q.h.promise.TTFT
	return ttft > 0 && q.isPrompt() && !q.h.req.Urgent && now.Sub(q.h.arrived)+e.soonest(q, n) > ttft
}

// soonest is how long the last n tokens of a prompt take if no other goes first: the step under way, and
// its own.
func (e *Engine) soonest(q *sequence, n int) time.Duration {
	if !e.pace.measured() {
		return 0
	}
	return e.target()/2 + time.Duration(e.pace.seconds(n, positions(n, q.length()-n))*float64(time.Second))
}
