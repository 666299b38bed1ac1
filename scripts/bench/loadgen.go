package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// loadgen measures `xpyd bench` itself: its cost of a request beside net/http's and fasthttp's
// clients, the rate and the number of streams it sustains, and whether its figures agree with
// those of aiperf (https://pypi.org/project/aiperf/) on the same server.
type loadgen struct {
	base
	venv, tokenizer string
	aiperf          string // the program; "" leaves the comparison out
}

func (b *loadgen) flags(f *flag.FlagSet) {
	f.StringVar(&b.venv, "venv", "", "Python environment with aiperf, made if missing (in the user's cache)")
	f.StringVar(&b.tokenizer, "tokenizer", "internal/model/stories260k", "Hugging Face directory for aiperf")
}

func (b *loadgen) parts() []part {
	engine := func(name, pace string, f func(context.Context, string) error) part {
		return part{name, func(ctx context.Context) error {
			self, err := os.Executable()
			if err != nil {
				return err
			}
			return b.serving(ctx, f, self, "engine", "127.0.0.1:0", pace)
		}}
	}
	return []part{engine("cost", "burst", b.cost), engine("rate", "burst", b.rate), engine("streams", pace.String(), b.streams),
		{"aiperf", func(ctx context.Context) error {
			return b.serving(ctx, b.compare, b.XPYD, "mock", "--dialect", "openai", "--role", "decode", "--listen", "127.0.0.1:0", "--ttft", ttft, "--itl", itl)
		}}}
}

func (b *loadgen) open(ctx context.Context) error {
	if _, err := b.Binary(ctx); err != nil || !b.Wants("aiperf") {
		return err
	}
	venv, err := harness.Python{Venv: b.venv, Name: "aiperf", Imports: "aiperf", Pip: [][]string{{"aiperf==0.13.0"}}}.Open(ctx)
	b.aiperf = filepath.Join(venv, "bin", "aiperf")
	return err
}

// serving runs f on a server that prints "listening URL".
func (b *loadgen) serving(ctx context.Context, f func(ctx context.Context, url string) error, argv ...string) error {
	p, said, _, err := b.Saying(ctx, "listening ", harness.Spec{Name: filepath.Base(argv[0]), Argv: argv})
	if err != nil {
		return err
	}
	defer p.Kill()
	url, _, _ := strings.Cut(said, " ")
	return f(ctx, url)
}

// used is what a process took.
type used struct {
	processors float64 // on average
	memory     int64   // peak bytes
}

// xpydBench runs `xpyd bench` and returns its report and resource usage.
func (b *loadgen) xpydBench(ctx context.Context, args ...string) (*report.Report, used, error) {
	var r report.Report
	begin := time.Now()
	state, err := b.Output(ctx, 5*time.Minute, &r, nil, append([]string{b.XPYD, "bench", "--model", "m", "--progress", "off", "--json", "-"}, args...)...)
	if err != nil {
		return nil, used{}, err
	}
	u := used{processors: (state.UserTime() + state.SystemTime()).Seconds() / time.Since(begin).Seconds()}
	if usage, ok := state.SysUsage().(*syscall.Rusage); ok {
		u.memory = usage.Maxrss << 10
	}
	p := &r.Phases[len(r.Phases)-1]
	if p.Requests.Failed > 0 {
		return nil, used{}, fmt.Errorf("%d failed: %+v", p.Requests.Failed, p.Errors)
	}
	return &r, u, nil
}

