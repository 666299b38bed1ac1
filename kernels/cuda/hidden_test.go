//go:build cuda && cgo && linux

package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// states runs tokens in chunks, beside sequences that draw, want logits or ask for their last row, and returns
// the hidden states of each chunk that ask wants.
func states(t *testing.T, b launcher, tokens []int32, chunks []int, ask kernels.Hidden) (all [][]float32) {
	t.Helper()
	for i, pos := 0, 0; pos < len(tokens); i++ {
		n := min(chunks[i%len(chunks)], len(tokens)-pos)
		seqs := []kernels.Seq{
			{Tokens: tokens[:3], Blocks: []int32{40}, WantLogits: true, Samples: []kernels.Sample{{TopP: 1, Logprobs: 2}}},
			{Tokens: tokens[pos : pos+n], Pos: pos, Blocks: slices.Clone(upTo[:32]), Hidden: ask},
			{Tokens: tokens[1:6], Blocks: []int32{41}, Hidden: kernels.HiddenLast},
			{Tokens: tokens[2:9], Blocks: []int32{42}},
		}
		if i%2 == 1 { // alone, where no logits are made
			seqs = seqs[1:2]
		}
		res := mustStep(t, b, seqs...)
		at := slices.IndexFunc(seqs, func(q kernels.Seq) bool { return q.Blocks[0] == 0 })
		if len(res[at].Hidden) != ask.Rows(n) || len(seqs) > 1 && (len(res[2].Hidden) != 1 || res[0].Hidden != nil || len(res[0].Logits) != b.Arch().Vocab || res[0].Samples[0].Token < 0) {
			t.Fatalf("chunk %d: %d rows of %d", i, len(res[at].Hidden), ask.Rows(n))
		}
		for _, row := range res[at].Hidden {
			all = append(all, slices.Clone(row))
		}
		pos += n
	}
	return all
}

var upTo = func() (ids []int32) {
	for i := range 40 {
		ids = append(ids, int32(i))
	}
	return ids
}()

// statesMatch holds a backend's hidden states against those of the CPU.
func statesMatch(t *testing.T, label string, b launcher, tokens []int32, chunks []int, want [][]float32) (worst float64) {
	t.Helper()
	got := states(t, b, tokens, chunks, kernels.HiddenAll)
	if len(got) != len(want) {
		t.Fatalf("%s: %d rows of %d", label, len(got), len(want))
	}
	for i := range want {
		e := relative(got[i], want[i])
		if !(e <= tolerance()) {
			t.Fatalf("%s: the hidden state of row %d is off by %.4f", label, i, e)
		}
		worst = max(worst, e)
	}
	last := states(t, b, tokens, chunks, kernels.HiddenLast)
	for i, pos := 0, 0; i < len(last); i++ {
		pos = min(pos+chunks[i%len(chunks)], len(tokens))
		if e := relative(last[i], want[pos-1]); !(e <= tolerance()) {
			t.Fatalf("%s: the last row of chunk %d is off by %.4f", label, i, e)
		}
	}
	return worst
}

const stateTokens = 301

func cpuStates(t *testing.T, b kernels.Backend, tokens []int32) (all [][]float32) {
	t.Helper()
	for _, row := range mustStep(t, b, kernels.Seq{Tokens: tokens, Blocks: slices.Clone(upTo[:32]), Hidden: kernels.HiddenAll})[0].Hidden {
		all = append(all, slices.Clone(row))
	}
	return all
}

// TestHiddenStates: they are the CPU's, within what rounding allows, as the logits are; more rows at once than there
// are rows of logits, in chunks and one by one, and beside everything else that a step may have.
func TestHiddenStates(t *testing.T) {
	for name, a := range families() {
		t.Run(name, func(t *testing.T) {
			w := randomWeights(a, 7)
			tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), stateTokens, a.Vocab)
			want := cpuStates(t, openCPU(t, a, w, 64, 16), tokens)
			worst := 0.0
			for _, opt := range []cuda.Options{{BlockTokens: 16}, {BlockTokens: 16, NoGraphs: true, NoPDL: true}} {
				b := open(t, a, w, opt)
				if !b.Info().Hidden {
					t.Fatal("it says that it has none")
				}
				for _, chunks := range [][]int{{stateTokens}, {3, 14, 1, 7, 100, 17}} {
					worst = max(worst, statesMatch(t, fmt.Sprintf("%+v, chunks of %v", opt, chunks), b, tokens, chunks, want))
				}
			}
			t.Logf("worst relative error %.5f", worst)
		})
	}
}

