package host

import (
	"context"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/kernels"
)

// Move is a unit between its record and blocks of the pool.
type Move struct {
	*Lease
	Blocks []int32
	Pos    int // of its first token
}

// mover copies units between host memory and the pool.
type mover interface {
	// Batch is how many units Gather and Scatter move together.
	Batch() int
	// Gather copies units out of the pool.
	Gather(units []Move) error
	// Scatter starts to copy units into blocks that nobody reads. wait, to be called once,
	// waits for the end and returns how many units, from the first, agree with their digests.
	Scatter(units []Move) (wait func() (good int, err error))
	// Arrives reports whether the pool can compute with units while they arrive. Arrive
	// is Scatter, layer by layer, for steps to wait for.
	Arrives() bool
	Arrive(units []Move) (kernels.HostArrival, error)
	close() error // before the memory goes
}

// newMover uses the pool's own way to move many blocks, if it has one: on a device whose
// layers are all alike.
func newMover(s level.Shape, pool kernels.Pool, mem []byte, slots int) (mover, error) {
	device, ok := pool.(bulkPool)
	if _, alike := s.Uniform(); !ok || !alike {
		return plainMover{s, pool}, nil
	}
	memory, err := device.RegisterHost(mem)
	if err != nil {
		return nil, fmt.Errorf("tier: %d MiB of host memory: %w", len(mem)>>20, err)
	}
	m := &bulkMover{shape: s, pool: device, memory: memory}
	if err := m.calibrate(slots); err != nil {
		return nil, errors.Join(fmt.Errorf("tier: move blocks: %w", err), memory.Close())
	}
	return m, nil
}

// plainMover copies block by block, as the pool is in host memory too.
type plainMover struct {
	shape level.Shape
	pool  kernels.Pool
}

func (m plainMover) Batch() int    { return 1 }
func (m plainMover) Arrives() bool { return false }
func (m plainMover) close() error  { return nil }

func (m plainMover) Arrive([]Move) (kernels.HostArrival, error) {
	return nil, errors.ErrUnsupported
}

func (m plainMover) Gather(units []Move) error {
	for _, u := range units {
		m.shape.Gather(m.pool, u.Blocks, u.Record())
	}
	return nil
}

func (m plainMover) Scatter(units []Move) func() (int, error) {
	return func() (int, error) {
		for i, u := range units {
			if !m.shape.Scatter(m.pool, u.Blocks, u.Pos, u.Record()) {
				return i, nil
			}
		}
		return len(units), nil
	}
}

// bulkPool moves many scattered blocks at once, and recomputes digests where they land.
type bulkPool interface {
	kernels.HostMover
	kernels.Verifier
}

// bulkMover has a device read and write the records itself. It waits for a move however
// long it takes: nobody else may have the memory before, and a device that does not end it
// computes nothing either.
type bulkMover struct {
	shape  level.Shape
	pool   bulkPool
	memory kernels.HostMemory
	// out and in are what copies each way; see calibrate.
	out, in kernels.Engine
}

// bulkUnits units take long enough to hide the launch of the next move: 32 MiB for an 8B
// model and units of 16 tokens.
const bulkUnits = 16

func (m *bulkMover) Batch() int   { return bulkUnits }
func (m *bulkMover) close() error { return m.memory.Close() }

// move describes the units: all layers of each block.
func (m *bulkMover) move(units []Move) *kernels.HostMove {
	s := &m.shape
	first := &s.ByLayer[0]
	rows, sums := int64(first.BlockBytes()), int64(first.DigestBytes())
	v := &kernels.HostMove{Memory: m.memory, Layers: len(s.ByLayer), LayerStride: rows * int64(s.Blocks), DigestStride: sums * int64(s.Blocks),
		Blocks: make([]kernels.HostBlock, 0, len(units)*s.Blocks)}
	for _, u := range units {
		at := int64(u.i) * int64(s.Record())
		for i, id := range u.Blocks {
			v.Blocks = append(v.Blocks, kernels.HostBlock{Block: id, Rows: at + int64(first.RowsAt) + int64(i)*rows, Digests: at + int64(first.DigestsAt) + int64(i)*sums,
				Filled: s.BlockTokens, FirstPos: u.Pos + i*s.BlockTokens})
		}
	}
	return v
}

func (m *bulkMover) Gather(units []Move) error {
	v := m.move(units)
	v.Engine = m.out
	p, err := m.pool.GatherBlocks(v)
	if err == nil {
		err = p.Wait(context.Background())
	}
	return err
}

func (m *bulkMover) Scatter(units []Move) func() (int, error) {
	v := m.move(units)
	v.Engine = m.in
	p, err := m.pool.ScatterBlocks(v)
	return func() (int, error) {
		if err == nil {
			err = p.Wait(context.Background())
		}
		if err != nil {
			return 0, err
		}
		return m.verify(units)
	}
}

// Arrive uses a kernel: its launches follow each other on the device, while copies would
// need a call from the host for every unit and group of layers.
func (m *bulkMover) Arrive(units []Move) (kernels.HostArrival, error) {
	v := m.move(units)
	v.Engine = kernels.Kernel
	return m.pool.(kernels.Arriver).ArriveBlocks(v)
}

func (m *bulkMover) Arrives() bool {
	_, ok := m.pool.(kernels.Arriver)
	return ok
}

// verify returns how many units, from the first, agree with their digests.
func (m *bulkMover) verify(units []Move) (int, error) {
	var list []kernels.Landed
	for _, u := range units {
		for i, id := range u.Blocks {
			for layer := range m.shape.ByLayer {
				list = append(list, kernels.Landed{Layer: layer, Block: id, FirstPos: u.Pos + i*m.shape.BlockTokens, Rows: m.shape.BlockTokens})
			}
		}
	}
	good, err := m.pool.Verify(context.Background(), list)
	if err != nil {
		return 0, err
	}
	for i, ok := range good {
		if !ok {
			return i / (len(m.shape.ByLayer) * m.shape.Blocks), nil
		}
	}
	return len(units), nil
}
