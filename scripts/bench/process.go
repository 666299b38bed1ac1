package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
)

// processBench measures how far the twin's goodput is from that of real processes: router, workers, HTTP,
// tickets, pushes and their digests, and a load generator that judges. Only the device is none: it
// waits as long as the table says (package timed). Where one machine runs them all, steps are slowed, so that what the
// processes compute is little beside; promises are slowed alike.
type processBench struct {
	base
	table, traces string
	window        time.Duration
	ttft, tpot    time.Duration

	steps *steptable.Table
	self  string // this program
	model string
	fit   processFit
	sent  uint64 // loads, each with prompts of its own
	began uint64 // workers, each with noise of its own
	errs  []processError
}

// processError is by how many % a load's goodput differs.
type processError struct {
	load     string
	off      float64 // above 0: the real one's is higher
	unsteady bool    // of the real one's requests more were good at a higher speed
}

func (e processError) String() string {
	text := fmt.Sprintf("%s %+.1f", e.load, e.off)
	if e.unsteady {
		text += " (unsteady)"
	}
	return text
}

const (
	processShare = 0.9  // of requests that are to be good
	processSeeds = 5    // of the twin, at each speed
	processLimit = 5.0  // %
	stepOfSpeed  = 0.1  // between the speeds that are sent, as a part of the twin's goodput
	leastOfSpeed = 0.45 // of the twin's goodput: below, and as far above, the search is given up
)

func (b *processBench) flags(f *flag.FlagSet) {
	f.StringVar(&b.table, "table", "", "a step table of a GPU, of xpyd bench step")
	f.StringVar(&b.traces, "traces", "", "two files: an Azure trace and a Mooncake trace, separated by a comma")
	f.DurationVar(&b.window, "window", 40*time.Second, "of each load")
	f.DurationVar(&b.ttft, "ttft", 2*time.Second, "a good request's time to its first token, at the table's speed")
	f.DurationVar(&b.tpot, "tpot", 25*time.Millisecond, "its mean gap between tokens, at the table's speed")
}

func (b *processBench) open(ctx context.Context) (err error) {
	if b.table == "" {
		return errors.New("-table names a step table")
	}
	if b.steps, err = steptable.Open(b.table); err != nil {
		return err
	}
	if b.steps.About.Backend != "cuda" {
		return fmt.Errorf("%s is of the backend %s: what takes a step while one runs is a GPU", b.table, b.steps.About.Backend)
	}
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	if b.XPYD, err = b.Binary(ctx); err != nil {
		return err
	}
	b.model = filepath.Join(b.Dir, "model")
	return writeTimedModel(b.model, b.steps.About.MaxContext)
}

// processLoad is a load that comes at some speed: once it is as described.
type processLoad struct {
	name    string
	slow    float64 // times as long as in the table
	entries []workload.Entry
	window  time.Duration
}

// of is the load at a speed.
func (l *processLoad) of(speed float64) []workload.Entry {
	var list []workload.Entry
	for _, e := range l.entries {
		if e.At = time.Duration(float64(e.At) / speed); e.At >= l.window {
			break
		}
		list = append(list, e)
	}
	return list
}

func (b *processBench) parts() []part {
	var list []part
	for _, name := range []string{"azure", "mooncake", "short", "shared"} {
		list = append(list, part{name, func(ctx context.Context) error {
			l, err := b.load(name)
			if err != nil {
				return err
			}
			return b.compare(ctx, l)
		}})
	}
	return list
}

// rounds calibrates, and records the worst of the loads' errors, if all were sent.
func (b *processBench) rounds(ctx context.Context, parts []part) error {
	if err := b.calibrate(ctx); err != nil {
		return fmt.Errorf("calibrate: %w", err)
	}
	if err := b.base.rounds(ctx, parts); err != nil || len(b.errs) < len(b.parts()) {
		return err
	}
	worst, each := 0.0, []string{}
	for _, e := range b.errs {
		worst = max(worst, math.Abs(e.off))
		each = append(each, e.String())
	}
	about := fmt.Sprintf("2P2D of processes, device timed like %s's steps of %s, TTFT %v and mean gap %v times the load's slowness; windows of %v: real beside twin, worst load",
		b.steps.About.Device, b.steps.About.Model, b.ttft, b.tpot, b.window)
	return b.Add(figures.Figure{Name: "brain.process_error_pct", Unit: "%", Value: worst, Peer: fmt.Sprintf("limit: %g %%", processLimit), PeerValue: processLimit,
		Ratio: worst / processLimit, Model: about, Runs: b.Rounds, Spread: strings.Join(each, ", ") + " %"})
}

// promise is what is promised of a load's requests.
func (b *processBench) promise(l *processLoad) sim.Promise {
	times := func(d time.Duration) time.Duration { return time.Duration(float64(d) * l.slow) }
	return sim.Promise{SLO: record.SLO{TTFT: times(b.ttft), TPOT: times(b.tpot)}, Share: processShare}
}

// good are the shares of good requests at a speed.
type good struct{ speed, real, twin float64 }

