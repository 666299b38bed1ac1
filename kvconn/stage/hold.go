package stage

import (
	"context"
	"fmt"
	"sync"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

// Inlet is the receiver's end of a lane. Calls may be concurrent.
type Inlet interface {
	// Receive returns when push number, of this many bytes, lies in the ring at at.
	Receive(ctx context.Context, number uint64, at, bytes int64) error
	// Landed is the newest push that lies in the ring with all before it, asked for or
	// not; 0 where pushes only come when asked for.
	Landed() uint64
	// Free allows the slots of all pushes up to number to be refilled.
	Free(number uint64)
	// Close ends the lane. It is called once our side no longer uses the ring, however
	// late. Afterwards nothing writes the ring, or it no longer matters.
	// kvconn.ErrStuck: it had not ended when ctx did.
	Close(ctx context.Context) error
}

// Hold is the receiver's end of a ring: a kvconn.StagedHold without Wait.
type Hold struct {
	pool   kernels.HostMover
	memory kernels.HostMemory
	geo    Geometry
	in     Inlet

	mu     sync.Mutex
	freed  uint64          // all pushes up to it
	ahead  map[uint64]bool // freed beyond it; at most Slots
	sizes  map[uint64]int  // blocks of each push that was received and not freed; at most Slots
	users  sync.WaitGroup  // of the ring; grows under mu, while not closed
	moved  chan struct{}   // closed when freed moves on
	closed bool
}

// NewHold makes the receiver's end; memory is the ring.
func NewHold(pool kernels.HostMover, memory kernels.HostMemory, geo Geometry, in Inlet) *Hold {
	return &Hold{pool: pool, memory: memory, geo: geo, in: in, ahead: map[uint64]bool{}, sizes: map[uint64]int{}, moved: make(chan struct{})}
}

// Ready implements kvconn.StagedHold, for lanes that need no joining.
func (h *Hold) Ready(context.Context) error { return nil }

// Ahead implements kvconn.StagedHold. It keeps the path to the device busy: the host sees
// some ten microseconds late that a copy into our blocks has ended, and only then has its
// digests checked. NCCL's transfers follow each other on a stream: only the first one that
// waits for its other end holds multiprocessors.
func (h *Hold) Ahead() int { return 4 }

// use keeps the ring until done is called.
func (h *Hold) use() (done func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, errClosed
	}
	h.users.Add(1)
	return h.users.Done, nil
}

// claim registers the receiver of a push once its slot is free in the ring: a sender
// may reuse a slot when it was sent, before we have copied it (kvconn/nccl).
func (h *Hold) claim(ctx context.Context, number uint64, blocks int) error {
	for {
		h.mu.Lock()
		_, twice := h.sizes[number]
		gone, room, moved := twice || number <= h.freed || h.ahead[number], number <= h.freed+uint64(h.geo.Slots), h.moved
		if !gone && room {
			h.sizes[number] = blocks
		}
		h.mu.Unlock()
		switch {
		case gone:
			return kvconn.ErrForgotten
		case room:
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("push %d: its slot is not free: %w", number, ctx.Err())
		}
	}
}

// Receive implements kvconn.StagedHold.
func (h *Hold) Receive(ctx context.Context, number uint64, blocks int) error {
	if err := h.geo.check(blocks); err != nil {
		return err
	}
	done, err := h.use()
	if err != nil {
		return err
	}
	defer done()
	if err := h.claim(ctx, number, blocks); err != nil {
		return err
	}
	// On an error the push stays claimed: the session ends.
	return h.in.Receive(ctx, number, h.geo.at(number), h.geo.bytes(blocks))
}

// Place implements kvconn.StagedHold.
func (h *Hold) Place(ctx context.Context, number uint64, layer int, blocks []kvconn.Placement) error {
	h.mu.Lock()
	n, ok := h.sizes[number]
	h.mu.Unlock()
	if !ok || len(blocks) < 1 {
		return fmt.Errorf("place %d blocks of push %d, which is not here", len(blocks), number)
	}
	done, err := h.use()
	if err != nil {
		return err
	}
	defer done()
	list := make([]kernels.HostBlock, len(blocks))
	for i, b := range blocks {
		if b.At < 0 || b.At >= n {
			return fmt.Errorf("place block %d of a push of %d", b.At, n)
		}
		list[i] = kernels.HostBlock{Block: b.Block, Filled: b.Rows}
		list[i].Rows, list[i].Digests = h.geo.place(number, b.At, n)
	}
	m := &kernels.HostMove{Memory: h.memory, FirstLayer: layer, Layers: 1, Blocks: list, Engine: kernels.Kernel, CTAs: ctas}
	placed, err := h.pool.ScatterBlocks(m)
	if err != nil {
		return err
	}
	// Inside the ticket's fence: only its end lets a revoke go on. It takes
	// microseconds a megabyte.
	if err := Finish(placed.Wait); err != nil {
		return err
	}
	return ctx.Err()
}

// Free implements kvconn.StagedHold.
func (h *Hold) Free(number uint64) {
	done, err := h.use()
	if err != nil {
		return // it is not refilled any more
	}
	defer done()
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.sizes, number)
	h.ahead[number] = true
	h.advance()
}

// advance frees the slots up to the first push that is still in use; needs mu.
func (h *Hold) advance() {
	if !h.ahead[h.freed+1] {
		return
	}
	for h.ahead[h.freed+1] {
		h.freed++
		delete(h.ahead, h.freed)
	}
	h.in.Free(h.freed)
	close(h.moved)
	h.moved = make(chan struct{})
}

// Forget implements kvconn.StagedHold.
func (h *Hold) Forget() {
	done, err := h.use()
	if err != nil {
		return
	}
	defer done()
	h.mu.Lock()
	defer h.mu.Unlock()
	for n := h.freed + 1; n <= min(h.in.Landed(), h.freed+uint64(h.geo.Slots)); n++ {
		if _, taken := h.sizes[n]; !taken {
			h.ahead[n] = true
		}
	}
	h.advance()
}

// Close waits until the ring is not in use, then ends the lane and frees the memory. On
// kvconn.ErrStuck both happen after it has returned.
func (h *Hold) Close() error {
	h.mu.Lock()
	over := h.closed
	h.closed = true
	h.mu.Unlock()
	if over {
		return nil
	}
	return bounded(func(ctx context.Context) error {
		h.users.Wait()
		return h.in.Close(ctx)
	})
}
