// Package modeltest writes models with random weights, as Hugging Face
// directories and as GGUF files, for tests and benchmarks. The same Config
// and seed give the same values in every format, whatever the order of
// tensors in the file.
package modeltest

import (
	"hash/fnv"
	"math"
	"math/rand/v2"

	"github.com/xpyd/xpyd/internal/model/arch"
)

// Tiny is a model of two layers whose width allows every GGUF block format of
// 32 values, of any family: "qwen2" has biases, "qwen3" head norms and heads
// wider than the model, "qwen3_moe" and "mixtral" experts,
// "gemma3_text" seven layers, of which one has no window, "deepseek_v2" and "deepseek_v3" latents, one
// layer without experts and one with them.
func Tiny(modelType string) arch.Config {
	c := shape(64, 96, 2, 4, 2, 128, 256)
	c.ModelType = modelType
	switch modelType {
	case "qwen2":
		c.QKVBias, c.TiedHead, c.NormEps = true, true, 1e-6
	case "qwen3":
		c.QKNorm, c.HeadDim, c.NormEps = true, 32, 1e-6
	case "gemma3_text":
		c.QKNorm, c.PostNorms, c.NormsFromOne, c.TiedHead, c.NormEps = true, true, true, true, 1e-6
		c.Layers, c.EmbedScale, c.Window, c.FullEvery, c.WindowTheta = 7, 8, 11, 6, 10000
	case "qwen3_moe":
		c.QKNorm, c.HeadDim, c.NormEps = true, 32, 1e-6
		c.Experts, c.ExpertsPerToken, c.ExpertWidth, c.NormExperts = 8, 3, 32, true
	case "deepseek_v2", "deepseek_v3":
		latent(&c)
	case "mixtral":
		c.Experts, c.ExpertsPerToken, c.ExpertWidth, c.NormExperts = 4, 2, c.Intermediate, true
	}
	return c
}

// latent makes c one of DeepSeek's: the second version's smaller model has no rank of queries, no groups
// and no scaled rotation, the third all of them.
func latent(c *arch.Config) {
	c.KVHeads, c.KVRank, c.NopeDim, c.RopeDim, c.ValueDim, c.HeadDim = 1, 32, 16, 8, 16, 24
	c.DenseLayers, c.Experts, c.ExpertsPerToken, c.ExpertWidth = 1, 8, 3, 32
	c.SharedExperts, c.Routing, c.RoutedScale = 2, arch.SoftmaxTop, 1
	if c.ModelType == "deepseek_v3" {
		c.QRank, c.SharedExperts, c.Routing, c.RoutedScale, c.NormExperts = 48, 1, arch.SigmoidBias, 2.5, true
		c.ExpertGroups, c.TopGroups, c.DraftLayers = 4, 2, 1
		yarn(c)
	}
}

// yarn stretches a latent's rotations, and with them its scores.
func yarn(c *arch.Config) {
	c.Rope = arch.RopeScaling{Kind: "yarn", Factor: 4, OriginalMaxPos: 64, BetaFast: 32, BetaSlow: 1, MScale: 1, MScaleAllDim: 0.7}
	m := 0.1*c.Rope.MScaleAllDim*math.Log(c.Rope.Factor) + 1
	c.ScoreScale = m * m / math.Sqrt(float64(c.HeadDim))
}

// Stories15M is the shape of llama2.c's stories15M.
func Stories15M() arch.Config { return tied(shape(288, 768, 6, 6, 6, 32000, 256)) }

// Stories110M is the shape of llama2.c's stories110M.
func Stories110M() arch.Config { return tied(shape(768, 2048, 12, 12, 12, 32000, 1024)) }

func tied(c arch.Config) arch.Config {
	c.TiedHead = true
	return c
}

func shape(hidden, inner, layers, heads, kvHeads, vocab, positions int) arch.Config {
	return arch.Config{
		ModelType: "llama", Layers: layers, Hidden: hidden, Intermediate: inner, Heads: heads, KVHeads: kvHeads,
		HeadDim: hidden / heads, Vocab: vocab, MaxPositions: positions, NormEps: 1e-5, RopeTheta: 10000,
		BOS: []int32{1}, EOS: []int32{2},
	}
}

// Values are the weights of one tensor: norms around 1, biases small, the
// embedding and the head wide enough that logits spread over a few units,
// projections with a gain of about 1.
func Values(seed uint64, t arch.Tensor) []float32 {
	h := fnv.New64a()
	h.Write([]byte(t.Name))
	rng := rand.New(rand.NewPCG(seed, h.Sum64()))
	n, in := 1, t.Shape[len(t.Shape)-1]
	for _, d := range t.Shape {
		n *= d
	}
	center, spread := float32(0), float32(math.Sqrt(3/float64(in)))
	switch t.Role {
	case arch.Norm, arch.AttnNorm, arch.MLPNorm, arch.QNorm, arch.KNorm, arch.AttnPostNorm, arch.MLPPostNorm, arch.QANorm, arch.KVANorm:
		center, spread = 1, 0.2
	case arch.QBias, arch.KBias, arch.VBias, arch.RouterBias:
		spread = 0.1
	case arch.Embed, arch.Head:
		spread *= 3
	}
	out := make([]float32, n)
	for i := range out {
		out[i] = center + spread*(2*rng.Float32()-1)
	}
	return out
}
