package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// turnsBench measures what it is worth, and costs, that prefill fetches from decode the
// answer of the turn before: conversations of two turns with kv.peers on and off.
type turnsBench struct{ *harness.Bench }

func (b *turnsBench) flags(*flag.FlagSet)        {}
func (b *turnsBench) open(context.Context) error { return nil }
func (b *turnsBench) parts() []part              { return []part{{"turns", b.compare}} }

func (b *turnsBench) compare(ctx context.Context) error {
	return talks(b.Bench, "peers.turns_", "ours with --kv-peers off",
		"stories260k, 1P1D over shared memory, 2 clients, 300 conversations of 2 turns, 40 tokens asked, 100 answered",
		[2]string{"on", "off"}, []string{"ttft_ms", "cpu_s", "cached_tokens"}, func(round int, way string) (talk, error) {
			return measureTalk(ctx, b.Bench, fmt.Sprint("turns-", way, round), 5*time.Minute, []string{"--kv-peers", way, "--threads", "1"},
				[]string{"--clients", "2", "--turns", "2", "--conversations", "300", "--input", "40", "--output", "100"})
		})
}

// talk is what one run of conversations against `xpyd up` comes to.
type talk struct {
	TTFT   float64 // p50, ms
	Rate   float64 // prompt and output tokens a second
	Cached float64 // prompt tokens
	Part   float64 // of all prompt tokens that were cached, %
	CPU    float64 // seconds of processor of `up` and the workers, from start to end
	Failed int     // requests
}

func (t talk) String() string {
	return fmt.Sprintf("TTFT p50 %.2f ms, %.0f tokens/s, processor time %.2f s, %.0f tokens cached (%.1f %%)", t.TTFT, t.Rate, t.CPU, t.Cached, t.Part)
}

// talkFigures are the numbers of a talk, by their names in figures.
var talkFigures = map[string]struct {
	unit string
	of   func(talk) float64
}{
	"ttft_ms":       {"ms", func(t talk) float64 { return t.TTFT }},
	"tokens_s":      {"tokens/s", func(t talk) float64 { return t.Rate }},
	"cpu_s":         {"s", func(t talk) float64 { return t.CPU }},
	"cached_tokens": {"tokens", func(t talk) float64 { return t.Cached }},
	"cached_pct":    {"% of prompt tokens", func(t talk) float64 { return t.Part }},
}

// talks measures two ways in turn, and writes the figures that are named.
func talks(b *harness.Bench, prefix, peer, model string, ways [2]string, names []string, measure func(round int, way string) (talk, error)) error {
	runs, err := figures.Compare(b.Sayf, b.Rounds, ways, measure)
	if err != nil {
		return err
	}
	for _, name := range names {
		n := talkFigures[name]
		f := figures.Figure{Name: prefix + name, Unit: n.unit, Peer: peer, Model: model}
		if err := b.Add(figures.RatiosOf(f, runs, n.of)); err != nil {
			return err
		}
	}
	return nil
}

// measureTalk runs `xpyd up` and `xpyd bench multiturn` against it.
func measureTalk(ctx context.Context, b *harness.Bench, name string, limit time.Duration, upArgs, benchArgs []string) (t talk, err error) {
	p, url, _, err := up(ctx, b, append([]string{"--data", filepath.Join(b.Dir, name)}, upArgs...)...)
	if err != nil {
		return t, err
	}
	var report struct {
		Phases []struct {
			Throughput struct {
				Total float64 `json:"total_tokens_per_s"`
			}
			Tokens struct {
				Input  struct{ Mean float64 }
				Cached float64
			}
			Latency struct {
				TTFT struct{ P50 float64 } `json:"ttft_ms"`
			}
			Requests struct{ Completed, Failed int }
		}
	}
	argv := append([]string{b.XPYD, "bench", "multiturn", "--url", url, "--endpoint", "completions", "--ignore-eos", "--progress", "off", "--json", "-"}, benchArgs...)
	_, err = b.Output(ctx, limit, &report, nil, argv...)
	if err := errors.Join(err, p.Stop()); err != nil {
		return t, err
	}
	if len(report.Phases) != 1 || report.Phases[0].Requests.Completed == 0 {
		return t, fmt.Errorf("the report: %+v", report)
	}
	r := report.Phases[0]
	return talk{TTFT: r.Latency.TTFT.P50, Rate: r.Throughput.Total, Cached: r.Tokens.Cached,
		Part: 100 * r.Tokens.Cached / (r.Tokens.Input.Mean * float64(r.Requests.Completed)), CPU: p.Used().Seconds(), Failed: r.Requests.Failed}, nil
}
