// Package links makes all NCCL calls for the links of one device from one thread, and
// decides when. NCCL demands it:
//
//   - calls for communicators of one device must not overlap;
//   - an aborted communicator must be freed;
//   - an abort frees device memory, which waits for every kernel of the process, even one
//     of another link that is waiting for its peer.
//
// Therefore:
//
//   - requests to a link are queued in order, and nobody waits for a launch;
//   - a closed link is not called again; its abort begins when no other link has a transfer
//     under way, and new transfers wait until it is over;
//   - links closed meanwhile are aborted together: all are told before any is freed.
//
// Each of these waits is bounded. A link whose transfer delays the end of another for too
// long has failed, and is aborted with it.
//
// Backends implement Library on top of NCCL.
package links

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// Library makes and ends communicators of two ranks. Group calls it, and the communicators
// it made, from one thread; End may run beside calls for communicators that it does not
// end.
type Library interface {
	// Open begins to make our end and returns at once.
	Open(id []byte, end kernels.LinkEnd, bytes int64) (Comm, error)
	// End aborts the communicators in abort, telling all before it waits for any. Then it
	// frees the memory of those in free: the same ones, or ones whose abort has returned.
	// It waits for the device and may never return.
	End(abort, free []Comm) error
}

// Comm is our end of a communicator and the memory that it moves. Once its abort has begun,
// only Memory may be called.
type Comm interface {
	Memory() kernels.HostMemory
	// Settle returns nil when no request is in progress, ErrLate if one still is after d.
	// Any other error is the communicator's.
	Settle(d time.Duration) error
	// Transfer asks for the next transfer, to run after after. ErrLate: it is asked for and
	// still in progress after d; Resume continues it. The Pending is the transfer on the
	// device.
	Transfer(at, bytes int64, after kernels.Pending, d time.Duration) (kernels.Pending, error)
	Resume(d time.Duration) (kernels.Pending, error)
	// Taken is the device memory it takes besides Memory.
	Taken() int64
}

const (
	warmBytes   = 8 << 20         // first transfer, once both ends are there: as large as later ones
	maxQueued   = 1 << 10         // transfers of a link not yet on the device
	openTime    = 5 * time.Second // for the thread to get to a call
	pollingTime = time.Millisecond
	eager       = 150 * time.Microsecond // the thread polls for orders this long after a transfer: waking it takes as long as moving some megabytes
	processors  = 8                      // a machine with this many can spare one to poll
)

// limits bound how long links wait for each other.
type limits struct {
	launch     time.Duration // a launch, before others go on
	shut, open time.Duration // before an abort, transfers are held back and let through in turns, so that two processes cannot deadlock
	gate       time.Duration // for others' transfers to end; then they are aborted too
	abort      time.Duration // for an abort; then others go on beside it
}

var defaults = limits{launch: 100 * time.Millisecond, shut: 300 * time.Millisecond, open: 100 * time.Millisecond, gate: 5 * time.Second, abort: time.Second}

var (
	errClosed = errors.New("the link is closed")
	errQueue  = errors.New("too many transfers are queued")
	errHeld   = errors.New("a transfer that does not finish holds up the end of another link")
	errStuck  = fmt.Errorf("%w: the thread that calls NCCL is stuck in a call", kernels.ErrLate)
)

// Group holds the links of one device.
type Group struct {
	lib  Library
	lim  limits
	live atomic.Int32 // links that have not ended
	gate atomic.Int64 // Unix ns since which transfers wait for a link's end; 0: none waits

	mu      sync.Mutex
	orders  []func(*loop) // for the thread
	running bool
	wake    chan struct{} // one slot
}

// New returns a group without links. Its thread lives while there are links.
func New(lib Library) *Group { return &Group{lib: lib, lim: defaults, wake: make(chan struct{}, 1)} }

// Live returns how many links have not ended.
func (g *Group) Live() int { return int(g.live.Load()) }

