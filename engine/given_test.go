package engine_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// TestGiven cuts random requests at any token of each choice and goes on from there, on small
// pools, with prompts computed here or elsewhere: what follows is what followed without a cut, to
// the bit of its log probabilities.
func TestGiven(t *testing.T) {
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
	for seed := range uint64(rounds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			cutUp(t, rand.New(rand.NewPCG(seed, 7)), fakes)
		})
	}
}

// TestGivenOnCPU is TestGiven on the real CPU backend.
func TestGivenOnCPU(t *testing.T) {
	if pipelined {
		return // the CPU backend is no Launcher: the first pass was the same
	}
	rounds := 12
	if testing.Short() {
		rounds = 2
	}
	open, preempted := onCPU(t), 0.0
	for seed := range uint64(rounds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			preempted += cutUp(t, rand.New(rand.NewPCG(seed, 8)), open)
		})
	}
	if preempted == 0 {
		t.Error("nothing was preempted: the test shows less than it should")
	}
}

// cutUp returns how many sequences were preempted.
func cutUp(t *testing.T, rng *rand.Rand, open backends) float64 {
	r, stems := crowded(t, rng, open)
	var wg sync.WaitGroup
	for i := range 10 {
		req := randomRequest(rng, r.MaxModelLen(), stems)
		req.ID = fmt.Sprint(i)
		req.Logprobs = rng.IntN(4) - 1
		if rng.IntN(4) == 0 {
			req.Repetition, req.Presence = 1.2, 0.3
		}
		want := aloneOn(t, open(64, 16), r.MaxModelLen(), req)
		before := make([]output, len(want))
		for i, w := range want {
			n := rng.IntN(len(w.tokens) + 1)
			before[i].tokens, before[i].sampled = slices.Clone(w.tokens[:n]), slices.Clone(w.sampled[:n])
			if n == len(w.tokens) {
				before[i].finish = w.finish
			}
			req.Given = append(req.Given, engine.Given{Tokens: w.tokens[:n], Done: n == len(w.tokens)})
		}
		elsewhere, recompute := rng.IntN(2) == 0, rng.IntN(2) == 0
		wg.Go(func() { r.goOn(t, req, before, want, elsewhere, recompute) })
	}
	wg.Wait()
	r.cache.Clear()
	if s := r.cache.Stats(); s.Free != s.Blocks {
		t.Errorf("not all free at the end: %+v", s)
	}
	return r.metric("xpyd_engine_preemptions_total")
}

func (r *rig) goOn(t *testing.T, req *engine.Request, before, want []output, elsewhere, recompute bool) {
	if elsewhere {
		second, ok := r.handedOver(t, req, recompute)
		if !ok {
			return
		}
		req = second
	}
	all := !slices.ContainsFunc(req.Given, func(g engine.Given) bool { return !g.Done })
	h := r.submit(req)
	got, info, err := collectAfter(h, before)
	if err != nil || (info == nil) != all || info != nil && info.Tokens != len(req.Prompt) {
		t.Errorf("prompt %+v, %v", info, err)
	}
	r.done(h)
	if !reflect.DeepEqual(got, want) {
		same(t, "continued", got, want, false)
		t.Errorf("log probabilities differ or more; prefilled %t, recomputed %t", elsewhere, recompute)
	}
}

// TestGivenIsOneChunk: given tokens are computed as a prompt is, not one by one, nothing is drawn
// before them, and a choice that is done takes part in no step.
func TestGivenIsOneChunk(t *testing.T) {
	var steps []string
	r := newRig(t, config(), enginetest.Config{Blocks: 64, BlockTokens: 16}, func(s *kernels.Step) error {
		line := ""
		for _, q := range s.Seqs {
			line += fmt.Sprintf("%d+%d", q.Pos, len(q.Tokens))
			for _, d := range q.Samples {
				line += fmt.Sprintf(" %d@%d", d.Choice, d.Position)
			}
			line += "; "
		}
		steps = append(steps, line)
		return nil
	})
	p := prompt(rng(), 20)
	req := request(p, 32)
	req.N, req.IgnoreEOS = 3, true
	want := r.generate(req)
	second := *req
	second.Given = []engine.Given{{Tokens: want[0].tokens[:30]}, {Done: true}, {Tokens: want[2].tokens[:31]}}
	second.Owner = "d"
	blocks, n := enginetest.HoldPrefix(r.cache, p[:16], "", "d")
	last, err := r.reserve(1, "d")
	if err != nil || n != 16 {
		t.Fatal(n, err)
	}
	// The last block's rows are missing: only the steps' shape is looked at. Prompts are short here, and so are
	// steps of takeovers.
	second.Prefilled = &engine.Prefilled{Blocks: append(blocks, last...), First: []kernels.Sampled{{Token: 1}, {Token: 1}, {Token: 1}}}
	steps = nil
	h := r.submit(&second)
	events, err := readAll(h)
	if err != nil {
		t.Fatal(err)
	}
	r.done(h)
	if want := []string{"20+30 0@50; ", "20+31 2@51; ", "50+1 0@51; "}; !slices.Equal(steps, want) {
		t.Errorf("steps %q, want %q", steps, want)
	}
	var got []string
	for _, ev := range events {
		got = append(got, fmt.Sprint(ev.Choice, " ", ev.Index, ev.Finish))
	}
	if want := []string{"0 30", "2 31length", "0 31length"}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
}
