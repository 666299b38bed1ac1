package main

import (
	"context"
	"encoding/json"
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
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/sim"
)

// twinBench measures how far the twin is from real fleets: the same loads through both.
type twinBench struct {
	base
	window, stepTime      time.Duration
	device                string // cpu or cuda
	library, keep, traces string
	files                 []string // of traces
	machine               *machine
	sent                  uint64 // loads, each with prompts of its own
}

func (b *twinBench) flags(f *flag.FlagSet) {
	f.DurationVar(&b.window, "window", 20*time.Second, "of each load")
	f.DurationVar(&b.stepTime, "step-time", time.Minute, "how long steps are timed for a table")
	f.StringVar(&b.device, "device", "cpu", "cpu, or cuda: all workers on one GPU")
	f.StringVar(&b.library, "library", "", "libxpyd_cuda.so; built if empty")
	f.StringVar(&b.keep, "keep", "", "a folder for the model, its table and what fleets were measured to do: a later run goes on from there")
	f.StringVar(&b.traces, "traces", "", "files of Azure or Mooncake traces, comma separated: a load of each")
}

// measured is what a load came to.
type measured struct {
	TTFT, TPOT, P99 float64 // ms: means, and of the first token
	Rate            float64 // output tokens a second
	Upper           float64 // ms between the median first token and the 90th percentile
}

func (m measured) ttft() float64 { return m.TTFT }
func (m measured) tpot() float64 { return m.TPOT }
func (m measured) p99() float64  { return m.P99 }
func (m measured) rate() float64 { return m.Rate }

func (m measured) String() string {
	return fmt.Sprintf("TTFT %.2f ms (p99 %.1f), TPOT %.3f ms, %.0f tokens/s", m.TTFT, m.P99, m.TPOT, m.Rate)
}

func (b *twinBench) open(ctx context.Context) (err error) {
	switch b.device {
	case "cpu":
		b.machine = b.onCPU()
	case "cuda":
		if err := buildForGPU(ctx, b.Bench, &b.library); err != nil {
			return err
		}
		b.machine = b.onGPU()
		b.Book.On(gpuName(ctx))
	default:
		return fmt.Errorf("-device %s: cpu or cuda", b.device)
	}
	if b.traces != "" {
		b.files = strings.Split(b.traces, ",")
	}
	b.XPYD, err = b.Binary(ctx)
	return err
}

// parts are a whole worker behind a router, and a pair.
func (b *twinBench) parts() (list []part) {
	for _, s := range []sim.Split{{Whole: 1}, {Prefill: 1, Decode: 1}} {
		list = append(list, part{fleetName(s), func(ctx context.Context) error { return b.machine.compare(ctx, s) }})
	}
	return list
}

// fleetName is a fleet's in the names of figures.
func fleetName(s sim.Split) string {
	if s.Whole == 1 {
		return "whole"
	}
	return s.String()
}

// real is what a fleet was measured to do.
type real struct {
	Fit    fitted       `json:"fit"`
	Rounds [][]measured `json:"rounds"` // by load
}

// compare sends each load through a real fleet and through its twin.
func (m *machine) compare(ctx context.Context, s sim.Split) error {
	if err := m.prepare(ctx); err != nil {
		return err
	}
	var all real
	path := filepath.Join(m.folder(), m.device+"-"+fleetName(s)+".json")
	if kept, err := os.ReadFile(path); err == nil {
		if err := json.Unmarshal(kept, &all); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		m.fit = all.Fit
	}
	for len(all.Rounds) < m.Rounds {
		if err := m.round(ctx, s, &all); err != nil {
			return err
		}
		raw, err := json.Marshal(all)
		if err != nil {
			return err
		}
		if err := os.WriteFile(path, raw, 0o644); err != nil {
			return err
		}
	}
	return m.judge(ctx, s, &all)
}

// round adds a round to what was measured.
func (m *machine) round(ctx context.Context, s sim.Split, all *real) (err error) {
	url, stop, err := m.start(ctx, s)
	defer func() { err = errors.Join(err, stop()) }()
	if err != nil {
		return err
	}
	if len(all.Rounds) == 0 {
		if err := m.calibrate(ctx, s, url); err != nil {
			return err
		}
		all.Fit = m.fit
	}
	list, err := m.loads()
	if err != nil {
		return err
	}
	var row []measured
	for _, l := range list {
		got, err := m.send(ctx, url, l)
		if err != nil {
			return fmt.Errorf("%s: %w", l.name, err)
		}
		m.Sayf("%s, %v, %s, round %d: %v", m.device, s, l.name, len(all.Rounds)+1, got)
		row = append(row, got)
	}
	all.Rounds = append(all.Rounds, row)
	return nil
}

// simulate runs a load through the twin.
func (m *machine) simulate(ctx context.Context, s sim.Split, l twinLoad, seed uint64) (got measured, err error) {
	out, err := simulated(ctx, m.config(s, seed), repeated(warm, m.sizes.in, m.sizes.out), l, time.Hour)
	if err != nil {
		return got, err
	}
	for i := range out {
		if out[i].Failed {
			return got, fmt.Errorf("the twin fails request %d of %s", i, l.name)
		}
	}
	return measuredOf(out), nil
}

