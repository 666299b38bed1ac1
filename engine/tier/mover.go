package tier

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/xpyd/xpyd/kernels"
)

// mover copies units between host memory and the pool.
type mover interface {
	// most is how many units go together.
	most() int
	// gather copies units out of the pool.
	gather(units []moving) error
	// scatter begins to put units into blocks that nobody reads. What it returns
	// waits for the end, and says how many units, from the first, have the rows
	// that their digests were made of; it is to be called once.
	scatter(units []moving) (wait func() (good int, err error))
	// close comes before the host memory goes.
	close() error
}

// arriver is a mover whose units can be computed with while they arrive.
type arriver interface {
	// arrives says whether the pool can do it.
	arrives() bool
	// arrive is scatter, layer by layer, for steps to wait for.
	arrive(units []moving) (kernels.HostArrival, error)
}

// moving is a unit on its way.
type moving struct {
	*lease // its record
	ids    []int32
	pos    int // of its first token
}

// newMover takes the pool's own way to move many blocks, if it has one: a device, all
// of whose layers are alike.
func newMover(s shape, pool kernels.Pool, h *host) (mover, error) {
	device, ok := pool.(bulkPool)
	if _, alike := s.Uniform(); !ok || !alike {
		return plainMover{s, pool}, nil
	}
	touch(h.mem.Bytes)
	memory, err := device.RegisterHost(h.mem.Bytes)
	if err != nil {
		return nil, fmt.Errorf("tier: %d MiB of host memory: %w", len(h.mem.Bytes)>>20, err)
	}
	m := &bulkMover{shape: s, pool: device, memory: memory}
	if err := m.calibrate(len(h.slots)); err != nil {
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
	shape shape
	pool  kernels.Pool
}

func (m plainMover) most() int    { return 1 }
func (m plainMover) close() error { return nil }

func (m plainMover) gather(units []moving) error {
	for _, u := range units {
		m.shape.gather(m.pool, u.ids, u.record())
	}
	return nil
}

func (m plainMover) scatter(units []moving) func() (int, error) {
	return func() (int, error) {
		for i, u := range units {
			if !m.shape.scatter(m.pool, u.ids, u.pos, u.record()) {
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
	shape  shape
	pool   bulkPool
	memory kernels.HostMemory
	// Who copies; see calibrate.
	out, in kernels.Engine
}

// bulkUnits together take long enough at the link's rate to hide the launch of
// the next: 32 MiB of an 8B model's units of 16 tokens.
const bulkUnits = 16

func (m *bulkMover) most() int    { return bulkUnits }
func (m *bulkMover) close() error { return m.memory.Close() }

// move describes the units: all layers of each block.
func (m *bulkMover) move(units []moving) *kernels.HostMove {
	s := &m.shape
	rows, sums := int64(s.layers[0].BlockBytes()), int64(s.layers[0].DigestBytes())
	v := &kernels.HostMove{Memory: m.memory, Layers: len(s.layers), LayerStride: rows * int64(s.blocks), DigestStride: sums * int64(s.blocks),
		Blocks: make([]kernels.HostBlock, 0, len(units)*s.blocks)}
	for _, u := range units {
		at := int64(u.i) * int64(s.record())
		for i, id := range u.ids {
			v.Blocks = append(v.Blocks, kernels.HostBlock{Block: id, Rows: at + headerSize + int64(i)*rows, Digests: at + int64(s.end.rows) + int64(i)*sums,
				Filled: s.BlockTokens, FirstPos: u.pos + i*s.BlockTokens})
		}
	}
	return v
}

func (m *bulkMover) gather(units []moving) error {
	v := m.move(units)
	v.Engine = m.out
	p, err := m.pool.GatherBlocks(v)
	if err == nil {
		err = p.Wait(context.Background())
	}
	return err
}

func (m *bulkMover) scatter(units []moving) func() (int, error) {
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

// arrive moves by kernel: its launches follow each other on the device, while
// copies would each be a call of the host's for every unit and group of layers.
func (m *bulkMover) arrive(units []moving) (kernels.HostArrival, error) {
	v := m.move(units)
	v.Engine = kernels.Kernel
	return m.pool.(kernels.Arriver).ArriveBlocks(v)
}

func (m *bulkMover) arrives() bool {
	_, ok := m.pool.(kernels.Arriver)
	return ok
}

// verify says how many units, from the first, are what their digests say.
func (m *bulkMover) verify(units []moving) (int, error) {
	var list []kernels.Landed
	for _, u := range units {
		for i, id := range u.ids {
			for layer := range m.shape.layers {
				list = append(list, kernels.Landed{Layer: layer, Block: id, FirstPos: u.pos + i*m.shape.BlockTokens, Rows: m.shape.BlockTokens})
			}
		}
	}
	good, err := m.pool.Verify(context.Background(), list)
	if err != nil {
		return 0, err
	}
	for i, ok := range good {
		if !ok {
			return i / (len(m.shape.layers) * m.shape.blocks), nil
		}
	}
	return len(units), nil
}
