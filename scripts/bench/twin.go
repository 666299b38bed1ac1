package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/scripts/bench/harness"
	"github.com/xpyd/xpyd/worker"
)

// twinBench measures how far the twin is from real fleets: the same loads through both.
type twinBench struct {
	base
	window, stepTime time.Duration
	table            *steptable.Table
	model            string
	front, host      time.Duration // see calibrate
}

func (b *twinBench) flags(f *flag.FlagSet) {
	f.DurationVar(&b.window, "window", 20*time.Second, "of each load")
	f.DurationVar(&b.stepTime, "step-time", time.Minute, "how long steps are timed for the table")
}

// twinLoad is a load, for some fleets of one machine.
type twinLoad struct {
	name    string
	closed  int // clients; 0: entries come at their times
	entries []workload.Entry
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
	if _, err := b.Binary(ctx); err != nil {
		return err
	}
	b.model = filepath.Join(b.Dir, "model")
	c := modeltest.Stories15M()
	c.Vocab, c.MaxPositions = 512, 2048
	files := map[string][]byte{}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if files[name], err = os.ReadFile(filepath.Join("internal/model/stories260k", name)); err != nil {
			return err
		}
	}
	if err := modeltest.WriteHF(b.model, c, modeltest.HFOptions{Seed: 1, DType: kernels.F32, Files: files}); err != nil {
		return err
	}
	path := filepath.Join(b.Dir, "table.json")
	out, err := harness.Run(ctx, nil, b.XPYD, "bench", "step", "--model", b.model, "--threads", "1", "--device", "cpu", "--time", b.stepTime.String(), "--out", path)
	if err != nil {
		return err
	}
	b.Sayf("%s", out)
	b.table, err = steptable.Open(path)
	return err
}

// parts are a whole worker behind a router, and a pair.
func (b *twinBench) parts() []part {
	return []part{{"whole", func(ctx context.Context) error { return b.compare(ctx, sim.Split{Whole: 1}) }},
		{"1P1D", func(ctx context.Context) error { return b.compare(ctx, sim.Split{Prefill: 1, Decode: 1}) }}}
}

// repeated are n requests of one length.
func repeated(n, in, out int) []workload.Entry {
	return slices.Repeat([]workload.Entry{{In: in, Out: out}}, n)
}

// loads are for a fleet that takes so many requests of 200 and 50 tokens a second.
func (b *twinBench) loads(rate float64) []twinLoad {
	open := func(share, burst float64, in, out string, prefixes int) (list []workload.Entry) {
		ins, _ := workload.ParseLengths(in, 1) // these are right
		outs, _ := workload.ParseLengths(out, 1)
		times, rng := arrival.New(arrival.Config{Rate: share * rate, Burstiness: burst}, 1), rand.New(rand.NewPCG(1, 1))
		for at := times.Next(); at < b.window; at = times.Next() {
			e := workload.Entry{At: at, In: min(ins.Tokens(rng, 1), 1000), Out: min(outs.Tokens(rng, 2), 500)}
			if prefixes > 0 { // a block of many, and one of its own
				e.In = workload.BlockTokens + min(e.In, workload.BlockTokens)
				e.Blocks = []uint64{uint64(rng.IntN(prefixes)), uint64(prefixes + len(list))}
			}
			list = append(list, e)
		}
		return list
	}
	n := int(b.window.Seconds() * rate)
	return []twinLoad{
		{"closed 1", 1, repeated(max(n/4, 20), 300, 40)},
		{"closed 4", 4, repeated(max(n/2, 40), 200, 50)},
		{"closed 16", 16, repeated(max(n, 80), 200, 50)},
		{"open 30 %", 0, open(0.3, 1, "200", "50", 0)},
		{"open 60 %", 0, open(0.6, 1, "50-350", "exp:50", 0)},
		{"open 85 %", 0, open(0.85, 1, "200", "50", 0)},
		{"bursts 50 %", 0, open(0.5, 0.4, "lognormal:150,0.6", "exp:40", 0)},
		{"prefixes", 0, open(0.3, 1, "64-256", "30-60", 4)},
	}
}

