package pinned

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/xpyd/xpyd/internal/nap"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/stage"
)

// The memory of a ring begins with a page of two words, each with one writer:
// the number up to which all pushes lie in the ring (the sender's), and the number
// up to which all slots are free again (the receiver's).
const (
	head      = 4096
	landedAt  = 0
	freedAt   = 128
	publishes = 4 // pushes gathered and not published yet, for each slot of the ring
)

func memoryBytes(g stage.Geometry) int64 { return head + g.Bytes() }

func word(mem []byte, at int) *uint64 { return (*uint64)(unsafe.Pointer(&mem[at])) }

// reach waits until the word is at least value.
func reach(ctx context.Context, at *uint64, value uint64) error {
	if err := nap.Until(ctx, func() bool { return atomic.LoadUint64(at) >= value }); err != nil {
		return fmt.Errorf("%w: at %d, not %d: %w", kernels.ErrLate, atomic.LoadUint64(at), value, err)
	}
	return nil
}

// outlet is the sender's end: a goroutine publishes pushes as they are gathered.
type outlet struct {
	mem   []byte
	slots uint64
	queue chan sent
	wg    sync.WaitGroup
	close sync.Once
	end   func() error // of the memory
}

type sent struct {
	number   uint64
	gathered kernels.Pending
}

func newOutlet(mem []byte, slots int, end func() error) *outlet {
	o := &outlet{mem: mem, slots: uint64(slots), queue: make(chan sent, publishes*slots), end: end}
	o.wg.Go(o.publish)
	return o
}

// Room implements stage.Outlet.
func (o *outlet) Room(ctx context.Context, number uint64) error {
	if number <= o.slots {
		return nil
	}
	return reach(ctx, word(o.mem, freedAt), number-o.slots)
}

// Send implements stage.Outlet. The queue has room: there are no more pushes under way
// than slots.
func (o *outlet) Send(number uint64, _, _ int64, gathered kernels.Pending) error {
	o.queue <- sent{number, gathered}
	return nil
}

// publish announces each push to the receiver once it is gathered. A failed one is not
// announced: its ticket has ended, and the receiver's wait runs into its deadline.
func (o *outlet) publish() {
	failed := false
	for s := range o.queue {
		err := stage.Finish(s.gathered.Wait)
		if failed = failed || err != nil; !failed {
			atomic.StoreUint64(word(o.mem, landedAt), s.number)
		}
	}
}

// Close implements stage.Outlet.
func (o *outlet) Close(context.Context) (err error) {
	o.close.Do(func() {
		close(o.queue)
		o.wg.Wait()
		err = o.end()
	})
	return err
}

// inlet is the receiver's end.
type inlet struct {
	mem []byte
	end func() error // of the memory
}

// Receive implements stage.Inlet.
func (i inlet) Receive(ctx context.Context, number uint64, _, _ int64) error {
	return reach(ctx, word(i.mem, landedAt), number)
}

// Landed implements stage.Inlet.
func (i inlet) Landed() uint64 { return atomic.LoadUint64(word(i.mem, landedAt)) }

// Free implements stage.Inlet.
func (i inlet) Free(number uint64) { atomic.StoreUint64(word(i.mem, freedAt), number) }

// Close implements stage.Inlet. The ring is no longer in use, however long that took.
func (i inlet) Close(context.Context) error { return i.end() }
