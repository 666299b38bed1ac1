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
)

var (
	_ kernels.Exporter   = (*Backend)(nil)
	_ kernels.PeerOpener = (*Backend)(nil)
	_ kernels.Arriver    = (*Backend)(nil)
	_ kernels.Gated      = (*Backend)(nil)
)

// move is lib.call with ErrNoPeerAccess told apart from other failures.
func (b *Backend) move(name string, f func() C.int32_t) error {
	err := b.lib.call(name, f)
	var e *kernels.Error
	if errors.As(err, &e) && e.Code == C.XK_NO_PEER {
		return fmt.Errorf("%w: %w", kernels.ErrNoPeerAccess, err)
	}
	return err
}

// reached returns a look function for await: whether the device has reached a mark.
func (b *Backend) reached(m *C.xk_mark) func(time.Duration) error {
	return func(d time.Duration) error {
		return b.move("xk_wait", func() C.int32_t { return C.api_wait(b.lib.api, m, C.int64_t(d)) })
	}
}

// done is a Pending for which there was nothing to do.
type done struct{}

// Wait implements kernels.Pending.
func (done) Wait(context.Context) error { return nil }

// marked is pending until the stream reaches a mark.
type marked struct {
	pending
	mark *C.xk_mark // freed once reached
}

// pendingMark returns a marked for the mark of a call.
func (b *Backend) pendingMark(m *C.xk_mark) *marked {
	free := func() { C.api_mark_free(b.lib.api, m) }
	return &marked{newPending(b.reached(m), free), m}
}

// hostMemory implements kernels.HostMemory.
type hostMemory struct {
	b      *Backend
	mem    []byte
	region *C.xk_region
	lent   bool // a link's device memory
}

// RegisterHost implements kernels.HostMover.
func (b *Backend) RegisterHost(mem []byte) (kernels.HostMemory, error) {
	if b.closed {
		return nil, errClosed
	}
	h := &hostMemory{b: b, mem: mem}
	err := b.move("xk_host_register", func() C.int32_t {
		return C.api_host_register(b.lib.api, b.ctx, unsafe.Pointer(unsafe.SliceData(mem)), C.int64_t(len(mem)), &h.region)
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

func (h *hostMemory) Bytes() []byte { return h.mem }

// Close implements kernels.HostMemory. It may come after the backend's.
func (h *hostMemory) Close() error {
	if h.region == nil || h.lent {
		return nil
	}
	r := h.region
	h.region = nil
	return h.b.move("xk_host_release", func() C.int32_t { return C.api_host_release(h.b.lib.api, r) })
}

// GatherBlocks implements kernels.HostMover.
func (b *Backend) GatherBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	return b.hostMove(m, true)
}

// ScatterBlocks implements kernels.HostMover.
func (b *Backend) ScatterBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	return b.hostMove(m, false)
}

func (b *Backend) hostMove(m *kernels.HostMove, toHost bool) (kernels.Pending, error) {
	h, places, args, err := b.describeMove(m)
	if err != nil {
		return nil, err
	}
	if len(places) == 0 {
		return done{}, nil
	}
	args.to_host = flag(toHost)
	var mark *C.xk_mark
	err = b.move("xk_move", func() C.int32_t { return C.api_move(b.lib.api, b.ctx, h.region, &args, &places[0], &mark) })
	if err != nil {
		return nil, err
	}
	return b.pendingMark(mark), nil
}

// describeMove translates a move into the library's terms.
func (b *Backend) describeMove(m *kernels.HostMove) (h *hostMemory, places []C.xk_place, args C.xk_move_args, err error) {
	h, ok := m.Memory.(*hostMemory)
	if b.closed || !ok || h.b != b || h.region == nil {
		return nil, nil, args, errors.New("kernels/cuda: move to memory that this backend has not registered")
	}
	if h.lent && m.Engine != kernels.Kernel {
		return nil, nil, args, errors.New("kernels/cuda: a link's memory is for Engine Kernel")
	}
	places = make([]C.xk_place, len(m.Blocks))
	for i, p := range m.Blocks {
		if p.Filled < 0 || p.Filled > b.layout.BlockTokens {
			return nil, nil, args, fmt.Errorf("kernels/cuda: block %d with %d of %d rows", p.Block, p.Filled, b.layout.BlockTokens)
		}
		places[i] = C.xk_place{block: C.int32_t(p.Block), filled: C.int32_t(p.Filled), rows: C.int64_t(p.Rows), digests: C.int64_t(p.Digests)}
	}
	if err := b.layers32(m.FirstLayer, m.Layers, len(places), m.CTAs); err != nil {
		return nil, nil, args, err
	}
	args = C.xk_move_args{
		layer: C.int32_t(m.FirstLayer), n_layers: C.int32_t(m.Layers), n_places: C.int32_t(len(places)),
		engine: C.int32_t(m.Engine), ctas: C.int32_t(m.CTAs),
		layer_stride: C.int64_t(m.LayerStride), digest_stride: C.int64_t(m.DigestStride),
	}
	return h, places, args, nil
}

// layers32 refuses what would not fit in 32 bits; the library checks the rest.
func (b *Backend) layers32(first, n, blocks, ctas int) error {
	if first < 0 || n < 1 || n > b.arch.Layers || first > b.arch.Layers-n || blocks > 1<<24 || ctas < 0 || ctas > 1<<16 {
		return fmt.Errorf("kernels/cuda: layers %d+%d of %d, %d blocks, %d CTAs", first, n, b.arch.Layers, blocks, ctas)
	}
	return nil
}
