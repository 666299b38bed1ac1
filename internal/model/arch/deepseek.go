package arch

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
)

// DeepSeek's decoders: latent attention, first layers with a SwiGLU, and then mixtures of experts
// beside shared ones. GGUF files of them are not read.

// deepseekV2 chooses experts by their parts in the softmax, its larger model from the best groups of them.
var deepseekV2 = deepseek(Family{Name: "deepseek_v2", Class: "DeepseekV2ForCausalLM"}, deepseekJSON{Scale: 1}, func(j *deepseekJSON, c *Config) error {
	switch {
	case j.Scoring != "" && j.Scoring != "softmax":
		return fmt.Errorf("scoring_func %.40q is not supported (softmax is)", j.Scoring)
	case j.Norm: // implementations disagree about what else it changes
		return errors.New("norm_topk_prob true is not supported for deepseek_v2")
	}
	c.Routing = SoftmaxTop
	switch j.Method {
	case "", "greedy":
		c.ExpertGroups, c.TopGroups = 0, 0
	case "group_limited_greedy":
	default:
		return fmt.Errorf("topk_method %.40q is not supported (greedy, group_limited_greedy are)", j.Method)
	}
	return nil
})

// deepseekV3 chooses experts by sigmoids with a bias that training has balanced them by.
var deepseekV3 = deepseek(Family{Name: "deepseek_v3", Class: "DeepseekV3ForCausalLM"}, deepseekJSON{Scale: 2.5, Norm: true}, func(j *deepseekJSON, c *Config) error {
	switch {
	case j.Scoring != "" && j.Scoring != "sigmoid":
		return fmt.Errorf("scoring_func %.40q is not supported (sigmoid is)", j.Scoring)
	case j.Method != "" && j.Method != "noaux_tc":
		return fmt.Errorf("topk_method %.40q is not supported (noaux_tc is)", j.Method)
	}
	c.Routing, c.NormExperts = SigmoidBias, j.Norm
	return nil
})

// deepseekJSON is what config.json has beyond a dense decoder's.
type deepseekJSON struct {
	QRank      *int    `json:"q_lora_rank"`
	KVRank     int     `json:"kv_lora_rank"`
	Nope       int     `json:"qk_nope_head_dim"`
	Rope       int     `json:"qk_rope_head_dim"`
	Value      int     `json:"v_head_dim"`
	Interleave *bool   `json:"rope_interleave"`
	Bias       bool    `json:"attention_bias"`
	Dense      int     `json:"first_k_dense_replace"`
	Every      *int    `json:"moe_layer_freq"`
	Experts    int     `json:"n_routed_experts"`
	Shared     int     `json:"n_shared_experts"`
	PerToken   int     `json:"num_experts_per_tok"`
	Width      int     `json:"moe_intermediate_size"`
	Groups     int     `json:"n_group"`
	TopGroups  int     `json:"topk_group"`
	Method     string  `json:"topk_method"`
	Scoring    string  `json:"scoring_func"`
	Norm       bool    `json:"norm_topk_prob"`
	Scale      float64 `json:"routed_scaling_factor"`
	Draft      int     `json:"num_nextn_predict_layers"`
	MTP        int     `json:"num_mtp_layers"` // the same, as transformers calls it
}

