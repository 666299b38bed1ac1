//go:build cuda && cgo && linux

package cuda_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

// timesPower multiplies an F16 tensor by 2^n, exactly: no element may leave the range.
func timesPower(t *testing.T, f16 kernels.Tensor, n int) {
	t.Helper()
	for i := 0; i < len(f16.Data); i += 2 {
		v := binary.LittleEndian.Uint16(f16.Data[i:])
		e := int(v>>10&31) + n
		if v&0x7fff == 0 {
			continue
		}
		if e < 1 || e > 30 {
			t.Fatalf("element %d times 2^%d is out of range", i/2, n)
		}
		binary.LittleEndian.PutUint16(f16.Data[i:], v&0x83ff|uint16(e)<<10)
	}
}

// Where fp16 ends. The residual stream is fp32: past 65504 the logits are as right
// as ever. What is too great elsewhere becomes 65504 and nothing infinite, in all
// kernels alike. Rows by each kind of projection: alone, in a batch, and more than
// a thousand.
func TestFP16Range(t *testing.T) {
	const n = 1250
	a := families()["llama gqa4 128"]
	chunks := []int{1, 100, 1, 1100, 1, 40, 7}
	tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), n, a.Vocab)
	opt := cuda.Options{FP16: true, Blocks: 100, MaxTokens: 1200}
	for _, invariant := range []bool{false, true} {
		opt.BatchInvariant = invariant
		w := kerneltest.Weights(a, kernels.F16, 3)
		timesPower(t, w[arch.Embed.At(0)], 14) // of deviation 11,000
		for l := range a.Layers {
			timesPower(t, w[arch.Down.At(l)], 16) // adds some 20,000 to each
		}
		want := forced(t, openCPU(t, a, w, 100, 16), tokens, chunks, 0)
		for i, l := range forced(t, open(t, a, w, opt), tokens, chunks, 2) {
			if e := relative(l, want[i]); !(e <= 0.02/8) {
				t.Errorf("invariant %v: logits of chunk %d are off by %.5f", invariant, i, e)
			}
		}
		for l := range a.Layers { // gates, ups, keys and values of 100,000. Were queries so, too, fp32 would not have the bits for scores
			for _, r := range []arch.Role{arch.Gate, arch.Up, arch.K, arch.V} {
				timesPower(t, w[r.At(l)], 17)
			}
		}
		b := open(t, a, w, opt)
		got := ends(t, b, tokens, chunks, 2)
		for pos, l := range got {
			for _, v := range l {
				if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
					t.Fatalf("invariant %v: a logit after %d tokens is %v", invariant, pos, v)
				}
			}
		}
		if !invariant {
			continue
		}
		for pos, l := range ends(t, b, tokens, []int{102, 1100, 1, 47}, 0) {
			if !sameBits(l, got[pos]) {
				t.Errorf("logits after %d tokens differ between chunks, by %.5f of their norm", pos, relative(l, got[pos]))
			}
		}
	}
}

// Rows of 16 bits are not all alike: a pool of bf16 takes none of fp16 as they are.
func TestFP16Peers(t *testing.T) {
	a := shape(1, 64, 64, 8, 4, 8, 64)
	w := randomWeights(a, 1)
	half, whole := open(t, a, w, cuda.Options{FP16: true}), open(t, a, w, cuda.Options{})
	for _, pair := range [][2]*cuda.Backend{{whole, half}, {half, whole}} {
		p, err := pair[0].OpenLocal(pair[1])
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := string(pair[0].Layout().Groups[0].DType), string(pair[1].Layout().Groups[0].DType)
		err = p.Push(&kernels.Push{Layers: 1, Blocks: []kernels.BlockPair{{}}})
		if err == nil || !strings.Contains(err.Error(), ours+" rows") || !strings.Contains(err.Error(), " and "+theirs) {
			t.Errorf("%s to %s: %v", ours, theirs, err)
		}
		if err := p.Close(soon(t)); err != nil {
			t.Error(err)
		}
	}
}
