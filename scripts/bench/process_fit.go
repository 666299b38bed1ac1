package main

import (
	"context"
	"errors"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/worker"
)

// processFit is what the table does not have, measured by loads of their own.
type processFit struct {
	front time.Duration // of a request without a prompt, to a worker and back
	rate  float64       // tokens of a prompt a second, on their way; 0: any
}

// calibrate fits it to one client's prompts, short ones and long ones, on a fleet that is not slowed.
func (b *processBench) calibrate(ctx context.Context) (err error) {
	const short, long = 100, 8000
	f, err := b.start(ctx, 1)
	defer func() { err = errors.Join(err, f.stop()) }()
	if err != nil {
		return err
	}
	if _, err := f.send(ctx, twinLoad{"warm", 1, warming}, nil); err != nil {
		return err
	}
	var more [2]float64 // ms than in a twin without
	for i, l := range []twinLoad{{"calibration, short", 1, repeated(60, short, 16)}, {"calibration, long", 1, repeated(20, long, 2)}} {
		p, err := f.send(ctx, l, nil)
		if err != nil {
			return err
		}
		out, err := simulated(ctx, b.config(1, 1), warming, l, time.Hour)
		if err != nil {
			return err
		}
		got, bare := measuredBy(p), measuredOf(out)
		more[i] = got.TTFT - bare.TTFT
		b.Sayf("%s: one client: real %v; twin %v", l.name, got, bare)
	}
	perToken := max(0, more[1]-more[0]) / (long - short)
	b.fit.front = max(0, time.Duration((more[0]-short*perToken)*float64(time.Millisecond)))
	if perToken > 0 {
		b.fit.rate = 1e3 / perToken
	}
	b.Sayf("so %v for a request, and %.0f of its tokens a second", b.fit.front, b.fit.rate)
	return nil
}

// config is the twin of a fleet whose steps take so many times as long.
func (b *processBench) config(slow float64, seed uint64) sim.Config {
	w := timedConfig(fleet.Decode, b.steps, slow)
	cfg := sim.On(b.steps, worker.EngineConfig(&w, true))
	cfg.Prefill, cfg.Decode, cfg.Seed = processFleet.Prefill, processFleet.Decode, seed
	cfg.Worker.Layers, cfg.Worker.Steps = 1, sim.Slowed{Steps: b.steps, Times: slow}
	// What a prompt takes on its way by its length counts as its KV's: both are before the first token.
	cfg.KV = sim.Link{Bytes: 1, Bandwidth: b.fit.rate}
	cfg.Front, cfg.Back = b.fit.front/2, b.fit.front-b.fit.front/2
	cfg.Heartbeat = w.Fleet.Heartbeat
	return cfg
}
