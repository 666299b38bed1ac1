package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

const eos = 7

// patience bounds each wait for what must come: long for a starved machine, and
// short of the limit of go test, which would not say what hung.
const patience = 2 * time.Minute

// pipelined makes every fake a kernels.Launcher.
var pipelined bool

// TestMain runs everything twice, because each promise holds for both kinds of
// backend: one that runs a step at a time, and one that overlaps them.
func TestMain(m *testing.M) {
	code := m.Run()
	pipelined = true
	fmt.Println("and with steps that overlap:")
	os.Exit(max(code, m.Run()))
}

// rig is an engine with its cache and backend.
type rig struct {
	*engine.Engine
	t       testing.TB
	backend kernels.Backend
	cache   *kvcache.Cache
	reg     *prometheus.Registry
	log     bytes.Buffer // the engine's loop writes it
}

func config() engine.Config {
	cfg := engine.DefaultConfig()
	cfg.EOS = []int32{eos}
	cfg.MaxBacklog = 1 << 20
	return cfg
}

// newRig starts an engine on a fake backend; onStep may be nil.
func newRig(t testing.TB, cfg engine.Config, shape enginetest.Config, onStep func(*kernels.Step) error) *rig {
	t.Helper()
	b := enginetest.New(shape)
	b.OnStep = onStep
	return newRigOn(t, cfg, b)
}

// newRigOn starts an engine. The test's end checks that nothing is held.
func newRigOn(t testing.TB, cfg engine.Config, b kernels.Backend) *rig {
	t.Helper()
	if fake, ok := b.(*enginetest.Backend); ok && pipelined {
		b = &enginetest.Pipelined{Backend: fake}
	}
	r := &rig{t: t, backend: b, reg: prometheus.NewRegistry()}
	var err error
	r.cache, err = kvcache.New(kvcache.Config{
		Blocks: r.backend.Blocks(), BlockTokens: r.backend.Layout().BlockTokens,
		Fingerprint: "fake", Numerics: "fake-1",
	})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(&r.log, nil))
	if r.Engine, err = engine.New(cfg, r.backend, r.cache, log, r.reg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

// fake is the backend without what makes it a Launcher.
func (r *rig) fake() *enginetest.Backend {
	switch b := r.backend.(type) {
	case *enginetest.Pipelined:
		return b.Backend
	case *device:
		return b.Backend
	}
	return r.backend.(*enginetest.Backend)
}

func (r *rig) close() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.Close(ctx); err != nil {
		r.t.Errorf("close: %v", err)
	}
	if err := r.cache.Check(); err != nil {
		r.t.Errorf("cache: %v", err)
	}
	if p, ok := r.backend.(*enginetest.Pipelined); ok && p.UnderWay() > 0 {
		r.t.Errorf("%d steps are under way", p.UnderWay())
	}
	if held := r.Holders(); len(held) > 0 {
		r.t.Errorf("still held: %+v", held)
	}
}

func (r *rig) submit(req *engine.Request) *engine.Handle {
	r.t.Helper()
	h, err := r.Submit(context.Background(), req)
	if err != nil {
		r.t.Fatalf("submit: %v", err)
	}
	return h
}

// done waits until the engine holds nothing for a request any more.
func (r *rig) done(h *engine.Handle) {
	r.t.Helper()
	select {
	case <-h.Done():
	case <-time.After(patience):
		r.t.Errorf("%s is not let go of: %+v, %+v", h.Owner(), r.Stats(), r.Holders())
	}
}

// reserve takes blocks outside the engine, when they are free.
func (r *rig) reserve(n int, owner string) ([]int32, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ids, _, err := r.cache.ReserveWait(ctx, &kvcache.Chain{}, 0, n, owner)
	return ids, err
}

// output is what one choice produced.
type output struct {
	tokens  []int32
	sampled []kernels.Sampled
	finish  engine.Finish
}

// collect reads a request to its end.
func collect(h *engine.Handle, n int) ([]output, *engine.PromptInfo, error) {
	return collectAfter(h, make([]output, n))
}

