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

var (
	_ kernels.Exporter   = (*Backend)(nil)
	_ kernels.PeerOpener = (*Backend)(nil)
	_ kernels.Arriver    = (*Backend)(nil)
)

// move is lib.call with the two failures that callers tell apart.
func (b *Backend) move(name string, f func() C.int32_t) error {
	err := b.lib.call(name, f)
	var e *kernels.Error
	if errors.As(err, &e) {
		switch e.Code {
		case C.XK_LATE:
			return fmt.Errorf("%w: %w", kernels.ErrLate, err)
		case C.XK_NO_PEER:
			return fmt.Errorf("%w: %w", kernels.ErrNoPeerAccess, err)
		}
	}
	return err
}

// slice is how long the library polls for a mark before it looks at the context.
const slice = time.Millisecond

// await waits for a mark as long as ctx lets it.
func (b *Backend) await(ctx context.Context, m *C.xk_mark) error {
	for {
		err := b.move("xk_wait", func() C.int32_t { return C.api_wait(b.lib.api, m, C.int64_t(slice)) })
		if !errors.Is(err, kernels.ErrLate) || ctx.Err() != nil {
			return err
		}
	}
}

// pending is a host move's mark.
type pending struct {
	b    *Backend
	mu   sync.Mutex
	mark *C.xk_mark // nil: done, with err
	err  error
}

// Wait implements kernels.Pending.
func (p *pending) Wait(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mark == nil {
		return p.err
	}
	err := p.b.await(ctx, p.mark)
	if errors.Is(err, kernels.ErrLate) {
		return err
	}
	C.api_mark_free(p.b.lib.api, p.mark)
	p.mark, p.err = nil, err
	return err
}

// hostMemory implements kernels.HostMemory.
type hostMemory struct {
	b      *Backend
	mem    []byte
	region *C.xk_region
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
	if h.region == nil {
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
	p := &pending{b: b}
	if len(places) == 0 {
		return p, nil
	}
	args.to_host = flag(toHost)
	err = b.move("xk_move", func() C.int32_t { return C.api_move(b.lib.api, b.ctx, h.region, &args, &places[0], &p.mark) })
	if err != nil {
		return nil, err
	}
	return p, nil
}

// describeMove puts a move into the library's terms.
func (b *Backend) describeMove(m *kernels.HostMove) (h *hostMemory, places []C.xk_place, args C.xk_move_args, err error) {
	h, ok := m.Memory.(*hostMemory)
	if b.closed || !ok || h.b != b || h.region == nil {
		return nil, nil, args, errors.New("kernels/cuda: move to memory that this backend has not registered")
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

// layers32 refuses what would not survive the way into 32 bits; the library
// checks the rest.
func (b *Backend) layers32(first, n, blocks, ctas int) error {
	if first < 0 || n < 1 || n > b.layout.Layers || first > b.layout.Layers-n || blocks > 1<<24 || ctas < 0 || ctas > 1<<16 {
		return fmt.Errorf("kernels/cuda: layers %d+%d of %d, %d blocks, %d CTAs", first, n, b.layout.Layers, blocks, ctas)
	}
	return nil
}
