package main

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/tokenizer"
)

// TestWideTokenizer: every token of the vLLM benchmark's model is text, so that clients see each.
func TestWideTokenizer(t *testing.T) {
	tokens, config, err := wideTokenizer(128000, 256)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "tokenizer.json"), tokens, 0o600), os.WriteFile(filepath.Join(dir, "tokenizer_config.json"), config, 0o600)); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if n := tok.VocabSize(); n != 128256 {
		t.Errorf("%d tokens", n)
	}
	for id := int32(256); id < 128000; id += 97 {
		if text := tok.TokenText(id); len(text) < 2 || strings.Trim(text, "abcdefghijklmnopqrstuvwxyz") != "" {
			t.Errorf("token %d is %q", id, text)
		}
	}
}

func TestSteady(t *testing.T) {
	p := &report.Phase{Timeline: report.Timeline{Bin: 1, OutputTokens: []float64{1, 2, 10, 20, 30, 3}}}
	p.Latency.E2E.Mean = 1000
	if got := steady(p, 1e9, 4e9); math.Abs(got-20) > 1e-9 { // bins 2 to 4
		t.Errorf("%v tokens/s", got)
	}
	if got := steady(p, 10e9, 1e9); got != 0 {
		t.Errorf("%v tokens/s of an empty window", got)
	}
}

func TestVLLMFigure(t *testing.T) {
	ours, theirs := []vllmRow{{TTFT: 10}, {TTFT: 30}}, []vllmRow{{TTFT: 20, Version: "1.2"}, {TTFT: 30, Failed: 2}}
	f := vllmFigure(closedLoops[1], "ttft_ratio.", "ms", ours, theirs, func(r vllmRow) float64 { return r.TTFT })
	if f.Name != "vs_vllm.ttft_ratio.c16" || f.Value != 0.75 || f.Ratio != 0.75 || f.Runs != 2 || !strings.HasPrefix(f.Peer, "vLLM 1.2,") || !strings.Contains(f.Spread, "ours 10..30 ms, vLLM 20..30; 2 requests failed") {
		t.Errorf("%+v", f)
	}
}
