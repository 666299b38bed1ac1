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

// gate implements kernels.Gate. It releases the library's part with its last layer.
type gate struct {
	awaited
	open func(layers int) // tells the library

	tell   sync.Mutex // of Open
	layers atomic.Int32
	over   chan struct{} // closed when all are
}

// Gate implements kernels.Gated.
func (b *Backend) Gate() (kernels.Gate, error) {
	if b.closed {
		return nil, errClosed
	}
	var at *C.xk_arrival
	if err := b.move("xk_gate", func() C.int32_t { return C.api_gate(b.lib.api, b.ctx, &at) }); err != nil {
		return nil, err
	}
	return &gate{awaited: b.newAwaited(at), open: func(n int) { C.api_gate_open(b.lib.api, at, C.int32_t(n)) }, over: make(chan struct{})}, nil
}

// Open implements kernels.Gate. It waits for no step: the launch of one may be waiting for
// another gate that the caller opens next.
func (g *gate) Open(layers int) {
	g.tell.Lock()
	defer g.tell.Unlock()
	if layers = min(layers, g.b.arch.Layers); layers <= g.Layers() {
		return
	}
	g.open(layers)
	g.layers.Store(int32(layers))
	if layers == g.b.arch.Layers {
		g.drop()
		close(g.over)
	}
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
