package kernels

import (
	"context"
	"sync/atomic"
)

// HostGate implements Gate for backends that compute on the host.
type HostGate struct {
	layers []chan struct{} // closed when the layer is open
	open   atomic.Int32    // how many are open
}

// NewHostGate returns a gate of layers layers.
func NewHostGate(layers int) *HostGate {
	g := &HostGate{layers: make([]chan struct{}, layers)}
	for i := range g.layers {
		g.layers[i] = make(chan struct{})
	}
	return g
}

// Open implements Gate.
func (g *HostGate) Open(layers int) {
	for n := g.open.Load(); int(n) < min(layers, len(g.layers)); n = g.open.Load() {
		if g.open.CompareAndSwap(n, n+1) {
			close(g.layers[n])
		}
	}
}

// Layers implements Arrival.
func (g *HostGate) Layers() int { return int(g.open.Load()) }

// AwaitLayer returns when a layer is open.
func (g *HostGate) AwaitLayer(layer int) { <-g.layers[layer] }

// Wait implements Pending.
func (g *HostGate) Wait(ctx context.Context) error {
	for _, layer := range g.layers {
		select {
		case <-layer:
		case <-ctx.Done():
			return ErrLate
		}
	}
	return nil
}
