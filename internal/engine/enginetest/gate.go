package enginetest

import (
	"context"
	"sync"

	"github.com/xpyd/xpyd/kernels"
)

// Gate implements kernels.Gate, and Layered.
type Gate struct {
	mu     sync.Mutex
	layers []chan struct{} // closed when one is open
	open   int
}

// NewGate makes a gate of so many layers.
func NewGate(layers int) *Gate {
	g := &Gate{}
	for range layers {
		g.layers = append(g.layers, make(chan struct{}))
	}
	return g
}

// Open implements kernels.Gate.
func (g *Gate) Open(layers int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for ; g.open < min(layers, len(g.layers)); g.open++ {
		close(g.layers[g.open])
	}
}

// Layers implements kernels.Arrival.
func (g *Gate) Layers() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open
}

// AwaitLayer implements Layered.
func (g *Gate) AwaitLayer(layer int) { <-g.layers[layer] }

// Wait implements kernels.Pending.
func (g *Gate) Wait(ctx context.Context) error {
	select {
	case <-g.layers[len(g.layers)-1]:
		return nil
	case <-ctx.Done():
		return kernels.ErrLate
	}
}
