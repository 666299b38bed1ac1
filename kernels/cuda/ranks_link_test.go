//go:build cgo && linux

package cuda

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/links"
)

// late is NCCL whose requests stay in progress until they are let through.
type late struct {
	t            *testing.T
	g            *Ranks
	opened, over int
	through      bool
}

// busy fails unless the driver is held: no step may be launched beside this call.
func (l *late) busy(what string) {
	if l.g.driver.TryLock() {
		l.t.Errorf("%s while steps can be launched", what)
		l.g.driver.Unlock()
	}
}

func (l *late) Open([]byte, kernels.LinkEnd, int64) (links.Comm, error) {
	l.busy("Open")
	l.opened++
	return l, nil
}

func (l *late) End(abort, free []links.Comm) error {
	l.busy("End")
	l.over += len(abort)
	return nil
}

func (l *late) state() error {
	if l.through {
		return nil
	}
	return fmt.Errorf("in progress: %w", kernels.ErrLate)
}

func (l *late) Memory() kernels.HostMemory                    { return &hostMemory{} }
func (l *late) Settle(time.Duration) error                    { return l.state() }
func (l *late) Resume(time.Duration) (kernels.Pending, error) { return done{}, l.state() }
func (l *late) Taken() int64                                  { return 0 }
func (l *late) Transfer(int64, int64, kernels.Pending, time.Duration) (kernels.Pending, error) {
	return done{}, l.state()
}

// newLate is ranks' NCCL above it, and a link's end.
func newLate(t *testing.T) (*late, ranksNCCL, *ranksComm) {
	t.Helper()
	g := &Ranks{}
	g.quiet.driver = &g.driver
	l := &late{t: t, g: g}
	n := ranksNCCL{g, func() links.Library { return l }}
	c, err := n.Open([]byte("id"), kernels.LinkSender, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return l, n, c.(*ranksComm)
}

// free fails unless steps can be launched.
func (l *late) free(when string) {
	l.t.Helper()
	if !l.g.driver.TryLock() {
		l.t.Fatalf("%s no step can be launched", when)
	}
	l.g.driver.Unlock()
}

// While a link is made no step is launched, and behind its first transfer's launch they are; where a
// step is being launched nobody waits for it, and nothing has begun.
func TestLinkHoldsDriver(t *testing.T) {
	l, n, c := newLate(t)
	l.g.driver.Lock()
	if err := c.Settle(0); !errors.Is(err, kernels.ErrLate) || l.opened != 0 {
		t.Fatalf("beside a step's launch: %v, %d were opened", err, l.opened)
	}
	l.g.driver.Unlock()
	l.free("before it is made")
	if err := c.Settle(0); !errors.Is(err, kernels.ErrLate) || l.opened != 1 {
		t.Fatalf("while it is made: %v, %d were opened", err, l.opened)
	}
	l.busy("it is made")
	l.through = true
	if err := c.Settle(0); err != nil {
		t.Fatal(err)
	}
	l.free("once the ends have met")
	l.g.driver.Lock()
	if _, err := c.Transfer(0, 1, nil, 0); !errors.Is(err, kernels.ErrLate) {
		t.Fatalf("the first transfer beside a step's launch: %v", err)
	}
	l.g.driver.Unlock()
	l.through = false
	if _, err := c.Resume(0); !errors.Is(err, kernels.ErrLate) {
		t.Fatalf("the first transfer: %v", err)
	}
	l.busy("the first transfer is launched")
	l.through = true
	if _, err := c.Resume(0); err != nil {
		t.Fatal(err)
	}
	l.free("behind the first transfer's launch")
	l.g.driver.Lock()
	if _, err := c.Transfer(0, 1, nil, 0); err != nil {
		t.Errorf("a transfer beside a step's launch: %v", err)
	}
	l.g.driver.Unlock()
	if err := n.End([]links.Comm{c}, []links.Comm{c}); err != nil || l.over != 1 {
		t.Errorf("%v, %d were aborted", err, l.over)
	}
	l.free("after its end")
}

// A link whose other end does not come has failed after a while, and lets steps go on with its end. One
// that was never begun is not aborted.
func TestLinkNobodyComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, n, c := newLate(t)
		for began := time.Now(); ; time.Sleep(time.Millisecond) {
			err := c.Settle(0)
			if took := time.Since(began); !errors.Is(err, kernels.ErrLate) {
				if err == nil || took < joinLimit || took > joinLimit+time.Second {
					t.Errorf("%v after %v", err, took)
				}
				break
			} else if took > 2*joinLimit {
				t.Fatal("it goes on")
			}
		}
		other, _ := n.Open([]byte("id"), kernels.LinkSender, 1<<20)
		if err := n.End([]links.Comm{c, other}, nil); err != nil || l.over != 1 {
			t.Errorf("%v, %d were aborted", err, l.over)
		}
		l.free("after its end")
	})
}

// An end does not wait for a link that is being made: both hold the driver together.
func TestLinkEndsBesideAnother(t *testing.T) {
	l, n, c := newLate(t)
	if err := c.Settle(0); !errors.Is(err, kernels.ErrLate) {
		t.Fatal(err)
	}
	if err := n.End(nil, nil); err != nil {
		t.Fatal(err)
	}
	l.busy("it is still made")
	if err := n.End([]links.Comm{c}, []links.Comm{c}); err != nil {
		t.Fatal(err)
	}
	l.free("after both")
}
