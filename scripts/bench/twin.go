package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
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
	f.StringVar(&b.keep, "keep", "", "a folder for models and tables: a run that finds them there uses them")
	f.StringVar(&b.traces, "traces", "", "files of Azure or Mooncake traces, comma separated: a load of each")
}

// measured is what a load came to.
type measured struct {
	TTFT, TPOT, P99 float64 // ms: means, and of the first token
	Rate            float64 // output tokens a second
}

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

// compare sends each load through a real fleet and through its twin.
func (m *machine) compare(ctx context.Context, s sim.Split) error {
	if err := m.prepare(ctx); err != nil {
		return err
	}
	var list []twinLoad
	var twin, real [][]measured // by load
	for round := range m.Rounds {
		url, stop, err := m.start(ctx, s)
		if err != nil {
			return errors.Join(err, stop())
		}
		if round == 0 {
			rate, err := m.calibrate(ctx, s, url)
			if err != nil {
				return errors.Join(err, stop())
			}
			if list, err = m.loads(m.window, rate, m.files); err != nil {
				return errors.Join(err, stop())
			}
			twin, real = make([][]measured, len(list)), make([][]measured, len(list))
		}
		for i, l := range list {
			got, err := m.send(ctx, url, l)
			if err != nil {
				return errors.Join(fmt.Errorf("%s: %w", l.name, err), stop())
			}
			want, err := m.simulate(ctx, s, l, uint64(round))
			if err != nil {
				return errors.Join(err, stop())
			}
			m.Sayf("%s, %v, %s, round %d: real %v; twin %v", m.name, s, l.name, round+1, got, want)
			twin[i], real[i] = append(twin[i], want), append(real[i], got)
		}
		if err := stop(); err != nil {
			return err
		}
	}
	return m.judge(s, list, twin, real)
}

// simulate runs a load through the twin.
func (m *machine) simulate(ctx context.Context, s sim.Split, l twinLoad, seed uint64) (got measured, err error) {
	out, err := sim.Run(ctx, m.config(s, seed), sim.Load{Requests: sim.Trace(l.entries, 1, 0), Closed: l.closed, Until: time.Hour})
	if err != nil {
		return got, err
	}
	var first []float64
	tokens, gaps, gap, last := 0, 0, 0.0, time.Duration(0)
	for i := range out {
		o := &out[i]
		if o.Failed {
			return got, fmt.Errorf("the twin fails request %d of %s", i, l.name)
		}
		first = append(first, o.TTFT().Seconds()*1e3)
		tokens += o.Tokens
		last = max(last, o.Last)
		if o.Tokens > 1 {
			gap += o.Gap().Seconds() * 1e3
			gaps++
		}
	}
	slices.Sort(first)
	for _, v := range first {
		got.TTFT += v / float64(len(first))
	}
	got.TPOT, got.P99 = gap/float64(max(gaps, 1)), first[len(first)*99/100]
	got.Rate = float64(tokens) / (last - out[0].At).Seconds()
	return got, nil
}

// steadyTail is how much a load's own repeats may differ in their 99th percentile for that to be compared.
const steadyTail = 20 // %

// judge records the errors: the median over all loads and quantities, the worst mean first token, and the worst
// 99th percentile of those whose own repeats differ little.
func (m *machine) judge(s sim.Split, list []twinLoad, twin, real [][]measured) error {
	var all, rates []float64
	worst, which, tail, tailOf, unsteady := 0.0, "", 0.0, "", []string(nil)
	for i, l := range list {
		off := func(of func(measured) float64) float64 {
			var t, r []float64
			for n := range twin[i] {
				t, r = append(t, of(twin[i][n])), append(r, of(real[i][n]))
			}
			return 100 * math.Abs(figures.Median(t)/figures.Median(r)-1)
		}
		ttft, tpot, rate := off(func(m measured) float64 { return m.TTFT }), off(func(m measured) float64 { return m.TPOT }), off(func(m measured) float64 { return m.Rate })
		m.Sayf("%s, %v, %s: off by %.1f %% in TTFT, %.1f %% in TPOT, %.1f %% in tokens a second", m.name, s, l.name, ttft, tpot, rate)
		all, rates = append(all, ttft, tpot, rate), append(rates, rate)
		low, high := math.Inf(1), 0.0
		for _, r := range real[i] {
			low, high = min(low, r.P99), max(high, r.P99)
		}
		if p99 := off(func(m measured) float64 { return m.P99 }); 100*(high/low-1) > steadyTail {
			unsteady = append(unsteady, fmt.Sprintf("%s (%.0f..%.0f ms)", l.name, low, high))
		} else if p99 >= tail {
			tail, tailOf = p99, l.name
		}
		if ttft > worst {
			worst, which = ttft, l.name
		}
	}
	about := fmt.Sprintf("%s; %v; %d loads of %v, twin beside real", m.about, s, len(list), m.window)
	figure := func(name string, value, limit float64, spread string) figures.Figure {
		return figures.Figure{Name: "twin." + name + "." + m.name + "." + fleetName(s), Unit: "%", Value: value, Peer: fmt.Sprintf("limit: %g %%", limit), PeerValue: limit,
			Ratio: value / limit, Model: about, Runs: m.Rounds, Spread: spread}
	}
	slices.Sort(all)
	return m.Add(figure("median_error_pct", figures.Median(all), 5, fmt.Sprintf("%.1f..%.1f over all loads", all[0], all[len(all)-1])),
		figure("worst_ttft_error_pct", worst, 10, "with "+which),
		figure("p99_error_pct", tail, steadyTail, "with "+tailOf+"; repeats differ by more: "+strings.Join(unsteady, ", ")),
		figure("throughput_error_pct", figures.Median(rates), 5, fmt.Sprintf("%.1f..%.1f", slices.Min(rates), slices.Max(rates))))
}
