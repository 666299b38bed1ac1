package kerneltest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
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
func (g *FakeGPU) GatherBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	return g.move(m, true, &g.gathers)
}

// ScatterBlocks implements kernels.HostMover.
func (g *FakeGPU) ScatterBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	return g.move(m, false, &g.scatters)
}

// lane is the order of the moves of one direction.
type lane struct {
	mu   sync.Mutex
	last *fakePending // nil: there was none
}

// fakePending is over when done is closed.
type fakePending struct{ done chan struct{} }

// Wait implements kernels.Pending. The end of the move wins over that of ctx; a nil
// fakePending is over.
func (p *fakePending) Wait(ctx context.Context) error {
	if p == nil {
		return nil
	}
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

// move is moveHeads of blocks that have the pool's heads and no others.
func (g *FakeGPU) move(m *kernels.HostMove, out bool, way *lane) (kernels.Pending, error) {
	h, ok := m.Memory.(*fakeMemory)
	if !ok || h.g != g {
		return nil, errors.New("fake GPU: a move to memory of this device, please")
	}
	return g.moveHeads(m, h.mem, g.view.Rows, 0, out, way)
}

// moveHeads begins a move between the pool and blocks of all's heads, of which the pool has those
// from first on. Another goroutine carries it out like a push: half of the planes of every block,
// and later the other half. Moves of one direction follow each other.
func (g *FakeGPU) moveHeads(m *kernels.HostMove, mem []byte, all kvlayout.Rows, first int, out bool, way *lane) (kernels.Pending, error) {
	if m.Layers != 1 {
		return nil, errors.New("fake GPU: a move of one layer, please")
	}
	g.nccl.driver.RLock() // a launch
	defer g.nccl.driver.RUnlock()
	rows, sums := int64(all.BlockBytes()), int64(all.DigestBytes())
	ids := make([]int32, len(m.Blocks))
	for i, b := range m.Blocks {
		if !g.view.has(m.FirstLayer, b.Block) || b.Rows < 0 || b.Rows%16 != 0 || b.Rows+rows > int64(len(mem)) || b.Digests < 0 || b.Digests+sums > int64(len(mem)) {
			return nil, fmt.Errorf("fake GPU: move of layer %d, %+v: out of range", m.FirstLayer, b)
		}
		ids[i] = b.Block
	}
	if out {
		g.use(ids, 1)
	}
	blocks, layer := slices.Clone(m.Blocks), m.FirstLayer
	p := &fakePending{make(chan struct{})}
	way.mu.Lock()
	before := way.last
	way.last = p
	way.mu.Unlock()
	transfer := func(host, pool []byte) {
		if out {
			copy(host, pool)
		} else {
			copy(pool, host)
		}
	}
	part := func(half int) {
		time.Sleep(g.Delay / 2)
		for _, b := range blocks {
			host, pool := mem[b.Rows:b.Rows+rows], g.view.block(layer, b.Block)
			g.view.Parts(pool, all.BlockTokens, func(plane, head int, own, ownScales []byte) {
				if (plane+head)%2 == half {
					theirs, scales := all.Part(host, all.BlockTokens, plane, first+head)
					transfer(theirs, own)
					transfer(scales, ownScales)
				}
			})
		}
	}
	g.moves.Go(func() {
		defer close(p.done)
		_ = before.Wait(context.Background()) // never late
		if out {
			defer g.use(ids, -1)
			for _, b := range blocks {
				g.rot(layer, b.Block)
			}
		}
		part(0)
		g.halfway()
		part(1)
		for _, b := range blocks {
			note, own := g.view.note(layer, b.Block), g.view.DigestBytes()
			transfer(mem[b.Digests+int64(8*first):][:own], note[:own])
			if !out {
				setFilled(note[own:], b.Filled)
			}
		}
	})
	return p, nil
}
