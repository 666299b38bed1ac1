package engine_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

func rng() *rand.Rand { return rand.New(rand.NewPCG(9, 9)) }

// force makes the fake draw the given tokens, by bias, whatever the prompt.
func force(req *engine.Request, token int32) *engine.Request {
	req.Temperature = 0
	req.Bias = append(req.Bias, kernels.Bias{ID: token, Value: 100})
	return req
}

func TestFinish(t *testing.T) {
	f := func(name string, change func(*engine.Request), tokens int, finish engine.Finish) {
		t.Helper()
		r := newRig(t, config(), enginetest.Config{Blocks: 4, BlockTokens: 16}, nil)
		req := request(prompt(rng(), 20), 10)
		force(req, eos)
		change(req)
		out := r.generate(req)
		if len(out[0].tokens) != tokens || out[0].finish != finish {
			t.Errorf("%s: %d tokens, %q; want %d, %q", name, len(out[0].tokens), out[0].finish, tokens, finish)
		}
	}
	f("EOS", func(*engine.Request) {}, 1, engine.FinishStop)
	f("EOS ignored", func(r *engine.Request) { r.IgnoreEOS = true }, 10, engine.FinishLength)
	f("stop token", func(r *engine.Request) { r.IgnoreEOS, r.StopTokens = true, []int32{3, eos} }, 1, engine.FinishStop)
	f("min tokens, then EOS", func(r *engine.Request) { r.MinTokens = 4 }, 5, engine.FinishStop)
	f("min tokens is max tokens", func(r *engine.Request) { r.MinTokens = 10 }, 10, engine.FinishLength)
	f("one token", func(r *engine.Request) { r.MaxTokens, r.IgnoreEOS = 1, true }, 1, engine.FinishLength)
	f("context length", func(r *engine.Request) { r.MaxTokens, r.IgnoreEOS = 0, true }, 44, engine.FinishLength)
	f("longest prompt", func(r *engine.Request) { r.Prompt, r.IgnoreEOS = prompt(rng(), 63), true }, 1, engine.FinishLength)
}

