//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/links"
)

var (
	_ kernels.Linker = (*Backend)(nil)
	_ links.Library  = nccl{}
	_ links.Comm     = (*comm)(nil)
)

// linkCTAs bounds the multiprocessors that NCCL takes for a transfer. It also sets the
// device memory that a link takes: with 8 some 70 to 130 MiB, with NCCL's own choice 260 to
// 520.
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

// OpenLink implements kernels.Linker.
func (b *Backend) OpenLink(id []byte, end kernels.LinkEnd, bytes int64) (kernels.Link, error) {
	if b.closed || len(id) == 0 {
		return nil, fmt.Errorf("kernels/cuda: a link named by %d bytes", len(id))
	}
	return b.links.Open(id, end, bytes)
}

// nccl is NCCL for the links of a backend.
type nccl struct{ b *Backend }

// comm is our end of a communicator.
type comm struct {
	b      *Backend
	at     *C.xk_link
	memory *hostMemory
}

// Open implements links.Library.
func (n nccl) Open(id []byte, end kernels.LinkEnd, bytes int64) (links.Comm, error) {
	b := n.b
	c := &comm{b: b, memory: &hostMemory{b: b, lent: true}}
	err := b.move("xk_link_open", func() C.int32_t {
		return C.api_link_open(b.lib.api, b.ctx, unsafe.Pointer(&id[0]), C.int64_t(len(id)), flag(end == kernels.LinkSender), C.int64_t(bytes), linkCTAs, &c.at)
	})
	if err != nil {
		return nil, err
	}
	C.api_link_region(b.lib.api, c.at, &c.memory.region)
	return c, nil
}

// End implements links.Library.
func (n nccl) End(abort, free []links.Comm) error {
	list := func(all []links.Comm) (at []*C.xk_link) {
		for _, c := range all {
			at = append(at, c.(*comm).at)
		}
		return append(at, nil) // never empty
	}
	a, f := list(abort), list(free)
	for _, c := range free {
		c := c.(*comm)
		c.at, c.memory.region = nil, nil
	}
	return n.b.move("xk_link_end", func() C.int32_t {
		return C.api_link_end(n.b.lib.api, &a[0], C.int32_t(len(abort)), &f[0], C.int32_t(len(free)))
	})
}

// Memory implements links.Comm.
func (c *comm) Memory() kernels.HostMemory { return c.memory }

// Settle implements links.Comm.
func (c *comm) Settle(d time.Duration) error {
	return c.b.move("xk_link_settle", func() C.int32_t { return C.api_link_settle(c.b.lib.api, c.at, C.int64_t(d)) })
}

// afterTime bounds the wait for others that look at what a transfer comes after.
const afterTime = 100 * time.Millisecond

// Transfer implements links.Comm.
func (c *comm) Transfer(at, bytes int64, after kernels.Pending, d time.Duration) (kernels.Pending, error) {
	ctx, cancel := context.WithTimeout(context.Background(), afterTime)
	defer cancel()
	var before []*C.xk_mark
	for _, a := range marks(after) {
		if err := a.hold(ctx); err != nil { // not as ErrLate: nothing was asked for
			return nil, errors.New("kernels/cuda: others keep looking at what the transfer comes after")
		}
		defer a.done()
		switch {
		case !a.over:
			before = append(before, a.mark)
		case a.err != nil:
			return nil, a.err
		}
	}
	n := len(before)
	before = append(before, nil) // never empty
	var mark *C.xk_mark
	return c.launched(&mark, c.b.move("xk_link_transfer", func() C.int32_t {
		return C.api_link_transfer(c.b.lib.api, c.at, C.int64_t(at), C.int64_t(bytes), &before[0], C.int32_t(n), C.int64_t(d), &mark)
	}))
}

// marks are what a device, or each rank's, has to reach before a transfer.
func marks(after kernels.Pending) (list []*marked) {
	switch a := after.(type) {
	case *marked:
		list = append(list, a)
	case pendings[kernels.Pending]:
		for _, p := range a {
			list = append(list, marks(p)...)
		}
	}
	return list
}

// Resume implements links.Comm.
func (c *comm) Resume(d time.Duration) (kernels.Pending, error) {
	var mark *C.xk_mark
	return c.launched(&mark, c.b.move("xk_link_resume", func() C.int32_t { return C.api_link_resume(c.b.lib.api, c.at, C.int64_t(d), &mark) }))
}

func (c *comm) launched(mark **C.xk_mark, err error) (kernels.Pending, error) {
	if err != nil {
		return nil, err
	}
	return c.b.pendingMark(*mark), nil
}

// Taken implements links.Comm.
func (c *comm) Taken() int64 {
	var n C.int64_t
	if c.b.move("xk_link_taken", func() C.int32_t { return C.api_link_taken(c.b.lib.api, c.at, &n) }) != nil {
		return 0
	}
	return int64(n)
}
