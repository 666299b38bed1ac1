package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// vllm measures one whole worker behind the router beside `vllm serve`, both at their
// defaults, one after the other on the same GPU: under closed loops of the same requests, and how
// many requests a second get what is promised of them.
//
//	bench vllm -rounds 2                     an hour and a half, 16 GB in -dir
//	bench vllm -rounds 2 -only c1,c16,c64,c128,p16,d128    the closed loops: a quarter of an hour
//	bench vllm -device cpu -peer URL -out '' a rehearsal: a tiny model, short prompts, a server that runs
//
// On a machine where it must run in pieces, or that has no git: -rows FILE -budget 580s -out ”
// there until all is measured, then the same -rows without a budget and with -out bench here.
type vllm struct {
	base
	library, device, python, peer, large string
	rowsFile                             string
	budget                               time.Duration
	began                                time.Time
	rows                                 []vllmRow
	model                                string
}

// closedLoop has clients that send one request after the other, each of so many tokens in and out.
type closedLoop struct {
	name             string
	clients, in, out int
}

var closedLoops = []closedLoop{
	{"c1", 1, 1000, 128}, {"c16", 16, 1000, 128}, {"c64", 64, 1000, 128}, {"c128", 128, 1000, 128},
	{"p16", 16, 4000, 32}, {"d128", 128, 128, 512},
}

// vllmRow is what one server did under one load. Times are in ms, rates in tokens a second.
type vllmRow struct {
	Round     int     `json:"round"`
	Server    string  `json:"server"`
	Load      string  `json:"load"`
	Device    string  `json:"device"`
	Version   string  `json:"version,omitempty"` // of vLLM
	TTFT      float64 `json:"ttft_p50"`
	TTFT99    float64 `json:"ttft_p99"`
	TPOT      float64 `json:"tpot_mean"`
	Output    float64 `json:"output"` // while all clients were at work
	Completed int     `json:"completed"`
	Failed    int     `json:"failed"`
	Rate      float64 `json:"rate,omitempty"` // of an open loop: asked, requests a second
	Good      float64 `json:"good,omitempty"` // part of its requests that got what was promised
}

const (
	oursName, vllmName = "xpyd", "vllm"
	vllmWindow         = 25 * time.Second
	vllmRamp           = 3 * time.Second
)

func (o *vllm) flags(f *flag.FlagSet) {
	f.StringVar(&o.library, "library", os.Getenv("XPYD_CUDA_LIB"), "libxpyd_cuda.so; built by scripts/build-cuda if empty")
	f.StringVar(&o.device, "device", "cuda", "cuda, or cpu for a rehearsal")
	f.StringVar(&o.python, "python", "python3", "an interpreter that has vLLM")
	f.StringVar(&o.peer, "peer", "", "URL of a server to measure instead of starting vLLM")
	f.StringVar(&o.large, "dir", os.TempDir(), "a folder for the model, which stays there for the next run")
	f.StringVar(&o.rowsFile, "rows", "", "JSON lines of what is measured; what they hold is not measured again")
	f.DurationVar(&o.budget, "budget", 0, "start nothing that does not fit into this time; 0: measure all")
}

func (o *vllm) parts() (list []part) {
	for _, l := range closedLoops {
		list = append(list, part{name: l.name})
	}
	for _, p := range promised {
		list = append(list, part{name: p.name})
	}
	return append(list, part{name: replayPart})
}

func (o *vllm) open(context.Context) error {
	o.began = time.Now()
	if o.device != "cuda" && o.Out != "" {
		return errors.New("a rehearsal records nothing: -out ''")
	}
	if o.rowsFile == "" {
		o.rowsFile = filepath.Join(o.Dir, "rows.jsonl")
	}
	raw, err := os.ReadFile(o.rowsFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for line := range strings.Lines(string(raw)) {
		var r vllmRow
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			return fmt.Errorf("%s: %w", o.rowsFile, err)
		}
		o.rows = append(o.rows, r)
		o.Book.Logf("%s", strings.TrimSpace(line))
	}
	return nil
}

// rounds measures what the rows lack, both servers in each round, and then makes the figures.
func (o *vllm) rounds(ctx context.Context, parts []part) error {
	for round := range o.Rounds {
		for _, server := range []string{oursName, vllmName} {
			var left []closedLoop
			for _, l := range closedLoops {
				wanted := slices.ContainsFunc(parts, func(p part) bool { return p.name == l.name })
				if wanted && !slices.ContainsFunc(o.rows, func(r vllmRow) bool { return r.Round == round && r.Server == server && r.Load == l.name }) {
					left = append(left, l)
				}
			}
			if len(left) == 0 {
				continue
			}
			if err := o.serve(ctx, round, server, left); err != nil {
				return fmt.Errorf("round %d, %s: %w", round+1, server, err)
			}
		}
	}
	if err := o.goodput(ctx, parts); err != nil {
		return err
	}
	if slices.ContainsFunc(parts, func(p part) bool { return p.name == replayPart }) {
		if err := o.replay(ctx); err != nil {
			return fmt.Errorf("replay: %w", err)
		}
	}
	return errors.Join(o.figures(parts), o.plots())
}