func TestSubmitRefuses(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{Blocks: 4, BlockTokens: 16, MaxPositions: 50}, nil)
	f := func(field string, change func(*engine.Request)) {
		t.Helper()
		req := request(prompt(rng(), 20), 10)
		change(req)
		_, err := r.Submit(t.Context(), req)
		var bad *engine.RequestError
		if !errors.As(err, &bad) || bad.Field != field || strings.Contains(err.Error(), "%!") {
			t.Errorf("%s: %v", field, err)
		}
	}
	f("prompt", func(r *engine.Request) { r.Prompt = nil })
	f("prompt", func(r *engine.Request) { r.Prompt = []int32{1, 48} })
	f("prompt", func(r *engine.Request) { r.Prompt = []int32{-1} })
	f("n", func(r *engine.Request) { r.N = -1 })
	f("n", func(r *engine.Request) { r.N = engine.MaxChoices + 1 })
	f("max_tokens", func(r *engine.Request) { r.MaxTokens = -1 })
	f("min_tokens", func(r *engine.Request) { r.MinTokens = 11 })
	f("stop_token_ids", func(r *engine.Request) { r.StopTokens = []int32{99} })
	f("logit_bias", func(r *engine.Request) { r.Bias = []kernels.Bias{{ID: 48}} })
	f("min_tokens", func(r *engine.Request) { r.MinTokens = -1 })
	f("promise", func(r *engine.Request) { r.Promise.TTFT = -1 })
	f("promise", func(r *engine.Request) { r.Promise.TPOT = -1 })
	f("logit_bias", func(r *engine.Request) { r.Bias = []kernels.Bias{{ID: -1}} })
	f("stop_token_ids", func(r *engine.Request) { r.StopTokens = []int32{-1} })
	f("logprobs", func(r *engine.Request) { r.Logprobs = 49 })
	f("logprobs", func(r *engine.Request) { r.PromptLogprobs = 49 })
	for n, change := range []func(*engine.Request){
		func(r *engine.Request) { r.Logprobs, r.PromptLogprobs = 48, 48 }, func(r *engine.Request) { r.N, r.MinTokens = engine.MaxChoices, 10 },
		func(r *engine.Request) { r.MaxTokens, r.MinTokens = 0, 100 }, func(r *engine.Request) { r.Bias, r.StopTokens = []kernels.Bias{{ID: 0}, {ID: 47}}, []int32{0, 47} },
		func(r *engine.Request) { r.Prompt = []int32{0, 47} }, func(r *engine.Request) { r.Prompt = make([]int32, 49) },
	} {
		req := request(prompt(rng(), 20), 10)
		if change(req); r.Check(req) != nil {
			t.Errorf("at the edge, %d: %v", n, r.Check(req))
		}
	}
	f("on_blocks", func(r *engine.Request) { r.OnBlocks = func(int, []engine.Ready) {} })
	pre := func(owner string, p engine.Prefilled) func(*engine.Request) {
		return func(r *engine.Request) { r.Owner, r.Prefilled = owner, &p }
	}
	f("prefilled", pre("", engine.Prefilled{Blocks: []int32{0, 1}}))
	f("prefilled", pre("a", engine.Prefilled{Blocks: []int32{0}}))
	f("prefilled", pre("a", engine.Prefilled{Blocks: []int32{0, 4}}))
	f("prefilled", pre("a", engine.Prefilled{Blocks: []int32{0, 1}, First: make([]kernels.Sampled, 2)}))
	f("prefilled", pre("a", engine.Prefilled{Blocks: []int32{0, 1}, First: []kernels.Sampled{{Token: 48}}}))
	f("prefilled", pre("a", engine.Prefilled{Blocks: []int32{0, -1}}))
	f("prefilled", pre("a", engine.Prefilled{Blocks: []int32{0, 1}, First: []kernels.Sampled{{Token: -1}}}))
	f("prefilled", func(r *engine.Request) {
		pre("a", engine.Prefilled{Blocks: []int32{0, 1}})(r)
		r.PrefillOnly = true
	})
	f("rows_only", func(r *engine.Request) { r.RowsOnly = true })
	f("rows_only", func(r *engine.Request) { r.RowsOnly, r.PrefillOnly, r.PromptLogprobs = true, true, 0 })
	given := func(list ...engine.Given) func(*engine.Request) {
		return func(r *engine.Request) { r.Given = list }
	}
	f("given", given(engine.Given{}, engine.Given{}))
	f("given", given(engine.Given{Tokens: []int32{1, 48}}))
	f("given", given(engine.Given{Tokens: []int32{-1}}))
	f("given", given(engine.Given{Tokens: []int32{1, eos, 2}}))
	f("given", given(engine.Given{Tokens: []int32{1, eos}}))
	f("given", given(engine.Given{Tokens: make([]int32, 10)})) // max_tokens
	f("given", given(engine.Given{Tokens: make([]int32, 1000)}))
	f("given", func(r *engine.Request) { r.MaxTokens, r.Given = 0, []engine.Given{{Tokens: make([]int32, 1000)}} })
	f("given", func(r *engine.Request) { r.PrefillOnly, r.Given = true, []engine.Given{{}} })
	_, err := r.Submit(t.Context(), request(prompt(rng(), 50), 1))
	var long *engine.TooLongError
	if !errors.As(err, &long) || long.Prompt != 50 || long.Max != 50 {
		t.Errorf("too long: %v", err)
	}
}

