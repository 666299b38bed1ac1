package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/worker"
)

// h100 takes about as long as an H100 for steps of an 8B model: what is timed here is the twin.
type h100 struct{}

// Step implements sim.Steps.
func (h100) Step(l steptable.Load) (mean, spread time.Duration) {
	tokens, attention := l.Decodes, 0.0
	for _, p := range l.Pieces {
		tokens += p.Tokens
		attention += float64(p.Tokens) * (float64(p.Position) + float64(p.Tokens)/2)
	}
	tiles := (tokens + 127) / 128
	us := max(5600+30*float64(l.Decodes), 1400+3520*float64(tiles)) + float64(l.Context)*0.042 + attention*0.0006
	mean = time.Duration(us * float64(time.Microsecond))
	return mean, mean / 100
}

// twinSpeed times the twin.
type twinSpeed struct {
	base
	trace string
}

func (b *twinSpeed) flags(f *flag.FlagSet) {
	f.StringVar(&b.trace, "trace", "", "a Mooncake trace")
}

func (b *twinSpeed) open(context.Context) error {
	if b.trace == "" {
		return errors.New("-trace names a Mooncake trace")
	}
	return nil
}

func (b *twinSpeed) parts() []part {
	return []part{{"hour16", func(ctx context.Context) error { return b.hour(ctx, "hour16_s", traceWorkers, 16, 30) }},
		{"hour1000", func(ctx context.Context) error { return b.hour(ctx, "hour1000_s", 1000, 256, 600) }}}
}

// hour times how long the twin takes for an hour of a trace on some whole workers with blocks of so many tokens.
func (b *twinSpeed) hour(ctx context.Context, name string, workers, block int, limit float64) error {
	f, err := os.Open(b.trace)
	if err != nil {
		return err
	}
	defer f.Close()
	entries, err := workload.ReadTrace(f)
	if err != nil {
		return err
	}
	w := worker.DefaultConfig(fleet.Decode)
	cfg := sim.DefaultConfig()
	cfg.Whole = workers
	cfg.Worker = sim.Worker{Engine: worker.EngineConfig(&w, true), Blocks: 27000 * 16 / block, BlockTokens: block, Layers: 32, Steps: h100{}, Overlaps: true}
	load := sim.Trace(atOnce(entries, workers/traceWorkers), 1, time.Hour)
	var took []float64
	for range b.Rounds {
		began := time.Now()
		out, err := sim.Run(ctx, cfg, sim.Load{Requests: load, Until: 2 * time.Hour})
		if err != nil {
			return err
		}
		took = append(took, time.Since(began).Seconds())
		failed, tokens := 0, 0
		for i := range out {
			tokens += out[i].Tokens
			if out[i].Failed {
				failed++
			}
		}
		b.Sayf("%s: %d requests, %d failed, %d tokens in %.1f s", name, len(out), failed, tokens, took[len(took)-1])
	}
	slices.Sort(took)
	fig := figures.Figure{Name: "twin." + name, Unit: "s", Value: figures.Median(took), Peer: "limit", PeerValue: limit, Ratio: figures.Median(took) / limit, Runs: len(took),
		Model:  fmt.Sprintf("an hour of a Mooncake trace, %d requests, on %d whole workers of an H100's steps, 8B shape, in blocks of %d", len(load), workers, block),
		Spread: fmt.Sprintf("%.1f..%.1f", took[0], took[len(took)-1])}
	return b.Add(fig)
}

// traceWorkers is how many workers a trace is for.
const traceWorkers = 16

// atOnce is so many of a trace, each at another time of its hour and with other prompts.
func atOnce(entries []workload.Entry, copies int) []workload.Entry {
	var all []workload.Entry
	for c := range copies {
		later := time.Duration(c) * time.Hour / time.Duration(copies)
		for _, e := range entries {
			e.At = (e.At + later) % time.Hour
			ids := make([]uint64, len(e.Blocks))
			for i, id := range e.Blocks {
				ids[i] = id | uint64(c)<<40
			}
			e.Blocks = ids
			all = append(all, e)
		}
	}
	slices.SortStableFunc(all, func(a, b workload.Entry) int { return cmp.Compare(a.At, b.At) })
	return all
}
