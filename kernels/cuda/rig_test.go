//go:build cuda && cgo && linux

package cuda_test

import (
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

var (
	randomTokens = kerneltest.Tokens
	mustStep     = kerneltest.Step
	sameBits     = kerneltest.SameBits
	digestsMatch = kerneltest.DigestsMatch
)

// inFP16 has these tests run in fp16, not bf16; those of FP8 have no such form.
func inFP16() bool { return os.Getenv("XPYD_CUDA_FP16") != "" }

// tolerance bounds ‖logits - CPU's‖/‖CPU's‖, teacher-forced. bf16 has 8 bits:
// each rounding is up to 0.4 %, and a layer rounds about ten times. fp16 has 11.
func tolerance() float64 {
	if inFP16() {
		return 0.02 / 8
	}
	return 0.02
}

// randomWeights are of the backend's type, so that the CPU has the same.
func randomWeights(a arch.Config, seed uint64) kernels.Weights {
	if inFP16() {
		return kerneltest.Weights(a, kernels.F16, seed)
	}
	return kerneltest.Weights(a, kernels.BF16, seed)
}

func shape(layers, hidden, ff, heads, kv, dim, vocab int) arch.Config {
	return arch.Config{
		ModelType: "llama", Layers: layers, Hidden: hidden, Intermediate: ff, Heads: heads, KVHeads: kv, HeadDim: dim,
		Vocab: vocab, MaxPositions: 4096, NormEps: 1e-5, RopeTheta: 10000, TiedHead: true,
	}
}

// families together use every feature, group size and attention kernel.
func families() map[string]arch.Config {
	f := map[string]arch.Config{
		"llama mha 64":    shape(2, 128, 300, 2, 2, 64, 100),
		"llama gqa4 128":  shape(2, 512, 1024, 8, 2, 128, 777),
		"llama gqa8 128":  shape(2, 256, 512, 8, 1, 128, 515),
		"qwen2 gqa7 64":   shape(2, 448, 1216, 14, 2, 64, 900),
		"qwen3 gqa2 128":  shape(2, 256, 768, 4, 2, 128, 640),
		"llama gqa2 8":    shape(3, 64, 172, 8, 4, 8, 512),
		"qwen3 gqa2 80":   shape(2, 72, 144, 4, 2, 80, 64),
		"gqa3 96":         shape(1, 104, 90, 3, 1, 96, 65),
		"gqa17 64":        shape(1, 64, 96, 17, 1, 64, 99),
		"llama gqa4 256x": shape(1, 128, 96, 4, 1, 256, 99),
		"moe 4 of 4":      shape(2, 256, 200, 4, 2, 64, 300),
		"moe 8 of 8":      shape(2, 128, 64, 4, 2, 64, 300),
	}
	// All experts are chosen, so that rounding chooses no other: TestMixtures.
	kerneltest.Change(f, "moe 4 of 4", func(a *arch.Config) {
		a.ModelType, a.Experts, a.ExpertsPerToken, a.ExpertWidth, a.NormExperts = "mixtral", 4, 4, 200, true
	})
	kerneltest.Change(f, "moe 8 of 8", func(a *arch.Config) {
		a.ModelType, a.QKNorm, a.Experts, a.ExpertsPerToken, a.ExpertWidth = "qwen3_moe", true, 8, 8, 96
	})
	kerneltest.Features(f)
	kerneltest.Change(f, "qwen3 gqa2 128", func(a *arch.Config) { a.QKNorm, a.NormEps, a.RopeTheta = true, 1e-6, 1e6 })
	kerneltest.Change(f, "qwen3 gqa2 80", func(a *arch.Config) { a.QKNorm, a.QKVBias = true, true })
	return f
}

func open(t testing.TB, a arch.Config, w kernels.Weights, opt cuda.Options) *cuda.Backend {
	t.Helper()
	if opt.Blocks == 0 {
		opt.Blocks = 64
	}
	if opt.MaxSeqs == 0 {
		opt.MaxSeqs = 16
	}
	opt.FP16 = opt.FP16 || inFP16()
	b, err := cuda.New(a, w, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

func openCPU(t testing.TB, a arch.Config, w kernels.Weights, blocks, blockTokens int) *cpu.Backend {
	t.Helper()
	b, err := cpu.New(a, w, cpu.Options{Blocks: blocks, BlockTokens: blockTokens})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// launcher is what a backend's steps are launched by.
type launcher interface {
	kernels.Backend
	kernels.Launcher
}

// mover is a launcher whose pool moves to and from host memory in bulk, and whose steps wait for blocks.
type mover interface {
	launcher
	kernels.Arriver
	kernels.Gated
}

func mustLaunch(t testing.TB, b kernels.Launcher, seqs ...kernels.Seq) {
	t.Helper()
	if err := b.Launch(&kernels.Step{Seqs: seqs}); err != nil {
		t.Fatal(err)
	}
}

func mustAwait(t testing.TB, b kernels.Launcher) []kernels.Result {
	t.Helper()
	r, err := b.Await()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func table(r *rand.Rand, b kernels.Backend, n int) []int32 {
	perm := r.Perm(b.Blocks())
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(perm[i])
	}
	return ids
}

// relative is ‖got-want‖/‖want‖; NaN anywhere makes it NaN.
func relative(got, want []float32) float64 {
	var d, n float64
	for i, w := range want {
		e := float64(got[i]) - float64(w)
		d += e * e
		n += float64(w) * float64(w)
	}
	return math.Sqrt(d / n)
}
