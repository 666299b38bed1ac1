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

// arrival implements kernels.HostArrival. It releases the library's part once it has the
// verdict.
type arrival struct {
	awaited
	n int // blocks

	mu   sync.Mutex
	over bool // with good and err
	good []bool
	err  error
}

// awaited is the library's part of what steps wait for. It is held by whoever brings the
// blocks, until all are there, and by each waiting step during its launch. Neither waits
// for the other: the last holder frees it.
type awaited struct {
	b *Backend
	*shared
	at *C.xk_arrival // valid for holders
}

func (b *Backend) newAwaited(at *C.xk_arrival) awaited {
	return awaited{b, newShared(func() { C.api_arrival_free(b.lib.api, at) }), at}
}

func (a *awaited) part() *awaited { return a }

// ArriveBlocks implements kernels.Arriver.
func (b *Backend) ArriveBlocks(m *kernels.HostMove) (kernels.HostArrival, error) {
	h, places, args, err := b.describeMove(m)
	if err != nil {
		return nil, err
	}
	if len(places) == 0 {
		return &arrival{awaited: awaited{b: b, shared: &shared{}}, over: true}, nil
	}
	first := make([]C.int32_t, len(places))
	for i, p := range m.Blocks {
		if p.FirstPos < 0 || p.FirstPos > math.MaxInt32 {
			return nil, fmt.Errorf("kernels/cuda: block %d begins at position %d", p.Block, p.FirstPos)
		}
		first[i] = C.int32_t(p.FirstPos)
	}
	var at *C.xk_arrival
	err = b.move("xk_arrive", func() C.int32_t { return C.api_arrive(b.lib.api, b.ctx, h.region, &args, &places[0], &first[0], &at) })
	if err != nil {
		return nil, err
	}
	return &arrival{awaited: b.newAwaited(at), n: len(places)}, nil
}

// Layers implements kernels.Arrival.
func (a *arrival) Layers() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over {
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

// settle fetches the verdict, once, when there is one; call it under mu.
func (a *arrival) settle() ([]bool, error) {
	if a.over {
		return a.good, a.err
	}
	bad := make([]C.uint8_t, a.n)
	err := a.b.move("xk_arrival_bad", func() C.int32_t { return C.api_arrival_bad(a.b.lib.api, a.at, &bad[0]) })
	if errors.Is(err, kernels.ErrLate) {
		return nil, err
	}
	a.over, a.err = true, err
	a.drop()
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

// behind makes the next step wait for arrivals. None of them is freed before free is
// called.
func (b *Backend) behind(list []kernels.Arrival) (free func(), err error) {
	held, err := b.holdAll(list)
	free = func() {
		for _, a := range held {
			a.drop()
		}
	}
	for _, a := range held {
		if err == nil {
			err = b.move("xk_step_after", func() C.int32_t { return C.api_step_after(b.lib.api, b.ctx, a.at) })
		}
	}
	if err != nil {
		free()
		return nil, err
	}
	return free, nil
}

// holdAll holds, once each, the arrivals that are not complete; held counts even on an
// error.
func (b *Backend) holdAll(list []kernels.Arrival) (held []*awaited, err error) {
	for _, k := range list {
		k, ok := k.(interface{ part() *awaited })
		if !ok || k.part().b != b {
			return held, errors.New("an arrival of another backend")
		}
		if a := k.part(); !slices.Contains(held, a) && a.hold() {
			held = append(held, a)
		}
	}
	return held, nil
}
