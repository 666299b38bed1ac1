//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/xpyd/xpyd/kernels"
)

// gate implements kernels.Gate. The library's part of it is freed when it is open,
// and not while a step that waits for it is launched.
type gate struct {
	b *Backend
	awaited

	tell   sync.Mutex // of Open; outside of awaited.mu, which a waiting step holds
	layers atomic.Int32
	over   chan struct{} // closed when all are
}

// Gate implements kernels.Gated.
func (b *Backend) Gate() (kernels.Gate, error) {
	if b.closed {
		return nil, errClosed
	}
	g := &gate{b: b, over: make(chan struct{})}
	if err := b.move("xk_gate", func() C.int32_t { return C.api_gate(b.lib.api, b.ctx, &g.at) }); err != nil {
		return nil, err
	}
	return g, nil
}

// Open implements kernels.Gate.
func (g *gate) Open(layers int) {
	g.tell.Lock()
	defer g.tell.Unlock()
	if layers = min(layers, g.b.arch.Layers); layers <= g.Layers() {
		return
	}
	C.api_gate_open(g.b.lib.api, g.at, C.int32_t(layers)) // at is there: it goes with the last layer
	g.layers.Store(int32(layers))
	if layers < g.b.arch.Layers {
		return
	}
	g.mu.Lock() // the step that is launched waits no more
	C.api_arrival_free(g.b.lib.api, g.at)
	g.at = nil
	g.mu.Unlock()
	close(g.over)
}

// Layers implements kernels.Arrival.
func (g *gate) Layers() int { return int(g.layers.Load()) }

// Wait implements kernels.Pending.
func (g *gate) Wait(ctx context.Context) error {
	select {
	case <-g.over:
		return nil
	case <-ctx.Done():
		return kernels.ErrLate
	}
}
