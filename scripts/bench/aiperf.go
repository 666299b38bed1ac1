package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

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

// of returns what a figure's name ends in: the 50th or 90th percentile, else the mean.
func (s aiperfStats) of(figure string) float64 {
	switch {
	case strings.HasSuffix(figure, "_p50"):
		return s.P50
	case strings.HasSuffix(figure, "_p90"):
		return s.P90
	}
	return s.Avg
}

// asAiperf has our metrics under aiperf's names. Its inter token latency is our TPOT; our
// ITL is its inter chunk latency, which its summary lacks.
func asAiperf(p *report.Phase) map[string]aiperfStats {
	of := func(v report.Values) aiperfStats { return aiperfStats{v.Mean, v.P50, v.P90, v.P99} }
	return map[string]aiperfStats{
		"time_to_first_token": of(p.Latency.TTFT), "inter_token_latency": of(p.Latency.TPOT), "request_latency": of(p.Latency.E2E),
		"request_throughput": {Avg: p.Throughput.Requests}, "output_token_throughput": {Avg: p.Throughput.OutputTokens},
	}
}

var aiperfFigures = []struct{ name, unit, metric string }{
	{"ttft_mean", "ms", "time_to_first_token"},
	{"ttft_p50", "ms", "time_to_first_token"},
	{"ttft_p90", "ms", "time_to_first_token"},
	{"itl_mean", "ms", "inter_token_latency"},
	{"itl_p50", "ms", "inter_token_latency"},
	{"e2e_mean", "ms", "request_latency"},
	{"e2e_p50", "ms", "request_latency"},
	{"e2e_p90", "ms", "request_latency"},
	{"requests_per_s", "requests/s", "request_throughput"},
	{"output_tokens_per_s", "tokens/s", "output_token_throughput"},
}

// ttft and itl are the mock's.
const ttft, itl = "400ms", "50ms"

// compare alternates xpyd bench and aiperf against `xpyd mock`, in a closed loop of 8 and at
// a fixed rate. The mock is as slow as a large model: aiperf spends up to 1 ms on each of
// several events that arrive together, which would dominate times of a few ms.
func (b *loadgen) compare(ctx context.Context, url string) error {
	var version strings.Builder
	if _, err := b.Output(ctx, time.Minute, &version, nil, b.aiperf, "--version"); err != nil {
		return err
	}
	for _, load := range []struct {
		name         string
		ours, theirs []string
	}{
		{"closed", []string{"--concurrency", "8", "--requests", "96"}, []string{"--concurrency", "8", "--request-count", "96"}},
		{"rate", []string{"--rate", "4", "--burstiness", "fixed", "--requests", "96"}, []string{"--request-rate", "4", "--arrival-pattern", "constant", "--request-count", "96"}},
	} {
		ours, theirs := make([][]float64, len(aiperfFigures)), make([][]float64, len(aiperfFigures))
		for range b.Rounds {
			r, _, err := b.xpydBench(ctx, append([]string{"--url", url, "--input", "128", "--output", "32"}, load.ours...)...)
			if err != nil {
				return err
			}
			stats, err := b.runAiperf(ctx, url, load.theirs)
			if err != nil {
				return err
			}
			for i, f := range aiperfFigures {
				s, ok := stats[f.metric]
				if !ok {
					return fmt.Errorf("aiperf's export lacks %s", f.metric)
				}
				ours[i], theirs[i] = append(ours[i], asAiperf(&r.Phases[0])[f.metric].of(f.name)), append(theirs[i], s.of(f.name))
			}
		}
		worst := 0.0
		for i, f := range aiperfFigures {
			f := figures.Figure{Name: "loadgen.aiperf." + load.name + "." + f.name, Unit: f.unit, Peer: "aiperf " + strings.TrimSpace(version.String()),
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
func (b *loadgen) runAiperf(ctx context.Context, url string, load []string) (map[string]aiperfStats, error) {
	dir, err := os.MkdirTemp(b.Dir, "aiperf")
	if err != nil {
		return nil, err
	}
	tokenizer := b.tokenizer
	if !filepath.IsAbs(tokenizer) {
		tokenizer = "./" + tokenizer // else aiperf looks for it on the hub
	}
	args := append([]string{b.aiperf, "profile", "-m", "m", "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer, "--use-server-token-count",
		"--synthetic-input-tokens-mean", "128", "--output-tokens-mean", "32", "--use-legacy-max-tokens", "--random-seed", "1", "--ui", "none", "--artifact-dir", dir}, load...)
	if _, err := b.Output(ctx, 10*time.Minute, io.Discard, nil, args...); err != nil {
		return nil, err
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
		if json.Unmarshal(v, &s) != nil {
			continue // not a metric
		}
		if stats[name] = s; s.Avg != 0 {
			b.Book.Logf("aiperf %s: avg %.4f p50 %.4f p90 %.4f p99 %.4f", name, s.Avg, s.P50, s.P90, s.P99)
		}
	}
	return stats, nil
}