// order queues f for the thread.
func (g *Group) order(f func(*loop)) {
	g.mu.Lock()
	g.orders = append(g.orders, f)
	if !g.running {
		g.running = true
		go (&loop{g: g}).run() // ends with the last link
	}
	g.mu.Unlock()
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// Open begins to make our end of a link.
func (g *Group) Open(id []byte, end kernels.LinkEnd, bytes int64) (kernels.Link, error) {
	type result struct {
		l   *Link
		err error
	}
	var left atomic.Bool // set once: the caller gave up, or the link was handed over
	out := make(chan result, 1)
	g.order(func(lp *loop) {
		l, err := lp.open(id, end, bytes)
		out <- result{l, err}
		if !left.CompareAndSwap(false, true) && err == nil {
			lp.close(l)
		}
	})
	timer := time.NewTimer(openTime)
	defer timer.Stop()
	var r result
	select {
	case r = <-out:
	case <-timer.C:
		if left.CompareAndSwap(false, true) {
			return nil, fmt.Errorf("open a link: %w", errStuck)
		}
		r = <-out // handed over just now
	}
	if r.err != nil {
		return nil, r.err
	}
	return r.l, nil
}

// Link implements kernels.Link.
type Link struct {
	g    *Group
	name string
	comm Comm
	size int64

	joined chan struct{} // closed after the first transfer, or on failure
	failed chan struct{} // closed when no further transfer begins
	ended  chan struct{} // closed once aborted and freed
	endErr error         // set before ended is closed

	closing atomic.Bool
	queued  atomic.Int32
	asked   atomic.Uint64 // transfers
	taken   atomic.Int64

	// Owned by the thread.
	state  state
	err    error // why it failed
	queue  []*Transfer
	begun  *Transfer   // asked for, not launched
	flying []*Transfer // launched, perhaps complete

	gone    bool // aborted, or being aborted
	aborted bool // the abort has returned
	freed   bool // its memory is freed, or is being freed
}

type state uint8

const (
	joining state = iota
	warming
	up
	over
)

// Memory implements kernels.Link.
func (l *Link) Memory() kernels.HostMemory { return l.comm.Memory() }

// Failed implements kernels.Link.
func (l *Link) Failed() <-chan struct{} { return l.failed }

// Taken implements kernels.Link.
func (l *Link) Taken() int64 { return l.taken.Load() }

// Ready implements kernels.Link.
func (l *Link) Ready(ctx context.Context) error {
	if !came(ctx, l.joined) {
		return fmt.Errorf("%s: %w: join: %w%s", l.name, kernels.ErrLate, context.Cause(ctx), l.g.shut())
	}
	out := make(chan error, 1)
	l.g.order(func(*loop) { out <- l.check() })
	select {
	case err := <-out:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s: %w: %w%s", l.name, kernels.ErrLate, context.Cause(ctx), l.g.shut())
	}
}

// Transfer implements kernels.Link. It does not wait for the launch.
func (l *Link) Transfer(_ context.Context, at, bytes int64, after kernels.Pending) (kernels.Pending, error) {
	if at < 0 || bytes < 1 || bytes > l.size || at > l.size-bytes {
		return nil, fmt.Errorf("%s: transfer of %d bytes at %d of %d", l.name, bytes, at, l.size)
	}
	if l.closing.Load() {
		return nil, fmt.Errorf("%s: %w", l.name, errClosed)
	}
	if l.queued.Add(1) > maxQueued {
		l.queued.Add(-1)
		return nil, fmt.Errorf("%s: %w", l.name, errQueue)
	}
	t := &Transfer{l: l, number: l.asked.Add(1), at: at, bytes: bytes, after: after, launched: make(chan struct{})}
	l.g.order(func(*loop) { l.enqueue(t) })
	return t, nil
}

// Close implements kernels.Link.
func (l *Link) Close(ctx context.Context) error {
	if !l.closing.Swap(true) {
		l.g.order(func(lp *loop) { lp.close(l) })
	}
	if !came(ctx, l.ended) {
		return fmt.Errorf("%s: abort: %w: %w%s", l.name, kernels.ErrLate, context.Cause(ctx), l.g.shut())
	}
	return l.endErr
}

// came waits until ch is closed, and reports false if ctx ends first.
func came(ctx context.Context, ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	case <-ctx.Done():
	}
	select {
	case <-ch: // both: the good news counts
		return true
	default:
		return false
	}
}

// shut describes, for an error, how long transfers have waited for a link's end; "" if they
// do not.
func (g *Group) shut() string {
	if at := g.gate.Load(); at != 0 {
		return fmt.Sprintf(" (transfers of this device wait for the end of a link, for %v)", time.Since(time.Unix(0, at)).Round(time.Millisecond))
	}
	return ""
}

// Transfer is one transfer of a link. It implements kernels.Pending.
type Transfer struct {
	l         *Link
	number    uint64
	at, bytes int64
	after     kernels.Pending
	launched  chan struct{} // closed when it is on the device or has failed
	err       error         // why it failed; set before launched is closed, as mark is
	mark      kernels.Pending
	over      atomic.Bool
	asked     atomic.Bool // NCCL was asked for it
}

// Wait implements kernels.Pending.
func (t *Transfer) Wait(ctx context.Context) error {
	if !came(ctx, t.launched) {
		return t.late(ctx)
	}
	if t.err != nil {
		return t.err
	}
	err := t.mark.Wait(ctx)
	if errors.Is(err, kernels.ErrLate) {
		return t.late(ctx)
	}
	t.over.Store(true)
	return err
}

// late returns ErrLate with how far the transfer got.
func (t *Transfer) late(ctx context.Context) error {
	where := "waits for its launch"
	select {
	case <-t.launched:
		where = "is on the device"
	default:
		if t.asked.Load() {
			where = "is being launched"
		}
	}
	return fmt.Errorf("%s: transfer %d of %d bytes %s: %w: %w%s", t.l.name, t.number, t.bytes, where, kernels.ErrLate, context.Cause(ctx), t.l.g.shut())
}

// end records that a transfer is launched, or why it never will be.
func (t *Transfer) end(mark kernels.Pending, err error) {
	t.mark, t.err, t.after = mark, err, nil
	close(t.launched)
	t.l.queued.Add(-1)
}

var (
	_ kernels.Link    = (*Link)(nil)
	_ kernels.Pending = (*Transfer)(nil)
)