func TestConfigRefused(t *testing.T) {
	f := func(want string, change func(*engine.Config)) {
		t.Helper()
		cfg := engine.DefaultConfig()
		change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	f("max running", func(c *engine.Config) { c.MaxRunning = 0 })
	f("max waiting", func(c *engine.Config) { c.MaxWaiting = 0 })
	f("step tokens", func(c *engine.Config) { c.StepTokens = 0 })
	f("max backlog", func(c *engine.Config) { c.MaxBacklog = 0 })
	f("max model len", func(c *engine.Config) { c.MaxModelLen = -1 })
	f("max failures", func(c *engine.Config) { c.MaxFailures = 0 })
	f("max step time", func(c *engine.Config) { c.MaxStepTime = -1 })
	f("promise", func(c *engine.Config) { c.Promise.TTFT = -1 })
	f("promise", func(c *engine.Config) { c.Promise.TPOT = -1 })
	cfg := engine.DefaultConfig()
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
}

func TestPrefixReuse(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	p := prompt(rng(), 70)
	f := func(name string, req *engine.Request, cached int) {
		t.Helper()
		_, info, err := collect(r.submit(req), 1)
		if err != nil || info.CachedTokens != cached || info.Tokens != len(req.Prompt) {
			t.Errorf("%s: %+v, %v; want %d cached", name, info, err, cached)
		}
	}
	first := request(p, 30)
	first.IgnoreEOS = true
	out := alone(t, r.MaxModelLen(), first)
	f("cold", first, 0)
	f("again", first, 64)
	f("prefix of whole blocks leaves one to compute", request(p[:64], 5), 48)
	f("generated blocks too", request(append(slices.Clone(p), out[0].tokens...), 5), 96)
	salted := request(p, 5)
	salted.Salt = "tenant"
	f("other salt", salted, 0)
	whole := request(p, 5)
	whole.PromptLogprobs = 0
	f("prompt logprobs compute all", whole, 0)
	if n, err := testutil.GatherAndCount(r.reg, "xpyd_engine_prefix_hit_tokens_total"); err != nil || n != 1 {
		t.Errorf("hit metric: %d, %v", n, err)
	}
}

func TestPromptLogprobs(t *testing.T) {
	f := func(stepTokens, length int) {
		t.Helper()
		cfg := config()
		cfg.StepTokens = stepTokens
		r := newRig(t, cfg, enginetest.Config{BlockTokens: 4}, nil)
		req := request(prompt(rng(), length), 3)
		req.PromptLogprobs, req.Logprobs, req.IgnoreEOS = 2, 1, true
		out, info, err := collect(r.submit(req), 1)
		if err != nil || len(info.Logprobs) != length-1 {
			t.Fatalf("chunks of %d: %d entries, %v", stepTokens, len(info.Logprobs), err)
		}
		for i, p := range info.Logprobs {
			if p.Self.ID != req.Prompt[i+1] || p.Self.Rank == 0 || len(p.Top) != 2 || p.Top[0].Rank != 1 {
				t.Errorf("chunks of %d: entry %d is %+v", stepTokens, i, p)
			}
		}
		if s := out[0].sampled[1]; s.Self.ID != s.Token || len(s.Top) != 1 || s.Top[0].Rank != 1 {
			t.Errorf("logprobs: %+v", s)
		}
	}
	f(1000, 37)
	f(1, 37)
	f(7, 37)
	f(16, 32)
	f(16, 33)
	f(16, 1)
}

// TestOnBlocks checks order and completeness of what a prefill worker hears,
// and that the rows are there when it hears of them.
func TestOnBlocks(t *testing.T) {
	f := func(name string, length, warm, stepTokens, blockTokens int) {
		t.Helper()
		cfg := config()
		cfg.StepTokens = stepTokens
		var r *rig
		p := prompt(rng(), length)
		r = newRig(t, cfg, enginetest.Config{BlockTokens: blockTokens, Layers: 3, Blocks: 256}, nil)
		if warm > 0 {
			r.generate(request(p[:warm], 1))
		}
		type at struct{ layer, index int }
		var order []at
		rows := make(map[at][]byte)
		req := request(p, 5)
		req.N, req.PrefillOnly = 2, true
		req.OnBlocks = func(layer int, ready []engine.Ready) {
			for _, b := range ready {
				key := at{layer, b.Index}
				want := min(blockTokens, length-b.Index*blockTokens)
				if rows[key] != nil || b.Rows != want || b.FirstPos != b.Index*blockTokens {
					t.Errorf("%s: layer %d: %+v", name, layer, b)
				}
				order = append(order, key)
				rows[key] = make([]byte, r.backend.Layout().Resolve()[0].PackedBytes(b.Rows))
				r.backend.Gather(layer, b.Block, 0, b.Rows, rows[key])
			}
		}
		h := r.submit(req)
		out, info, err := collect(h, 2)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		solo := request(p, 1)
		solo.N = 2
		same(t, name, out, aloneOn(t, enginetest.New(enginetest.Config{Layers: 3}), 0, solo), false)
		if h.CachedTokens() != info.CachedTokens || (warm > 0) != (info.CachedTokens > 0) {
			t.Errorf("%s: %d and %d cached", name, h.CachedTokens(), info.CachedTokens)
		}
		blocks := h.Blocks()
		if len(order) != 3*len(blocks) {
			t.Errorf("%s: heard of %d, want 3 layers of %d", name, len(order), len(blocks))
		}
		for i, buf := range r.gather(blocks, length) {
			key := at{i / len(blocks), i % len(blocks)}
			if !slices.Equal(buf, rows[key]) {
				t.Errorf("%s: rows of %+v changed after they were announced", name, key)
			}
		}
		// Within a layer indexes ascend; a block is announced layer by layer.
		next := make([]int, 3)
		for _, k := range order {
			if k.index != next[k.layer] || k.layer > 0 && next[k.layer-1] <= k.index {
				t.Fatalf("%s: order %v", name, order)
			}
			next[k.layer]++
		}
		if len(r.Holders()) != 1 {
			t.Errorf("%s: holders %+v", name, r.Holders())
		}
		h.Release()
		r.done(h)
		if h.Blocks() != nil || len(r.Holders()) != 0 {
			t.Errorf("%s: held after release: %+v", name, r.Holders())
		}
		h.Release() // twice is once
	}
	f("one step", 50, 0, 1000, 16)
	f("whole blocks", 48, 0, 1000, 16)
	f("chunks", 50, 0, 20, 16)
	f("tiny chunks", 50, 0, 1, 16)
	f("prefix hits", 70, 40, 20, 16)
	f("all but one hit", 33, 32, 20, 16)
	f("small blocks", 41, 20, 7, 4)
	f("units of three blocks", 110, 0, 7, 24)
	f("large blocks", 300, 0, 90, 256)
	f("one token", 1, 0, 10, 16)
}

func TestPrefillOnlyNeedsRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		r := newRig(t, config(), enginetest.Config{}, func(*kernels.Step) error { <-gate; return nil })
		req := request(prompt(rng(), 40), 0)
		req.PrefillOnly = true
		h := r.submit(req)
		synctest.Wait() // in its step
		h.Cancel()
		close(gate)
		if _, _, err := collect(h, 1); !errors.Is(err, engine.ErrCancelled) {
			t.Errorf("cancelled: %v", err)
		}
		if len(r.Holders()) != 1 || len(h.Blocks()) != 3 {
			t.Errorf("a cancelled prefill let its blocks go: %+v", r.Holders())
		}
		synctest.Wait()
		select {
		case <-h.Done():
			t.Error("done before release")
		default:
		}
		h.Release()
		r.done(h)
	})
}

