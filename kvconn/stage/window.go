package stage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

// Outlet is the sender's end of a lane. A window calls its methods, other than Close,
// from one goroutine at a time.
type Outlet interface {
	// Room waits until the slot of a push may be filled.
	Room(ctx context.Context, number uint64) error
	// Send brings [at, at+bytes) of the ring to the receiver as push number once
	// gathered is done, and does not wait for that.
	Send(number uint64, at, bytes int64, gathered kernels.Pending) error
	// Close ends the lane; once it has returned, nothing reads the ring.
	Close(ctx context.Context) error
}

// Window is the sender's end of a ring: a kvconn.StagedWindow.
type Window struct {
	pool   kernels.HostMover
	memory kernels.HostMemory
	geo    Geometry
	out    Outlet
	copier kernels.Engine // Auto: chosen for each push

	ctx     context.Context // ends with Abandon
	abandon context.CancelFunc

	closed atomic.Bool
	turn   chan struct{} // a token: one push at a time, in the order of numbers; taken before mu
	number uint64        // the turn's

	mu      sync.Mutex
	pending []gathering // oldest first, not awaited yet; kvconn bounds how many
}

// gathering is one push whose rows are being read from our pool.
type gathering struct {
	number uint64
	done   kernels.Pending
}

// NewWindow makes the sender's end; memory is the ring. copier gathers; Auto chooses.
func NewWindow(pool kernels.HostMover, memory kernels.HostMemory, geo Geometry, out Outlet, copier kernels.Engine) *Window {
	w := &Window{pool: pool, memory: memory, geo: geo, out: out, copier: copier, turn: make(chan struct{}, 1)}
	w.ctx, w.abandon = context.WithCancel(context.Background())
	return w
}

var _ kvconn.StagedWindow = (*Window)(nil)

// Ready implements kvconn.StagedWindow, for lanes that need no joining.
func (w *Window) Ready(context.Context) error { return nil }

// MaxMoves implements kvconn.StagedWindow.
func (w *Window) MaxMoves() int { return w.geo.Moves }

// patience bounds waits for a device.
const patience = 10 * time.Second

// roomTime bounds one wait for room, and for the turn.
const roomTime = 100 * time.Millisecond

// room waits for the turn and for the slot of the next push; done gives the turn back.
func (w *Window) room() (number uint64, done func(), err error) {
	ctx, cancel := context.WithTimeout(w.ctx, roomTime)
	defer cancel()
	none := func(err error) (uint64, func(), error) {
		switch {
		case w.ctx.Err() != nil:
			err = errAbandoned
		case ctx.Err() != nil:
			return 0, nil, fmt.Errorf("%w: %w", kvconn.ErrNoRoom, err)
		}
		return 0, nil, fmt.Errorf("wait for room: %w: %w", kvconn.ErrBroken, err)
	}
	select {
	case w.turn <- struct{}{}:
	case <-ctx.Done():
		return none(context.Cause(ctx))
	}
	done = func() { <-w.turn }
	number = w.number + 1
	switch {
	case w.closed.Load():
		err = errClosed
	case w.ctx.Err() != nil:
		err = errAbandoned
	default:
		err = w.out.Room(ctx, number)
	}
	if err != nil {
		done()
		return none(err)
	}
	return number, done, nil
}

// Push implements kvconn.DeviceWindow.
func (w *Window) Push(layer int, moves []kvconn.Move) (uint64, error) {
	if err := w.geo.check(len(moves)); err != nil {
		return 0, err
	}
	number, done, err := w.room()
	if err != nil {
		return 0, err
	}
	defer done()
	blocks := make([]kernels.HostBlock, len(moves))
	for i, m := range moves {
		blocks[i] = kernels.HostBlock{Block: m.From}
		blocks[i].Rows, blocks[i].Digests = w.geo.place(number, i, len(moves))
	}
	engine := w.copier
	if engine == kernels.Auto {
		engine = w.geo.engine(blocks)
	}
	gathered, err := w.pool.GatherBlocks(&kernels.HostMove{Memory: w.memory, FirstLayer: layer, Layers: 1, Blocks: blocks, Engine: engine, CTAs: ctas})
	if err != nil {
		return 0, err
	}
	w.mu.Lock()
	w.pending = append(w.pending, gathering{number, gathered})
	w.mu.Unlock()
	w.number = number // the slot is this push's, whatever comes of it
	if err := w.out.Send(number, w.geo.at(number), w.geo.bytes(len(moves)), gathered); err != nil {
		w.abandon() // a number without its bytes: the receiver cannot go on
		return 0, fmt.Errorf("%w: %w", kvconn.ErrBroken, err)
	}
	return number, nil
}

// Abandon implements kvconn.StagedWindow.
func (w *Window) Abandon() { w.abandon() }

// Await implements kvconn.DeviceWindow: our rows have been read once they are gathered.
// It returns that push's own error, and is called once for it.
func (w *Window) Await(number uint64) (err error) {
	w.mu.Lock()
	upto := slices.DeleteFunc(slices.Clone(w.pending), func(g gathering) bool { return g.number > number })
	w.mu.Unlock()
	for _, g := range upto { // several bulk writers push: those before it may not have been asked for
		if failed := Finish(g.done.Wait); g.number == number {
			err = failed
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pending = slices.DeleteFunc(w.pending, func(g gathering) bool { return g.number == number })
	return err
}

// Finish waits for a device's work, again while wait returns kernels.ErrLate: only the
// end of the work proves anything.
func Finish(wait func(context.Context) error) error {
	for {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := wait(ctx)
		cancel()
		if !errors.Is(err, kernels.ErrLate) {
			return err
		}
	}
}

// Close implements kvconn.Window. On kvconn.ErrStuck the ring and our rows are still in
// use.
func (w *Window) Close() error {
	w.abandon()
	w.closed.Store(true)
	return bounded(func(ctx context.Context) error {
		w.turn <- struct{}{} // held by a push that is starting
		last := w.number
		<-w.turn
		return errors.Join(w.Await(last), w.out.Close(ctx))
	})
}

// bounded runs end, which ends one side of a ring and which a device may hold up for
// ever. After patience it returns kvconn.ErrStuck, and end goes on.
func bounded(end func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- end(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w after %v", kvconn.ErrStuck, patience)
	}
}
