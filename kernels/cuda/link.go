//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
)

var _ kernels.Linker = (*Backend)(nil)

// linkCTAs is how many multiprocessors NCCL may take for a transfer. It also sets
// what a link takes of the device's memory: with 8 some 70 to 130 MiB, where as many
// as NCCL likes take 260 to 520.
const linkCTAs = 8

// NewLink implements kernels.Linker.
func (b *Backend) NewLink() ([]byte, error) {
	if b.closed {
		return nil, errClosed
	}
	id := make([]byte, C.XK_LINK_ID_BYTES)
	if err := b.move("xk_link_id", func() C.int32_t { return C.api_link_id(b.lib.api, unsafe.Pointer(&id[0])) }); err != nil {
		return nil, err
	}
	return id, nil
}

// link implements kernels.Link.
type link struct {
	b      *Backend
	memory *hostMemory

	mu  sync.RWMutex // at: calls read, Close writes
	at  *C.xk_link   // nil: closed
	end ending
}

// OpenLink implements kernels.Linker.
func (b *Backend) OpenLink(id []byte, end kernels.LinkEnd, bytes int64) (kernels.Link, error) {
	if b.closed || len(id) == 0 {
		return nil, fmt.Errorf("kernels/cuda: a link named by %d bytes", len(id))
	}
	l := &link{b: b, memory: &hostMemory{b: b, lent: true}}
	err := b.move("xk_link_open", func() C.int32_t {
		return C.api_link_open(b.lib.api, b.ctx, unsafe.Pointer(&id[0]), C.int64_t(len(id)), flag(end == kernels.LinkSender), C.int64_t(bytes), linkCTAs, &l.at)
	})
	if err != nil {
		return nil, err
	}
	b.links.Add(1)
	C.api_link_region(b.lib.api, l.at, &l.memory.region)
	return l, nil
}

func (l *link) Memory() kernels.HostMemory { return l.memory }

// call runs f unless the link is closed, or is about to be.
func (l *link) call(name string, f func() C.int32_t) error {
	if !l.mu.TryRLock() {
		return errClosed
	}
	defer l.mu.RUnlock()
	if l.at == nil || l.b.closed {
		return errClosed
	}
	return l.b.move(name, f)
}

// Ready implements kernels.Link: it asks again and again, so that Close need not wait.
func (l *link) Ready(ctx context.Context) error {
	for {
		err := l.call("xk_link_ready", func() C.int32_t { return C.api_link_ready(l.b.lib.api, l.at, C.int64_t(slice)) })
		if !errors.Is(err, kernels.ErrLate) || ctx.Err() != nil {
			return err
		}
		time.Sleep(slice)
	}
}

// linkTime bounds the launch of a transfer, which takes some 50 microseconds.
const linkTime = time.Second

// Transfer implements kernels.Link.
func (l *link) Transfer(ctx context.Context, at, bytes int64, after kernels.Pending) (kernels.Pending, error) {
	var mark, before *C.xk_mark
	if a, ok := after.(*marked); ok {
		if err := a.hold(ctx); err != nil {
			return nil, err
		}
		defer a.done()
		switch {
		case !a.over:
			before = a.mark
		case a.err != nil:
			return nil, a.err
		}
	}
	left := linkTime
	if d, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(d))
	}
	err := l.call("xk_link_transfer", func() C.int32_t {
		return C.api_link_transfer(l.b.lib.api, l.at, C.int64_t(at), C.int64_t(bytes), before, C.int64_t(left), &mark)
	})
	if err != nil {
		return nil, err
	}
	return l.b.pendingMark(mark), nil
}

// Taken implements kernels.Link.
func (l *link) Taken() int64 {
	var n C.int64_t
	if l.call("xk_link_taken", func() C.int32_t { return C.api_link_taken(l.b.lib.api, l.at, &n) }) != nil {
		return 0
	}
	return int64(n)
}

// Close implements kernels.Link. NCCL's abort has no deadline of its own.
func (l *link) Close(ctx context.Context) error { return l.end.wait(ctx, l.breakOff) }

// breakOff waits for the calls under way, which have deadlines, and ends the link.
func (l *link) breakOff() error {
	l.mu.Lock()
	at := l.at
	l.at, l.memory.region = nil, nil
	l.mu.Unlock()
	defer l.b.links.Add(-1)
	return l.b.move("xk_link_close", func() C.int32_t { return C.api_link_close(l.b.lib.api, at) })
}