// deepseek completes f. Defaults stand for keys that config.json lacks, transformers' as in
// other families; route takes how experts are chosen, or says why they cannot be.
func deepseek(f Family, defaults deepseekJSON, route func(j *deepseekJSON, c *Config) error) Family {
	f.readHF = func(b []byte) (Config, error) {
		c, err := denseHF(b, denseJSON{HeadDim: new(0)})
		if err != nil {
			return Config{}, err
		}
		j := defaults
		j.QRank = new(1536) // null says that there is none
		if err := json.Unmarshal(b, &j); err != nil {
			return Config{}, err
		}
		if err := j.refuse(); err != nil {
			return Config{}, err
		}
		j.attention(&c)
		c.DraftLayers = cmp.Or(j.Draft, j.MTP)
		if j.Experts == 0 {
			return c, nil // every layer is dense
		}
		c.Experts, c.ExpertsPerToken, c.ExpertWidth = j.Experts, j.PerToken, j.Width
		c.DenseLayers, c.SharedExperts, c.RoutedScale = j.Dense, j.Shared, j.Scale
		c.ExpertGroups, c.TopGroups = j.Groups, j.TopGroups
		return c, route(&j, &c)
	}
	f.tensors = func(c *Config) []Tensor { return tensors(c, denseNames, deepseekMixed) }
	f.layer = func(c *Config, l int) (Attention, FeedForward) {
		if c.Experts == 0 || l < c.DenseLayers {
			return MLA, SwiGLU
		}
		return MLA, SharedMixture
	}
	return f
}

// refuse rejects what would silently be computed differently.
func (j *deepseekJSON) refuse() error {
	switch {
	case j.Bias:
		return errors.New("attention_bias true is not supported with latent attention")
	case j.Interleave != nil && !*j.Interleave:
		return errors.New("rope_interleave false is not supported (true is)")
	case j.Every != nil && *j.Every != 1:
		return fmt.Errorf("moe_layer_freq %d is not supported (1 is)", *j.Every)
	case !(j.Scale > 0):
		return fmt.Errorf("routed_scaling_factor %v is not positive", j.Scale)
	}
	return nil
}

func (j *deepseekJSON) attention(c *Config) {
	c.KVRank, c.NopeDim, c.RopeDim, c.ValueDim = j.KVRank, j.Nope, j.Rope, j.Value
	if j.QRank != nil {
		c.QRank = *j.QRank
	}
	c.KVHeads, c.HeadDim = 1, j.Nope+j.Rope
	if r := &c.Rope; r.Kind == "yarn" && r.MScaleAllDim != 0 {
		m := r.mscale(r.MScaleAllDim)
		c.ScoreScale = m * m / math.Sqrt(float64(c.HeadDim))
	}
}

// deepseekMixed are the names in layers that are mixtures.
var deepseekMixed = names{
	Router:     {"model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight"},
	RouterBias: {"model.layers.{}.mlp.gate.e_score_correction_bias", "blk.{}.exp_probs_b.bias"},
	SharedGate: {"model.layers.{}.mlp.shared_experts.gate_proj.weight", "blk.{}.ffn_gate_shexp.weight"},
	SharedUp:   {"model.layers.{}.mlp.shared_experts.up_proj.weight", "blk.{}.ffn_up_shexp.weight"},
	SharedDown: {"model.layers.{}.mlp.shared_experts.down_proj.weight", "blk.{}.ffn_down_shexp.weight"},
	Gate:       {"model.layers.{}.mlp.experts.[].gate_proj.weight", "blk.{}.ffn_gate_exps.weight"},
	Up:         {"model.layers.{}.mlp.experts.[].up_proj.weight", "blk.{}.ffn_up_exps.weight"},
	Down:       {"model.layers.{}.mlp.experts.[].down_proj.weight", "blk.{}.ffn_down_exps.weight"},
}

// latentTensors lists a layer's up to attention's output, whose width it returns.
func (c *Config) latentTensors(add func(r Role, shape ...int)) (width int) {
	if q := c.Heads * c.HeadDim; c.QRank > 0 {
		add(QA, c.QRank, c.Hidden)
		add(QANorm, c.QRank)
		add(QB, q, c.QRank)
	} else {
		add(Q, q, c.Hidden)
	}
	add(KVA, c.KVRank+c.RopeDim, c.Hidden)
	add(KVANorm, c.KVRank)
	add(KVB, c.Heads*(c.NopeDim+c.ValueDim), c.KVRank)
	return c.Heads * c.ValueDim
}
