package host

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/kernels"
)

// mover copies units between host memory and the pool; level.Memory says how.
type mover interface {
	Batch() int
	Gather(units []level.Move) error
	Scatter(units []level.Move) (wait func() (good int, err error))
	Arrives() bool
	Arrive(units []level.Move) (kernels.HostArrival, error)
	close() error // before the memory goes
}

// newMover takes the pool's own way to move many blocks, if it has one: a device, all
// of whose layers are alike.
func newMover(s level.Shape, pool kernels.Pool, mem []byte, slots int) (mover, error) {
	device, ok := pool.(bulkPool)
	if _, alike := s.Uniform(); !ok || !alike {
		return plainMover{s, pool}, nil
	}
	touch(mem)
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

// touch has the system give all pages, which registering would take one after
// another: 3 s of 10 GiB.
func touch(mem []byte) {
	const part = 64 << 20
	var next atomic.Int64
	var all sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		all.Go(func() {
			for at := next.Add(part) - part; at < int64(len(mem)); at = next.Add(part) - part {
				one := mem[at:min(at+part, int64(len(mem)))]
				for i := 0; i < len(one); i += 4096 {
					one[i] = 0
				}
			}
		})
	}
	all.Wait()
}

// plainMover copies block by block: the pool is host memory as well.
type plainMover struct {
	shape level.Shape
	pool  kernels.Pool
}

func (m plainMover) Batch() int    { return 1 }
func (m plainMover) Arrives() bool { return false }
func (m plainMover) close() error  { return nil }

func (m plainMover) Arrive([]level.Move) (kernels.HostArrival, error) {
	return nil, errors.ErrUnsupported
}

func (m plainMover) Gather(units []level.Move) error {
	for _, u := range units {
		m.shape.Gather(m.pool, u.Blocks, u.Record())
	}
	return nil
}

func (m plainMover) Scatter(units []level.Move) func() (int, error) {
	return func() (int, error) {
		for i, u := range units {
			if !m.shape.Scatter(m.pool, u.Blocks, u.Pos, u.Record()) {
				return i, nil
			}
		}
		return len(units), nil
	}
}

// bulkPool moves scattered blocks in one go, and makes digests where they land.
type bulkPool interface {
	kernels.HostMover
	Verify(context.Context, []kernels.Landed) ([]bool, error)
}

// bulkMover has a device read and write the records itself. A move that has
// begun is waited for however long it takes: nobody else may have its memory
// before, and a device that does not end it computes nothing either.
type bulkMover struct {
	shape  level.Shape
	pool   bulkPool
	memory kernels.HostMemory
	// Who copies; see calibrate.
	out, in kernels.Engine
}

// bulkUnits together take long enough at the link's rate to hide the launch of
// the next: 32 MiB of an 8B model's units of 16 tokens.
const bulkUnits = 16

func (m *bulkMover) Batch() int   { return bulkUnits }
func (m *bulkMover) close() error { return m.memory.Close() }

// move describes the units: all layers of each block.
func (m *bulkMover) move(units []level.Move) *kernels.HostMove {
	s := &m.shape
	first := &s.ByLayer[0]
	rows, sums := int64(first.BlockBytes()), int64(first.DigestBytes())
	v := &kernels.HostMove{Memory: m.memory, Layers: len(s.ByLayer), LayerStride: rows * int64(s.Blocks), DigestStride: sums * int64(s.Blocks),
		Blocks: make([]kernels.HostBlock, 0, len(units)*s.Blocks)}
	for _, u := range units {
		at := int64(u.Lease.(*lease).i) * int64(s.Record())
		for i, id := range u.Blocks {
			v.Blocks = append(v.Blocks, kernels.HostBlock{Block: id, Rows: at + int64(first.RowsAt) + int64(i)*rows, Digests: at + int64(first.DigestsAt) + int64(i)*sums,
				Filled: s.BlockTokens, FirstPos: u.Pos + i*s.BlockTokens})
		}
	}
	return v
}

func (m *bulkMover) Gather(units []level.Move) error {
	v := m.move(units)
	v.Engine = m.out
	p, err := m.pool.GatherBlocks(v)
	if err == nil {
		err = p.Wait(context.Background())
	}
	return err
}

func (m *bulkMover) Scatter(units []level.Move) func() (int, error) {
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

// Arrive moves by kernel: its launches follow each other on the device, while
// copies would each be a call of the host's for every unit and group of layers.
func (m *bulkMover) Arrive(units []level.Move) (kernels.HostArrival, error) {
	v := m.move(units)
	v.Engine = kernels.Kernel
	return m.pool.(kernels.Arriver).ArriveBlocks(v)
}

func (m *bulkMover) Arrives() bool {
	_, ok := m.pool.(kernels.Arriver)
	return ok
}

// verify returns how many units, from the first, are what their digests say.
func (m *bulkMover) verify(units []level.Move) (int, error) {
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
