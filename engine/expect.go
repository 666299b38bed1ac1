package engine

import (
	"context"
	"time"
)

// A stream that moves here stands still from its last token where it was to the end of a step that it is
// in here. Its worker brings its rows first, so the engine knows of it before it comes (Expect): when
// the client has the next run of it, some time within one of the other's steps. So that this is about
// when a step ends here, Expect waits for half a step before that; no step is then planned behind the
// one under way, and the next waits a little.

const (
	// expectFor is how long a stream is expected.
	expectFor = 50 * time.Millisecond
	// holdFor is how long a step waits for it.
	holdFor = 10 * time.Millisecond
	// holdShare is how much longer the engine does not wait again, so that those who decode here
	// lose a twentieth at most, however many streams come.
	holdShare = 20
)

// predict notes when the device will have ended the steps under way.
func (e *Engine) predict() {
	if !e.timed() || len(e.flights) == 0 {
		return
	}
	end, takes := e.deviceBegan(e.flights[0]), time.Duration(0)
	for _, f := range e.flights {
		takes = e.pace.takes(f.members)
		end = end.Add(takes)
	}
	e.ends.Store(end.UnixNano())
	e.takes.Store(int64(takes))
}

// Expect tells that a stream begun elsewhere, whose rows are here, will be submitted within one of its
// steps, and returns when it may be.
func (e *Engine) Expect(ctx context.Context) {
	if d := e.untilMiddle(); d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	e.expected.Store(e.now().Add(expectFor).UnixNano())
}

// untilMiddle is the time to the middle of a step on a device: of the one under way, or of the next.
func (e *Engine) untilMiddle() time.Duration {
	takes := e.takes.Load()
	if takes > int64(expectFor) {
		return 0
	}
	d := e.ends.Load() - takes/2 - e.now().UnixNano()
	if d < 0 {
		d += takes
	}
	return time.Duration(d)
}

func (e *Engine) expects() bool {
	at := e.expected.Load()
	return at > 0 && at > e.now().UnixNano()
}

// hold waits with the next step for the stream that is expected, on a device that has ended all steps.
// It reports whether it waited: something may have come meanwhile.
func (e *Engine) hold() bool {
	d := e.holds()
	if d <= 0 {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-e.wake:
	case <-timer.C:
	}
	return true
}

// holds is how long hold waits.
func (e *Engine) holds() time.Duration {
	now := e.now()
	if e.timed() && len(e.flights) == 0 && len(e.running) > 0 && e.expects() && !now.Before(e.holdNext) {
		if e.holding.IsZero() {
			e.holding = now
		}
		if d := holdFor - now.Sub(e.holding); d > 0 {
			return d
		}
	}
	if !e.holding.IsZero() {
		e.holdNext = now.Add(holdShare * now.Sub(e.holding))
		e.holding = time.Time{}
	}
	return 0
}
