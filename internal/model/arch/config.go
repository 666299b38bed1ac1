package arch

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Config is a model's architecture with its sizes, and the ids that begin and
// end its texts. Fields that an architecture lacks are zero.
type Config struct {
	ModelType    string // Name of its Family
	Layers       int
	Hidden       int // model width
	Intermediate int // SwiGLU width
	Heads        int // query heads
	KVHeads      int // divides Heads
	HeadDim      int // even; may differ from Hidden/Heads
	Vocab        int
	MaxPositions int // longest context, tokens
	NormEps      float32
	RopeTheta    float64
	Rope         RopeScaling
	// RopeFreqFactors, if set, are HeadDim/2 divisors of the rotary frequencies:
	// Llama 3's scaling, precomputed, as GGUF files have it. Rope.Kind is then "".
	RopeFreqFactors []float32
	Experts         int // SwiGLUs of a layer's Mixture; 0: layers have one SwiGLU
	ExpertsPerToken int
	ExpertWidth     int  // of each expert, as Intermediate
	NormExperts     bool // the chosen experts' parts sum to 1
	QKVBias         bool // q, k and v have biases
	QKNorm          bool // RMSNorm over each head of q and k before they are rotated
	TiedHead        bool // the head is the embedding
	PostNorms       bool // what attention and feed-forward add is normed before it is added
	NormsFromOne    bool // norms multiply by 1 + their weights
	EmbedScale      float32
	ScoreScale      float64 // of attention scores; 0: 1/sqrt(HeadDim)
	Window          int     // positions of layers that are windowed; 0: none is
	FullEvery       int     // of so many layers the last is not
	WindowTheta     float64 // RopeTheta of windowed layers, which scale nothing
	KVRank          int     // width of MLA's latent; 0: there is none
	QRank           int     // width of MLA's latent of queries; 0: queries are projected at once
	NopeDim         int     // of a head's key what is not rotated; HeadDim is it and RopeDim
	RopeDim         int     // what is, one for all heads
	ValueDim        int     // of a head's values
	DenseLayers     int     // the first layers, which have a SwiGLU in place of a SharedMixture
	SharedExperts   int     // how many experts' width has what every position computes
	Routing         string  // SoftmaxTop or SigmoidBias; of a SharedMixture
	ExpertGroups    int     // groups that experts divide into by number; 0: there are none
	TopGroups       int     // that experts are chosen from
	RoutedScale     float64 // factor of the chosen experts' parts; 0: 1
	DraftLayers     int     // that a checkpoint has behind Layers for drafts, and nobody reads
	BOS             []int32
	EOS             []int32
}

// How a SharedMixture's experts are chosen.
const (
	// SoftmaxTop takes those of the greatest parts in the softmax over all; a group is as good as its best.
	SoftmaxTop = "softmax"
	// SigmoidBias takes those of the greatest sigmoids, a bias added (RouterBias), which parts are without;
	// a group is as good as the sum of its best two.
	SigmoidBias = "sigmoid with bias"
)

// LatentEps is the epsilon of the norms of MLA's latents, whatever NormEps is.
const LatentEps = 1e-6

// Rotated is how many elements of a head are rotated.
func (c *Config) Rotated() int {
	if c.KVRank > 0 {
		return c.RopeDim
	}
	return c.HeadDim
}

// Bounds on every model. Products of two or three of them fit in an int64. Those of layers and
// key/value heads are kvlayout's MaxLayers and MaxHeads; a test in kernels compares them.
const (
	maxLayers    = 1 << 10
	maxWidth     = 1 << 20
	maxHeads     = 1 << 14
	maxKVHeads   = 1 << 10
	maxVocab     = 1 << 24
	maxExperts   = 1 << 12
	maxPositions = 1 << 30
)

