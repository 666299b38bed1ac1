package nap_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/nap"
)

// What another goroutine sets is seen, at once, while naps are short, and later.
func TestUntil(t *testing.T) {
	for _, after := range []time.Duration{0, 200 * time.Microsecond, 60 * time.Millisecond} {
		var word atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(after)
			word.Store(true)
		})
		if err := nap.Until(t.Context(), word.Load); err != nil || !word.Load() {
			t.Errorf("set after %v: %v", after, err)
		}
		wg.Wait()
	}
}

// The end of the context ends the wait, unless what was waited for is there too.
func TestUntilItEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var asked atomic.Int64
	err := nap.Until(ctx, func() bool {
		if asked.Add(1) == 10 {
			cancel()
		}
		return false
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := nap.Until(ctx, func() bool { return true }); err != nil {
		t.Errorf("there, and cancelled: %v", err)
	}
}

// How late a waiter is that has to nap, beside one that uses a timer.
func BenchmarkLate(b *testing.B) {
	late := func(b *testing.B, wait func(ready func() bool)) {
		var all []time.Duration
		for b.Loop() {
			due := time.Now().Add(300 * time.Microsecond)
			wait(func() bool { return !time.Now().Before(due) })
			all = append(all, time.Since(due))
		}
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)/2].Microseconds()), "us-late-p50")
	}
	b.Run("nap", func(b *testing.B) {
		late(b, func(ready func() bool) { _ = nap.Until(b.Context(), ready) })
	})
	b.Run("timer", func(b *testing.B) {
		late(b, func(ready func() bool) {
			for tick := time.NewTimer(0); !ready(); tick.Reset(50 * time.Microsecond) {
				<-tick.C
			}
		})
	})
}
