package kernels_test

import (
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// What arch accepts is what a layout can say: as many layers and as many key/value heads.
func TestModelBoundsAreTheLayouts(t *testing.T) {
	for _, c := range []struct {
		layers, kvHeads int
		fits            bool
	}{
		{kvlayout.MaxLayers, kvlayout.MaxHeads, true},
		{kvlayout.MaxLayers + 1, 1, false},
		{1, 2 * kvlayout.MaxHeads, false}, // a divisor of the query heads
	} {
		a := arch.Config{ModelType: "llama", Layers: c.layers, Hidden: 64, Intermediate: 64, Heads: 2 * kvlayout.MaxHeads, KVHeads: c.kvHeads,
			HeadDim: 2, Vocab: 64, MaxPositions: 64, NormEps: 1e-5, RopeTheta: 1e4}
		if err := a.Validate(); (err == nil) != c.fits {
			t.Errorf("%d layers, %d key/value heads: a model says %v", c.layers, c.kvHeads, err)
		}
		if err := kvlayout.Plain(c.layers, c.kvHeads, 2, 16, kvlayout.F32).Validate(); (err == nil) != c.fits {
			t.Errorf("%d layers, %d key/value heads: a layout says %v", c.layers, c.kvHeads, err)
		}
	}
}

// A latent is one head of two planes, whose bytes do not depend on the query heads.
func TestLatentLayout(t *testing.T) {
	for _, heads := range []int{16, 128} {
		a := arch.Config{ModelType: "deepseek_v3", Layers: 61, Heads: heads, KVHeads: 1, KVRank: 512, NopeDim: 128, RopeDim: 64, ValueDim: 128, HeadDim: 192}
		l := kernels.Layout(&a, 64, kvlayout.BF16)
		if err := l.Validate(); err != nil || l.BlockBytes() != 64*61*(512+64)*2 || l.Groups[0].Kind != kvlayout.Latent {
			t.Errorf("%d heads: %v, %d bytes: %v", heads, l, l.BlockBytes(), err)
		}
		if l = kernels.Layout(&a, 16, kvlayout.F8E4M3); l.Groups[0].Scale != kvlayout.F32 {
			t.Errorf("FP8 rows have no scale: %v", l)
		}
	}
}