// Validate checks the architecture, ranges and divisibility. Errors name the field.
func (c *Config) Validate() error {
	family, err := c.family()
	if err != nil {
		return err
	}
	type count struct {
		name    string
		v, high int
	}
	counts := []count{
		{"number of layers", c.Layers, maxLayers},
		{"hidden size", c.Hidden, maxWidth},
		{"intermediate size", c.Intermediate, maxWidth},
		{"number of attention heads", c.Heads, maxHeads},
		{"number of key/value heads", c.KVHeads, maxKVHeads},
		{"head dimension", c.HeadDim, 1 << 14},
		{"vocabulary size", c.Vocab, maxVocab},
		{"maximum position", c.MaxPositions, maxPositions},
	}
	if _, feed := family.layer(c, 0); feed == Mixture || c.Experts > 0 {
		counts = append(counts, count{"number of experts (num_experts, num_local_experts, n_routed_experts)", c.Experts, maxExperts}, count{"number of experts a token (num_experts_per_tok)", c.ExpertsPerToken, c.Experts},
			count{"width of an expert (moe_intermediate_size)", c.ExpertWidth, maxWidth})
	}
	for _, f := range counts {
		if f.v < 1 || f.v > f.high {
			return fmt.Errorf("%s %d is not in 1..%d", f.name, f.v, f.high)
		}
	}
	if c.Heads%c.KVHeads != 0 {
		return fmt.Errorf("%d attention heads are not a multiple of %d key/value heads", c.Heads, c.KVHeads)
	}
	if c.HeadDim%2 != 0 {
		return fmt.Errorf("head dimension %d is odd", c.HeadDim)
	}
	if !(c.NormEps > 0) || math.IsInf(float64(c.NormEps), 0) {
		return fmt.Errorf("norm epsilon %v is not positive", c.NormEps)
	}
	if !(c.RopeTheta > 0) || math.IsInf(c.RopeTheta, 0) {
		return fmt.Errorf("rope theta %v is not positive", c.RopeTheta)
	}
	if err := errors.Join(c.validateWindows(), c.validateLatent(), c.validateRouting()); err != nil {
		return err
	}
	if s := float64(c.EmbedScale); s < 0 || math.IsInf(s, 0) || s != s || c.ScoreScale < 0 || math.IsInf(c.ScoreScale, 0) || c.ScoreScale != c.ScoreScale {
		return fmt.Errorf("scales of embeddings, %v, and of scores, %v: want positive ones, or none", c.EmbedScale, c.ScoreScale)
	}
	for _, f := range c.RopeFreqFactors {
		if !(f > 0) || math.IsInf(float64(f), 0) {
			return fmt.Errorf("rope frequency factor %v is not positive", f)
		}
	}
	for _, id := range append(c.BOS[:len(c.BOS):len(c.BOS)], c.EOS...) {
		if id < 0 {
			return fmt.Errorf("bos_token_id or eos_token_id: token id %d is negative", id)
		}
	}
	_, _, err = c.RopeFrequencies()
	return err
}

func (c *Config) validateWindows() error {
	if c.Window == 0 {
		return nil
	}
	if c.Window < 1 || c.Window > maxPositions {
		return fmt.Errorf("window %d is not in 1..%d positions", c.Window, maxPositions)
	}
	if c.FullEvery < 1 || c.FullEvery > maxLayers+1 {
		return fmt.Errorf("a layer without a window after every %d is not in 1..%d", c.FullEvery, maxLayers+1)
	}
	if !(c.WindowTheta > 0) || math.IsInf(c.WindowTheta, 0) {
		return fmt.Errorf("rope theta %v of windowed layers is not positive", c.WindowTheta)
	}
	return nil
}

func (c *Config) validateLatent() error {
	if attention, _ := c.Layer(0); attention != MLA {
		return nil
	}
	for _, f := range []struct {
		name    string
		v, low  int
		divides int
	}{
		{"kv_lora_rank", c.KVRank, 1, 1}, {"q_lora_rank", c.QRank, 0, 1}, {"qk_nope_head_dim", c.NopeDim, 1, 1},
		{"qk_rope_head_dim", c.RopeDim, 2, 2}, {"v_head_dim", c.ValueDim, 1, 1},
	} {
		if f.v < f.low || f.v > 1<<14 || f.v%f.divides != 0 {
			return fmt.Errorf("%s %d is not in %d..%d, or odd where it is rotated", f.name, f.v, f.low, 1<<14)
		}
	}
	if c.HeadDim != c.NopeDim+c.RopeDim || c.KVHeads != 1 {
		return fmt.Errorf("head dimension %d and %d key/value heads: a latent is one, and heads are of %d and %d", c.HeadDim, c.KVHeads, c.NopeDim, c.RopeDim)
	}
	return nil
}