// compare sends each load through a real fleet and through its twin.
func (b *twinBench) compare(ctx context.Context, s sim.Split) error {
	var list []twinLoad
	var twin, real [][]measured // by load
	for round := range b.Rounds {
		p, url, err := b.start(ctx, s)
		if err != nil {
			return err
		}
		if round == 0 {
			rate, err := b.calibrate(ctx, s, url)
			if err != nil {
				return err
			}
			list = b.loads(rate)
			twin, real = make([][]measured, len(list)), make([][]measured, len(list))
		}
		for i, l := range list {
			got, err := b.send(ctx, url, l)
			if err != nil {
				return fmt.Errorf("%s: %w", l.name, err)
			}
			want, err := b.simulate(ctx, s, l, uint64(round))
			if err != nil {
				return err
			}
			b.Sayf("%v, %s, round %d: real %v; twin %v", s, l.name, round+1, got, want)
			twin[i], real[i] = append(twin[i], want), append(real[i], got)
		}
		if err := p.Stop(); err != nil {
			return err
		}
	}
	return b.judge(s, list, twin, real)
}

// start starts a fleet with a router.
func (b *twinBench) start(ctx context.Context, s sim.Split) (*harness.Process, string, error) {
	common := []string{"--model", b.model, "--threads", "1", "--device", "cpu"}
	if s.Whole == 0 {
		p, url, _, err := up(ctx, b.Bench, append([]string{"--data", filepath.Join(b.Dir, "pair"), "--prefill", strconv.Itoa(s.Prefill), "--decode", strconv.Itoa(s.Decode)}, common...)...)
		return p, url, err
	}
	addr, err := harness.FreeAddr()
	if err != nil {
		return nil, "", err
	}
	// The whole worker ends with the bench: it holds nothing between rounds but its cache.
	w, err := b.Listening(ctx, addr, harness.Spec{Name: "whole", Argv: append([]string{b.XPYD, "decode", "--listen", addr, "--trust-everyone", "--served-name", "m"}, common...)})
	if err != nil {
		return nil, "", err
	}
	file := filepath.Join(b.Dir, "router.yaml")
	yaml := fmt.Sprintf("static: [{id: whole, role: decode, url: \"http://%s\", dialect: openai, model: m}]\nfleet: {listen: \"127.0.0.1:0\"}\n", addr)
	if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
		return nil, "", err
	}
	p, url, _, err := b.Saying(ctx, "listening ", harness.Spec{Name: "router", Argv: []string{b.XPYD, "router", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", filepath.Join(b.Dir, "whole"), "--config", file}})
	if err != nil {
		w.Kill()
		return nil, "", err
	}
	return p, url, p.Until(ctx, time.Minute, func() error { _, err := b.send(ctx, url, twinLoad{"first", 1, repeated(1, 10, 2)}); return err })
}

// calibrate measures what of a request and of a step the table does not have, by one client's short
// requests, and what the fleet takes: requests of 200 and 50 tokens a second.
func (b *twinBench) calibrate(ctx context.Context, s sim.Split, url string) (rate float64, err error) {
	l := twinLoad{"calibration", 1, repeated(100, 64, 60)}
	b.front, b.host = 0, 0
	got, err := b.send(ctx, url, l)
	if err != nil {
		return 0, err
	}
	bare, err := b.simulate(ctx, s, l, 0)
	if err != nil {
		return 0, err
	}
	ms := func(v float64) time.Duration { return max(0, time.Duration(v*float64(time.Millisecond))) }
	b.front, b.host = ms(got.TTFT-bare.TTFT), ms(got.TPOT-bare.TPOT)
	top, err := b.send(ctx, url, twinLoad{"capacity", 16, repeated(200, 200, 50)})
	b.Sayf("%v: %v to a worker and back, %v between steps; at most %v", s, b.front, b.host, top)
	return top.Rate / 50, err
}

// send runs a load against a server.
func (b *twinBench) send(ctx context.Context, url string, l twinLoad) (m measured, err error) {
	argv := []string{b.XPYD, "bench", "--url", url, "--endpoint", "completions", "--prompt-ids", "3-500", "--ignore-eos", "--progress", "off", "--json", "-"}
	if l.closed > 0 {
		e := l.entries[0]
		argv = append(argv, "--concurrency", strconv.Itoa(l.closed), "--requests", strconv.Itoa(len(l.entries)), "--input", strconv.Itoa(e.In), "--output", strconv.Itoa(e.Out))
	} else {
		file := filepath.Join(b.Dir, "load.jsonl")
		if err := writeTrace(file, l.entries); err != nil {
			return m, err
		}
		argv = append(argv, "--trace", file)
	}
	var all report.Report
	if _, err := b.Output(ctx, 10*b.window+time.Minute, &all, nil, argv...); err != nil {
		return m, err
	}
	if len(all.Phases) != 1 || all.Phases[0].Requests.Failed > 0 || all.Phases[0].Requests.Completed == 0 {
		return m, fmt.Errorf("the report: %+v", all)
	}
	p := &all.Phases[0]
	return measured{TTFT: p.Latency.TTFT.Mean, TPOT: p.Latency.TPOT.Mean, P99: p.Latency.TTFT.P99, Rate: p.Throughput.OutputTokens}, nil
}

// writeTrace writes a Mooncake trace.
func writeTrace(path string, entries []workload.Entry) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	enc := json.NewEncoder(f)
	for i := range entries {
		e := &entries[i]
		line := map[string]any{"timestamp": float64(e.At) / float64(time.Millisecond), "input_length": e.In, "output_length": e.Out, "hash_ids": e.Blocks}
		if err := enc.Encode(line); err != nil {
			return err
		}
	}
	return f.Close()
}

// simulate runs a load through the twin.
func (b *twinBench) simulate(ctx context.Context, s sim.Split, l twinLoad, seed uint64) (m measured, err error) {
	w := worker.DefaultConfig(fleet.Decode)
	cfg := sim.DefaultConfig()
	cfg.Whole, cfg.Prefill, cfg.Decode, cfg.Seed = s.Whole, s.Prefill, s.Decode, seed
	cfg.Front, cfg.Back = b.front/2, b.front-b.front/2
	about := &b.table.About
	cfg.Worker = sim.Worker{Engine: worker.EngineConfig(&w, false), Blocks: about.Blocks, BlockTokens: about.BlockTokens, Layers: about.Shape.Layers, Steps: b.table, Host: b.host}
	cfg.KV = sim.Link{Bytes: b.table.KV.BytesPerToken, Bandwidth: b.table.KV.Bandwidth, Latency: time.Duration(b.table.KV.Latency * float64(time.Second))}
	out, err := sim.Run(ctx, cfg, sim.Load{Requests: sim.Trace(l.entries, 1, 0), Closed: l.closed, Until: time.Hour})
	if err != nil {
		return m, err
	}
	var first []float64
	tokens, gaps, gap, last := 0, 0, 0.0, time.Duration(0)
	for i := range out {
		o := &out[i]
		if o.Failed {
			return m, fmt.Errorf("the twin fails request %d of %s", i, l.name)
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
		m.TTFT += v / float64(len(first))
	}
	m.TPOT, m.P99 = gap/float64(max(gaps, 1)), first[len(first)*99/100]
	m.Rate = float64(tokens) / (last - out[0].At).Seconds()
	return m, nil
}

// steadyTail is how much a load's own repeats may differ in their 99th percentile for that to be compared.
const steadyTail = 20 // %

// judge records the errors: the median over all loads and quantities, the worst mean first token, and the worst
// 99th percentile of those whose own repeats differ little.
func (b *twinBench) judge(s sim.Split, list []twinLoad, twin, real [][]measured) error {
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
		b.Sayf("%v, %s: off by %.1f %% in TTFT, %.1f %% in TPOT, %.1f %% in tokens a second", s, l.name, ttft, tpot, rate)
		all, rates = append(all, ttft, tpot, rate), append(rates, rate)
		low, high := math.Inf(1), 0.0
		for _, m := range real[i] {
			low, high = min(low, m.P99), max(high, m.P99)
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
	about := fmt.Sprintf("CPU, a thread a worker; 15M shape, 512 tokens, 2,048 positions, random f32 weights; %v; %d loads of %v, twin beside real", s, len(list), b.window)
	figure := func(name string, value, limit float64, spread string) figures.Figure {
		return figures.Figure{Name: "twin." + name + "." + s.String(), Unit: "%", Value: value, Peer: fmt.Sprintf("limit: %g %%", limit), PeerValue: limit,
			Ratio: value / limit, Model: about, Runs: b.Rounds, Spread: spread}
	}
	slices.Sort(all)
	return b.Add(figure("median_error_pct", figures.Median(all), 5, fmt.Sprintf("%.1f..%.1f over all loads", all[0], all[len(all)-1])),
		figure("worst_ttft_error_pct", worst, 10, "with "+which),
		figure("p99_error_pct", tail, steadyTail, "with "+tailOf+"; repeats differ by more: "+strings.Join(unsteady, ", ")),
		figure("throughput_error_pct", figures.Median(rates), 5, fmt.Sprintf("%.1f..%.1f", slices.Min(rates), slices.Max(rates))))
}
