package kerneltest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// fakeMemory is registered host memory.
type fakeMemory struct {
	g   *FakeGPU
	mem []byte
}

func (m *fakeMemory) Bytes() []byte { return m.mem }
func (m *fakeMemory) Close() error  { return nil }

// RegisterHost implements kernels.HostMover.
func (g *FakeGPU) RegisterHost(mem []byte) (kernels.HostMemory, error) {
	if len(mem) == 0 {
		return nil, errors.New("fake GPU: no memory to register")
	}
	return &fakeMemory{g, mem}, nil
}

// GatherBlocks implements kernels.HostMover.
func (g *FakeGPU) GatherBlocks(m *kernels.HostMove) (kernels.Pending, error) { return g.move(m, true) }

// ScatterBlocks implements kernels.HostMover.
func (g *FakeGPU) ScatterBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	return g.move(m, false)
}

// fakePending is over when done is closed.
type fakePending struct{ done chan struct{} }

// Wait implements kernels.Pending.
func (p *fakePending) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-p.done:
		return nil
	default:
		return fmt.Errorf("%w: %w", kernels.ErrLate, ctx.Err())
	}
}

// move begins a move, which another goroutine carries out like a push: half of
// every block, and later the other half. Moves of one direction follow each other.
func (g *FakeGPU) move(m *kernels.HostMove, out bool) (kernels.Pending, error) {
	h, ok := m.Memory.(*fakeMemory)
	if !ok || h.g != g || m.Layers != 1 {
		return nil, errors.New("fake GPU: a move of one layer, to memory of this device, please")
	}
	g.nccl.driver.RLock() // a launch
	defer g.nccl.driver.RUnlock()
	rows, sums := int64(g.view.BlockBytes()), int64(g.view.DigestBytes())
	ids := make([]int32, len(m.Blocks))
	for i, b := range m.Blocks {
		if !g.view.has(m.FirstLayer, b.Block) || b.Rows < 0 || b.Rows%16 != 0 || b.Rows+rows > int64(len(h.mem)) || b.Digests < 0 || b.Digests+sums > int64(len(h.mem)) {
			return nil, fmt.Errorf("fake GPU: move of layer %d, %+v: out of range", m.FirstLayer, b)
		}
		ids[i] = b.Block
	}
	if out {
		g.use(ids, 1)
	}
	blocks := append([]kernels.HostBlock(nil), m.Blocks...)
	layer := m.FirstLayer
	p := &fakePending{make(chan struct{})}
	way := &g.ways[0]
	if out {
		way = &g.ways[1]
	}
	way.mu.Lock()
	before := way.last
	way.last = p.done
	way.mu.Unlock()
	g.moves.Go(func() {
		defer close(p.done)
		if before != nil {
			<-before
		}
		if out {
			defer g.use(ids, -1)
		}
		part := func(from, upto int64) {
			time.Sleep(g.Delay / 2)
			for _, b := range blocks {
				pool, host := g.view.block(layer, b.Block), h.mem[b.Rows:b.Rows+rows]
				if out {
					copy(host[from:upto], pool[from:upto])
				} else {
					copy(pool[from:upto], host[from:upto])
				}
			}
		}
		for _, b := range blocks {
			if out {
				g.rot(layer, b.Block)
			}
		}
		part(0, rows/2)
		g.halfway()
		part(rows/2, rows)
		for _, b := range blocks {
			note := g.view.note(layer, b.Block)
			if out {
				copy(h.mem[b.Digests:b.Digests+sums], note)
			} else {
				copy(note[:sums], h.mem[b.Digests:])
				setFilled(note[sums:], b.Filled)
			}
		}
	})
	return p, nil
}
