package engine_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// backends makes a backend for a pool.
type backends func(blocks, blockTokens int) kernels.Backend

func fakes(blocks, blockTokens int) kernels.Backend {
	return enginetest.New(enginetest.Config{Blocks: blocks, BlockTokens: blockTokens})
}

// TestSameTokensInAnyCompany runs random mixes of requests on small, badly
// fitting pools: whatever the company, chunks, prefix hits, preemptions and
// evictions, each request must get the tokens it gets alone.
func TestSameTokensInAnyCompany(t *testing.T) {
	rounds := 60
	if testing.Short() {
		rounds = 15
	}
	for seed := range uint64(rounds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			company(t, rand.New(rand.NewPCG(seed, 1)), fakes)
		})
	}
}

// crowded is an engine with limits and a pool so small that random requests, which begin with the
// stems, are in each other's way.
func crowded(t *testing.T, rng *rand.Rand, open backends) (r *rig, stems [][]int32) {
	t.Helper()
	blockTokens := []int{1, 3, 4, 8, 16, 24, 32}[rng.IntN(7)]
	tokens := 96 + rng.IntN(200)
	cfg := config()
	cfg.MaxRunning = 1 + rng.IntN(10)
	cfg.StepTokens = 1 + rng.IntN(80)
	cfg.MaxBacklog = []int{1, 3, 1000}[rng.IntN(3)]
	cfg.Speculation = guessing(t, rand.New(rand.NewPCG(uint64(tokens), 3)), open)
	r = newRigOn(t, cfg, open(max(tokens/blockTokens, 3), blockTokens))
	return r, [][]int32{prompt(rng, 64), prompt(rng, 48)}
}

func company(t *testing.T, rng *rand.Rand, open backends) {
	r, stems := crowded(t, rng, open)
	var wg sync.WaitGroup
	for i := range 12 {
		req := randomRequest(rng, r.MaxModelLen(), stems)
		req.ID = fmt.Sprint(i)
		want := aloneOn(t, open(64, 16), r.MaxModelLen(), req)
		fate := rng.IntN(6)
		cut := rng.IntN(8)
		wg.Go(func() { r.live(t, req, want, fate, cut) })
	}
	wg.Wait()
	r.cache.Clear()
	if s := r.cache.Stats(); s.Free != s.Blocks {
		t.Errorf("not all free at the end: %+v", s)
	}
}

func randomRequest(rng *rand.Rand, maxLen int, stems [][]int32) *engine.Request {
	p := slices.Clone(stems[rng.IntN(len(stems))])
	p = append(p[:rng.IntN(len(p)+1)], prompt(rng, 1+rng.IntN(20))...)
	p = p[:min(len(p), maxLen-1)]
	req := request(p, 1+rng.IntN(50))
	req.Seed = rng.Uint64()
	req.Temperature = float32(rng.IntN(3)) / 2
	if rng.IntN(3) == 0 {
		req.N = 2 + rng.IntN(4)
	}
	if rng.IntN(3) == 0 {
		req.MinTokens = rng.IntN(req.MaxTokens + 1)
	}
	if rng.IntN(3) == 0 {
		req.StopTokens = []int32{rng.Int32N(48), rng.Int32N(48)}
	}
	if rng.IntN(4) == 0 {
		req.MaxTokens = 0
	}
	req.IgnoreEOS = rng.IntN(2) == 0
	if rng.IntN(4) == 0 {
		req.Frequency = 0.5
	}
	if rng.IntN(5) == 0 {
		req.PromptLogprobs = 2
	}
	if rng.IntN(5) == 0 {
		req.Salt = "other"
	}
	if rng.IntN(3) == 0 {
		req.Guide = newWalk(rng.Uint64(), rng.IntN(20), 3+rng.IntN(40))
	}
	more := rand.New(rand.NewPCG(req.Seed, 2))
	if more.IntN(5) == 0 {
		req.Allowed = prompt(more, 3+more.IntN(20))
		if req.Guide != nil { // of these one may always come
			req.Allowed = append(req.Allowed, 0, 1, 2, 3, 4, 5)
		}
	}
	if more.IntN(4) == 0 {
		req.BadWords = [][]int32{{more.Int32N(48)}, prompt(more, 2), prompt(more, 3)}
	}
	if len(req.Allowed) > 0 { // what leaves nothing is refused
		req.MinTokens, req.BadWords = 0, req.BadWords[min(1, len(req.BadWords)):]
	}
	if more.IntN(4) == 0 {
		req.Logprobs, req.LogprobIDs = 0, prompt(more, 1+more.IntN(4))
	}
	if req.Seed%2 == 0 { // its first token is stepped on before it is known
		req.Promise.ITL = time.Millisecond
	}
	return req
}

