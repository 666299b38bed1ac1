package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// turnsBench measures what it gains and costs that prefill fetches the previous turn's answer
// from decode: conversations of two turns with kv.peers on and off.
type turnsBench struct{ base }

func (b *turnsBench) parts() []part { return []part{{"turns", b.compare}} }

func (b *turnsBench) compare(ctx context.Context) error {
	return talks(b.Bench, "peers.turns_", "ours with --kv-peers off",
		"stories260k, 1P1D over shared memory, 2 clients, 300 conversations of 2 turns, 40 tokens asked, 100 answered",
		[2]string{"on", "off"}, []string{"ttft_ms", "cpu_s", "cached_tokens"}, func(round int, way string) (talk, error) {
			return measureTalk(ctx, b.Bench, fmt.Sprint("turns-", way, round), 5*time.Minute, []string{"--kv-peers", way, "--threads", "1"},
				[]string{"--clients", "2", "--turns", "2", "--conversations", "300", "--input", "40", "--output", "100"})
		})
}

// talk is the outcome of a run of conversations against `xpyd up`.
type talk struct {
	TTFT   float64 // p50, ms
	Rate   float64 // prompt and output tokens/s
	Cached float64 // prompt tokens
	Part   float64 // share of cached prompt tokens, %
	CPU    float64 // processor seconds of `up` and its workers, from start to end
	Failed int     // requests
}

func (t talk) String() string {
	return fmt.Sprintf("TTFT p50 %.2f ms, %.0f tokens/s, processor time %.2f s, %.0f tokens cached (%.1f %%)", t.TTFT, t.Rate, t.CPU, t.Cached, t.Part)
}

// talkFigures are the numbers of a talk by the names of their figures.
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

// talks alternates two ways and records the named figures.
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

// measureTalk runs `xpyd bench multiturn` against `xpyd up`.
func measureTalk(ctx context.Context, b *harness.Bench, name string, limit time.Duration, upArgs, benchArgs []string) (t talk, err error) {
	p, url, _, err := up(ctx, b, append([]string{"--data", filepath.Join(b.Dir, name)}, upArgs...)...)
	if err != nil {
		return t, err
	}
	var all report.Report
	argv := append([]string{b.XPYD, "bench", "multiturn", "--url", url, "--endpoint", "completions", "--ignore-eos", "--progress", "off", "--json", "-"}, benchArgs...)
	_, err = b.Output(ctx, limit, &all, nil, argv...)
	if err := errors.Join(err, p.Stop()); err != nil {
		return t, err
	}
	if len(all.Phases) != 1 || all.Phases[0].Requests.Completed == 0 {
		return t, fmt.Errorf("the report: %+v", all)
	}
	r, cached := &all.Phases[0], float64(all.Phases[0].Tokens.Cached)
	return talk{TTFT: r.Latency.TTFT.P50, Rate: r.Throughput.TotalTokens, Cached: cached,
		Part: 100 * cached / (r.Tokens.Input.Mean * float64(r.Requests.Completed)), CPU: p.Used().Seconds(), Failed: r.Requests.Failed}, nil
}
