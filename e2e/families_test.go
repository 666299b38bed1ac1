package e2e

import (
	"encoding/json"
	"math"
	"os"
	"strconv"
	"testing"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// TestFamilies: on the CPU each family's models have transformers' logits
// (testdata/families_golden.py), within 1e-4 of their range.
func TestFamilies(t *testing.T) {
	raw, err := os.ReadFile("testdata/families_golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var goldens map[string]map[string][]float64 // by model and position
	if err := json.Unmarshal(raw, &goldens); err != nil {
		t.Fatal(err)
	}
	models := modeltest.Goldens()
	if len(goldens) != len(models) {
		t.Errorf("%d models have goldens, of %d", len(goldens), len(models))
	}
	for _, g := range models {
		t.Run(g.Name, func(t *testing.T) {
			dir := t.TempDir()
			if err := modeltest.WriteHF(dir, g.Config, modeltest.HFOptions{Seed: g.Seed}); err != nil {
				t.Fatal(err)
			}
			m, err := model.Open(t.Context(), dir, model.Options{CacheDir: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = m.Close() }()
			b, err := cpu.New(m.Config, m.Weights(false), cpu.Options{Blocks: 3})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = b.Close() }()
			prompt, pos := modeltest.GoldenPrompt(g.Config.Vocab), 0
			for _, at := range []int{0, 20, 47} {
				r, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{{Tokens: prompt[pos : at+1], Pos: pos, Blocks: []int32{2, 0, 1}, WantLogits: true}}})
				if err != nil {
					t.Fatal(err)
				}
				pos = at + 1
				want := goldens[g.Name][strconv.Itoa(at)]
				if len(want) != len(r[0].Logits) {
					t.Fatalf("position %d: %d logits, the golden has %d", at, len(r[0].Logits), len(want))
				}
				low, high, worst := math.Inf(1), math.Inf(-1), 0.0
				for i, v := range want {
					low, high = min(low, v), max(high, v)
					worst = max(worst, math.Abs(v-float64(r[0].Logits[i])))
				}
				if !(worst <= 1e-4*(high-low)) {
					t.Errorf("position %d: off by up to %g, in a range of %g", at, worst, high-low)
				}
			}
		})
	}
}
