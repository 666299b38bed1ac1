//go:build cuda && cgo && linux

package cuda_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/cuda"
)

func shape(layers, hidden, ff, heads, kv, dim, vocab int) kernels.Arch {
	return kernels.Arch{
		Layers: layers, Hidden: hidden, Intermediate: ff, Heads: heads, KVHeads: kv, HeadDim: dim,
		Vocab: vocab, MaxPositions: 4096, NormEps: 1e-5, RopeTheta: 10000, TiedHead: true,
	}
}

// families together use every feature, group size and attention kernel.
func families() map[string]kernels.Arch {
	f := map[string]kernels.Arch{
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
	}
	set := func(name string, g func(a *kernels.Arch)) { a := f[name]; g(&a); f[name] = a }
	set("llama mha 64", func(a *kernels.Arch) { a.TiedHead = false })
	set("llama gqa4 128", func(a *kernels.Arch) {
		a.Rope = kernels.RopeScaling{Kind: "llama3", Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMaxPos: 64}
	})
	set("qwen2 gqa7 64", func(a *kernels.Arch) {
		a.QKVBias = true
		a.Rope = kernels.RopeScaling{Kind: "yarn", Factor: 4, OriginalMaxPos: 64}
	})
	set("qwen3 gqa2 128", func(a *kernels.Arch) { a.QKNorm, a.NormEps, a.RopeTheta = true, 1e-6, 1e6 })
	set("qwen3 gqa2 80", func(a *kernels.Arch) { a.QKNorm, a.QKVBias = true, true })
	return f
}

func tensor(r *rand.Rand, dt kernels.DType, scale, base float64, dims ...int) kernels.Tensor {
	n := 1
	for _, d := range dims {
		n *= d
	}
	t := kernels.Tensor{DType: dt, Shape: dims, Data: make([]byte, n*dt.Bytes())}
	for i := range n {
		bits := math.Float32bits(float32(base + scale*r.NormFloat64()))
		if dt == kernels.F32 {
			binary.LittleEndian.PutUint32(t.Data[4*i:], bits)
		} else {
			binary.LittleEndian.PutUint16(t.Data[2*i:], uint16(bits>>16))
		}
	}
	return t
}

// randomWeights makes a model whose activations stay near one; matrices are
// bf16, so that both backends have the same.
func randomWeights(a kernels.Arch, seed uint64) kernels.Weights {
	r := rand.New(rand.NewPCG(seed, 99))
	proj := func(rows, k int) kernels.Tensor {
		return tensor(r, kernels.BF16, 1/math.Sqrt(float64(k)), 0, rows, k)
	}
	norm := func(n int) kernels.Tensor { return tensor(r, kernels.F32, 0.1, 1, n) }
	bias := func(n int) kernels.Tensor { return tensor(r, kernels.BF16, 0.3, 0, n) }
	q, kv := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	w := kernels.Weights{Embed: tensor(r, kernels.BF16, 0.7, 0, a.Vocab, a.Hidden), Norm: norm(a.Hidden)}
	if !a.TiedHead {
		w.Head = proj(a.Vocab, a.Hidden)
	}
	for range a.Layers {
		l := kernels.LayerWeights{
			AttnNorm: norm(a.Hidden), MLPNorm: norm(a.Hidden),
			Q: proj(q, a.Hidden), K: proj(kv, a.Hidden), V: proj(kv, a.Hidden), O: proj(a.Hidden, q),
			Gate: proj(a.Intermediate, a.Hidden), Up: proj(a.Intermediate, a.Hidden), Down: proj(a.Hidden, a.Intermediate),
		}
		if a.QKVBias {
			l.QBias, l.KBias, l.VBias = bias(q), bias(kv), bias(kv)
		}
		if a.QKNorm {
			l.QNorm, l.KNorm = norm(a.HeadDim), norm(a.HeadDim)
		}
		w.Layers = append(w.Layers, l)
	}
	return w
}

func open(t testing.TB, a kernels.Arch, w kernels.Weights, opt cuda.Options) *cuda.Backend {
	t.Helper()
	if opt.Blocks == 0 {
		opt.Blocks = 64
	}
	if opt.MaxSeqs == 0 {
		opt.MaxSeqs = 16
	}
	b, err := cuda.New(a, w, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

func openCPU(t testing.TB, a kernels.Arch, w kernels.Weights, blocks, blockTokens int) *cpu.Backend {
	t.Helper()
	b, err := cpu.New(a, w, cpu.Options{Blocks: blocks, BlockTokens: blockTokens})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

func mustStep(t testing.TB, b kernels.Backend, seqs ...kernels.Seq) []kernels.Result {
	t.Helper()
	r, err := b.Step(&kernels.Step{Seqs: seqs})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func mustLaunch(t testing.TB, b *cuda.Backend, seqs ...kernels.Seq) {
	t.Helper()
	if err := b.Launch(&kernels.Step{Seqs: seqs}); err != nil {
		t.Fatal(err)
	}
}

func mustAwait(t testing.TB, b *cuda.Backend) []kernels.Result {
	t.Helper()
	r, err := b.Await()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func randomTokens(r *rand.Rand, n, vocab int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(r.IntN(vocab))
	}
	return ids
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

func sameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

// digestsMatch checks that a block's stored digests are those of its first n rows.
func digestsMatch(t *testing.T, b kernels.Backend, block int32, firstPos, n int) {
	t.Helper()
	l := b.Layout()
	got, want := make([]uint64, l.KVHeads), make([]uint64, l.KVHeads)
	rows := make([]byte, l.RowsBytes(n))
	for layer := range l.Layers {
		b.Gather(layer, block, 0, n, rows)
		kernels.DigestRows(l, layer, firstPos, n, rows, want)
		if b.Digest(layer, block, got); !slices.Equal(got, want) {
			t.Fatalf("layer %d block %d: digest %x, rows have %x", layer, block, got, want)
		}
	}
}
