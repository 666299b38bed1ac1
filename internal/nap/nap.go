// Package nap waits for what another process or a device writes into memory, without notice.
//
// A Go timer is too slow: in a process whose goroutines all wait, one of 20 microseconds takes more
// than a millisecond, because the runtime sleeps in epoll_wait, which counts milliseconds. A nap is
// the kernel's: it blocks a thread, for some 50 microseconds too long (the kernel's slack).
//
// Non-goals: waiting for anything that can wake a goroutine.
package nap

import (
	"context"
	"runtime"
	"time"
)

const (
	busy     = 50 * time.Microsecond // asked without a pause at first
	looks    = 64                    // between two looks at the clock
	shortest = 20 * time.Microsecond
	longest  = 200 * time.Microsecond
	patient  = 20 * time.Millisecond // after which microseconds do not matter
	timer    = time.Millisecond
)

// Until polls ready until it is true, and returns nil. If ctx ends first, it returns ctx's error
// within a millisecond.
func Until(ctx context.Context, ready func() bool) error {
	began := time.Now()
	for time.Since(began) < busy {
		for range looks {
			if ready() {
				return nil
			}
		}
		runtime.Gosched()
	}
	var tick *time.Timer
	for d := shortest; ; d = min(2*d, longest) {
		switch {
		case ready():
			return nil
		case ctx.Err() != nil:
			if ready() { // both: what is there counts
				return nil
			}
			return ctx.Err()
		case time.Since(began) < patient:
			pause(d)
			continue
		case tick == nil:
			tick = time.NewTimer(timer)
			defer tick.Stop()
		default:
			tick.Reset(timer)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}