func TestChoicesShareThePrompt(t *testing.T) {
	peak := 0
	var r *rig
	r = newRig(t, config(), enginetest.Config{Blocks: 64, BlockTokens: 16}, func(*kernels.Step) error {
		peak = max(peak, r.cache.Stats().Held)
		return nil
	})
	req := request(prompt(rng(), 100), 10)
	req.N, req.IgnoreEOS = 8, true
	want := alone(t, r.MaxModelLen(), req)
	same(t, "eight choices", r.generate(req), want, false)
	if limit := 6 + 8; peak > limit { // 6 whole blocks shared, one more each
		t.Errorf("%d blocks held at most, want %d", peak, limit)
	}
	for i := range want[1:] {
		if slices.Equal(want[0].tokens, want[i+1].tokens) {
			t.Errorf("choice %d is choice 0", i+1)
		}
	}
}

func TestFailedStep(t *testing.T) {
	var mu sync.Mutex
	fail := ""
	set := func(how string) { mu.Lock(); fail = how; mu.Unlock() }
	cfg := config()
	cfg.MaxFailures = 2
	r := newRig(t, cfg, enginetest.Config{}, func(*kernels.Step) error {
		mu.Lock()
		defer mu.Unlock()
		switch fail {
		case "error":
			return errors.New("device lost")
		case "panic":
			panic("index out of range")
		}
		return nil
	})
	req := request(prompt(rng(), 40), 5)
	req.N = 3
	want := alone(t, r.MaxModelLen(), req)
	f := func(how string, panicked, healthy bool) {
		t.Helper()
		set(how)
		h := r.submit(req)
		_, _, err := collect(h, 3)
		var step *engine.StepError
		if !errors.As(err, &step) || step.Panicked != panicked {
			t.Errorf("%s: %v", how, err)
		}
		r.done(h)
		if len(r.Holders()) != 0 || (r.Health() == nil) != healthy {
			t.Errorf("%s: holders %+v, health %v", how, r.Holders(), r.Health())
		}
	}
	f("error", false, true)
	f("panic", true, false)
	set("")
	same(t, "afterwards", r.generate(req), want, false)
	if r.Health() != nil {
		t.Errorf("afterwards: %v", r.Health())
	}
}

func TestOnBlocksPanic(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	p := prompt(rng(), 40)
	for range 2 { // in the step, then with prefix hits
		req := request(p, 1)
		req.PrefillOnly = true
		req.OnBlocks = func(int, []engine.Ready) { panic("pusher") }
		h := r.submit(req)
		_, _, err := collect(h, 1)
		var step *engine.StepError
		if !errors.As(err, &step) || !step.Panicked {
			t.Errorf("%v", err)
		}
		h.Release()
		r.done(h)
		r.generate(request(p, 1))
	}
}

func TestQueueFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		cfg := config()
		cfg.MaxWaiting, cfg.MaxRunning = 2, 1
		r := newRig(t, cfg, enginetest.Config{}, func(*kernels.Step) error { <-gate; return nil })
		handles := []*engine.Handle{r.submit(request(prompt(rng(), 5), 1))}
		synctest.Wait() // in its step
		handles = append(handles, r.submit(request(prompt(rng(), 5), 1)), r.submit(request(prompt(rng(), 5), 1)))
		if _, err := r.Submit(t.Context(), request(prompt(rng(), 5), 1)); !errors.Is(err, engine.ErrQueueFull) {
			t.Errorf("fourth: %v", err)
		}
		if s := r.Stats(); s.Waiting != 2 || s.Running != 1 || s.QueuedTokens != 15 {
			t.Errorf("stats: %+v", s)
		}
		close(gate)
		for _, h := range handles {
			if _, _, err := collect(h, 1); err != nil {
				t.Error(err)
			}
		}
		r.generate(request(prompt(rng(), 5), 1)) // there is room again
	})
}

func TestClose(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	req := request(prompt(rng(), 20), 40)
	req.IgnoreEOS = true
	h := r.submit(req)
	r.close() // lets it finish
	out, _, err := collect(h, 1)
	if err != nil || len(out[0].tokens) != 40 {
		t.Errorf("after close: %d tokens, %v", len(out[0].tokens), err)
	}
	if _, err := r.Submit(t.Context(), req); !errors.Is(err, engine.ErrClosed) {
		t.Errorf("submit: %v", err)
	}
	h.Cancel()
	r.close() // again
}

func TestCloseAborts(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	pre := request(prompt(rng(), 20), 1)
	pre.PrefillOnly = true
	held := r.submit(pre)
	if _, _, err := collect(held, 1); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("close: %v", err)
	}
	if len(r.Holders()) != 1 {
		t.Errorf("holders: %+v", r.Holders())
	}
	held.Release() // the loop is gone
	r.done(held)
}

func TestCloseAbortsLiveRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		cfg := config()
		cfg.MaxRunning = 1
		r := newRig(t, cfg, enginetest.Config{}, func(*kernels.Step) error { <-gate; return nil })
		req := request(prompt(rng(), 20), 400)
		req.IgnoreEOS = true
		handles := []*engine.Handle{r.submit(req), r.submit(req)} // one runs, one waits
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		closed := make(chan error)
		go func() { closed <- r.Close(ctx) }()
		time.Sleep(2 * time.Second)
		close(gate)
		if err := <-closed; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("close: %v", err)
		}
		for _, h := range handles {
			if _, _, err := collect(h, 1); !errors.Is(err, engine.ErrClosed) {
				t.Errorf("an aborted request ends with %v", err)
			}
		}
	})
}

func TestMetrics(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	r.generate(request(prompt(rng(), 20), 4))
	r.generate(request(prompt(rng(), 1), 3)) // a chunk of one token is no decode step
	r.tokens("prefill", 20+1)
	r.tokens("decode", 3+2) // the last is not computed with
	problems, err := testutil.GatherAndLint(r.reg)
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
	families, err := r.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "xpyd_engine_") {
			t.Errorf("metric %s", f.GetName())
		}
	}
	log := r.reg
	if _, err := engine.New(config(), r.backend, r.cache, nil, log); err == nil {
		t.Error("a second engine on one registry")
	}
}

func TestMismatchedCache(t *testing.T) {
	c, err := kvcache.New(kvcache.Config{Blocks: 3, BlockTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := engine.New(config(), enginetest.New(enginetest.Config{}), c, nil, nil); err == nil {
		t.Error("cache and backend differ")
	}
}

// TestMetricsTaken: an engine whose metrics another has does not start, and takes only its own back.
func TestMetricsTaken(t *testing.T) {
	b := enginetest.New(enginetest.Config{})
	c, err := kvcache.New(kvcache.Config{Blocks: b.Blocks(), BlockTokens: b.Layout().BlockTokens})
	if err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	other := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "xpyd_engine_queued_tokens", Help: "Prompt tokens not yet computed."}, func() float64 { return 7 })
	reg.MustRegister(other)
	if _, err := engine.New(config(), b, c, slog.New(slog.DiscardHandler), reg); err == nil {
		t.Error("two have the same metrics")
	}
	if all, err := reg.Gather(); err != nil || len(all) != 1 || all[0].GetMetric()[0].GetGauge().GetValue() != 7 {
		t.Errorf("%v, %v", all, err)
	}
}
