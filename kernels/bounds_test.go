package kernels_test

import (
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
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
