package cpu

import (
	"math"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
)

func TestTopGroups(t *testing.T) {
	nan := float32(math.NaN())
	f := func(values []float32, groups, top int, two bool, want ...int) {
		t.Helper()
		v := slices.Clone(values)
		topGroups(v, make([]float32, groups), top, two)
		var left []int
		size := len(v) / groups
		for g := range groups {
			gone := !slices.ContainsFunc(v[g*size:(g+1)*size], func(x float32) bool { return !math.IsInf(float64(x), -1) })
			if !gone {
				left = append(left, g)
			}
			for i := g * size; i < (g+1)*size && !gone; i++ {
				if v[i] != values[i] && values[i] == values[i] {
					t.Errorf("value %d of a group that stays is %v, it was %v", i, v[i], values[i])
				}
			}
		}
		if !slices.Equal(left, want) {
			t.Errorf("%v in %d groups: %v stay, want %v", values, groups, left, want)
		}
	}
	f([]float32{1, 0, 3, 0, 2, 0}, 3, 1, false, 1)
	f([]float32{1, 0, 3, 0, 2, 0}, 3, 2, false, 1, 2)
	f([]float32{0, 9, 5, 5, 1, 7}, 3, 1, false, 0)
	f([]float32{0, 9, 5, 5, 1, 7}, 3, 1, true, 1)    // 9, 10, 8
	f([]float32{0, 9, 5, 5, 1, 7}, 3, 2, true, 0, 1) // 8 is too little
	f([]float32{2, 2, 2, 2, 2, 2}, 3, 2, true, 0, 1) // the lower first among equals
	f([]float32{3, 1, 1, 3}, 2, 1, true, 0)
	f([]float32{-5, -4, -3, -9}, 2, 1, false, 1)
	f([]float32{nan, nan, 1, 2, 0, 0}, 3, 1, false, 1) // what is no number comes last
}

// Experts and parts of a row of logits, the greatest first.
func TestRoute(t *testing.T) {
	f := func(a arch.Config, logits, bias []float32, want []int32, parts ...float64) {
		t.Helper()
		a.Experts, a.ExpertsPerToken = len(logits), len(want)
		b := &Backend{arch: a, ops: portableOps()}
		scores := append(slices.Clone(logits), make([]float32, roundUp(len(logits), panelRows)-len(logits))...)
		picks := make([]pick, len(want))
		b.route(&experts{bias: bias}, scores, make([]float32, a.Experts+a.ExpertGroups), picks)
		for i, p := range picks {
			if p.expert != want[i] || math.Abs(float64(p.part)-parts[i]) > 1e-6 {
				t.Errorf("%v: pick %d is %+v, want expert %d with %v", logits, i, p, want[i], parts[i])
			}
		}
	}
	sig := func(x float64) float64 { return 1 / (1 + math.Exp(-x)) }
	soft := arch.Config{Routing: arch.SoftmaxTop, RoutedScale: 2}
	third := 1.0 / (1 + math.E + math.E*math.E)
	f(soft, []float32{0, 1, 2}, nil, []int32{2, 1}, 2*math.E*math.E*third, 2*math.E*third)
	f(soft, []float32{1, 1, 1, 1}, nil, []int32{0, 1}, 0.5, 0.5)
	soft.ExpertGroups, soft.TopGroups = 2, 1
	f(soft, []float32{0, 2, 1, 1}, nil, []int32{1, 0}, 2*math.Exp(2)/(1+math.Exp(2)+2*math.E), 2/(1+math.Exp(2)+2*math.E))
	biased := arch.Config{Routing: arch.SigmoidBias, RoutedScale: 1}
	f(biased, []float32{0, 1, -1}, []float32{0, 0, 0.9}, []int32{2, 1}, sig(-1), sig(1)) // a bias chooses, and is no part of it
	biased.NormExperts, biased.RoutedScale = true, 2.5
	f(biased, []float32{0, 1, -1}, []float32{0, 0, 0.9}, []int32{2, 1}, 2.5*sig(-1)/(sig(-1)+sig(1)), 2.5*sig(1)/(sig(-1)+sig(1)))
	biased.ExpertGroups, biased.TopGroups = 2, 1
	f(biased, []float32{3, -9, 1, 1}, make([]float32, 4), []int32{2, 3}, 1.25, 1.25) // the best expert's group is not the best
	nan := float32(math.NaN())
	b := &Backend{arch: arch.Config{Experts: 3, ExpertsPerToken: 2, Routing: arch.SigmoidBias}, ops: portableOps()}
	picks := make([]pick, 2)
	b.route(&experts{bias: make([]float32, 3)}, append([]float32{nan, nan, nan}, make([]float32, 29)...), make([]float32, 3), picks)
	if picks[0].expert != 0 || picks[1].expert != 1 {
		t.Errorf("of what is no number: %+v", picks)
	}
}
