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
// long the runs of a block are. Copy engines win unless a kernel is 5 % faster, since the
// model needs the multiprocessors. It takes about 20 ms. Where pool or host memory is too
// small to measure, the engine stays Auto.
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
	pairs := [][2]kernels.Engine{{kernels.Copy, kernels.Copy}, {kernels.Kernel, kernels.Kernel}, {kernels.Copy, kernels.Kernel}, {kernels.Kernel, kernels.Copy}}
	took := make([]time.Duration, len(pairs))
	for i, p := range pairs {
		var all []time.Duration
		for range 1 + calibrateRounds { // the first warms up
			out.Engine, in.Engine = p[0], p[1]
			d, err := m.both(out, in)
			if err != nil {
				return err
			}
			all = append(all, d)
		}
		took[i] = slices.Min(all[1:])
	}
	best := slices.Index(took, slices.Min(took))
	if float64(took[0]) < 1.05*float64(took[best]) {
		best = 0
	}
	m.out, m.in = pairs[best][0], pairs[best][1]
	return nil
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
