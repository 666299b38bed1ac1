package cpu

import (
	"math"

	"github.com/xpyd/xpyd/internal/model/arch"
)

// route fills in a SharedMixture's experts, the greatest choice first, with their parts. It overwrites scores, which
// are the router's logits with padding, and choice, which has room for a number an expert and one a group.
func (b *Backend) route(e *experts, scores, choice []float32, picks []pick) {
	a := &b.arch
	choice, worth := choice[:a.Experts], choice[a.Experts:][:a.ExpertGroups]
	total := float32(1)
	if a.Routing == arch.SoftmaxTop {
		for i := a.Experts; i < len(scores); i++ {
			scores[i] = float32(math.Inf(-1))
		}
		total = b.ops.softmax(&scores[0], len(scores)) // scores are exponentials, in the same order
		copy(choice, scores)
	} else {
		for i := range choice {
			scores[i] = 1 / (1 + exp32(-scores[i]))
			choice[i] = scores[i] + e.bias[i]
		}
	}
	if a.TopGroups < a.ExpertGroups {
		topGroups(choice, worth, a.TopGroups, a.Routing == arch.SigmoidBias)
	}
	greatest(choice, picks)
	if a.NormExperts {
		total = 0
		for _, p := range picks {
			total += scores[p.expert]
		}
		total += 1e-20
	}
	for j := range picks {
		picks[j].part = float32(scores[picks[j].expert]/total) * float32(a.RoutedScale)
	}
}

// topGroups leaves the values of the best groups, the lower first among equals, and makes -Inf of all others. A
// group is as good as its greatest value, or as its two greatest together. There is a worth a group, which it
// overwrites.
func topGroups(values, worth []float32, top int, two bool) {
	size := len(values) / len(worth)
	for g := range worth {
		first, second := float32(math.Inf(-1)), float32(math.Inf(-1))
		for _, v := range values[g*size : (g+1)*size] {
			switch {
			case v > first:
				first, second = v, first
			case v > second:
				second = v
			}
		}
		if worth[g] = first; two {
			worth[g] += second
		}
	}
	for g, own := range worth {
		better := 0
		for other, v := range worth {
			if v > own || v == own && other < g {
				better++
			}
		}
		if better < top {
			continue
		}
		for i := range size {
			values[g*size+i] = float32(math.Inf(-1))
		}
	}
}
