package cpu_test

import (
	"encoding/json"
	"math"
	"os"
	"testing"

	"github.com/xpyd/xpyd/kernels"
)

func ropeOf(t *testing.T, a kernels.Arch) ([]float64, float64) {
	t.Helper()
	freq, factor, err := a.RopeFrequencies()
	if err != nil {
		t.Fatal(err)
	}
	return freq, factor
}

// The goldens are float32 values of Hugging Face transformers; their script
// lies beside them.
func TestRope(t *testing.T) {
	raw, err := os.ReadFile("testdata/rope_goldens.json")
	if err != nil {
		t.Fatal(err)
	}
	var g struct {
		Cases []struct {
			Dim   int
			Theta float64
			Rope  struct {
				Type          string  `json:"rope_type"`
				Factor        float64 `json:"factor"`
				Low           float64 `json:"low_freq_factor"`
				High          float64 `json:"high_freq_factor"`
				Original      int     `json:"original_max_position_embeddings"`
				BetaFast      float64 `json:"beta_fast"`
				BetaSlow      float64 `json:"beta_slow"`
				Attention     float64 `json:"attention_factor"`
				MScale        float64 `json:"mscale"`
				MScaleAllDim  float64 `json:"mscale_all_dim"`
				TruncateOrNil *bool   `json:"truncate"`
			}
			InvFreq   []float64 `json:"inv_freq"`
			Attention float64   `json:"attention_factor"`
		}
	}
	if err := json.Unmarshal(raw, &g); err != nil {
		t.Fatal(err)
	}
	for i, c := range g.Cases {
		r := c.Rope
		freq, factor := ropeOf(t, kernels.Arch{HeadDim: c.Dim, RopeTheta: c.Theta, Rope: kernels.RopeScaling{
			Kind: r.Type, Factor: r.Factor, LowFreqFactor: r.Low, HighFreqFactor: r.High, OriginalMaxPos: r.Original,
			AttentionFactor: r.Attention, BetaFast: r.BetaFast, BetaSlow: r.BetaSlow,
			MScale: r.MScale, MScaleAllDim: r.MScaleAllDim, NoTruncate: r.TruncateOrNil != nil && !*r.TruncateOrNil,
		}})
		if math.Abs(factor-c.Attention) > 1e-6 {
			t.Errorf("case %d (%s): attention factor %v, want %v", i, r.Type, factor, c.Attention)
		}
		for j, want := range c.InvFreq {
			if math.Abs(freq[j]-want) > 2e-6*want {
				t.Errorf("case %d (%s): frequency %d is %v, want %v", i, r.Type, j, freq[j], want)
			}
		}
	}
}

func TestRopeFactors(t *testing.T) {
	plain, _ := ropeOf(t, kernels.Arch{HeadDim: 8, RopeTheta: 1e4})
	got, _ := ropeOf(t, kernels.Arch{HeadDim: 8, RopeTheta: 1e4, RopeFreqFactors: []float32{1, 2, 4, 8}})
	for i, f := range []float64{1, 2, 4, 8} {
		if got[i] != plain[i]/f {
			t.Errorf("frequency %d: %v, want %v", i, got[i], plain[i]/f)
		}
	}
	for _, a := range []kernels.Arch{
		{HeadDim: 8, RopeTheta: 1e4, RopeFreqFactors: []float32{1}},
		{HeadDim: 8, RopeTheta: 1e4, Rope: kernels.RopeScaling{Kind: "longrope", Factor: 1}},
		{HeadDim: 8, RopeTheta: 1e4, Rope: kernels.RopeScaling{Kind: "yarn", Factor: 2}},
		{HeadDim: 8, RopeTheta: 1e4, Rope: kernels.RopeScaling{Kind: "linear"}},
	} {
		if _, _, err := a.RopeFrequencies(); err == nil {
			t.Errorf("%+v: no error", a.Rope)
		}
	}
}
