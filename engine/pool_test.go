package engine_test

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// noHidden is a backend that gives no hidden states.
type noHidden struct{ *enginetest.Backend }

func (noHidden) Info() kernels.Info { return kernels.Info{Name: "fake", Numerics: "fake-1"} }

// vector reads a request that pools to its end.
func vector(h *engine.Handle) (v []float32, info *engine.PromptInfo, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for n := 0; ; {
		events, err := h.Next(ctx)
		if errors.Is(err, io.EOF) && n == 1 {
			return v, info, nil
		}
		if err != nil {
			return nil, nil, err
		}
		if n += len(events); n > 1 {
			return nil, nil, errors.New("more than one event")
		}
		v, info = events[0].Pooled, events[0].Prompt
	}
}

// wantVector is computed from one step of the whole prompt on a backend of its own.
func wantVector(t *testing.T, p []int32, how engine.Pooling) []float32 {
	t.Helper()
	table := make([]int32, (len(p)+15)/16)
	for i := range table {
		table[i] = int32(i)
	}
	out, err := enginetest.New(enginetest.Config{}).Step(&kernels.Step{Seqs: []kernels.Seq{{Tokens: p, Blocks: table, Hidden: kernels.HiddenAll}}})
	if err != nil {
		t.Fatal(err)
	}
	rows := out[0].Hidden
	if how == engine.PoolLast {
		return rows[len(rows)-1]
	}
	sum := 0.0
	for _, r := range rows {
		sum += float64(r[0])
	}
	return []float32{float32(sum / float64(len(rows)))}
}

// TestPooling: a prompt's vector has the same bits whatever the chunks, the batch, prefix hits and
// preemptions, and nothing is held for it afterwards (rig.close).
func TestPooling(t *testing.T) {
	for _, how := range []engine.Pooling{engine.PoolLast, engine.PoolMean} {
		// A mean that is preempted begins anew, so the last case must let one end in between.
		for _, c := range []struct{ chunk, blocks, retract int }{{512, 64, 0}, {7, 64, 0}, {16, 24, 0}, {5, 40, 40}} {
			rng := rand.New(rand.NewPCG(1, uint64(c.chunk)))
			cfg := config()
			cfg.StepTokens, cfg.PrefillTokens, cfg.MaxStepTime, cfg.RetractEvery = c.chunk, c.chunk, 0, c.retract
			r := newRig(t, cfg, enginetest.Config{Blocks: c.blocks}, nil)
			long := prompt(rng, 100)
			var all sync.WaitGroup
			for i := range 12 {
				p := slices.Concat(long[:16*(i%5)], prompt(rng, 1+i*3))
				all.Go(func() {
					if i%4 == 3 {
						if _, _, err := collect(r.submit(request(p, 9)), 1); err != nil {
							t.Errorf("%s, %+v, beside: %v", how, c, err)
						}
					}
					got, info, err := vector(r.submit(&engine.Request{Prompt: p, Pooling: how, Logprobs: -1, PromptLogprobs: -1}))
					if want := wantVector(t, p, how); err != nil || !slices.Equal(got, want) {
						t.Errorf("%s, %+v, prompt %d: %v, %v, want %v", how, c, i, got, err, want)
					} else if info == nil || info.Tokens != len(p) || how == engine.PoolMean && info.CachedTokens != 0 {
						t.Errorf("%s, %+v, prompt %d: %+v", how, c, i, info)
					}
				})
			}
			all.Wait()
		}
	}
}

// TestPoolingCache: the last token's state may stand on a cached prefix, and leaves one; the mean needs all rows.
func TestPoolingCache(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	p := prompt(rand.New(rand.NewPCG(1, 2)), 48)
	for i, c := range []struct {
		how    engine.Pooling
		cached int
	}{{engine.PoolMean, 0}, {engine.PoolLast, 47}, {engine.PoolMean, 0}} {
		got, info, err := vector(r.submit(&engine.Request{Prompt: p, Pooling: c.how, Logprobs: -1, PromptLogprobs: -1}))
		if want := wantVector(t, p, c.how); err != nil || !slices.Equal(got, want) || info.CachedTokens > c.cached || (info.CachedTokens > 0) != (c.cached > 0) {
			t.Errorf("%d, %s: %v, %+v, %v, want %v", i, c.how, got, info, err, want)
		}
	}
}

// TestPoolingRefused: what cannot be pooled is refused at once; a prompt may fill the context.
func TestPoolingRefused(t *testing.T) {
	cfg := config()
	cfg.MaxModelLen = 40
	r := newRig(t, cfg, enginetest.Config{}, nil)
	p := prompt(rand.New(rand.NewPCG(1, 2)), 41)
	of := func(p []int32) *engine.Request {
		return &engine.Request{Prompt: p, Pooling: engine.PoolLast, Logprobs: -1, PromptLogprobs: -1}
	}
	if got, _, err := vector(r.submit(of(p[:40]))); err != nil || !slices.Equal(got, wantVector(t, p[:40], engine.PoolLast)) {
		t.Errorf("a prompt as long as the context: %v, %v", got, err)
	}
	var long *engine.TooLongError
	if err := r.Check(of(p)); !errors.As(err, &long) {
		t.Errorf("a prompt longer than the context: %v", err)
	}
	two, held, listed := of(p[:3]), of(p[:3]), of(p[:3])
	two.N, held.PrefillOnly, listed.PromptLogprobs = 2, true, 0
	for _, req := range []*engine.Request{two, held, listed} {
		var bad *engine.RequestError
		if err := r.Check(req); !errors.As(err, &bad) || bad.Field != "pooling" {
			t.Errorf("%+v: %v", req, err)
		}
	}
	if err := newRigOn(t, config(), noHidden{enginetest.New(enginetest.Config{})}).Check(of(p[:3])); !errors.Is(err, kernels.ErrNoHidden) {
		t.Errorf("on a backend without hidden states: %v", err)
	}
}

// TestPoolingSpoilt: a state that is no number fails its request, and no other.
func TestPoolingSpoilt(t *testing.T) {
	b := enginetest.New(enginetest.Config{})
	b.Spoil = func(q *kernels.Seq, res *kernels.Result) {
		for _, row := range res.Hidden {
			if q.Tokens[0] == 5 {
				row[0] = float32(math.NaN())
			}
		}
	}
	r := newRigOn(t, config(), b)
	for _, c := range []struct {
		first int32
		bad   bool
	}{{5, true}, {6, false}} {
		_, _, err := vector(r.submit(&engine.Request{Prompt: []int32{c.first, 1, 2}, Pooling: engine.PoolMean, Logprobs: -1, PromptLogprobs: -1}))
		var spoilt *engine.OutputError
		if errors.As(err, &spoilt) != c.bad || !c.bad && err != nil {
			t.Errorf("a prompt that begins with %d: %v", c.first, err)
		}
	}
}
