package worker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// endurance is a random load that a backend must bear: greedy and sampled
// requests of random lengths, many more than the pool has room for, of which a
// part is aborted and some are refused.
type endurance struct {
	backend            kernels.Backend // whose results depend on a request alone
	clients            int
	kinds              int // different requests, each of which is first run alone
	prompt, output     int // tokens at most
	stepTokens, queued int
	more               func(done int) bool // whether to go on
}

// What came of the load.
type endured struct {
	whole, aborted, full, refused int
	tokens                        int
	used                          []float64 // part of the pool that was held, as each request ended
	evicted                       uint64
}

func (e *endurance) open(t *testing.T, queued int) (*engine.Engine, *kvcache.Cache) {
	t.Helper()
	cache, err := kvcache.New(kvcache.Config{Blocks: e.backend.Blocks(), BlockTokens: e.backend.Layout().BlockTokens, Fingerprint: "endurance", Numerics: e.backend.Info().Numerics})
	if err != nil {
		t.Fatal(err)
	}
	cfg := engine.DefaultConfig()
	cfg.StepTokens, cfg.MaxWaiting = e.stepTokens, queued
	eng, err := engine.New(cfg, e.backend, cache, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return eng, cache
}

// shut ends the engine, which must have left nothing behind.
func shut(t *testing.T, e *engine.Engine, cache *kvcache.Cache) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := errors.Join(e.Health(), e.Close(ctx), cache.Check()); err != nil {
		t.Error(err)
	}
	if held := cache.Holders(); len(held) > 0 {
		t.Errorf("still held: %+v", held)
	}
	cache.Clear()
	if s := cache.Stats(); s.Free != s.Blocks || s.Waiters != 0 {
		t.Errorf("a pool of which all was free ends as %+v", s)
	}
}

// request makes one of the kinds. Half of the prompts begin alike.
func (e *endurance) request(kind int) *engine.Request {
	r := rand.New(rand.NewPCG(uint64(kind), 7))
	vocab := e.backend.Arch().Vocab
	p := randomPrompt(uint64(1e6+kind), 1+r.IntN(e.prompt), vocab)
	if r.IntN(2) == 0 {
		copy(p, randomPrompt(uint64(2e6+kind%3), len(p)*3/4, vocab))
	}
	req := &engine.Request{Prompt: p, MaxTokens: 1 + r.IntN(e.output), IgnoreEOS: true, Logprobs: -1, PromptLogprobs: -1, Sampling: engine.Sampling{TopP: 1}}
	switch r.IntN(4) {
	case 0:
		req.Sampling = engine.Sampling{Seed: r.Uint64(), Temperature: 0.8, TopP: 0.95}
	case 1:
		req.Sampling = engine.Sampling{Seed: r.Uint64(), Temperature: 1, TopK: 40, TopP: 1, Frequency: 0.3}
	}
	return req
}

// randomPrompt is n tokens of a seed.
func randomPrompt(seed uint64, n, vocab int) []int32 {
	r := rand.New(rand.NewPCG(seed, 1))
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32(r.IntN(vocab))
	}
	return tokens
}

// tokensOf reads a request's tokens, at most n.
func tokensOf(ctx context.Context, h *engine.Handle, most int) ([]int32, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var tokens []int32
	for len(tokens) < most {
		events, err := h.Next(ctx)
		if errors.Is(err, io.EOF) {
			return tokens, nil
		}
		if err != nil {
			return tokens, err
		}
		for _, ev := range events {
			tokens = append(tokens, ev.Sampled.Token)
		}
	}
	return tokens, nil
}