// warm is how many requests a twin serves before a load: the real one has served others.
const warm = 8

// simulated is what came of a load's requests in a twin that has served others, one after the other.
func simulated(ctx context.Context, cfg sim.Config, others []workload.Entry, l twinLoad, until time.Duration) ([]sim.Outcome, error) {
	requests := sim.Trace(slices.Concat(others, l.entries), 1, 0)
	out, err := sim.Run(ctx, cfg, sim.Load{Requests: requests, Warm: len(others), Closed: l.closed, Until: until})
	if err != nil {
		return nil, err
	}
	return out[len(others):], nil
}

// measuredOf is of those that did not fail.
func measuredOf(out []sim.Outcome) (got measured) {
	var first []float64
	tokens, gaps, gap, last := 0, 0, 0.0, time.Duration(0)
	for i := range out {
		o := &out[i]
		if o.Failed {
			continue
		}
		first = append(first, o.TTFT().Seconds()*1e3)
		tokens += o.Tokens
		last = max(last, o.Last)
		if o.Tokens > 1 {
			gap += o.Gap().Seconds() * 1e3
			gaps++
		}
	}
	if len(first) == 0 {
		return got
	}
	slices.Sort(first)
	for _, v := range first {
		got.TTFT += v / float64(len(first))
	}
	got.TPOT, got.P99 = gap/float64(max(gaps, 1)), first[len(first)*99/100]
	got.Upper = first[len(first)*9/10] - first[len(first)/2]
	got.Rate = float64(tokens) / (last - out[0].At).Seconds()
	return got
}

// A load's own repeats may differ by so much in a quantity for that to be compared.
const steadyTTFT, steadyTail = 10, 20 // %

// judge records the errors: the median over all loads and quantities, the worst mean first token, and the worst
// 99th percentile, of loads whose own repeats differ little.
func (m *machine) judge(ctx context.Context, s sim.Split, all *real) error {
	list, err := m.loads()
	if err != nil {
		return err
	}
	var every, rates []float64
	worst, tail := worstOf{limit: steadyTTFT}, worstOf{limit: steadyTail}
	for i, l := range list {
		var ours, theirs []measured // the twin's and the fleet's
		for round, row := range all.Rounds {
			got, err := m.simulate(ctx, s, l, uint64(round))
			if err != nil {
				return err
			}
			ours, theirs = append(ours, got), append(theirs, row[i])
		}
		off := func(of func(measured) float64) float64 {
			return 100 * math.Abs(medianOf(ours, of)/medianOf(theirs, of)-1)
		}
		ttft, tpot, rate := off(measured.ttft), off(measured.tpot), off(measured.rate)
		m.Sayf("%s, %v, %s: the twin has %v: off by %.1f %% in TTFT, %.1f %% in TPOT, %.1f %% in tokens a second", m.device, s, l.name, ours[0], ttft, tpot, rate)
		every, rates = append(every, ttft, tpot, rate), append(rates, rate)
		worst.add(l.name, ttft, theirs, measured.ttft)
		tail.add(l.name, off(measured.p99), theirs, measured.p99)
	}
	about := fmt.Sprintf("%s; %v; %d loads of %v, twin beside real", m.about, s, len(list), m.window)
	figure := func(name string, value, limit float64, spread string) figures.Figure {
		return figures.Figure{Name: "twin." + name + "." + m.device + "." + fleetName(s), Unit: "%", Value: value, Peer: fmt.Sprintf("limit: %g %%", limit), PeerValue: limit,
			Ratio: value / limit, Model: about, Runs: len(all.Rounds), Spread: spread}
	}
	slices.Sort(every)
	return m.Add(figure("median_error_pct", figures.Median(every), 5, fmt.Sprintf("%.1f..%.1f over all loads", every[0], every[len(every)-1])),
		figure("worst_ttft_error_pct", worst.value, 10, worst.String()),
		figure("p99_error_pct", tail.value, 20, tail.String()),
		figure("throughput_error_pct", figures.Median(rates), 5, fmt.Sprintf("%.1f..%.1f", slices.Min(rates), slices.Max(rates))))
}

func medianOf(list []measured, of func(measured) float64) float64 {
	var all []float64
	for _, m := range list {
		all = append(all, of(m))
	}
	return figures.Median(all)
}

// worstOf is the largest error over loads whose repeats differ by at most limit, in %.
type worstOf struct {
	limit, value float64
	with         string
	unsteady     []string
}

func (w *worstOf) add(name string, off float64, repeats []measured, of func(measured) float64) {
	low, high := math.Inf(1), 0.0
	for _, r := range repeats {
		low, high = min(low, of(r)), max(high, of(r))
	}
	switch {
	case 100*(high/low-1) > w.limit:
		w.unsteady = append(w.unsteady, fmt.Sprintf("%s (%.0f..%.0f ms, off by %.0f %%)", name, low, high, off))
	case off >= w.value:
		w.value, w.with = off, name
	}
}

func (w *worstOf) String() string {
	text := "with " + w.with
	if len(w.unsteady) > 0 {
		text += "; repeats differ by more: " + strings.Join(w.unsteady, ", ")
	}
	return text
}
