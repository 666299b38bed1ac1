package flight

import (
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/pick"
)

// runTogether sends both legs at once: prefill's on its own goroutine, which
// close waits for, decode's here. Whichever fails first, before decode has
// committed itself, ends the other.
func (a *attempt) runTogether(x *dialect.Exchange) (*answer, *failure) {
	started := a.q.s.Spawn(func() {
		defer close(a.pDone)
		a.prefill(x)
	})
	if !started {
		close(a.pDone)
		a.d.End(ErrShutdown)
	}
	return a.askDecode(x)
}

// grace is how long one leg's hearsay about the other waits for the other's
// own word.
const grace = 50 * time.Millisecond

// prefill sends prefill's leg and waits for its outcome, however long decode
// takes to stream; it is over when prefill's part is.
func (a *attempt) prefill(x *dialect.Exchange) {
	res, f := a.askPrefill(x)
	if f == nil {
		a.choice.DonePrefill()
		a.p.set(legDone)
		a.heard(res)
		return
	}
	a.choice.EndPrefill()
	a.q.s.legs.remove(a.p)
	a.p.fail()
	if f.hearsay() {
		await(a.dDone)
	}
	a.mu.Lock()
	a.outcome = res.Outcome
	a.mu.Unlock()
	a.failDecode(f)
}

// heard notes prefill's good word. If decode can wait in vain from here on,
// prefill is still watched until decode's first event, and so is the clock.
func (a *attempt) heard(res dialect.Result) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.outcome, a.usage, a.counted = res.Outcome, res.Prompt, res.Counted
	if !a.rules.Watched || a.committed || a.failed != nil || a.closed {
		a.q.s.legs.remove(a.p)
		return
	}
	a.unwatch = a.watch()
}

// silent gives the attempt up because decode does not answer.
func (a *attempt) silent(err error) {
	if a.failDecode(&failure{role: fleet.Decode, id: a.d.inst.ID, outcome: ticket.Late, reason: reasonTimeout, err: err, retry: true,
		avoid: []string{a.p.inst.ID, a.d.inst.ID, a.d.inst.ID}}) {
		a.fault(a.d, pick.Broken)
	}
}

// watch ends decode's leg when prefill dies with the blocks that decode has to
// collect, and when the dialect's budgets of time are used up. It returns how
// to end that.
func (a *attempt) watch() func() {
	start, silence, gap := time.Now(), a.q.s.DecodeSilence, a.rules.Gap
	if gap <= 0 || a.rules.Order != dialect.PrefillFirst {
		gap = silence
	}
	var timer *time.Timer
	timer = time.AfterFunc(min(gap, silence), func() {
		left := silence - time.Since(start)
		switch {
		case left <= 0:
			err := fmt.Errorf("it is silent for %v after prefill's answer", silence)
			if a.rules.Hint != "" {
				err = fmt.Errorf("%w; %s", err, a.rules.Hint)
			}
			a.silent(err)
		case !a.d.sent.Load():
			a.silent(fmt.Errorf("it did not take its request within %v of prefill's answer", gap))
		default:
			a.mu.Lock() // unwatch may have stopped the timer just now
			if a.unwatch != nil {
				timer.Reset(left)
			}
			a.mu.Unlock()
		}
	})
	stop := a.p.OnEnd(func() {
		if cause := a.p.Cause(); errors.Is(cause, errInstanceDead) {
			a.failDecode(&failure{role: fleet.Prefill, id: a.p.inst.ID, outcome: ticket.Dead, reason: reasonDead, err: cause, retry: true,
				exclude: []string{a.p.inst.ID}, holds: a.d.inst.ID})
		}
	})
	return func() {
		timer.Stop()
		stop()
		a.q.s.legs.remove(a.p)
	}
}

// failDecode ends decode's leg with the failure, unless decode has committed itself
// or something else failed before.
func (a *attempt) failDecode(f *failure) (matters bool) {
	a.mu.Lock()
	matters = !a.committed && a.failed == nil && !a.closed
	if matters {
		a.failed = f
	}
	a.mu.Unlock()
	if matters {
		a.d.End(f)
	}
	return matters
}

func await(done <-chan struct{}) {
	select {
	case <-done: // mostly
		return
	default:
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

// commit marks that decode has begun to answer, unless prefill's failure or
// another attempt came first.
func (a *attempt) commit() bool {
	a.mu.Lock()
	ok := a.failed == nil && a.d.Cause() == nil
	won := ok && a.hedge.win(a)
	if a.committed = won; won {
		a.endWatch()
	}
	a.mu.Unlock()
	if won {
		a.hedge.endLoser(a)
	} else if ok {
		a.end(errLost)
	}
	return won
}

// beaten is why decode could not commit.
func (a *attempt) beaten() *failure {
	a.mu.Lock()
	f := a.failed
	a.mu.Unlock()
	if f == nil {
		f = a.broken(a.d, a.d.Cause())
	}
	return f
}