// live lets one request meet its fate and compares what it got.
func (r *rig) live(t *testing.T, req *engine.Request, want []output, fate, cut int) {
	switch fate {
	case 0: // cancelled in the middle
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		h, err := r.Submit(ctx, req)
		if err != nil {
			t.Errorf("submit: %v", err)
			return
		}
		got := make([]output, max(req.N, 1))
		for range cut {
			events, err := h.Next(ctx)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Errorf("before it is cancelled: %v", err)
				break
			}
			for _, ev := range events {
				got[ev.Choice].tokens = append(got[ev.Choice].tokens, ev.Sampled.Token)
				got[ev.Choice].finish = ev.Finish
			}
		}
		cancel()
		r.done(h)
		same(t, "cancelled", got, want, true)
	case 1: // one choice hits a stop string
		h := r.submit(req)
		for i := range max(req.N, 1) {
			if i%2 == 0 {
				h.CancelChoice(i)
			}
		}
		got, _, err := collect(h, max(req.N, 1))
		if err != nil {
			t.Errorf("collect: %v", err)
		}
		r.done(h) // a step that is under way may hold its blocks still
		for i := range got {
			if i%2 == 0 { // what came before the cancel is right too
				same(t, "cut choice", got[i:i+1], want[i:i+1], true)
			} else {
				same(t, "sibling of a cut choice", got[i:i+1], want[i:i+1], false)
			}
		}
	case 2: // prefilled elsewhere, in part by itself
		r.handoff(t, req, want, cut%2 == 0)
	default:
		h := r.submit(req)
		got, _, err := collect(h, max(req.N, 1))
		if err != nil {
			t.Errorf("collect: %v", err)
		}
		r.done(h)
		same(t, "whole", got, want, false)
	}
}

// handoff goes on from a prompt that was prefilled elsewhere.
func (r *rig) handoff(t *testing.T, req *engine.Request, want []output, recompute bool) {
	second, ok := r.handedOver(t, req, recompute)
	if !ok {
		return
	}
	h := r.submit(second)
	got, _, err := collect(h, max(req.N, 1))
	if err != nil {
		t.Errorf("decode: %v", err)
		return
	}
	r.done(h)
	same(t, fmt.Sprintf("handed over, recompute %t", recompute), got, want, false)
}

// handedOver runs the prompt as a prefill worker would, and makes the request by which a decode
// worker goes on from a copy of its rows, both on this engine.
func (r *rig) handedOver(t *testing.T, req *engine.Request, recompute bool) (*engine.Request, bool) {
	first := *req
	first.ID += "-prefill"
	first.Given, first.PrefillOnly, first.RowsOnly = nil, true, recompute && req.RowsDo()
	first.MaxTokens, first.MinTokens = req.MaxTokens, req.MinTokens
	h := r.submit(&first)
	defer h.Release()
	out, info, err := collect(h, max(req.N, 1))
	if err != nil || (info == nil) != first.RowsOnly {
		t.Errorf("prefill: %+v, %v", info, err)
		return nil, false
	}
	rows := r.gather(h.Blocks(), len(req.Prompt))
	h.Release()
	r.done(h)
	second := *req
	second.Owner = req.ID + "-decode"
	blocks, err := r.reserve(r.cache.BlocksFor(len(req.Prompt)), second.Owner)
	if err != nil {
		t.Errorf("reserve: %v", err)
		return nil, false
	}
	r.scatter(blocks, len(req.Prompt), rows)
	second.Prefilled = &engine.Prefilled{Blocks: blocks, CachedTokens: h.CachedTokens()}
	if !recompute {
		for _, o := range out {
			second.Prefilled.First = append(second.Prefilled.First, o.sampled...)
		}
	}
	return &second, true
}
