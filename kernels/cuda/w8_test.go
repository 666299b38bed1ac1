//go:build cuda && cgo && linux

package cuda_test

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

// Bounds on what FP8 adds to the logits' error of these small random models:
// activations in E4M3 (steps of more than 16 rows), and weights as well.
const (
	a8Tolerance = 0.10
	w8Tolerance = 0.12
)

// Weights in FP8, beside the CPU's logits with exactly those values: up to 16
// rows as close as bf16 is; with more, activations are FP8 as well. What the
// device rounds is what an FP8 checkpoint of the same rounding has, to the bit.
// And beside bf16 weights, reported.
func TestW8Logits(t *testing.T) {
	const n = 200
	for name, a := range families() {
		if a.Hidden%16 != 0 || a.Heads*a.HeadDim%16 != 0 || a.Experts > 0 { // the last are refused: TestMixtureRefused
			continue
		}
		t.Run(name, func(t *testing.T) {
			plain := randomWeights(a, 7)
			f8, widened := kerneltest.F8Weights(plain)
			tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), n, a.Vocab)
			want := forced(t, openCPU(t, a, widened, 64, 16), tokens, []int{1}, 0)
			bf16 := forced(t, open(t, a, plain, cuda.Options{}), tokens, []int{1}, 0)
			for _, run := range []struct {
				label     string
				chunks    []int
				beside    int
				tolerance float64
			}{{"one by one", []int{1}, 0, tolerance()}, {"a few", []int{3, 9, 1}, 2, tolerance()}, {"chunks", []int{33, 17, 64, 86}, 0, a8Tolerance}, {"whole", []int{n}, 0, a8Tolerance}} {
				opt := cuda.Options{WeightsFP8: true, Blocks: 40}
				got := forced(t, open(t, a, f8, opt), tokens, run.chunks, run.beside)
				rounded := forced(t, open(t, a, plain, opt), tokens, run.chunks, run.beside)
				var sums [2]float64
				top1 := 0
				for i, pos := 0, 0; i < len(got); i++ {
					pos = min(pos+run.chunks[i%len(run.chunks)], n)
					e, w := relative(got[i], want[pos-1]), relative(got[i], bf16[pos-1])
					if !(e <= run.tolerance) || !(w <= w8Tolerance) {
						t.Fatalf("%s: logits after %d tokens are off by %.4f from the CPU's with these weights, %.4f from bf16 weights'", run.label, pos, e, w)
					}
					if !sameBits(got[i], rounded[i]) {
						t.Fatalf("%s: after %d tokens what was rounded on the device gives other bits than what was FP8 before: %.5f", run.label, pos, relative(rounded[i], got[i]))
					}
					sums[0], sums[1] = sums[0]+e, sums[1]+w
					if argmax(got[i]) == argmax(bf16[pos-1]) {
						top1++
					}
				}
				k := float64(len(got))
				t.Logf("%s: from the CPU with these weights %.5f, from bf16 weights %.5f on average, top-1 equal to theirs %d of %d", run.label, sums[0]/k, sums[1]/k, top1, len(got))
			}
		})
	}
}

// FP8 weights and FP8 KV together, a scale for a whole tensor, and what is refused.
func TestW8Loads(t *testing.T) {
	a := families()["llama gqa4 128"]
	plain := randomWeights(a, 7)
	f8, _ := kerneltest.F8Weights(plain)
	// scaled is f8 with other scales of one tensor.
	scaled := func(p arch.Place, scale []float32) kernels.Weights {
		w := maps.Clone(f8)
		t := w[p]
		t.Scale = scale
		w[p] = t
		return w
	}
	one := scaled(arch.Gate.At(0), []float32{0.01})
	all := scaled(arch.Gate.At(0), slices.Repeat([]float32{0.01}, a.Intermediate))
	tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), 60, a.Vocab)
	opt := cuda.Options{WeightsFP8: true, KVFP8: true}
	x, y := forced(t, open(t, a, one, opt), tokens, []int{40, 1}, 1), forced(t, open(t, a, all, opt), tokens, []int{40, 1}, 1)
	for i := range x {
		if !sameBits(x[i], y[i]) {
			t.Fatal("one scale for all is not that scale for each")
		}
	}
	refuse := func(what string, w kernels.Weights, opt cuda.Options) {
		t.Helper()
		opt.Blocks = 8
		if b, err := cuda.New(a, w, opt); err == nil {
			b.Close()
			t.Errorf("%s: loaded", what)
		}
	}
	refuse("three scales", scaled(arch.Down.At(1), make([]float32, 3)), opt)
	refuse("no scale", scaled(arch.Down.At(1), nil), opt)
	refuse("FP8 weights without WeightsFP8", f8, cuda.Options{})
	refuse("batch invariance", plain, cuda.Options{WeightsFP8: true, BatchInvariant: true})
}
