package modeltest

import (
	"fmt"
	"math"

	"github.com/xpyd/xpyd/internal/model/arch"
)

// Golden is a model with random weights whose logits transformers computed as well.
type Golden struct {
	Name   string
	Config arch.Config
	Seed   uint64
}

// Goldens are two models of each family: Tiny, and one with other sizes of everything that the
// family has.
func Goldens() []Golden {
	var all []Golden
	for i, f := range arch.Families() {
		c := Tiny(f.Name)
		all = append(all, Golden{f.Name + "-1", c, uint64(2 * i)})
		c.Layers, c.Hidden, c.Intermediate, c.Heads, c.KVHeads, c.Vocab = 3, 96, 80, 6, 3, 112
		c.RopeTheta, c.TiedHead = 50000, !c.TiedHead
		if c.Window > 0 {
			c.Window, c.FullEvery, c.ScoreScale, c.TiedHead, c.WindowTheta = 20, 2, 1.0/3, true, 30000
			c.EmbedScale, c.Rope = float32(math.Sqrt(96)), arch.RopeScaling{Kind: "linear", Factor: 4}
		}
		if c.KVRank > 0 {
			otherLatent(&c)
		} else if c.Experts > 0 {
			c.Experts, c.ExpertsPerToken = 5, 4
			if c.ModelType == "mixtral" {
				c.ExpertWidth = c.Intermediate
			} else {
				c.ExpertWidth, c.NormExperts = 24, false
			}
		}
		all = append(all, Golden{fmt.Sprint(f.Name, "-2"), c, uint64(2*i + 1)})
	}
	return all
}

// otherLatent has what Tiny lacks of each version: groups of experts by the softmax with a rank of queries,
// and a sigmoid without groups or a rank.
func otherLatent(c *arch.Config) {
	c.KVHeads, c.KVRank, c.NopeDim, c.RopeDim, c.ValueDim, c.HeadDim = 1, 44, 12, 4, 20, 16
	c.Experts, c.ExpertsPerToken, c.ExpertWidth = 6, 4, 24
	c.Rope, c.ScoreScale = arch.RopeScaling{}, 0
	if c.ModelType == "deepseek_v2" {
		c.QRank, c.SharedExperts, c.ExpertGroups, c.TopGroups, c.RoutedScale = 40, 1, 3, 2, 3
		yarn(c)
		return
	}
	c.QRank, c.SharedExperts, c.ExpertGroups, c.TopGroups, c.NormExperts, c.RoutedScale, c.DraftLayers = 0, 3, 1, 1, false, 1.5, 0
	c.DenseLayers, c.NormEps = 2, 1e-4
}

// GoldenPrompt is what they are asked.
func GoldenPrompt(vocab int) []int32 {
	ids := make([]int32, 48)
	for i := range ids {
		ids[i] = int32((37*i + 11) % vocab)
	}
	return ids
}
