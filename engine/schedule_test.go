package engine_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// metric reads a counter without labels.
func (r *rig) metric(name string) float64 {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	r.t.Fatalf("no metric %s", name)
	return 0
}

// tokens checks how many positions were computed in a phase.
func (r *rig) tokens(phase string, want float64) {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if l := m.GetLabel(); f.GetName() == "xpyd_engine_tokens_total" && len(l) == 1 && l[0].GetValue() == phase && m.GetCounter().GetValue() != want {
				r.t.Errorf("%v positions of %s, want %v", m.GetCounter().GetValue(), phase, want)
			}
		}
	}
}

func TestIdleEngineSleeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config(), enginetest.Config{}, nil)
		r.generate(request(prompt(rng(), 20), 4))
		before := time.Now()
		time.Sleep(time.Hour) // returns only if nothing else wants the clock
		synctest.Wait()
		if time.Since(before) != time.Hour {
			t.Error("something polls")
		}
		r.close()
	})
}

func TestDecodeGoesFirst(t *testing.T) {
	var shapes [][]int // tokens of each sequence, step by step
	cfg := config()
	cfg.StepTokens, cfg.MaxStepTime = 32, 0
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		r := newRig(t, cfg, enginetest.Config{}, func(s *kernels.Step) error {
			<-gate
			var shape []int
			for _, q := range s.Seqs {
				shape = append(shape, len(q.Tokens))
			}
			shapes = append(shapes, shape)
			return nil
		})
		short := request(prompt(rng(), 10), 5)
		short.IgnoreEOS = true
		h := r.submit(short)
		synctest.Wait() // in its first step
		long := r.submit(request(prompt(rng(), 100), 1))
		close(gate)
		for _, h := range []*engine.Handle{h, long} {
			if _, _, err := collect(h, 1); err != nil {
				t.Error(err)
			}
		}
		r.close()
	})
	// Chunks end with a block of 16.
	want := [][]int{{10}, {1, 16}, {1, 16}, {1, 16}, {1, 16}, {32}, {4}}
	if pipelined { // the second step was launched before the long one came
		want = [][]int{{10}, {1}, {1, 16}, {1, 16}, {1, 16}, {32}, {20}}
	}
	if !slices.EqualFunc(shapes, want, slices.Equal) {
		t.Errorf("steps %v, want %v", shapes, want)
	}
}

// TestPrefillAlone: the oldest prompt gets large chunks while nothing decodes,
// others only what a step has left below 2048 tokens; beside a stream that
// decodes, or is about to, none is larger than StepTokens.
func TestPrefillAlone(t *testing.T) {
	var shapes [][]int
	cfg := config()
	cfg.StepTokens, cfg.PrefillTokens, cfg.MaxStepTime = 512, 4096, 0
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		r := newRig(t, cfg, enginetest.Config{Blocks: 2000, BlockTokens: 16, MaxPositions: 16384}, func(s *kernels.Step) error {
			<-gate
			var shape []int
			for _, q := range s.Seqs {
				shape = append(shape, len(q.Tokens))
			}
			shapes = append(shapes, shape)
			return nil
		})
		first := r.submit(request(prompt(rng(), 16), 1))
		synctest.Wait() // in its step; what follows comes together
		var handles []*engine.Handle
		for _, n := range []int{6000, 1600, 3000} {
			q := request(prompt(rng(), n), 2)
			q.IgnoreEOS = true
			handles = append(handles, r.submit(q))
		}
		close(gate)
		for _, h := range append(handles, first) {
			if _, _, err := collect(h, 1); err != nil {
				t.Error(err)
			}
		}
		r.close()
	})
	most := 0
	for _, shape := range shapes {
		total, decodes := 0, 0
		for i, n := range shape {
			total += n
			if n == 1 {
				decodes++
			}
			if i > 0 && n > 1 && total > 2048 {
				t.Errorf("step %v: a second prompt makes it larger than 2048", shape)
			}
		}
		if decodes > 0 && total > 512 {
			t.Errorf("step %v: more than 512 tokens beside a stream that decodes", shape)
		}
		most = max(most, total)
	}
	if most != 4096 {
		t.Errorf("the largest step has %d tokens, want 4096: %v", most, shapes)
	}
}

// TestStepTime lets the fake take 1 ms a token: chunks settle at MaxStepTime.
func TestStepTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var took []time.Duration
		r := newRig(t, config(), enginetest.Config{}, func(s *kernels.Step) error {
			n := 0
			for _, q := range s.Seqs {
				n += len(q.Tokens)
			}
			d := time.Duration(n) * time.Millisecond
			took = append(took, d)
			time.Sleep(d)
			return nil
		})
		r.generate(request(prompt(rng(), 500), 1))
		for i, d := range took[1:] {
			if d > 50*time.Millisecond || d < 30*time.Millisecond && i+2 < len(took) {
				t.Errorf("step %d of %d took %v", i+1, len(took), d)
			}
		}
		r.close()
	})
}

