//go:build cgo && linux

package cuda

import (
	"errors"
	"testing"

	"github.com/xpyd/xpyd/kernels"
)

// describing is a backend without a library: it describes steps, and any call of the
// library panics.
func describing(vocab, arena int) *Backend {
	b := &Backend{blocks: 8, opt: Options{MaxTokens: 64, MaxSeqs: 8, NoGraphs: true},
		arch: kernels.Arch{Layers: 1, Vocab: vocab, MaxPositions: 128}, layout: kernels.Layout{BlockTokens: 16}}
	fold := newFolder(vocab)
	for i := range b.steps {
		s := &b.steps[i]
		s.half, s.fold = i, fold
		s.arena, s.tokens, s.logits = make([]byte, arena), make([]int32, 16), make([]float32, 2*vocab)
		s.logprobs = resize(s.logprobs, 64)
	}
	return b
}

// A step that is too large says so, and nothing has happened: nothing is to be awaited,
// and the draws before it can still be named.
func TestTooLarge(t *testing.T) {
	const vocab = 4096
	one := kernels.Sample{TopP: 1, Logprobs: -1}
	heavy, listed := one, one
	heavy.Ban = make([]int32, vocab)
	for i := range heavy.Ban {
		heavy.Ban[i] = int32(i)
	}
	listed.Logprobs = 20
	many := func(n int, p kernels.Sample) (list []kernels.Sample) {
		for range n {
			list = append(list, p)
		}
		return list
	}
	f := func(what string, seqs ...kernels.Seq) {
		t.Helper()
		b := describing(vocab, 32<<10)
		b.launched, b.awaited, b.draws = 5, 5, 3
		for i := range seqs {
			if seqs[i].Tokens == nil {
				seqs[i].Tokens = []int32{1}
			}
			seqs[i].Blocks = []int32{0, 1, 2, 3, 4}
		}
		err := b.Launch(&kernels.Step{Seqs: seqs})
		if !errors.Is(err, kernels.ErrStepTooLarge) {
			t.Errorf("%s: %v", what, err)
		}
		if b.launched != 5 || b.awaited != 5 || b.draws != 3 || b.steps[1].step != nil {
			t.Errorf("%s: %d steps launched, %d awaited, %d draws", what, b.launched, b.awaited, b.draws)
		}
		if _, err := b.describe(&b.steps[1], &kernels.Step{Seqs: []kernels.Seq{{Tokens: []int32{1}, Blocks: []int32{0}, Samples: many(1, one)}}}, 0); err != nil {
			t.Errorf("%s: then a small step: %v", what, err)
		}
	}
	f("rows", kernels.Seq{Tokens: make([]int32, 65)})
	f("draws", kernels.Seq{Samples: many(10, one)}, kernels.Seq{Samples: many(7, one)})
	f("log probabilities", kernels.Seq{Samples: many(4, listed)})
	f("logits", kernels.Seq{WantLogits: true}, kernels.Seq{WantLogits: true}, kernels.Seq{WantLogits: true})
	f("penalties", kernels.Seq{Samples: many(1, heavy)})
}