// collectAfter goes on from what was there before, which it changes.
func collectAfter(h *engine.Handle, out []output) ([]output, *engine.PromptInfo, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var info *engine.PromptInfo
	for {
		events, err := h.Next(ctx)
		if errors.Is(err, io.EOF) {
			return out, info, nil
		}
		if err != nil {
			return out, info, err
		}
		for _, ev := range events {
			o := &out[ev.Choice]
			if ev.Index != len(o.tokens) || o.finish != "" {
				return out, info, errors.New("events out of order")
			}
			o.tokens = append(o.tokens, ev.Sampled.Token)
			o.sampled = append(o.sampled, ev.Sampled)
			o.finish = ev.Finish
			if ev.Prompt != nil {
				if info != nil {
					return out, info, errors.New("prompt info came twice")
				}
				info = ev.Prompt
			}
		}
	}
}

func (r *rig) generate(req *engine.Request) []output {
	r.t.Helper()
	out, _, err := collect(r.submit(req), max(req.N, 1))
	if err != nil {
		r.t.Fatalf("generate: %v", err)
	}
	return out
}

// alone is what a request yields by itself on a roomy engine with the default
// fake, or on backend b.
func alone(t testing.TB, maxLen int, req *engine.Request) []output {
	t.Helper()
	return aloneOn(t, enginetest.New(enginetest.Config{Blocks: 1024}), maxLen, req)
}

func aloneOn(t testing.TB, b kernels.Backend, maxLen int, req *engine.Request) []output {
	t.Helper()
	cfg := config()
	cfg.MaxModelLen, cfg.Speculation = maxLen, engine.Speculation{}
	r := newRigOn(t, cfg, b)
	defer r.close()
	solo := *req
	solo.Prefilled, solo.PrefillOnly, solo.OnBlocks, solo.Owner, solo.Given = nil, false, nil, "", nil
	return r.generate(&solo)
}

// same compares tokens and reasons. part allows got to be cut short.
func same(t testing.TB, what string, got, want []output, part bool) {
	t.Helper()
	for i := range want {
		g, w := got[i], want[i]
		if part && len(g.tokens) < len(w.tokens) && g.finish == "" {
			w.tokens, w.finish = w.tokens[:len(g.tokens)], ""
		}
		if !slices.Equal(g.tokens, w.tokens) || g.finish != w.finish {
			t.Errorf("%s, choice %d:\n got %v %q\nwant %v %q", what, i, g.tokens, g.finish, w.tokens, w.finish)
		}
	}
}

func prompt(rng *rand.Rand, n int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = rng.Int32N(48)
	}
	return p
}

func request(p []int32, maxTokens int) *engine.Request {
	return &engine.Request{
		Prompt: p, MaxTokens: maxTokens, Logprobs: -1, PromptLogprobs: -1,
		Sampling: engine.Sampling{Seed: 1, Temperature: 1},
	}
}

// gather copies a prompt's rows out of the pool, scatter into it, as a push
// does: [layer][block] packed rows.
func (r *rig) gather(blocks []int32, n int) [][]byte {
	var out [][]byte
	r.eachBlock(blocks, n, func(layer int, id int32, rows int) {
		buf := make([]byte, r.backend.Layout().Resolve()[0].PackedBytes(rows))
		r.backend.Gather(layer, id, 0, rows, buf)
		out = append(out, buf)
	})
	return out
}

func (r *rig) scatter(blocks []int32, n int, packed [][]byte) {
	r.eachBlock(blocks, n, func(layer int, id int32, rows int) {
		r.backend.Scatter(layer, id, 0, rows, packed[0])
		packed = packed[1:]
	})
}

func (r *rig) eachBlock(blocks []int32, n int, f func(layer int, id int32, rows int)) {
	for layer := range r.backend.Layout().Layers() {
		for i, id := range blocks {
			f(layer, id, min(r.cache.BlockTokens(), n-i*r.cache.BlockTokens()))
		}
	}
}