// fits reports whether something that takes so long fits into the budget.
func (o *vllm) fits(need time.Duration) bool {
	return o.budget == 0 || time.Since(o.began)+need <= o.budget
}

// serve starts a server, warms it up and measures it under each load that the budget has room for.
func (o *vllm) serve(ctx context.Context, round int, server string, loads []closedLoop) error {
	start := map[string]time.Duration{oursName: 40 * time.Second, vllmName: 90 * time.Second}[server]
	if !o.fits(start + vllmWindow + 10*time.Second) {
		o.Sayf("round %d, %s: no time left", round+1, server)
		return nil
	}
	url, version, stop, err := o.warm(ctx, server)
	if err != nil {
		return errors.Join(err, stop())
	}
	for _, l := range loads {
		if !o.fits(vllmWindow + vllmRamp + 8*time.Second) {
			o.Sayf("round %d, %s, %s: no time left", round+1, server, l.name)
			break
		}
		r, err := o.measure(ctx, url, l, vllmWindow, vllmRamp, 1000*round+slices.Index(closedLoops, l))
		if err != nil {
			return errors.Join(fmt.Errorf("%s: %w", l.name, err), stop())
		}
		r.Round, r.Server, r.Device, r.Version = round, server, o.on(ctx), version
		o.Sayf("round %d, %-4s %-4s TTFT %.1f ms, p99 %.1f; TPOT %.2f ms; %.0f tokens/s; %d requests, %d failed", round+1, server, l.name, r.TTFT, r.TTFT99, r.TPOT, r.Output, r.Completed, r.Failed)
		if err := o.keep(r); err != nil {
			return errors.Join(err, stop())
		}
	}
	return stop()
}

// warm starts a server and warms it up.
func (o *vllm) warm(ctx context.Context, server string, settings ...string) (url, version string, stop func() error, err error) {
	if url, stop, err = o.start(ctx, server, settings...); err != nil {
		return url, version, stop, err
	}
	if server == vllmName && o.peer == "" {
		out, err := harness.Run(ctx, nil, o.python, "-c", "from importlib.metadata import version; print(version('vllm'))")
		if version = strings.TrimSpace(out); err != nil {
			return url, version, stop, err
		}
	}
	for _, warm := range []closedLoop{{"warm", 64, 1000, 32}, {"warm", 1, 1000, 64}} {
		if _, err := o.measure(ctx, url, warm, 3*time.Second, 0, 77); err != nil {
			return url, version, stop, err
		}
	}
	return url, version, stop, nil
}

// on names the device.
func (o *vllm) on(ctx context.Context) string {
	if o.device == "cuda" {
		return gpuName(ctx)
	}
	return figures.Device()
}

func (o *vllm) keep(r vllmRow) error {
	o.rows = append(o.rows, r)
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(o.rowsFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}

// measure runs `xpyd bench` for a window after a ramp.
func (o *vllm) measure(ctx context.Context, url string, l closedLoop, window, ramp time.Duration, seed int) (r vllmRow, err error) {
	p, err := o.load(ctx, url, l.in, l.out, window, ramp, seed, "--concurrency", strconv.Itoa(l.clients))
	if err != nil {
		return r, err
	}
	r = rowOf(p)
	r.Load, r.Output = l.name, steady(p, ramp, window)
	return r, nil
}

// load sends requests of so many tokens in and out, and returns what was measured of them.
func (o *vllm) load(ctx context.Context, url string, in, out int, window, ramp time.Duration, seed int, how ...string) (*report.Phase, error) {
	ids := "300-127000"
	if o.device == "cpu" {
		in, out, ids = in/20, max(2, out/20), "3-500"
	}
	var all report.Report
	argv := append([]string{o.XPYD, "bench", "--url", url, "--endpoint", "completions", "--model", "model", "--prompt-ids", ids, "--ignore-eos",
		"--extra", `{"temperature":0}`, "--seed", strconv.Itoa(seed), "--progress", "off", "--json", "-", "--duration", (window + ramp).String(), "--ramp", ramp.String(),
		"--input", strconv.Itoa(in), "--output", strconv.Itoa(out)}, how...)
	if _, err := o.Bench.Output(ctx, window+ramp+time.Minute, &all, nil, argv...); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all.Phases, func(p report.Phase) bool { return p.Measured })
	if i < 0 || all.Phases[i].Requests.Completed == 0 {
		return nil, fmt.Errorf("no request completed: %+v", all.Phases)
	}
	return &all.Phases[i], nil
}

