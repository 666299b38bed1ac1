package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// TestVLLMPlots: charts are drawn of what both servers did, and of nothing else.
func TestVLLMPlots(t *testing.T) {
	out := t.TempDir()
	o := &vllm{base: base{Bench: &harness.Bench{Options: harness.Options{Out: out}}}}
	row := func(server, load string, rate float64) {
		o.rows = append(o.rows, vllmRow{Server: server, Load: load, TTFT: 30, TTFT99: 90, TPOT: 9, Output: 1800, Rate: rate, Good: 0.5})
	}
	drawn := func() (names string) {
		list, _ := filepath.Glob(filepath.Join(out, "plots", "*.svg"))
		for _, f := range list {
			names += " " + strings.TrimSuffix(filepath.Base(f), ".svg")
		}
		return names
	}
	for _, load := range []string{"c1", "c16", "c64", "c128"} {
		for _, server := range servers {
			if drawn() != "" {
				t.Fatal("a chart of a part")
			}
			row(server, load, 0)
			if err := o.plots(); err != nil {
				t.Fatal(err)
			}
		}
	}
	row(oursName, "goodput.b", 24)
	row(oursName, "goodput.c", 18)
	row(vllmName, "goodput.c", 18)
	row(vllmName, "goodput.c", 12)
	if err := o.plots(); err != nil || drawn() != " vllm-clients vllm-goodput.c" {
		t.Errorf("%v, %s", err, drawn())
	}
	b, err := os.ReadFile(filepath.Join(out, "plots", "vllm-goodput.c.svg"))
	if err != nil || strings.Count(string(b), `class="mark"`) != 9 || !strings.Contains(string(b), "within 1s and 12ms") {
		t.Errorf("%v\n%s", err, b)
	}
	if got := o.overRates(promise{"goodput.c", time.Second, 12 * time.Millisecond, nil})[0].Lines[1].Points[0].X; got != 12 {
		t.Errorf("rates begin with %v", got)
	}
}
