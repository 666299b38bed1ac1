//go:build cuda && cgo && linux

package cuda_test

import (
	"testing"

	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

// TestVerify: with BatchInvariant drafts change no bit of what is drawn, of the rows that count, and of their
// digests, as graphs and launched one by one.
func TestVerify(t *testing.T) {
	for _, name := range []string{"llama gqa4 128", "qwen2 gqa7 64", "qwen3 gqa2 80", "moe 4 of 4"} {
		for _, plain := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				a := families()[name]
				b := open(t, a, randomWeights(a, 7), cuda.Options{Blocks: 60, MaxSeqs: 16, BatchInvariant: true, NoGraphs: plain, NoPDL: plain})
				kerneltest.Verify(t, b)
			})
		}
	}
}
