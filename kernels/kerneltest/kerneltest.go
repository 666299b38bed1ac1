// Package kerneltest is shared by the tests of all backends: small models with random
// weights, and comparisons to the bit. Only tests import it.
package kerneltest

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// tensor has normal values of this mean (base) and deviation (scale).
func tensor(r *rand.Rand, dt kernels.DType, scale, base float64, dims ...int) kernels.Tensor {
	n := 1
	for _, d := range dims {
		n *= d
	}
	t := kernels.Tensor{DType: dt, Shape: dims, Data: make([]byte, 0, n*dt.Bytes())}
	for range n {
		bits := math.Float32bits(float32(base + scale*r.NormFloat64()))
		switch dt {
		case kernels.F32:
			t.Data = binary.LittleEndian.AppendUint32(t.Data, bits)
		case kernels.BF16:
			t.Data = binary.LittleEndian.AppendUint16(t.Data, uint16(bits>>16))
		case kernels.F16: // truncated; normal range only
			h := uint16(0)
			if e := int(bits>>23&255) - 112; e > 0 && e < 31 {
				h = uint16(e<<10) | uint16(bits>>13&1023)
			}
			t.Data = binary.LittleEndian.AppendUint16(t.Data, h|uint16(bits>>16)&0x8000)
		}
	}
	return t
}

// Weights makes a model whose activations stay near one, its matrices in dt.
func Weights(a arch.Config, dt kernels.DType, seed uint64) kernels.Weights {
	r := rand.New(rand.NewPCG(seed, 99))
	ts := a.Tensors()
	order := func(t arch.Tensor) int { // the whole model's first
		if t.Role <= arch.Head {
			return int(t.Role) - 1<<8
		}
		return t.Layer<<8 + int(t.Role)
	}
	slices.SortStableFunc(ts, func(x, y arch.Tensor) int { return order(x) - order(y) })
	w := kernels.Weights{}
	for _, t := range ts {
		switch last := t.Shape[len(t.Shape)-1]; {
		case t.Role == arch.Embed:
			w[t.Place] = tensor(r, dt, 0.7, 0, t.Shape...)
		case len(t.Shape) == 2:
			w[t.Place] = tensor(r, dt, 1/math.Sqrt(float64(last)), 0, t.Shape...)
		case t.Role == arch.QBias || t.Role == arch.KBias || t.Role == arch.VBias || t.Role == arch.RouterBias:
			w[t.Place] = tensor(r, dt, 0.3, 0, t.Shape...)
		default: // a norm
			w[t.Place] = tensor(r, kernels.F32, 0.1, 1, t.Shape...)
		}
	}
	return w
}

// Features gives some families, by name, features that only some models have.
func Features(f map[string]arch.Config) {
	Change(f, "llama mha 64", func(a *arch.Config) { a.TiedHead = false })
	Change(f, "llama gqa4 128", func(a *arch.Config) {
		a.Rope = arch.RopeScaling{Kind: "llama3", Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMaxPos: 64}
	})
	Change(f, "qwen2 gqa7 64", func(a *arch.Config) {
		a.QKVBias = true
		a.Rope = arch.RopeScaling{Kind: "yarn", Factor: 4, OriginalMaxPos: 64}
	})
}

// Change changes one entry.
func Change(f map[string]arch.Config, name string, g func(a *arch.Config)) {
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

// SameBits reports whether two lists are equal to the bit, NaNs too.
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