func rowOf(p *report.Phase) vllmRow {
	return vllmRow{TTFT: p.Latency.TTFT.P50, TTFT99: p.Latency.TTFT.P99, TPOT: p.Latency.TPOT.Mean,
		Completed: int(p.Requests.Completed), Failed: int(p.Requests.Failed)}
}

// steady is the output rate while all clients were at work: from the end of the first answers to
// that of the window.
func steady(p *report.Phase, ramp, window time.Duration) float64 {
	t := p.Timeline
	from, to := ramp.Seconds()+p.Latency.E2E.Mean/1000, (ramp + window).Seconds()
	tokens, n := 0.0, 0
	for i, v := range t.OutputTokens {
		if float64(i)*t.Bin >= from && float64(i+1)*t.Bin <= to {
			tokens, n = tokens+v, n+1
		}
	}
	if n == 0 {
		return 0
	}
	return tokens / (float64(n) * t.Bin)
}

// figures records ours over vLLM's, of the rounds that have both.
func (o *vllm) figures(parts []part) error {
	for _, p := range promised {
		if !slices.ContainsFunc(parts, func(q part) bool { return q.name == p.name }) {
			continue
		}
		if f, ok := o.goodputFigure(p); ok {
			if err := o.Add(f); err != nil {
				return err
			}
		}
	}
	for _, l := range closedLoops {
		if !slices.ContainsFunc(parts, func(p part) bool { return p.name == l.name }) {
			continue
		}
		var ours, theirs []vllmRow
		for _, r := range o.rows {
			i := slices.IndexFunc(o.rows, func(p vllmRow) bool { return p.Round == r.Round && p.Load == r.Load && p.Server == vllmName })
			if r.Load == l.name && r.Server == oursName && i >= 0 {
				ours, theirs = append(ours, r), append(theirs, o.rows[i])
			}
		}
		if len(ours) < o.Rounds {
			o.Sayf("%s: %d of %d rounds are measured", l.name, len(ours), o.Rounds)
			continue
		}
		o.Book.On(ours[0].Device)
		total := "output_ratio."
		if l.in > 10*l.out { // mostly prompts: the same requests a second, counted in all their tokens
			total = "total_ratio."
		}
		for _, q := range []struct {
			name, unit string
			of         func(vllmRow) float64
		}{
			{"ttft_ratio.", "ms", func(r vllmRow) float64 { return r.TTFT }},
			{"ttft_p99_ratio.", "ms", func(r vllmRow) float64 { return r.TTFT99 }},
			{"tpot_ratio.", "ms", func(r vllmRow) float64 { return r.TPOT }},
			{total, "tokens/s", func(r vllmRow) float64 { return r.Output }},
		} {
			if err := o.Add(vllmFigure(l, q.name, q.unit, ours, theirs, q.of)); err != nil {
				return err
			}
		}
	}
	return nil
}

// vllmFigure is a ratio of ours to vLLM's; the spread has the values themselves.
func vllmFigure(l closedLoop, name, unit string, ours, theirs []vllmRow, of func(vllmRow) float64) figures.Figure {
	var v [2][]float64
	ratios := make([]float64, len(ours))
	failed := 0
	for i := range ours {
		v[0], v[1] = append(v[0], of(ours[i])), append(v[1], of(theirs[i]))
		ratios[i] = v[0][i] / v[1][i]
		failed += ours[i].Failed + theirs[i].Failed
	}
	f := figures.Figure{Name: "vs_vllm." + name + l.name, Peer: "vLLM " + theirs[0].Version + ", vllm serve's defaults",
		Model: fmt.Sprintf("Llama-3-8B shape, random bf16 weights; %d clients, %d tokens in, %d out; one whole worker behind the router, defaults", l.clients, l.in, l.out)}
	f = f.Ratios(ratios, slices.Repeat([]float64{1}, len(ratios)))
	f.Spread = fmt.Sprintf("ratio %.3f..%.3f; ours %.4g..%.4g %s, vLLM %.4g..%.4g; %d requests failed",
		slices.Min(ratios), slices.Max(ratios), slices.Min(v[0]), slices.Max(v[0]), unit, slices.Min(v[1]), slices.Max(v[1]), failed)
	return f
}
