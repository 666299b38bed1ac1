//go:build cuda && cgo && linux

package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/xpyd/xpyd/kernels/cuda"
)

// mixtures choose: where two experts nearly tie, bf16 may choose another than fp32 does.
func TestMixtures(t *testing.T) {
	const n = 301
	for _, of := range []struct{ experts, perToken, width int }{{32, 4, 96}, {128, 8, 64}, {500, 3, 40}, {5, 1, 200}} {
		t.Run(fmt.Sprintf("%d of %d", of.perToken, of.experts), func(t *testing.T) {
			a := shape(1, 256, 64, 4, 2, 64, 300) // of one layer: what another expert gives reaches no other row
			a.ModelType, a.QKNorm = "qwen3_moe", true
			a.Experts, a.ExpertsPerToken, a.ExpertWidth, a.NormExperts = of.experts, of.perToken, of.width, of.experts == 128
			w := randomWeights(a, 7)
			tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), n, a.Vocab)
			want := forced(t, openCPU(t, a, w, 64, 16), tokens, []int{1}, 0)
			for _, opt := range []cuda.Options{{}, {NoGraphs: true, NoPDL: true}, {BatchInvariant: true}} {
				b := open(t, a, w, opt)
				for _, c := range []struct {
					chunks []int
					beside int
				}{{[]int{1}, 0}, {[]int{1}, 6}, {[]int{3, 14, 1, 7, 100, 17}, 4}, {[]int{n}, 9}} {
					got := forced(t, b, tokens, c.chunks, c.beside)
					other := 0
					for i, pos := 0, 0; i < len(got); i++ {
						pos = min(pos+c.chunks[i%len(c.chunks)], n)
						switch e := relative(got[i], want[pos-1]); {
						case !(e <= 0.6):
							t.Errorf("invariant %v, chunks %v: logits after %d tokens are off by %.4f", opt.BatchInvariant, c.chunks, pos, e)
						case e > tolerance():
							other++
						}
					}
					if len(got) > 20 && other > len(got)/6 {
						t.Errorf("invariant %v, chunks %v: %d of %d rows are off by more than %.4f", opt.BatchInvariant, c.chunks, other, len(got), tolerance())
					}
					t.Logf("invariant %v, chunks %v: %d of %d rows had other experts", opt.BatchInvariant, c.chunks, other, len(got))
				}
			}
		})
	}
}

// Steps of every way to compute a mixture give what the CPU gives, where no choice can differ.
func TestMixtureSizes(t *testing.T) {
	a := families()["moe 8 of 8"]
	w := randomWeights(a, 3)
	tokens := randomTokens(rand.New(rand.NewPCG(2, 1)), 1500, a.Vocab)
	want := forced(t, openCPU(t, a, w, 128, 16), tokens, []int{1}, 0)
	b := open(t, a, w, cuda.Options{Blocks: 128})
	for _, chunk := range []int{2, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 500, 1500} {
		for i, got := range forced(t, b, tokens, []int{chunk}, 0) {
			pos := min((i+1)*chunk, len(tokens))
			if e := relative(got, want[pos-1]); !(e <= tolerance()) {
				t.Fatalf("chunks of %d: logits after %d tokens are off by %.4f", chunk, pos, e)
			}
		}
	}
}
