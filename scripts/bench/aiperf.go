package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/report"
)

// aiperfStats is one metric of aiperf's export.
type aiperfStats struct {
	Avg float64 `json:"avg"`
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
}

// pair is one figure as both tools have it.
type pair struct {
	name, unit string
	ours       func(*report.Phase) float64
	metric     string // of aiperf
	theirs     func(aiperfStats) float64
}

// pairs are what is compared. aiperf's inter token latency is what we call
// TPOT, its inter chunk latency (not in its summary) our ITL.
func pairs() []pair {
	avg, p50, p90 := func(s aiperfStats) float64 { return s.Avg }, func(s aiperfStats) float64 { return s.P50 }, func(s aiperfStats) float64 { return s.P90 }
	l := func(get func(*report.Latency) float64) func(*report.Phase) float64 {
		return func(p *report.Phase) float64 { return get(&p.Latency) }
	}
	return []pair{
		{"ttft_mean", "ms", l(func(l *report.Latency) float64 { return l.TTFT.Mean }), "time_to_first_token", avg},
		{"ttft_p50", "ms", l(func(l *report.Latency) float64 { return l.TTFT.P50 }), "time_to_first_token", p50},
		{"ttft_p90", "ms", l(func(l *report.Latency) float64 { return l.TTFT.P90 }), "time_to_first_token", p90},
		{"itl_mean", "ms", l(func(l *report.Latency) float64 { return l.TPOT.Mean }), "inter_token_latency", avg},
		{"itl_p50", "ms", l(func(l *report.Latency) float64 { return l.TPOT.P50 }), "inter_token_latency", p50},
		{"e2e_mean", "ms", l(func(l *report.Latency) float64 { return l.E2E.Mean }), "request_latency", avg},
		{"e2e_p50", "ms", l(func(l *report.Latency) float64 { return l.E2E.P50 }), "request_latency", p50},
		{"e2e_p90", "ms", l(func(l *report.Latency) float64 { return l.E2E.P90 }), "request_latency", p90},
		{"requests_per_s", "requests/s", func(p *report.Phase) float64 { return p.Throughput.Requests }, "request_throughput", avg},
		{"output_tokens_per_s", "tokens/s", func(p *report.Phase) float64 { return p.Throughput.OutputTokens }, "output_token_throughput", avg},
	}
}

// compare runs xpyd bench and aiperf by turns against `xpyd mock`, in a closed
// loop of 8 and at a fixed rate. The mock's times are those of a large model:
// events that come at once cost aiperf up to a ms each, which with times of a
// few ms would be most of what is compared.
func (b *loadgen) compare(ctx context.Context) error {
	version, err := exec.CommandContext(ctx, b.aiperf, "--version").Output()
	if err != nil {
		return fmt.Errorf("%s --version: %w", b.aiperf, err)
	}
	peer := "aiperf " + strings.TrimSpace(string(version))
	tokenizer := b.tokenizer
	if !filepath.IsAbs(tokenizer) {
		tokenizer = "./" + tokenizer // else aiperf looks for it on the hub
	}
	const ttft, itl = "400ms", "50ms"
	url, stop, err := b.server(ctx, b.XPYD, "mock", "--dialect", "openai", "--role", "decode", "--listen", "127.0.0.1:0", "--ttft", ttft, "--itl", itl)
	if err != nil {
		return err
	}
	defer stop()
	for _, load := range []struct {
		name         string
		ours, theirs []string
	}{
		{"closed", []string{"--concurrency", "8", "--requests", "96"}, []string{"--concurrency", "8", "--request-count", "96"}},
		{"rate", []string{"--rate", "4", "--burstiness", "fixed", "--requests", "96"}, []string{"--request-rate", "4", "--arrival-pattern", "constant", "--request-count", "96"}},
	} {
		list := pairs()
		ours, theirs := make([][]float64, len(list)), make([][]float64, len(list))
		for range b.Rounds {
			r, _, err := b.xpydBench(ctx, append([]string{"--url", url, "--input", "128", "--output", "32"}, load.ours...)...)
			if err != nil {
				return err
			}
			stats, err := b.runAiperf(ctx, url, tokenizer, load.theirs)
			if err != nil {
				return err
			}
			for i, p := range list {
				s, ok := stats[p.metric]
				if !ok {
					return fmt.Errorf("aiperf's export lacks %s", p.metric)
				}
				ours[i], theirs[i] = append(ours[i], p.ours(&r.Phases[0])), append(theirs[i], p.theirs(s))
			}
		}
		worst := 0.0
		for i, p := range list {
			f := figures.Figure{Name: "loadgen.aiperf." + load.name + "." + p.name, Unit: p.unit, Peer: peer,
				Model: "xpyd mock, TTFT " + ttft + ", ITL " + itl + ", 32 tokens, " + strings.Join(load.ours, " ")}.Ratios(ours[i], theirs[i])
			if err := b.Add(f); err != nil {
				return err
			}
			worst = max(worst, math.Abs(f.Ratio-1))
		}
		b.Sayf("aiperf, %s: all within %.2f %%", load.name, 100*worst)
	}
	return nil
}

// runAiperf runs aiperf and returns its summary by metric.
func (b *loadgen) runAiperf(ctx context.Context, url, tokenizer string, load []string) (map[string]aiperfStats, error) {
	dir, err := os.MkdirTemp("", "xpyd-aiperf")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	args := append([]string{"profile", "-m", "m", "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer, "--use-server-token-count",
		"--synthetic-input-tokens-mean", "128", "--output-tokens-mean", "32", "--use-legacy-max-tokens", "--random-seed", "1", "--ui", "none", "--artifact-dir", dir}, load...)
	b.Book.Logf("$ aiperf %q", args)
	cmd := exec.CommandContext(ctx, b.aiperf, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("aiperf: %w: %s", err, out.Bytes())
	}
	raw, err := os.ReadFile(filepath.Join(dir, "profile_export_aiperf.json"))
	if err != nil {
		return nil, err
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(raw, &all); err != nil {
		return nil, err
	}
	stats := map[string]aiperfStats{}
	for name, v := range all {
		var s aiperfStats
		if json.Unmarshal(v, &s) == nil {
			stats[name] = s
			if s.Avg != 0 {
				b.Book.Logf("aiperf %s: avg %.4f p50 %.4f p90 %.4f p99 %.4f", name, s.Avg, s.P50, s.P90, s.P99)
			}
		}
	}
	return stats, nil
}
