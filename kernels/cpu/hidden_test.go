package cpu_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// states runs tokens in chunks beside other sequences, and returns the hidden states of each.
func states(t *testing.T, b *cpu.Backend, tokens []int32, chunk int, ask kernels.Hidden) (all [][]float32) {
	t.Helper()
	for pos := 0; pos < len(tokens); pos += chunk {
		part := tokens[pos:min(pos+chunk, len(tokens))]
		draws := kernels.Seq{Tokens: tokens[:3], Blocks: []int32{6}, WantLogits: true} // its row is of the same norm
		other := kernels.Seq{Tokens: tokens[1:6], Blocks: []int32{7}, Hidden: kernels.HiddenLast}
		out, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{draws, {Tokens: part, Pos: pos, Blocks: []int32{0, 1, 2, 3}, Hidden: ask}, other}})
		if err != nil {
			t.Fatal(err)
		}
		if len(out[1].Hidden) != ask.Rows(len(part)) || len(out[0].Hidden) != 0 || len(out[2].Hidden) != 1 {
			t.Fatalf("%d, %d and %d rows of hidden states", len(out[0].Hidden), len(out[1].Hidden), len(out[2].Hidden))
		}
		for _, row := range out[1].Hidden {
			all = append(all, slices.Clone(row))
		}
	}
	return all
}

// Hidden states have the same bits whatever the instruction set, threads, ranks, chunks and batch, and are
// close to those of a float64 forward written independently.
func TestHiddenStates(t *testing.T) {
	for _, name := range []string{"llama gqa2 8", "qwen3 moe 33", "gemma3 16"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := families()[name]
			w := randomWeights(a, kernels.F32, 7)
			tokens := randomTokens(rand.New(rand.NewPCG(3, 4)), 37, a.Vocab)
			_, exact := forward(t, a, w, tokens)
			var want [][]float32
			for _, opt := range []cpu.Options{{Threads: 1}, {Threads: 3}, {Threads: 2, Ranks: 2}, {Threads: 1, SIMD: "portable"}} {
				opt.Blocks, opt.BlockTokens = 8, 16
				for _, chunk := range []int{37, 1, 14} {
					label := fmt.Sprintf("%+v in chunks of %d", opt, chunk)
					b := open(t, a, w, opt)
					got := states(t, b, tokens, chunk, kernels.HiddenAll)
					if want == nil {
						want = got
						closeTo(t, label, got, exact)
					}
					last := states(t, b, tokens, chunk, kernels.HiddenLast)
					for i := range want {
						if !sameBits(got[i], want[i]) {
							t.Fatalf("%s: row %d differs", label, i)
						}
					}
					for i, row := range last {
						if at := min((i+1)*chunk, len(tokens)) - 1; !sameBits(row, want[at]) {
							t.Fatalf("%s: the last row of chunk %d is not row %d", label, i, at)
						}
					}
				}
			}
		})
	}
}

// A sequence cannot ask for both: the rows would be normed twice.
func TestHiddenStatesAndLogits(t *testing.T) {
	a := families()["llama gqa2 8"]
	b := open(t, a, randomWeights(a, kernels.F32, 7), cpu.Options{Blocks: 2, Threads: 1})
	for _, q := range []kernels.Seq{{WantLogits: true}, {Samples: make([]kernels.Sample, 1)}, {Targets: []int32{-1}}} {
		q.Tokens, q.Blocks, q.Hidden = []int32{1}, []int32{0}, kernels.HiddenLast
		if _, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{q}}); err == nil {
			t.Errorf("%+v is taken", q)
		}
	}
}
