package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

// The pool takes what its part of the device leaves, whatever others hold; what
// does not fit is refused with the numbers.
func TestPoolBlocks(t *testing.T) {
	const gib = 1 << 30
	m := Memory{Total: 80 * gib, Weights: 15 * gib, Scratch: gib, Block: 2 << 20, Device: "a GPU"}
	f := func(free int64, part float64, asked, want int, wantErr ...string) {
		t.Helper()
		got, err := poolBlocks(m, free, part, asked)
		if got != want || (err != nil) != (len(wantErr) > 0) {
			t.Errorf("free %d, part %v, asked %d: %d %v, want %d", free, part, asked, got, err, want)
		}
		for _, w := range wantErr {
			if err != nil && !strings.Contains(err.Error(), w) {
				t.Errorf("%q is not in %q", w, err)
			}
		}
	}
	f(62*gib, 0.9, 0, (72-17)*gib/(2<<20))
	f(62*gib, 0.45, 0, (36-17)*gib/(2<<20)) // two workers of one GPU
	f(30*gib, 0.45, 0, (36-17)*gib/(2<<20)) // the other one's pool changes nothing
	f(62*gib, 0.2, 0, 0, "20% of a GPU's 81920 MiB is 16384 MiB", "weights take 15360", "scratch for steps 1024", "2048 KiB")
	f(40*gib, 0.9, 0, 0, "28160 blocks needs 56320 MiB", "40704 of a GPU's 81920 MiB are free")
	f(62*gib, 0.9, 1000, 1000)
	f(1*gib, 0.9, 1000, 0, "1000 blocks needs 2000 MiB")
	m.Block = 1 << 10
	f(62*gib, 0.9, 0, MaxBlocks)
}

// What the forms of weights and KV need, how they look, and what they are called:
// blocks of different numerics are never mixed.
func TestForms(t *testing.T) {
	a := arch.Config{ModelType: "llama", Layers: 2, Hidden: 64, Intermediate: 64, Heads: 4, KVHeads: 2, HeadDim: 128, Vocab: 64, MaxPositions: 64, NormEps: 1e-5, RopeTheta: 1e4}
	f := func(want string, opt Options, headDim int) {
		t.Helper()
		a.HeadDim = headDim
		err := errors.Join(opt.fill(), checkArch(&a, &opt))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%+v, head_dim %d: %v, want %q", opt, headDim, err, want)
		}
	}
	f("", Options{KVFP8: true}, 128)
	f("", Options{KVFP8: true, BlockTokens: 48}, 80)
	f("multiple of 16 tokens, not 24", Options{KVFP8: true, BlockTokens: 24}, 128)
	f("head_dim of a multiple of 16, not 72", Options{KVFP8: true}, 72)
	f("exclude each other", Options{KVFP8: true, BatchInvariant: true}, 128)
	f("", Options{BlockTokens: 24}, 72)
	f("", Options{WeightsFP8: true, KVFP8: true}, 128)
	f("exclude each other", Options{WeightsFP8: true, BatchInvariant: true}, 128)
	f("", Options{FP16: true, BatchInvariant: true, BlockTokens: 24}, 72)
	f("fp16 and an FP8 KV cache exclude", Options{FP16: true, KVFP8: true}, 128)
	f("fp16 and FP8 weights exclude", Options{FP16: true, WeightsFP8: true}, 128)
	a.Heads = 1
	f("widths 64 and 72 to be multiples of 16", Options{WeightsFP8: true}, 72)
	a.Heads = 4

	a.HeadDim = 128
	opt, plain := Options{KVFP8: true, BlockTokens: 32}, Options{BlockTokens: 32}
	l, p := opt.layout(&a).Resolve()[0], plain.layout(&a).Resolve()[0]
	if l.DType != "f8e4m3" || l.RowBytes(0) != 128 || l.BlockBytes() != 2*2*32*(128+4) || l.BlockBytes()%16 != 0 {
		t.Errorf("layout %+v, blocks of %d bytes", l, l.BlockBytes())
	}
	if p.DType != "bf16" || p.BlockBytes() != 2*2*32*256 {
		t.Errorf("layout %+v, blocks of %d bytes", p, p.BlockBytes())
	}
	half := Options{FP16: true, BlockTokens: 32}
	if l := half.layout(&a).Resolve()[0]; l.DType != "f16" || l.BlockBytes() != p.BlockBytes() {
		t.Errorf("layout %+v, blocks of %d bytes", l, l.BlockBytes())
	}
	if invariant := (&Options{FP16: true, BatchInvariant: true}).numerics(1); half.numerics(1) != "cuda-fp16-1" || invariant != "cuda-fp16-invariant-2-00000001" {
		t.Errorf("numerics %q and %q", half.numerics(1), invariant)
	}
	names := []string{opt.numerics(1), plain.numerics(1), (&Options{BatchInvariant: true}).numerics(1)}
	both, weights := Options{KVFP8: true, WeightsFP8: true}, Options{WeightsFP8: true}
	if both.numerics(1) != "cuda-fp8-kv8-1" || weights.numerics(1) != "cuda-fp8-1" || names[0] != "cuda-bf16-kv8-1" || names[1] != Numerics || names[2] != InvariantNumerics+"00000001" {
		t.Errorf("numerics %q", names)
	}
}

// A pool whose rows the kernels cannot serve is refused, and named.
func TestServed(t *testing.T) {
	for name, l := range kerneltest.Layouts(16) {
		_, err := served(l)
		if plain := name == "gqa" || name == "fp8"; (err == nil) != plain || err != nil && !strings.Contains(err.Error(), l.String()) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
