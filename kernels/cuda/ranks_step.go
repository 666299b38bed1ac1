//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// Step implements kernels.Backend.
func (g *Ranks) Step(st *kernels.Step) ([]kernels.Result, error) {
	if g.lead.launched > g.lead.awaited {
		return nil, &kernels.Error{Call: "step", Err: errUnderWay}
	}
	if len(st.Seqs) == 0 {
		return nil, nil
	}
	if err := g.Launch(st); err != nil {
		return nil, err
	}
	return g.Await()
}

// Launch implements kernels.Launcher.
func (g *Ranks) Launch(st *kernels.Step) error {
	err := g.failure()
	bucket := 0
	if err == nil {
		bucket, err = g.lead.check(st)
	}
	if err == nil {
		err = g.launch(st, bucket)
	}
	if err != nil {
		return &kernels.Error{Call: "step", Err: err}
	}
	return nil
}

// each calls f for every rank at once: a launch may wait for room in the device's queue, which
// only another rank's launch makes.
func (g *Ranks) each(f func(i int, b *Backend) error) error {
	errs := make([]error, len(g.ranks))
	var wg sync.WaitGroup
	if g.serial {
		for i, b := range g.ranks {
			if err := errors.Join(f(i, b), drain(g.ranks)); err != nil {
				return err
			}
		}
		return nil
	}
	for i, b := range g.ranks[1:] {
		wg.Go(func() { errs[i+1] = f(i+1, b) })
	}
	errs[0] = f(0, g.ranks[0])
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			errs[i] = fmt.Errorf("rank %d: %w", g.ranks[i].shard.rank, err)
		}
	}
	return errors.Join(errs...)
}

// drain waits until none of these ranks computes.
func drain(ranks []*Backend) error {
	list := contexts(ranks)
	lib := ranks[0].lib
	return lib.call("xk_ranks_drain", func() C.int32_t { return C.api_ranks_drain(lib.api, &list[0], C.int32_t(len(list))) })
}

// describe describes a step for all ranks: the description is the same, in memory of each.
func (g *Ranks) describe(st *kernels.Step, bucket int) (*stepState, C.xk_step_args, error) {
	half := g.lead.launched % uint64(len(g.lead.steps))
	s := &g.lead.steps[half]
	args, err := g.lead.describe(s, st, bucket)
	if err != nil {
		return nil, args, err
	}
	for _, b := range g.ranks {
		if b != g.lead {
			copy(b.steps[half].arena, s.arena[:s.used])
		}
	}
	return s, args, nil
}

func (g *Ranks) launch(st *kernels.Step, bucket int) error {
	behind, err := g.arrivals(st.Arrivals)
	if err != nil {
		return err
	}
	s, args, err := g.describe(st, bucket)
	if err != nil {
		return err
	}
	g.driver.Lock()
	defer g.driver.Unlock()
	err = g.each(func(_ int, b *Backend) error {
		free, err := b.behind(behind[b.shard.rank])
		if err != nil {
			return err
		}
		defer free()
		g.launching.Add(1)
		defer g.launching.Add(-1)
		return b.lib.call("xk_step", func() C.int32_t { return C.api_step(b.lib.api, b.ctx, &args) })
	})
	if err != nil { // some ranks may have begun
		g.fail(err)
		return g.failure()
	}
	g.lead.noteLaunch(s, st)
	return nil
}

// Draw implements kernels.Holder: rank 0 alone draws.
func (g *Ranks) Draw() {
	g.driver.Lock()
	defer g.driver.Unlock()
	if err := g.lead.drawHeld(); err != nil {
		g.fail(err)
	}
}

// Await implements kernels.Launcher.
func (g *Ranks) Await() ([]kernels.Result, error) {
	if g.lead.launched == g.lead.awaited {
		return nil, &kernels.Error{Call: "step", Err: errors.New("no step is under way")}
	}
	s := &g.lead.steps[g.lead.awaited%uint64(len(g.lead.steps))]
	if s == g.lead.held {
		return nil, &kernels.Error{Call: "step", Err: errHeld}
	}
	g.lead.awaited++
	st := s.step
	s.step = nil
	err := g.layers(st)
	for _, b := range g.ranks {
		err = errors.Join(err, g.over(b))
	}
	if err != nil {
		g.fail(err)
	}
	if first := g.failure(); first != nil {
		return nil, &kernels.Error{Call: "step", Err: first}
	}
	return g.lead.collect(s, st), nil
}

// layers calls OnLayer for each layer as all ranks are done with it.
func (g *Ranks) layers(st *kernels.Step) error {
	if st.OnLayer == nil {
		return nil
	}
	for l := range g.lead.arch.Layers {
		for _, b := range g.ranks {
			err := g.until(b, "xk_layer_over", func() C.int32_t {
				return C.api_layer_over(b.lib.api, b.ctx, C.int32_t(l), C.int64_t(watchEvery))
			})
			if err != nil {
				return err
			}
		}
		if g.failure() != nil {
			return nil // Await tells
		}
		st.OnLayer(l)
	}
	return nil
}

// over waits for the end of a rank's oldest step.
func (g *Ranks) over(b *Backend) error {
	err := g.until(b, "xk_step_over", func() C.int32_t { return C.api_step_over(b.lib.api, b.ctx, C.int64_t(watchEvery)) })
	if err != nil {
		return err
	}
	return b.waitStep()
}

// until calls what waits for a rank for a moment until it is not late; after a failure not for
// long.
func (g *Ranks) until(b *Backend, name string, f func() C.int32_t) error {
	var since time.Time
	for {
		err := b.lib.call(name, f)
		if err == nil {
			return nil
		}
		if !errors.Is(err, kernels.ErrLate) {
			return fmt.Errorf("rank %d: %w", b.shard.rank, err)
		}
		switch now := time.Now(); {
		case g.failure() == nil:
		case since.IsZero():
			since = now
		case now.Sub(since) > lost:
			return fmt.Errorf("rank %d: %w", b.shard.rank, err)
		}
	}
}
