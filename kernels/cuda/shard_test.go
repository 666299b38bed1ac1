package cuda

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

func shardArch() arch.Config {
	return arch.Config{ModelType: "llama", Layers: 1, Hidden: 24, Intermediate: 172, Heads: 8, KVHeads: 2, HeadDim: 16, Vocab: 777, MaxPositions: 64, NormEps: 1e-5, RopeTheta: 1e4, QKVBias: true}
}

// Ranks have each value of a tensor once, KV heads as often as there are ranks for one;
// what is not divided all of them have.
func TestShards(t *testing.T) {
	mixed := shardArch()
	mixed.ModelType, mixed.QKVBias, mixed.Experts, mixed.ExpertsPerToken, mixed.ExpertWidth = "mixtral", false, 3, 2, 172
	testShards(t, shardArch())
	testShards(t, mixed)
}

func testShards(t *testing.T, a arch.Config) {
	w := kerneltest.Weights(a, kernels.BF16, 1)
	for _, ranks := range []int{1, 2, 4, 8} {
		for _, p := range a.Tensors() {
			whole := w[p.Place]
			rows, cols := p.Shape[0], 1
			if len(p.Shape) == 2 {
				cols = p.Shape[1]
			}
			seen := make([]int, rows*cols) // by value's place
			for rank := range ranks {
				s, err := shardOf(&a, rank, ranks)
				if err != nil {
					t.Fatal(err)
				}
				c, n, stride := s.cut(&a, p.Role, whole)
				at := (cap(whole.Data) - cap(c.Data)) / 2 // of its first value in the whole
				if stride == 0 {
					for i := range n {
						seen[at+i]++
					}
					continue
				}
				for i := range n { // rows of n/rows values
					own := n / rows
					seen[at+i/own*stride+i%own]++
				}
				if len(c.Data) != ((rows-1)*stride+n/rows)*2 {
					t.Errorf("%s of rank %d of %d: %d bytes", p.Name, rank, ranks, len(c.Data))
				}
			}
			want := 1
			switch p.Role {
			case arch.K, arch.V, arch.KBias, arch.VBias:
				want = max(1, ranks/a.KVHeads)
			case arch.Embed, arch.Norm, arch.AttnNorm, arch.MLPNorm, arch.QNorm, arch.KNorm, arch.Router:
				want = ranks
			}
			if i := slices.IndexFunc(seen, func(n int) bool { return n != want }); i >= 0 {
				t.Errorf("%s of %d ranks: value %d is there %d times, want %d", p.Name, ranks, i, seen[i], want)
			}
		}
	}
}

// Scales of FP8 rows go with the rows; those of columns are all ranks'.
func TestShardScales(t *testing.T) {
	a := shardArch()
	s, err := shardOf(&a, 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	f := func(r arch.Role, rows, cols int, scales, want int, first float32) {
		t.Helper()
		tensor := kernels.Tensor{DType: kernels.F8, Data: make([]byte, rows*cols), Scale: make([]float32, scales)}
		for i := range tensor.Scale {
			tensor.Scale[i] = float32(i)
		}
		if c, _, _ := s.cut(&a, r, tensor); len(c.Scale) != want || c.Scale[0] != first {
			t.Errorf("role %d: %d scales from %v on, want %d from %v", r, len(c.Scale), c.Scale[0], want, first)
		}
	}
	f(arch.Q, 128, 24, 128, 64, 64)
	f(arch.Gate, 172, 24, 1, 1, 0)
	f(arch.Gate, 172, 24, 172, 84, 88)
	f(arch.Down, 24, 172, 24, 24, 0)
	f(arch.O, 24, 128, 1, 1, 0)
}

// What cannot be divided is refused, and named.
func TestShardsRefused(t *testing.T) {
	f := func(want string, ranks int, change func(*arch.Config)) {
		t.Helper()
		a := shardArch()
		change(&a)
		var err error
		for rank := 0; rank < ranks && err == nil; rank++ {
			_, err = shardOf(&a, rank, ranks)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%d ranks: %v, want %q", ranks, err, want)
		}
	}
	f("8 heads cannot be divided among 3", 3, func(*arch.Config) {})
	f("3 KV heads and 4 ranks", 4, func(a *arch.Config) { a.Heads, a.KVHeads = 12, 3 })
	f("at most 8 ranks", 16, func(a *arch.Config) { a.Heads = 16 })
	f("a vocabulary of 9 leave nothing for rank 2 of 4", 4, func(a *arch.Config) { a.Vocab = 9 })
}

// What no kernel computes is refused by name.
func TestMixtureRefused(t *testing.T) {
	a := shardArch()
	a.Hidden, a.ModelType, a.Experts, a.ExpertsPerToken, a.ExpertWidth = 32, "mixtral", 8, 2, 64
	for _, f := range []func(*arch.Config, *Options){
		func(a *arch.Config, _ *Options) { a.Hidden = 16400 },
		func(a *arch.Config, _ *Options) { a.Experts = 513 },
		func(a *arch.Config, _ *Options) { a.Experts, a.ExpertsPerToken = 64, 33 },
	} {
		c, o := a, Options{}
		c.QKVBias = false
		f(&c, &o)
		if err := checkArch(&c, &o); !errors.Is(err, ErrUnserved) {
			t.Errorf("%d of %d experts, %+v: %v", c.ExpertsPerToken, c.Experts, o, err)
		}
	}
	if err := checkArch(&a, &Options{}); err != nil {
		t.Error(err)
	}
}

// Latent attention is refused as a model that no kernel computes, whatever else is asked, so that --device auto takes the CPU.
func TestLatentRefused(t *testing.T) {
	for _, family := range []string{"deepseek_v2", "deepseek_v3"} {
		a := shardArch()
		a.ModelType, a.KVHeads, a.QKVBias, a.HeadDim = family, 1, false, 15 // and no head of a width that kernels have
		a.KVRank, a.NopeDim, a.RopeDim, a.ValueDim = 32, 9, 6, 8
		for _, o := range []Options{{}, {WeightsFP8: true}, {KVFP8: true}} {
			if err := checkArch(&a, &o); !errors.Is(err, ErrUnserved) || !strings.Contains(err.Error(), "multi-head latent") {
				t.Errorf("%s, %+v: %v", family, o, err)
			}
		}
	}
}
