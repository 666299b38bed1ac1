//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/xpyd/xpyd/internal/nap"
	"github.com/xpyd/xpyd/kernels"
)

// arrival implements kernels.HostArrival. The library's part of it is freed when
// everything has arrived, and not while a step that waits for it is launched.
type arrival struct {
	b *Backend
	n int // blocks

	awaited
	good []bool
	err  error
}

// awaited is the library's part of what steps wait for.
type awaited struct {
	mu sync.Mutex    // held while a step is launched that waits for it
	at *C.xk_arrival // nil: all is there, or will never be
}

// ArriveBlocks implements kernels.Arriver.
func (b *Backend) ArriveBlocks(m *kernels.HostMove) (kernels.HostArrival, error) {
	h, places, args, err := b.describeMove(m)
	if err != nil {
		return nil, err
	}
	a := &arrival{b: b, n: len(places)}
	if len(places) == 0 {
		return a, nil
	}
	first := make([]C.int32_t, len(places))
	for i, p := range m.Blocks {
		if p.FirstPos < 0 || p.FirstPos > math.MaxInt32 {
			return nil, fmt.Errorf("kernels/cuda: block %d begins at position %d", p.Block, p.FirstPos)
		}
		first[i] = C.int32_t(p.FirstPos)
	}
	err = b.move("xk_arrive", func() C.int32_t { return C.api_arrive(b.lib.api, b.ctx, h.region, &args, &places[0], &first[0], &a.at) })
	if err != nil {
		return nil, err
	}
	return a, nil
}

// Layers implements kernels.Arrival.
func (a *arrival) Layers() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.at == nil {
		return a.b.arch.Layers
	}
	var n C.int32_t
	if a.b.move("xk_arrived", func() C.int32_t { return C.api_arrived(a.b.lib.api, a.at, &n) }) != nil {
		return 0
	}
	return int(n)
}

// Good implements kernels.HostArrival.
func (a *arrival) Good() ([]bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.settle()
}

// settle takes the verdict when there is one, once; under mu.
func (a *arrival) settle() ([]bool, error) {
	if a.at == nil {
		return a.good, a.err
	}
	bad := make([]C.uint8_t, a.n)
	err := a.b.move("xk_arrival_bad", func() C.int32_t { return C.api_arrival_bad(a.b.lib.api, a.at, &bad[0]) })
	if errors.Is(err, kernels.ErrLate) {
		return nil, err
	}
	C.api_arrival_free(a.b.lib.api, a.at)
	a.at, a.err = nil, err
	if err == nil {
		a.good = make([]bool, a.n)
		for i, b := range bad {
			a.good[i] = b == 0
		}
	}
	return a.good, a.err
}

// Wait implements kernels.Pending.
func (a *arrival) Wait(ctx context.Context) (err error) {
	if late := nap.Until(ctx, func() bool {
		_, err = a.Good()
		return !errors.Is(err, kernels.ErrLate)
	}); late != nil {
		return kernels.ErrLate
	}
	return err
}

// behind has the next step wait for arrivals. None of them is freed before free
// has been called.
func (b *Backend) behind(list []kernels.Arrival) (free func(), err error) {
	var held []*awaited
	free = func() {
		for _, a := range held {
			a.mu.Unlock()
		}
	}
	for _, k := range list {
		var a *awaited
		switch k := k.(type) {
		case *arrival:
			if k.b == b {
				a = &k.awaited
			}
		case *gate:
			if k.b == b {
				a = &k.awaited
			}
		}
		if a == nil {
			free()
			return nil, errors.New("an arrival of another backend")
		}
		if slices.Contains(held, a) {
			continue
		}
		a.mu.Lock()
		held = append(held, a)
	}
	for _, a := range held {
		if a.at == nil {
			continue
		}
		if err := b.move("xk_step_after", func() C.int32_t { return C.api_step_after(b.lib.api, b.ctx, a.at) }); err != nil {
			free()
			return nil, err
		}
	}
	return free, nil
}
