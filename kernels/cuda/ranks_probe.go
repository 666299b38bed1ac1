//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"fmt"
	"unsafe"
)

// Reduce runs the all-reduce alone, for tests: each rank's x gets the sum of all ranks' partial
// rows, in their order, and xn the norm of that by the first layer's weights. All are [ranks]
// [rows][hidden], xn of the weights' type, the others of the residual stream's; which is 0 or 1,
// in turn.
func (g *Ranks) Reduce(which, rows int, partial, x, xn []byte) error {
	return g.reduce(which, rows, false, partial, x, xn)
}

// ReduceSignalled is Reduce by one rank after the other, for sanitizers, which let one kernel run
// at a time: no wait is left out or lasts, as all barriers say that the others have come.
func (g *Ranks) ReduceSignalled(which, rows int, partial, x, xn []byte) error {
	return g.reduce(which, rows, true, partial, x, xn)
}

func (g *Ranks) reduce(which, rows int, signalled bool, partial, x, xn []byte) error {
	size := 2
	if g.lead.opt.FP16 {
		size = 4
	}
	if n := len(g.ranks) * rows * g.lead.arch.Hidden; len(partial) != n*size || len(x) != n*size || len(xn) != 2*n || n == 0 {
		return fmt.Errorf("kernels/cuda: all-reduce of %d, %d and %d bytes", len(partial), len(x), len(xn))
	}
	list := contexts(g.ranks)
	return g.lead.lib.call("xk_reduce_test", func() C.int32_t {
		return C.api_reduce_test(g.lead.lib.api, &list[0], C.int32_t(len(list)), C.int32_t(which), C.int32_t(rows), flag(signalled), unsafe.Pointer(&partial[0]), unsafe.Pointer(&x[0]), unsafe.Pointer(&xn[0]))
	})
}

// Hold has what is launched next on a rank begin only when it is called again with false, for
// tests: until then its device seems dead.
func (g *Ranks) Hold(rank int, on bool) error {
	b := g.ranks[rank]
	return b.lib.call("xk_ranks_hold", func() C.int32_t { return C.api_ranks_hold(b.lib.api, b.ctx, flag(on)) })
}

// What ReduceTime measures.
const (
	AllReduce   = int(C.XK_REDUCE)    // without its norm
	EmptyKernel = int(C.XK_EMPTY)     // that a graph launches
	CopyRows    = int(C.XK_COPY_ROWS) // of another rank, by each rank at once
)

// ReduceTime measures calls for so many rows in graphs: the microseconds of one, in each run.
func (g *Ranks) ReduceTime(what, rows, calls, runs int) ([]float64, error) {
	us := make([]C.double, max(runs, 1))
	list := contexts(g.ranks)
	err := g.lead.lib.call("xk_reduce_bench", func() C.int32_t {
		return C.api_reduce_bench(g.lead.lib.api, &list[0], C.int32_t(len(list)), C.int32_t(rows), C.int32_t(calls), C.int32_t(runs), C.int32_t(what), &us[0])
	})
	if err != nil {
		return nil, err
	}
	out := make([]float64, len(us))
	for i, v := range us {
		out[i] = float64(v)
	}
	return out, nil
}
