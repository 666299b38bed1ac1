package arch_test

import (
	"encoding/json"
	"math"
	"os"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
)

func ropeOf(t *testing.T, a arch.Config) ([]float64, float64) {
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
				arch.RopeScaling
				Truncate *bool
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
		r.NoTruncate = r.Truncate != nil && !*r.Truncate
		freq, factor := ropeOf(t, arch.Config{HeadDim: c.Dim, RopeTheta: c.Theta, Rope: r.RopeScaling})
		if math.Abs(factor-c.Attention) > 1e-6 {
			t.Errorf("case %d (%s): attention factor %v, want %v", i, r.Kind, factor, c.Attention)
		}
		for j, want := range c.InvFreq {
			if math.Abs(freq[j]-want) > 2e-6*want {
				t.Errorf("case %d (%s): frequency %d is %v, want %v", i, r.Kind, j, freq[j], want)
			}
		}
	}
}

func TestRopeFactors(t *testing.T) {
	plain, _ := ropeOf(t, arch.Config{HeadDim: 8, RopeTheta: 1e4})
	got, _ := ropeOf(t, arch.Config{HeadDim: 8, RopeTheta: 1e4, RopeFreqFactors: []float32{1, 2, 4, 8}})
	for i, f := range []float64{1, 2, 4, 8} {
		if got[i] != plain[i]/f {
			t.Errorf("frequency %d: %v, want %v", i, got[i], plain[i]/f)
		}
	}
	for _, a := range []arch.Config{
		{HeadDim: 8, RopeTheta: 1e4, RopeFreqFactors: []float32{1}},
		{HeadDim: 8, RopeTheta: 1e4, Rope: arch.RopeScaling{Kind: "longrope", Factor: 1}},
		{HeadDim: 8, RopeTheta: 1e4, Rope: arch.RopeScaling{Kind: "yarn", Factor: 2}},
		{HeadDim: 8, RopeTheta: 1e4, Rope: arch.RopeScaling{Kind: "linear"}},
	} {
		if _, _, err := a.RopeFrequencies(); err == nil {
			t.Errorf("%+v: no error", a.Rope)
		}
	}
}
