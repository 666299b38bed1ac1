package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// TestMoved: the index has all whole units of a request that runs, answers included. With their
// rows another engine goes on, from any token, as if nothing had been, and computes only the rest.
func TestMoved(t *testing.T) {
	rounds := 60
	if testing.Short() {
		rounds = 15
	}
	for seed := range uint64(rounds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			moved(t, rand.New(rand.NewPCG(seed, 9)))
		})
	}
}

func moved(t *testing.T, rng *rand.Rand) {
	shape := enginetest.Config{Blocks: 256, BlockTokens: []int{16, 24, 32}[rng.IntN(3)]}
	cfg := config()
	cfg.MaxBacklog = 1 // it stands still when it is not read
	from := newRig(t, cfg, shape, nil)
	var computed atomic.Int64
	to := newRig(t, config(), shape, func(s *kernels.Step) error {
		for _, q := range s.Seqs {
			computed.Add(int64(len(q.Tokens)))
		}
		return nil
	})
	req := randomRequest(rng, from.MaxModelLen(), [][]int32{prompt(rng, 64)})
	req.Logprobs = rng.IntN(3) - 1
	req.MaxTokens = 1 + rng.IntN(100)
	req.MinTokens = min(req.MinTokens, req.MaxTokens)
	want := alone(t, from.MaxModelLen(), req)

	h := from.submit(req)
	before := begun(t, h, len(want), rng.IntN(120))
	most := 0 // positions that may be computed behind the move
	for i, c := range before {
		req.Given = append(req.Given, engine.Given{Tokens: c.tokens, Done: c.finish != ""})
		if c.finish != "" {
			continue
		}
		tokens := slices.Concat(req.Prompt, c.tokens)
		most += len(tokens) + len(want[i].tokens) - len(c.tokens)
		if len(c.tokens) > 0 {
			most -= copyUnits(t, from, to, tokens[:len(tokens)-1], req.Salt)
		}
	}
	h.Cancel()
	from.done(h)
	h = to.submit(req)
	got, _, err := collectAfter(h, before)
	if err != nil {
		t.Fatal(err)
	}
	to.done(h)
	if !reflect.DeepEqual(got, want) {
		same(t, "moved", got, want, false)
		t.Error("log probabilities differ or more")
	}
	if pipelined {
		most += len(want) // a token's row that its step computes in vain
	}
	if n := computed.Load(); int(n) > most {
		t.Errorf("%d positions computed, want at most %d", n, most)
	}
}

// begun reads some tokens, or all.
func begun(t *testing.T, h *engine.Handle, choices, least int) []output {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out := make([]output, choices)
	for n := 0; n < least; {
		events, err := h.Next(ctx)
		if err != nil { // mostly the end
			break
		}
		for _, ev := range events {
			o := &out[ev.Choice]
			o.tokens, o.sampled, o.finish = append(o.tokens, ev.Sampled.Token), append(o.sampled, ev.Sampled), ev.Finish
			n++
		}
	}
	return out
}

// copyUnits copies the rows of tokens' whole units from one pool to another's index, as one worker
// brings them from another, and returns how many tokens are there.
func copyUnits(t *testing.T, from, to *rig, tokens []int32, salt string) int {
	t.Helper()
	units := len(tokens) / from.cache.UnitTokens() * from.cache.UnitTokens()
	blocks, n := enginetest.HoldPrefix(from.cache, tokens, salt, "peer/give")
	if n != units {
		t.Errorf("the index has %d of %d tokens of a running request", n, units)
	}
	chain := to.cache.NewChain(salt)
	chain.Extend(tokens[:n])
	table, had, err := to.cache.Borrow(&chain, n, to.cache.Blocks(), "peer/fetch")
	if err != nil {
		t.Fatal(err)
	}
	to.scatter(table, n, from.gather(blocks, n))
	to.cache.InsertChain(&chain, tokens[:n], table, had)
	to.cache.ReleaseAll("peer/fetch")
	from.cache.ReleaseAll("peer/give")
	return n
}
