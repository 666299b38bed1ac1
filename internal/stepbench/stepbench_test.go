package stepbench_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/internal/stepbench"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/kernels"
)

// law is the time that the device of these tests takes for a step, by virtual time.
func law(s *kernels.Step) time.Duration {
	tokens, draws, seen := 0, 0, 0
	for _, q := range s.Seqs {
		tokens += len(q.Tokens)
		draws += len(q.Samples)
		seen += len(q.Tokens)*q.Pos + len(q.Tokens)*len(q.Tokens)/2
	}
	return 2*time.Millisecond + time.Duration(tokens)*50*time.Microsecond + time.Duration(draws)*30*time.Microsecond +
		time.Duration(len(s.Seqs))*5*time.Microsecond + time.Duration(seen)*200*time.Nanosecond
}

func device() *enginetest.Backend {
	b := enginetest.New(enginetest.Config{Layers: 1, Blocks: 300, MaxPositions: 1024})
	b.OnStep = func(s *kernels.Step) error {
		time.Sleep(law(s))
		return nil
	}
	return b
}

func config() stepbench.Config {
	return stepbench.Config{MaxBatch: 24, StepTokens: 256, MaxContext: 1000, Time: time.Hour, HeldOut: 40, Seed: 1}
}

// TestMeasure: of a device whose times follow a law the table foretells steps that it was not made
// of. Steps name no block twice (the fake refuses that) and never more than there are.
func TestMeasure(t *testing.T) {
	for _, name := range []string{"step by step", "launched"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := device()
				var backend kernels.Backend = b
				if name == "launched" {
					backend = &enginetest.Pipelined{Backend: b}
				}
				var said bytes.Buffer
				cfg := config()
				cfg.Time, cfg.Progress = 2*time.Minute, &said
				r, err := stepbench.Measure(t.Context(), backend, cfg)
				if err != nil {
					t.Fatal(err)
				}
				table := r.Table
				if h := table.HeldOut; h.Steps != 40 || h.Median > 0.01 || h.Worst > 0.05 {
					t.Errorf("held out: %+v", h)
				}
				if r.LeftOut != 0 || r.Runs < 3 || r.Points != len(table.Prefill)+len(table.Decode)+len(table.Undrawn) {
					t.Errorf("%d points of %d, %d, %d, %d runs, %d left out", r.Points, len(table.Prefill), len(table.Decode), len(table.Undrawn), r.Runs, r.LeftOut)
				}
				if !strings.Contains(said.String(), "round 2: ") {
					t.Errorf("progress: %q", said.String())
				}
				has := func(batch, context int) {
					t.Helper()
					if !slices.ContainsFunc(table.Decode, func(d steptable.Decode) bool { return d.Batch == batch && d.Context == context }) {
						t.Errorf("no decode of %d at %d", batch, context)
					}
				}
				has(1, 16)
				has(1, 1000)
				has(24, 16)
				has(24, 192) // all that 300 blocks have room for
				if a := table.About; a.Blocks != 300 || a.BlockTokens != 16 || a.MaxContext != 1000 || table.KV.BytesPerToken != 16 {
					t.Errorf("%+v, %+v", a, table.KV)
				}
				if p, ok := backend.(*enginetest.Pipelined); ok && (p.Overlapped() == 0 || p.UnderWay() != 0) {
					t.Errorf("%d steps overlapped, %d are under way", p.Overlapped(), p.UnderWay())
				}
			})
		})
	}
}

// TestLittleTime: what there is no time for are points between others; the ends are always there.
func TestLittleTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.Time = 3 * time.Second
		begin := time.Now()
		r, err := stepbench.Measure(t.Context(), device(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took > 5*time.Second || r.LeftOut == 0 || r.Runs < 1 {
			t.Errorf("%v, %d left out, %d runs", took, r.LeftOut, r.Runs)
		}
		p := r.Table.Prefill
		if first, last := p[0], p[len(p)-1]; first.Tokens != 1 || last.Tokens != 256 || last.Position != 744 {
			t.Errorf("from %+v to %+v", first, last)
		}
	})
}

// TestEnough: a fast device is done before the time is over.
func TestEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := stepbench.Config{MaxBatch: 1, StepTokens: 1, MaxContext: 32, Time: time.Hour, HeldOut: 2}
		begin := time.Now()
		r, err := stepbench.Measure(t.Context(), device(), cfg)
		if err != nil || r.Runs < 200 || time.Since(begin) > time.Minute {
			t.Errorf("%+v, %v, %v", r, err, time.Since(begin))
		}
	})
}

// TestRefused: what a pool, a model or the caller does not allow.
func TestRefused(t *testing.T) {
	f := func(want string, change func(*stepbench.Config)) {
		t.Helper()
		cfg := config()
		change(&cfg)
		b := enginetest.New(enginetest.Config{Blocks: 20, MaxPositions: 400})
		if _, err := stepbench.Measure(t.Context(), b, cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("max-context 401: the model's longest is 400", func(c *stepbench.Config) { c.MaxContext = 401 })
	f("max-context 350: the KV pool has room for 320 tokens", func(c *stepbench.Config) { c.MaxContext = 350 })
	f("want 32 at least", func(c *stepbench.Config) { c.MaxContext = 31 })
	f("max-batch 0, step-tokens 256: want 1 at least", func(c *stepbench.Config) { c.MaxContext, c.MaxBatch = 100, 0 })
}

// TestFails: a step that fails and a caller that gives up end it at once.
func TestFails(t *testing.T) {
	broken, n := errors.New("broken"), 0
	ctx, cancel := context.WithCancel(t.Context())
	b := enginetest.New(enginetest.Config{Blocks: 100})
	b.OnStep = func(*kernels.Step) error {
		if n++; n == 50 {
			return broken
		}
		return nil
	}
	cfg := config()
	cfg.MaxContext = 400
	if _, err := stepbench.Measure(ctx, b, cfg); !errors.Is(err, broken) || n != 50 {
		t.Errorf("%v after %d steps", err, n)
	}
	b.OnStep = func(*kernels.Step) error {
		cancel()
		return nil
	}
	if _, err := stepbench.Measure(ctx, b, cfg); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