// TestHiddenStatesOverlap: two steps under way have theirs apart, and one whose draws wait has its own.
func TestHiddenStatesOverlap(t *testing.T) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 3)
	tokens := randomTokens(rand.New(rand.NewPCG(1, 1)), 80, a.Vocab)
	want := cpuStates(t, openCPU(t, a, w, 64, 16), tokens)
	b := open(t, a, w, cuda.Options{BlockTokens: 16})
	near := func(what string, got [][]float32, want ...[]float32) {
		t.Helper()
		if len(got) != len(want) {
			t.Fatalf("%s: %d rows of %d", what, len(got), len(want))
		}
		for i := range want {
			if e := relative(got[i], want[i]); !(e <= tolerance()) {
				t.Fatalf("%s: row %d is off by %.4f", what, i, e)
			}
		}
	}
	blocks := upTo[:8]
	mustLaunch(t, b, kernels.Seq{Tokens: tokens[:50], Blocks: blocks, Hidden: kernels.HiddenAll})
	mustLaunch(t, b, kernels.Seq{Tokens: tokens[50:79], Pos: 50, Blocks: blocks, Hidden: kernels.HiddenAll})
	near("the first of two", mustAwait(t, b)[0].Hidden, want[:50]...)
	near("the second of two", mustAwait(t, b)[0].Hidden, want[50:79]...)
	err := b.Launch(&kernels.Step{Hold: true, Seqs: []kernels.Seq{{Tokens: tokens[79:], Pos: 79, Blocks: blocks, Hidden: kernels.HiddenLast},
		{Tokens: tokens[:1], Blocks: upTo[9:10], Samples: []kernels.Sample{{TopP: 1, Logprobs: -1}}}}})
	if err != nil {
		t.Fatal(err)
	}
	b.Draw()
	res := mustAwait(t, b)
	near("one that is held", res[0].Hidden, want[79])
	if res[1].Samples[0].Token < 0 {
		t.Error("nothing is drawn beside it")
	}
}

// TestRanksHiddenStates: of several ranks too.
func TestRanksHiddenStates(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	for _, name := range []string{"llama gqa4 128", "moe 8 of 8"} {
		a := families()[name]
		w := randomWeights(a, 7)
		tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), stateTokens, a.Vocab)
		for _, n := range rankCounts(t, 2) {
			t.Run(fmt.Sprintf("%s by %d", name, n), func(t *testing.T) {
				want := cpuStates(t, openCPU(t, a, w, 64, 16), tokens)
				b := openRanks(t, a, w, n, cuda.Options{BlockTokens: 16})
				for _, chunks := range [][]int{{stateTokens}, {3, 14, 1, 7, 100, 17}} {
					t.Logf("chunks of %v: worst %.5f", chunks, statesMatch(t, fmt.Sprint(chunks), b, tokens, chunks, want))
				}
			})
		}
	}
}

// TestInvariantHiddenStates: with batch invariance they have the same bits however the prompt is cut, and beside whom.
func TestInvariantHiddenStates(t *testing.T) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 7)
	tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), stateTokens, a.Vocab)
	b := open(t, a, w, cuda.Options{BlockTokens: 16, BatchInvariant: true})
	want := states(t, b, tokens, []int{stateTokens}, kernels.HiddenAll)
	for i, row := range states(t, b, tokens, []int{3, 14, 1, 7, 100, 17}, kernels.HiddenAll) {
		if !sameBits(row, want[i]) {
			t.Fatalf("row %d differs", i)
		}
	}
}