// cost measures the processor time of a request by our client and by others, with
// BenchmarkCost of internal/loadgen/client.
func (b *loadgen) cost(ctx context.Context, url string) error {
	binary := filepath.Join(b.Dir, "client.test")
	if err := harness.BuildTest(ctx, ".", binary, "./internal/loadgen/client"); err != nil {
		return err
	}
	for name, n := range map[string]int{"whole": 20000, "stream16": 10000} {
		us := map[string][]float64{}
		for range b.Rounds {
			for _, client := range []string{"xpyd", "net-http", "fasthttp"} {
				v, err := speed(ctx, costOf, []string{binary, "-test.run", "^$", "-test.bench", "^BenchmarkCost$/^" + name + "$/^" + client + "$", "-test.benchtime", fmt.Sprint(n, "x")}, []string{"XPYD_COST_URL=" + url})
				if err != nil {
					return err
				}
				us[client] = append(us[client], v)
			}
		}
		b.Sayf("cost.%s: µs of processor time a request: %v", name, us)
		for suffix, peer := range map[string]string{"": "net-http", "_fasthttp": "fasthttp"} {
			f := figures.Figure{Name: "loadgen.cpu_us." + name + suffix, Unit: "µs", Peer: strings.Replace(peer, "-", "/", 1) + "'s client, without reading the JSON", Model: "2 KB prompt, 32 at once"}
			if err := b.Add(f.Ratios(us["xpyd"], us[peer])); err != nil {
				return err
			}
		}
	}
	return nil
}

var costOf = regexp.MustCompile(`([0-9.]+) cpu-us/op`)

// rate asks for 5,000 requests/s.
func (b *loadgen) rate(ctx context.Context, url string) error {
	const asked = 5000
	for _, kind := range []struct {
		name string
		args []string
	}{{"whole", []string{"--no-stream"}}, {"stream16", nil}} {
		var reached, limit []float64
		for range b.Rounds {
			args := append([]string{"--url", url, "--endpoint", "completions", "--rate", fmt.Sprint(asked), "--duration", "10s", "--ramp", "1s", "--output", "16"}, kind.args...)
			r, u, err := b.xpydBench(ctx, args...)
			if err != nil {
				return err
			}
			p := &r.Phases[0]
			b.Sayf("rate.%s: %.0f requests/s of %d asked, late by p50 %.3f p99 %.3f ms, E2E p50 %.3f p99 %.3f ms, %.2f processors, %d MiB", kind.name, p.Throughput.Requests, asked,
				p.Latency.Late.P50, p.Latency.Late.P99, p.Latency.E2E.P50, p.Latency.E2E.P99, u.processors, u.memory>>20)
			reached, limit = append(reached, p.Throughput.Requests), append(limit, asked)
		}
		f := figures.Figure{Name: "loadgen.rate." + kind.name, Unit: "requests/s", Peer: "asked for (Poisson), server on the same 2 processors", Model: "512-word prompt, 16 tokens"}
		if err := b.Add(f.Ratios(reached, limit)); err != nil {
			return err
		}
	}
	return nil
}

const pace = 250 * time.Millisecond // of a stream's tokens

// streams opens 10,000 streams.
func (b *loadgen) streams(ctx context.Context, url string) error {
	const open = 10000
	var delay, delayLimit, memory, memoryLimit []float64
	for range b.Rounds {
		r, u, err := b.xpydBench(ctx, "--url", url, "--endpoint", "completions", "--concurrency", fmt.Sprint(open), "--duration", "30s", "--ramp", "10s", "--output", "40", "--input", "64")
		if err != nil {
			return err
		}
		p := &r.Phases[0]
		late := p.Latency.ITL.P99 - float64(pace.Milliseconds())
		kb := float64(u.memory) / open / 1024
		b.Sayf("streams: %d open, %.0f tokens/s, gaps p50 %.1f p99 %.1f ms, %.2f processors, %.1f KiB a stream", slices.Max(p.Timeline.InFlight), p.Throughput.OutputTokens, p.Latency.ITL.P50, p.Latency.ITL.P99, u.processors, kb)
		delay, delayLimit = append(delay, late), append(delayLimit, 50)
		memory, memoryLimit = append(memory, kb), append(memoryLimit, 32)
	}
	return b.Add(figures.Figure{Name: "loadgen.streams_delay_ms", Unit: "ms", Peer: "limit: p99 of a gap over its 250 ms, server's delay included",
		Model: "10,000 streams at 4 tokens/s"}.Ratios(delay, delayLimit),
		figures.Figure{Name: "loadgen.stream_kb", Unit: "KiB", Peer: "limit: the router's of a stream",
			Model: "10,000 streams at 4 tokens/s; peak resident memory of the whole process"}.Ratios(memory, memoryLimit))
}
