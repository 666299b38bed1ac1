package cuda

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// TestPendingForMany: no waiter is held up by one that waits longer, a finished operation
// is freed once, and a transfer can be put behind it between two looks.
func TestPendingForMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		done, frees := time.Now().Add(10*time.Second), 0
		one := newPending(func(d time.Duration) error {
			if time.Sleep(d); time.Now().Before(done) {
				return kernels.ErrLate
			}
			return broken
		}, func() { frees++ })
		p := &one
		patient := make(chan error, 1)
		go func() { patient <- p.Wait(t.Context()) }()
		for range 3 {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			err := p.Wait(ctx)
			cancel()
			if took := time.Since(began); !errors.Is(err, kernels.ErrLate) || took > 100*time.Millisecond+slice {
				t.Errorf("%v after %v", err, took)
			}
			if err := p.hold(t.Context()); err != nil { // as a transfer behind it does
				t.Error(err)
			}
			p.done()
		}
		if err := <-patient; err != broken || time.Now().After(done.Add(2*slice)) {
			t.Errorf("%v, %v late", err, time.Since(done))
		}
		if err := p.Wait(t.Context()); err != broken || frees != 1 {
			t.Errorf("again: %v, freed %d times", err, frees)
		}
	})
}