func (c *Config) validateRouting() error {
	if c.DraftLayers < 0 || c.DraftLayers > maxLayers {
		return fmt.Errorf("num_nextn_predict_layers %d is not in 0..%d", c.DraftLayers, maxLayers)
	}
	if c.Routing == "" {
		return nil
	}
	if c.Routing != SoftmaxTop && c.Routing != SigmoidBias {
		return fmt.Errorf("routing %.40q is not supported", c.Routing)
	}
	if c.DenseLayers < 0 || c.DenseLayers > c.Layers {
		return fmt.Errorf("first_k_dense_replace %d is not in 0..%d", c.DenseLayers, c.Layers)
	}
	if c.SharedExperts < 0 || c.SharedExperts > maxExperts || c.SharedExperts*c.ExpertWidth > maxWidth {
		return fmt.Errorf("n_shared_experts %d of a width of %d are more than %d, or fewer than none", c.SharedExperts, c.ExpertWidth, maxWidth)
	}
	if s := c.RoutedScale; s < 0 || math.IsInf(s, 0) || s != s {
		return fmt.Errorf("routed_scaling_factor %v is not positive", s)
	}
	if c.ExpertGroups == 0 && c.TopGroups == 0 {
		return nil
	}
	n, least := c.ExpertGroups, 1
	if c.Routing == SigmoidBias {
		least = 2
	}
	if n < 1 || n > c.Experts || c.Experts%n != 0 || c.Experts/n < least {
		return fmt.Errorf("n_group %d does not divide %d experts into groups of %d or more", n, c.Experts, least)
	}
	if c.TopGroups < 1 || c.TopGroups > n || c.TopGroups*(c.Experts/n) < c.ExpertsPerToken {
		return fmt.Errorf("topk_group %d of %d groups has no %d experts (num_experts_per_tok)", c.TopGroups, n, c.ExpertsPerToken)
	}
	return nil
}

// Windowed is the model as its windowed layers rotate.
func (c *Config) Windowed() Config {
	w := *c
	w.RopeTheta, w.Rope, w.RopeFreqFactors = c.WindowTheta, RopeScaling{}, nil
	return w
}

// Canonical is the Config's part of a fingerprint: one "key=value" line a field,
// in this order, without those of zero value: a field added later does not
// change the fingerprints of models that lack it.
func (c *Config) Canonical() string {
	var b strings.Builder
	line := func(k, v string, given bool) {
		if given {
			b.WriteString(k + "=" + v + "\n")
		}
	}
	str := func(k, v string) { line(k, strconv.Quote(v), v != "") }
	num := func(k string, v float64) { line(k, strconv.FormatFloat(v, 'g', -1, 64), v != 0) }
	flag := func(k string, v bool) { line(k, "true", v) }
	list := func(k string, v []int32) { line(k, strings.Trim(fmt.Sprint(v), "[]"), len(v) > 0) }
	str("model_type", c.ModelType)
	num("layers", float64(c.Layers))
	num("hidden", float64(c.Hidden))
	num("intermediate", float64(c.Intermediate))
	flag("post_norms", c.PostNorms)
	flag("norms_from_one", c.NormsFromOne)
	num("embed_scale", float64(c.EmbedScale))
	num("score_scale", c.ScoreScale)
	num("window", float64(c.Window))
	num("full_every", float64(c.FullEvery))
	num("window_theta", c.WindowTheta)
	num("kv_rank", float64(c.KVRank))
	num("q_rank", float64(c.QRank))
	num("nope_dim", float64(c.NopeDim))
	num("rope_dim", float64(c.RopeDim))
	num("value_dim", float64(c.ValueDim))
	num("dense_layers", float64(c.DenseLayers))
	num("shared_experts", float64(c.SharedExperts))
	str("routing", c.Routing)
	num("expert_groups", float64(c.ExpertGroups))
	num("top_groups", float64(c.TopGroups))
	num("routed_scale", c.RoutedScale)
	num("draft_layers", float64(c.DraftLayers))
	num("experts", float64(c.Experts))
	num("experts_per_token", float64(c.ExpertsPerToken))
	num("expert_width", float64(c.ExpertWidth))
	flag("norm_experts", c.NormExperts)
	num("heads", float64(c.Heads))
	num("kv_heads", float64(c.KVHeads))
	num("head_dim", float64(c.HeadDim))
	num("vocab", float64(c.Vocab))
	num("max_positions", float64(c.MaxPositions))
	num("norm_eps", float64(c.NormEps))
	num("rope_theta", c.RopeTheta)
	str("rope.kind", c.Rope.Kind)
	num("rope.factor", c.Rope.Factor)
	num("rope.low_freq_factor", c.Rope.LowFreqFactor)
	num("rope.high_freq_factor", c.Rope.HighFreqFactor)
	num("rope.original_max_pos", c.Rope.OriginalMaxPos)
	num("rope.attention_factor", c.Rope.AttentionFactor)
	num("rope.beta_fast", c.Rope.BetaFast)
	num("rope.beta_slow", c.Rope.BetaSlow)
	num("rope.mscale", c.Rope.MScale)
	num("rope.mscale_all_dim", c.Rope.MScaleAllDim)
	flag("rope.no_truncate", c.Rope.NoTruncate)
	for i, f := range c.RopeFreqFactors {
		num("rope.freq_factor."+strconv.Itoa(i), float64(f))
	}
	flag("qkv_bias", c.QKVBias)
	flag("qk_norm", c.QKNorm)
	flag("tied_head", c.TiedHead)
	list("bos", c.BOS)
	list("eos", c.EOS)
	return b.String()
}
