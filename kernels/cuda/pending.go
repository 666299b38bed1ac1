package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// slice is how long the library polls for a mark before it looks at the context.
const slice = time.Millisecond

// pending is an operation of the device for which several callers may wait. They take turns
// to look, a slice each, so that none outwaits its context because of another's, and a
// transfer can be put behind it meanwhile.
type pending struct {
	look func(d time.Duration) error // nil when it is done, ErrLate if not within d
	free func()                      // frees what look uses

	turn chan struct{} // token of the one who looks; guards the fields below
	over bool          // then err is set
	err  error
}

func newPending(look func(time.Duration) error, free func()) pending {
	return pending{look: look, free: free, turn: make(chan struct{}, 1)}
}

// hold waits for the turn, or returns ErrLate when ctx ends first. done gives it back.
func (p *pending) hold(ctx context.Context) error {
	select {
	case p.turn <- struct{}{}: // a free turn is taken even when no time is left
		return nil
	default:
	}
	select {
	case p.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", kernels.ErrLate, context.Cause(ctx))
	}
}

func (p *pending) done() { <-p.turn }

// Wait implements kernels.Pending.
func (p *pending) Wait(ctx context.Context) error {
	return await(ctx, func(d time.Duration) error {
		if err := p.hold(ctx); err != nil {
			return err
		}
		defer p.done()
		if p.over {
			return p.err
		}
		err := p.look(d)
		if !errors.Is(err, kernels.ErrLate) {
			p.free()
			p.over, p.err = true, err
		}
		return err
	})
}

// shared counts holders, beginning with its maker: the last to drop it frees it.
type shared struct {
	holders atomic.Int32
	free    func()
}

func newShared(free func()) *shared {
	s := &shared{free: free}
	s.holders.Store(1)
	return s
}

// hold adds a holder; it returns false if it has been freed.
func (s *shared) hold() bool {
	for {
		n := s.holders.Load()
		if n == 0 {
			return false
		}
		if s.holders.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (s *shared) drop() {
	if s.holders.Add(-1) == 0 {
		s.free()
	}
}

// await looks, a slice at a time, until look succeeds or ctx ends; the last look does not
// wait.
func await(ctx context.Context, look func(d time.Duration) error) error {
	for {
		d := slice
		if ctx.Err() != nil {
			d = 0
		}
		if err := look(d); d == 0 || !errors.Is(err, kernels.ErrLate) {
			return err
		}
	}
}
