// Package kerneltest is what the tests of all backends share: small models with
// random weights, and comparisons to the bit. Nothing but tests imports it.
package kerneltest

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
)

// tensor has normal values of this mean (base) and deviation (scale).
func tensor(r *rand.Rand, dt kernels.DType, scale, base float64, dims ...int) kernels.Tensor {
	n := 1
	for _, d := range dims {
		n *= d
	}
	t := kernels.Tensor{DType: dt, Shape: dims, Data: make([]byte, n*dt.Bytes())}
	for i := range n {
		v := float32(base + scale*r.NormFloat64())
		bits := math.Float32bits(v)
		switch dt {
		case kernels.F32:
			binary.LittleEndian.PutUint32(t.Data[4*i:], bits)
		case kernels.BF16:
			binary.LittleEndian.PutUint16(t.Data[2*i:], uint16(bits>>16))
		case kernels.F16: // truncated; normal range only
			e := int(bits>>23&255) - 112
			h := uint16(0)
			if e > 0 && e < 31 {
				h = uint16(e<<10) | uint16(bits>>13&1023)
			}
			binary.LittleEndian.PutUint16(t.Data[2*i:], h|uint16(bits>>16)&0x8000)
		}
	}
	return t
}

// Weights makes a model whose activations stay near one, its matrices in dt.
func Weights(a kernels.Arch, dt kernels.DType, seed uint64) kernels.Weights {
	r := rand.New(rand.NewPCG(seed, 99))
	proj := func(rows, k int) kernels.Tensor { return tensor(r, dt, 1/math.Sqrt(float64(k)), 0, rows, k) }
	norm := func(n int) kernels.Tensor { return tensor(r, kernels.F32, 0.1, 1, n) }
	q, kv := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	w := kernels.Weights{Embed: tensor(r, dt, 0.7, 0, a.Vocab, a.Hidden), Norm: norm(a.Hidden)}
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
			l.QBias, l.KBias, l.VBias = tensor(r, dt, 0.3, 0, q), tensor(r, dt, 0.3, 0, kv), tensor(r, dt, 0.3, 0, kv)
		}
		if a.QKNorm {
			l.QNorm, l.KNorm = norm(a.HeadDim), norm(a.HeadDim)
		}
		w.Layers = append(w.Layers, l)
	}
	return w
}

// Features gives the families of these names what only some models have.
func Features(f map[string]kernels.Arch) {
	Change(f, "llama mha 64", func(a *kernels.Arch) { a.TiedHead = false })
	Change(f, "llama gqa4 128", func(a *kernels.Arch) {
		a.Rope = kernels.RopeScaling{Kind: "llama3", Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMaxPos: 64}
	})
	Change(f, "qwen2 gqa7 64", func(a *kernels.Arch) {
		a.QKVBias = true
		a.Rope = kernels.RopeScaling{Kind: "yarn", Factor: 4, OriginalMaxPos: 64}
	})
}

// Change changes one entry.
func Change(f map[string]kernels.Arch, name string, g func(a *kernels.Arch)) {
	a := f[name]
	g(&a)
	f[name] = a
}

// Step runs one step of these sequences.
func Step(t testing.TB, b kernels.Backend, seqs ...kernels.Seq) []kernels.Result {
	t.Helper()
	r, err := b.Step(&kernels.Step{Seqs: seqs})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Tokens draws n ids of a vocabulary.
func Tokens(r *rand.Rand, n, vocab int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(r.IntN(vocab))
	}
	return ids
}

// SameBits tells whether two lists are equal to the bit, NaNs too.
func SameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

// DigestsMatch checks that a block's stored digests are those of its first n rows.
func DigestsMatch(t testing.TB, b kernels.Backend, block int32, firstPos, n int) {
	t.Helper()
	for i, layer := range b.Layout().Resolve() {
		got, want := make([]uint64, layer.Heads), make([]uint64, layer.Heads)
		rows := make([]byte, layer.PackedBytes(n))
		b.Gather(i, block, 0, n, rows)
		kernels.DigestRows(&layer, firstPos, n, rows, want)
		if b.Digest(i, block, got); !slices.Equal(got, want) {
			t.Fatalf("layer %d block %d: digest %x, rows have %x", i, block, got, want)
		}
	}
}