// run fails the test if anything but the promised refusals goes wrong, if a
// token differs from the quiet run's, or if something leaks.
func (e *endurance) run(t *testing.T) endured {
	t.Helper()
	want := make([][]int32, e.kinds)
	quiet, cache := e.open(t, 1)
	for i := range want {
		h, err := quiet.Submit(t.Context(), e.request(i))
		if err != nil {
			t.Fatal(err)
		}
		if want[i], err = tokensOf(t.Context(), h, 1<<30); err != nil {
			t.Fatal(err)
		}
	}
	shut(t, quiet, cache)

	eng, cache := e.open(t, e.queued)
	var (
		mu  sync.Mutex
		all endured
		wg  sync.WaitGroup
	)
	for c := range e.clients {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(c), 3))
			for n := 0; !t.Failed(); n++ {
				mu.Lock()
				goes := e.more(all.whole + all.aborted)
				mu.Unlock()
				if !goes {
					return
				}
				one := e.one(t, eng, r, fmt.Sprintf("%d-%d", c, n), want)
				s := cache.Stats()
				mu.Lock()
				all.whole, all.aborted, all.full, all.refused, all.tokens = all.whole+one.whole, all.aborted+one.aborted, all.full+one.full, all.refused+one.refused, all.tokens+one.tokens
				if one.whole > 0 {
					all.used = append(all.used, float64(s.Held)/float64(s.Blocks))
				}
				all.evicted = s.Evicted
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	shut(t, eng, cache)
	return all
}

// one sends a request and lets it live, or aborts it.
func (e *endurance) one(t *testing.T, eng *engine.Engine, r *rand.Rand, id string, want [][]int32) (got endured) {
	if r.IntN(50) == 0 {
		_, err := eng.Submit(t.Context(), &engine.Request{ID: id, Prompt: make([]int32, eng.MaxModelLen()+1), MaxTokens: 1, Logprobs: -1, PromptLogprobs: -1})
		var long *engine.TooLongError
		if !errors.As(err, &long) {
			t.Errorf("a prompt that cannot fit: %v", err)
		}
		got.refused++
		return got
	}
	kind := r.IntN(e.kinds)
	req := e.request(kind)
	req.ID = id
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	h, err := eng.Submit(ctx, req)
	if errors.Is(err, engine.ErrQueueFull) { // a promised refusal; wait for the queue to move
		got.full++
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
		}
		return got
	}
	if err != nil {
		t.Errorf("submit: %v", err)
		return got
	}
	most, aborts := 1<<30, r.IntN(5) == 0
	if aborts {
		most = r.IntN(len(want[kind]) + 1)
	}
	tokens, err := tokensOf(ctx, h, most)
	if err != nil {
		t.Errorf("request %s: %v", id, err)
	}
	if aborts {
		cancel()
		select {
		case <-h.Done():
		case <-time.After(patience):
			t.Errorf("request %s is aborted and not let go of: %+v", id, eng.Holders())
		}
		got.aborted++
	} else {
		got.whole++
	}
	got.tokens = len(tokens)
	if len(tokens) > len(want[kind]) || !slices.Equal(tokens, want[kind][:len(tokens)]) || (!aborts && len(tokens) != len(want[kind])) {
		t.Errorf("request %s of kind %d (temperature %v): %d tokens differ from the quiet run's %d:\n got %v\nwant %v", id, kind, req.Temperature, len(tokens), len(want[kind]), tokens, want[kind])
	}
	return got
}

func average(v []float64) float64 {
	s := 0.0
	for _, x := range v {
		s += x
	}
	return s / float64(max(len(v), 1))
}

// TestEndurance runs the load on a backend without a model; TestGPUEndurance runs it on a GPU.
func TestEndurance(t *testing.T) {
	fake := enginetest.New(enginetest.Config{Blocks: 192, BlockTokens: 16, MaxPositions: 512})
	e := endurance{backend: &enginetest.Pipelined{Backend: fake}, clients: 64, kinds: 60, prompt: 200, output: 60, stepTokens: 256, queued: 30,
		more: func(done int) bool { return done < 600 }}
	got := e.run(t)
	t.Logf("%d whole, %d aborted, %d tokens; refused %d for length, %d for a full queue; %.0f %% of the pool held, %d blocks evicted",
		got.whole, got.aborted, got.tokens, got.refused, got.full, 100*average(got.used), got.evicted)
	if got.whole == 0 || got.aborted == 0 || got.evicted == 0 || average(got.used) < 0.5 {
		t.Errorf("this is no load: %d whole, %d aborted, %d blocks evicted, %.2f of the pool held", got.whole, got.aborted, got.evicted, average(got.used))
	}
}