// TestWholeTiles: a long prompt's steps end with a tile of 128 tokens, and what
// would be a small last step goes with the one before it. 50 µs a token: 4000 tokens
// in four times MaxStepTime.
func TestWholeTiles(t *testing.T) {
	var steps []int
	cfg := config()
	cfg.StepTokens, cfg.PrefillTokens = 512, 4096
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, cfg, enginetest.Config{Blocks: 2000, BlockTokens: 16, MaxPositions: 16384}, func(s *kernels.Step) error {
			n := 0
			for _, q := range s.Seqs {
				n += len(q.Tokens)
			}
			steps = append(steps, n)
			time.Sleep(time.Duration(n) * 50 * time.Microsecond)
			return nil
		})
		random := rng()
		for _, n := range []int{128, 4096, 6000, 4400, 4600} {
			r.generate(request(prompt(random, n), 1))
		}
		r.close()
	})
	want := []int{128, 4096, 3968, 2032, 3968, 432, 3968, 632}
	if !slices.Equal(steps, want) {
		t.Errorf("steps %v, want %v", steps, want)
	}
}

// TestShortPrompts: short prompts that come behind a long one get their first token with its
// next steps, beside streams that decode or not, and it gets at least half of each.
func TestShortPrompts(t *testing.T) {
	for _, decodes := range []int{0, 3} {
		cfg := config()
		cfg.StepTokens, cfg.PrefillTokens, cfg.MaxStepTime = 512, 4096, 0
		synctest.Test(t, func(t *testing.T) {
			var shapes [][]int
			r := newRig(t, cfg, enginetest.Config{Blocks: 4000, BlockTokens: 16, MaxPositions: 40_000}, func(s *kernels.Step) error {
				var shape []int
				for _, q := range s.Seqs {
					shape = append(shape, len(q.Tokens))
				}
				shapes = append(shapes, shape)
				time.Sleep(10 * time.Millisecond)
				return nil
			})
			var list []*engine.Handle
			ask := func(n, tokens int) *engine.Handle {
				q := request(prompt(rng(), n), tokens)
				q.IgnoreEOS = true
				h := r.submit(q)
				list = append(list, h)
				return h
			}
			for range decodes {
				ask(16, 200)
			}
			time.Sleep(25 * time.Millisecond)
			ask(20_000, 1)
			time.Sleep(25 * time.Millisecond) // some of it is computed
			began := time.Now()
			for range 3 {
				h := ask(60, 1)
				if _, err := h.Next(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if took := time.Since(began); took > 100*time.Millisecond {
				t.Errorf("%d decode: three short prompts, one after the other, took %v", decodes, took)
			}
			for _, h := range list {
				if _, _, err := collect(h, 1); err != nil && !errors.Is(err, io.EOF) {
					t.Error(err)
				}
			}
			r.close()
			for _, shape := range shapes {
				if long, total := slices.Max(shape), 0; long > 64 {
					for _, n := range shape {
						total += n
					}
					if 2*long < total-total%16 {
						t.Errorf("%d decode: step %v: the long prompt gets less than half", decodes, shape)
					}
				}
			}
		})
	}
}

func readAll(h *engine.Handle) ([]engine.Event, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var all []engine.Event
	for {
		events, err := h.Next(ctx)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, events...)
	}
}

func TestCancelFreesAtTheEndOfTheStep(t *testing.T) {
	f := func(name string, leave func(h *engine.Handle, cancel func())) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			gate := make(chan struct{})
			r := newRig(t, config(), enginetest.Config{}, func(*kernels.Step) error { <-gate; return nil })
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			req := request(prompt(rng(), 40), 100)
			req.N = 3
			h, err := r.Submit(ctx, req)
			if err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			leave(h, cancel)
			synctest.Wait()
			if len(r.Holders()) != 1 {
				t.Errorf("%s: freed while the step runs", name)
			}
			gate <- struct{}{}
			synctest.Wait()
			select {
			case <-h.Done():
			default:
				t.Errorf("%s: not done after the step", name)
			}
			if len(r.Holders()) != 0 {
				t.Errorf("%s: still held: %+v", name, r.Holders())
			}
			if _, err := h.Next(t.Context()); err == nil {
				t.Errorf("%s: more events", name)
			}
			close(gate)
			r.close()
		})
	}
	f("cancel", func(h *engine.Handle, _ func()) { h.Cancel() })
	f("context", func(_ *engine.Handle, cancel func()) { cancel() })
	f("release", func(h *engine.Handle, _ func()) { h.Release() })
	f("every choice", func(h *engine.Handle, _ func()) {
		for i := range 3 {
			h.CancelChoice(i)
		}
		h.CancelChoice(0)
		h.CancelChoice(7)
	})
}

func TestNextHonoursContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		r := newRig(t, config(), enginetest.Config{}, func(*kernels.Step) error { <-gate; return nil })
		h := r.submit(request(prompt(rng(), 5), 1))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := h.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("at the deadline: %v", err)
		}
		close(gate)
		if _, _, err := collect(h, 1); err != nil {
			t.Errorf("afterwards: %v", err)
		}
		r.close()
	})
}

// TestPrefilledPassesTheQueue: blocks that were reserved are not left idle
// behind a request that waits for memory.
func TestPrefilledPassesTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config(), enginetest.Config{Blocks: 6, BlockTokens: 16}, nil)
		p := prompt(rng(), 20)
		pre := request(p, 0)
		pre.PrefillOnly = true
		h := r.submit(pre)
		out, _, err := collect(h, 1)
		if err != nil {
			t.Fatal(err)
		}
		rows := r.gather(h.Blocks(), len(p))
		h.Release()
		r.done(h)
		blocks, err := r.cache.Alloc(2, "d")
		if err != nil {
			t.Fatal(err)
		}
		r.scatter(blocks, len(p), rows)
		outside, err := r.cache.Alloc(2, "elsewhere")
		if err != nil {
			t.Fatal(err)
		}
		big := r.submit(request(prompt(rng(), 80), 1)) // waits
		synctest.Wait()
		req := request(p, 8)
		req.IgnoreEOS, req.Owner = true, "d"
		req.Prefilled = &engine.Prefilled{Blocks: blocks, First: out[0].sampled, CachedTokens: 3}
		d := r.submit(req)
		got, info, err := collect(d, 1)
		if err != nil || info.CachedTokens != 3 {
			t.Fatalf("%+v, %v", info, err)
		}
		same(t, "prefilled", got, alone(t, r.MaxModelLen(), req), false)
		r.cache.Release(outside, "elsewhere")
		if _, _, err := collect(big, 1); err != nil {
			t.Error(err)
		}
		r.close()
	})
}

// TestStopsAtTheFirstToken: a prefilled request whose first tokens end it
// never enters the batch.
func TestStopsAtTheFirstToken(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	blocks, err := r.cache.Alloc(1, "d")
	if err != nil {
		t.Fatal(err)
	}
	req := request(prompt(rng(), 5), 9)
	req.Owner, req.N = "d", 2
	req.StopTokens = []int32{0}
	req.Prefilled = &engine.Prefilled{Blocks: blocks, First: []kernels.Sampled{{Token: eos}, {Token: 0}}}
	out := r.generate(req)
	for i, o := range out {
		if !slices.Equal(o.tokens, []int32{[]int32{eos, 0}[i]}) || o.finish != engine.FinishStop {
			t.Errorf("%+v", o)
		}
	}
	if n, _ := r.fake().Steps(); n != 0 {
		t.Errorf("%d steps", n)
	}
}

// TestFirstTokensAtOnce: first tokens that another worker drew are told as the request is submitted, also
// while a step is under way, once and before any other.
func TestFirstTokensAtOnce(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRigOn(t, config(), newDevice(enginetest.Config{Blocks: 2000, BlockTokens: 16, MaxPositions: 16384}, func(*kernels.Step) time.Duration { return time.Second }))
		long := request(prompt(rng(), 100), 200)
		long.IgnoreEOS = true
		beside := r.submit(long)
		time.Sleep(3500 * time.Millisecond)
		blocks, err := r.cache.Alloc(1, "d")
		if err != nil {
			t.Fatal(err)
		}
		req := request(prompt(rng(), 5), 3)
		req.IgnoreEOS, req.Owner, req.N = true, "d", 2
		req.Prefilled = &engine.Prefilled{Blocks: blocks, CachedTokens: 4, First: []kernels.Sampled{{Token: 7}, {Token: 9}}}
		began := time.Now()
		h := r.submit(req)
		events, err := h.Next(t.Context())
		if err != nil || time.Since(began) > 0 || len(events) != 2 || events[0].Sampled.Token != 7 || events[1].Sampled.Token != 9 ||
			events[0].Prompt == nil || events[0].Prompt.Tokens != 5 || events[0].Prompt.CachedTokens != 4 || events[1].Prompt != nil {
			t.Errorf("after %v: %+v %v", time.Since(began), events, err)
		}
		next := []int{1, 1}
		for {
			events, err := h.Next(t.Context())
			if err != nil {
				break
			}
			for _, ev := range events {
				if ev.Index != next[ev.Choice] || ev.Prompt != nil {
					t.Errorf("%+v, want index %d", ev, next[ev.Choice])
				}
				next[ev.Choice]++
			}
		}
		if next[0] != 3 || next[1] != 3 {
			t.Errorf("%v tokens", next)
		}
		beside.Cancel()
		r.close()
	})
}
