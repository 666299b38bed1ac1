package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/internal/trust"
)

// Goodput is between the two speeds that the share crosses.
func TestCrossings(t *testing.T) {
	for name, c := range map[string]struct {
		list       []good
		real, twin float64
	}{
		"both":       {[]good{{0.9, 1, 1}, {1, 0.95, 0.9}, {1.1, 0.85, 0.7}}, 1.05, 1},
		"real not":   {[]good{{0.9, 0.8, 1}, {1, 0.7, 0.8}}, 0, 0.95},
		"twin not":   {[]good{{0.9, 1, 1}, {1, 0.8, 1}}, 0.95, 0},
		"twice":      {[]good{{0.8, 1, 1}, {0.9, 0.8, 1}, {1, 1, 1}, {1.1, 0.8, 0.8}}, 1.05, 1.05},
		"none known": {nil, 0, 0},
	} {
		if real, twin := crossings(c.list); math.Abs(real-c.real) > 1e-9 || math.Abs(twin-c.twin) > 1e-9 {
			t.Errorf("%s: %g and %g, want %g and %g", name, real, twin, c.real, c.twin)
		}
	}
}

// What another program disturbed is called unsteady; what a trace's windows differ by is not.
func TestUnsteady(t *testing.T) {
	for _, c := range []struct {
		low, high float64
		want      bool
	}{{0.68, 0.99, true}, {0.95, 0.96, false}, {0.9, 0.7, false}} {
		if got := unsteady([]good{{0.9, c.low, 1}, {1, c.high, 1}}); got != c.want {
			t.Errorf("%g and then %g: %v, want %v", c.low, c.high, got, c.want)
		}
	}
}

// A real fleet and its twin get the same requests at any speed.
func TestProcessLoads(t *testing.T) {
	b := &processBench{window: 10 * time.Second}
	for _, name := range []string{"short", "shared"} {
		l, err := b.load(name)
		if err != nil {
			t.Fatal(err)
		}
		shared := map[uint64]int{}
		for _, e := range l.of(3) {
			for _, id := range e.Blocks {
				shared[id]++
			}
			if want := (e.In + workload.BlockTokens - 1) / workload.BlockTokens; e.At >= l.window || e.Blocks != nil && len(e.Blocks) != want {
				t.Fatalf("%s: %+v", name, e)
			}
		}
		if n := len(l.of(3)); n < 15 || n > 45 {
			t.Errorf("%s: %d requests in 10 s, three times as fast as once a second", name, n)
		}
		often := 0
		for id, n := range shared {
			if n > 1 && id >= prefixes*prefixBlocks {
				t.Errorf("block %d is of %d prompts", id, n)
			}
			if n > 1 {
				often++
			}
		}
		if name == "shared" && often < prefixBlocks {
			t.Errorf("%d blocks are shared: %v", often, shared)
		}
	}
}

// constant is a table whose steps take 20 ms.
func constant(t *testing.T) (path string) {
	t.Helper()
	took := steptable.Time{Seconds: 0.020, Runs: 1}
	table := steptable.Table{Version: steptable.Version,
		About:   steptable.About{Device: "a test's", Backend: "cuda", BlockTokens: 16, Blocks: 64, MaxBatch: 8, StepTokens: 256, MaxContext: 512, Shape: steptable.Shape{Layers: 1}},
		Prefill: []steptable.Prefill{{Tokens: 1, Time: took}, {Tokens: 256, Time: took}}, Decode: []steptable.Decode{{Batch: 1, Context: 1, Time: took}, {Batch: 8, Context: 512, Time: took}}}
	path = filepath.Join(t.TempDir(), "table.json")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := table.Write(f); err != nil {
		t.Fatal(err)
	}
	return path
}

// A worker whose device only waits answers as any, and no sooner than its table says, times its slowness.
func TestTimedWorker(t *testing.T) {
	table, model := constant(t), filepath.Join(t.TempDir(), "model")
	t.Chdir("../..")
	if err := writeTimedModel(model, 512); err != nil {
		t.Fatal(err)
	}
	secret, join := trust.NewSecret(), filepath.Join(t.TempDir(), "join")
	if err := os.WriteFile(join, []byte("#"+secret.Reveal()), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	o := timedWorker{id: "d", role: string(fleet.Decode), join: join, model: model, table: table, slow: 2, seed: 1}
	w, d, err := o.start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Close(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	}()
	const tokens = 6
	i := w.Instance()
	if !strings.Contains(i.Numerics, "timed") {
		t.Errorf("its numerics are %q: workers that compute could be its peers", i.Numerics)
	}
	h := http.Header{"Content-Type": {"application/json"}}
	h.Set(trust.Header, secret.Token(trust.HTTP, trust.Member(i.ID, i.Epoch)))
	prompt := strings.TrimSuffix(strings.Repeat("7,", 40), ",")
	began := time.Now()
	var got struct {
		Usage struct {
			Completion int `json:"completion_tokens"`
		}
		Choices []struct{ Text string }
	}
	err = call(ctx, http.MethodPost, w.URL()+"/v1/completions", h, fmt.Sprintf(`{"model":%q,"prompt":[%s],"max_tokens":%d,"ignore_eos":true}`, i.Model, prompt, tokens), func(r io.Reader, _ http.Header) error {
		return json.NewDecoder(r).Decode(&got)
	})
	if took := time.Since(began); err != nil || took < tokens*40*time.Millisecond {
		t.Fatalf("%v after %v, want at least %d steps of 40 ms", err, took, tokens)
	}
	if late := d.Late(); late.Steps < 1 || late.Steps > tokens+1 {
		t.Errorf("%v, want one a token", late)
	}
	if got.Usage.Completion != tokens || len(got.Choices) != 1 || got.Choices[0].Text == "" {
		t.Fatalf("%+v", got)
	}
}

// The helper that the benchmark starts says why it does not start.
func TestServeTimedRefuses(t *testing.T) {
	var said bytes.Buffer
	if err := serveTimed(t.Context(), []string{"-table", filepath.Join(t.TempDir(), "none")}, &said); err == nil || said.Len() > 0 {
		t.Fatal(err, said.String())
	}
}