// compare sends a load to a real fleet and to its twin at the twin's goodput and around it, until both have
// been above the share and below.
func (b *processBench) compare(ctx context.Context, l *processLoad) error {
	c := &sim.Case{Config: b.config(l.slow, 1), Promise: b.promise(l), Patience: patience,
		Load: func(speed float64) []sim.Request { return sim.Trace(l.entries, speed, l.window) }}
	top, err := c.Search(ctx, processFleet)
	if err != nil {
		return err
	}
	if top.Speed == 0 || top.AtLeast {
		return fmt.Errorf("the twin has no goodput: %+v", top.Point)
	}
	requests := l.of(top.Speed)
	b.Sayf("%s, steps %g times as long: the twin's goodput is %.2f requests a second (%d in %v), %.0f tokens a second", l.name, l.slow, top.Rate, len(requests), l.window, top.Tokens)
	var list []good
	send := func(part float64) error {
		g, err := b.share(ctx, l, top.Speed, part)
		list = append(list, g)
		slices.SortFunc(list, func(a, b good) int { return int(math.Copysign(1, a.speed-b.speed)) })
		return err
	}
	for _, part := range []float64{1 - stepOfSpeed, 1, 1 + stepOfSpeed} {
		if err := send(part); err != nil {
			return err
		}
	}
	real, twin := crossings(list)
	for i := 2; real == 0 || twin == 0; i++ {
		part := 1 + stepOfSpeed*float64(i)
		if least := list[0]; min(least.real, least.twin) < processShare {
			part = least.speed - stepOfSpeed
		}
		if math.Abs(part-1) > 1-leastOfSpeed {
			return fmt.Errorf("%s: no share of good requests crosses %g: %+v", l.name, processShare, list)
		}
		if err := send(part); err != nil {
			return err
		}
		real, twin = crossings(list)
	}
	off := 100 * (real/twin - 1)
	e := processError{l.name, off, unsteady(list)}
	b.errs = append(b.errs, e)
	b.Sayf("%s: goodput %.2f requests a second, the twin's %.2f, by the same speeds: %v %%", l.name, real*top.Rate, twin*top.Rate, e)
	return nil
}

// share sends the load at a part of the twin's goodput.
func (b *processBench) share(ctx context.Context, l *processLoad, goodput, part float64) (good, error) {
	g := good{speed: part}
	load, promise := twinLoad{l.name, 0, l.of(goodput * part)}, b.promise(l)
	var twin measured
	var each []string
	for seed := range uint64(processSeeds) {
		out, err := simulated(ctx, b.config(l.slow, seed+1), warming, load, l.window+patience)
		if err != nil {
			return g, err
		}
		kept := 0
		for i := range out {
			if promise.Kept(&out[i]) {
				kept++
			}
		}
		g.twin += float64(kept) / float64(len(out)) / processSeeds
		each = append(each, fmt.Sprintf("%.1f", 100*float64(kept)/float64(len(out))))
		twin = measuredOf(out)
	}
	for range b.Rounds {
		kept, got, err := b.real(ctx, l, load)
		if err != nil {
			return g, err
		}
		g.real += kept / float64(b.Rounds)
		b.Sayf("%s at %.2f of the goodput, %d requests: %.1f %% are good, %v; in the twin %.1f %% (%s), %v",
			l.name, part, len(load.entries), 100*kept, got, 100*g.twin, strings.Join(each, " "), twin)
	}
	return g, nil
}

// crossings are the highest speeds at which enough are good, between those that were sent; 0: not known.
func crossings(list []good) (real, twin float64) {
	at := func(share func(good) float64) float64 {
		for i := len(list) - 1; i > 0; i-- {
			if low, high := share(list[i-1]), share(list[i]); low >= processShare && high < processShare {
				return list[i-1].speed + (list[i].speed-list[i-1].speed)*(low-processShare)/(low-high)
			}
		}
		return 0
	}
	return at(func(g good) float64 { return g.real }), at(func(g good) float64 { return g.twin })
}

// unsteady reports whether more of the real fleet's requests were good at some speed than at a lower one, as
// something else on the machine does, and not by a little, as a trace's windows do.
func unsteady(list []good) bool {
	const little = 0.05
	for i := 1; i < len(list); i++ {
		if list[i].real > list[i-1].real+little {
			return true
		}
	}
	return false
}

// real starts a fleet of processes, and returns what part of a load's requests was good there.
func (b *processBench) real(ctx context.Context, l *processLoad, load twinLoad) (share float64, got measured, err error) {
	f, err := b.start(ctx, l.slow)
	defer func() { err = errors.Join(err, f.stop()) }()
	if err != nil {
		return 0, got, err
	}
	if _, err := f.send(ctx, twinLoad{"warm", 1, warming}, nil); err != nil {
		return 0, got, err
	}
	before, began, promise := f.cpu(), time.Now(), b.promise(l)
	p, err := f.send(ctx, load, &promise)
	if err != nil {
		return 0, got, err
	}
	if p.Goodput == nil || p.Requests.Completed+p.Requests.Failed != len(load.entries) {
		return 0, got, fmt.Errorf("the report: %+v", p)
	}
	if p.Requests.Failed > 0 { // none does in the twin: a worker that gets no processor for seconds is dead
		return 0, got, fmt.Errorf("%d requests failed; is the machine busy? %+v", p.Requests.Failed, p.Errors)
	}
	b.Sayf("%s: router and workers took %.2f processors", l.name, (f.cpu()-before).Seconds()/time.Since(began).Seconds())
	return p.Goodput.Fraction, measuredBy(p), nil
}
