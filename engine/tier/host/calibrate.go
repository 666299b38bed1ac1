package host

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

const (
	calibrateUnits  = 32 // moved each way: enough to outweigh the cost of a launch
	calibrateRounds = 3  // the fastest counts
)

// calibrate measures, before anybody uses the pool, what moves units faster while both ways
// are in use: for each way, copy engines or a kernel. That depends on the machine and on how
// long the runs of a block are. A kernel takes multiprocessors from the steps beside it, whose
// kernels want them all: on an H100 a decode step of 7 ms takes 10 beside one. Nobody waits for
// a unit that is saved, so copy engines do that unless they take twice as long; who waits for
// one that is loaded gets a kernel where that is 5 % faster. It takes about 20 ms. Where pool or
// host memory is too small to measure, the engine stays Auto.
func (m *bulkMover) calibrate(slots int) error {
	pool, ok := m.pool.(interface{ Blocks() int })
	if !ok {
		return nil
	}
	n := min(calibrateUnits, slots/2, pool.Blocks()/(2*m.shape.Blocks))
	if n < calibrateUnits/4 {
		return nil
	}
	out, in := m.some(0, n), m.some(n, n)
	var took [2][2]time.Duration
	for o := range engines {
		for i := range engines {
			out.Engine, in.Engine = engines[o], engines[i]
			var all []time.Duration
			for range 1 + calibrateRounds { // the first warms up
				d, err := m.both(out, in)
				if err != nil {
					return err
				}
				all = append(all, d)
			}
			took[o][i] = slices.Min(all[1:])
		}
	}
	o, i := choose(took)
	m.out, m.in = engines[o], engines[i]
	return nil
}

// engines are what moves units.
var engines = [2]kernels.Engine{kernels.Copy, kernels.Kernel}

// choose returns which of engines move units out and in, by what moves both ways at once took with
// each.
func choose(took [2][2]time.Duration) (out, in int) {
	way := func(out int) int {
		if took[out][1]*105 < took[out][0]*100 {
			return 1
		}
		return 0
	}
	if in = way(0); took[1][way(1)]*2 < took[0][in] {
		return 1, way(1)
	}
	return 0, in
}

// some describes n units, in slots and blocks from the first-th on.
func (m *bulkMover) some(first, n int) *kernels.HostMove {
	return m.move(unitsFrom(m.shape, nil, first, first*m.shape.Blocks, n))
}

// both times a move out and a move in at once.
func (m *bulkMover) both(out, in *kernels.HostMove) (time.Duration, error) {
	began := time.Now()
	a, errA := m.pool.GatherBlocks(out)
	b, errB := m.pool.ScatterBlocks(in)
	if errA == nil {
		errA = a.Wait(context.Background())
	}
	if errB == nil {
		errB = b.Wait(context.Background())
	}
	return time.Since(began), errors.Join(errA, errB)
}
