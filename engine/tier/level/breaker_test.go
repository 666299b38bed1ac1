package level

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// TestBreaker: one probe at a time, ever less often, until one succeeds.
func TestBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var probes []time.Duration
		began := time.Now()
		down := errors.New("down")
		b := &Breaker{}
		b.Probe = func(context.Context) error {
			probes = append(probes, time.Since(began))
			if len(probes) < 8 {
				return down
			}
			return nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		for range 3 {
			b.Failed(ctx, down)
		}
		for !b.Allow() && time.Since(began) < time.Hour {
			time.Sleep(time.Second / 2)
		}
		if got := fmt.Sprint(probes); got != "[1s 3s 7s 15s 31s 1m1s 1m31s 2m1s]" {
			t.Error(got)
		}
		b.Failed(ctx, down)
		if open, _, err := b.State(); !open || err != down {
			t.Error(open, err)
		}
		cancel()
		b.Close()
		b.Failed(ctx, down) // probes no more
		synctest.Wait()
	})
}
