package arch

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Decoders of the Llama kind whose layers are mixtures of experts.

// mixtral scales the chosen experts' parts to sum to 1. Its experts are as wide as a dense layer.
// Its GGUF files call it a llama.
var mixtral = mixture(Family{Name: "mixtral", Class: "MixtralForCausalLM", tensors: func(c *Config) []Tensor {
	return paired(c, tensors(c, denseNames, names{
		Router: {"model.layers.{}.block_sparse_moe.gate.weight", "blk.{}.ffn_gate_inp.weight"},
		Gate:   {"model.layers.{}.block_sparse_moe.experts.[].w1.weight", "blk.{}.ffn_gate_exps.weight"},
		Up:     {"model.layers.{}.block_sparse_moe.experts.[].w3.weight", "blk.{}.ffn_up_exps.weight"},
		Down:   {"model.layers.{}.block_sparse_moe.experts.[].w2.weight", "blk.{}.ffn_down_exps.weight"},
	}))
}}, denseJSON{UseSliding: true}, func(b []byte, c *Config) error {
	var j struct {
		Experts  int `json:"num_local_experts"`
		PerToken int `json:"num_experts_per_tok"`
	}
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	c.Experts, c.ExpertsPerToken, c.ExpertWidth, c.NormExperts = j.Experts, j.PerToken, c.Intermediate, true
	return nil
})

var qwen3MoE = mixture(Family{Name: "qwen3_moe", Class: "Qwen3MoeForCausalLM", GGUF: "qwen3moe", tensors: func(c *Config) []Tensor {
	return tensors(c, denseNames, names{
		Router: {"model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight"},
		Gate:   {"model.layers.{}.mlp.experts.[].gate_proj.weight", "blk.{}.ffn_gate_exps.weight"},
		Up:     {"model.layers.{}.mlp.experts.[].up_proj.weight", "blk.{}.ffn_up_exps.weight"},
		Down:   {"model.layers.{}.mlp.experts.[].down_proj.weight", "blk.{}.ffn_down_exps.weight"},
	})
}}, denseJSON{}, func(b []byte, c *Config) error {
	var j struct {
		Experts  int   `json:"num_experts"`
		PerToken int   `json:"num_experts_per_tok"`
		Width    int   `json:"moe_intermediate_size"`
		Norm     bool  `json:"norm_topk_prob"`
		Step     *int  `json:"decoder_sparse_step"`
		Dense    []int `json:"mlp_only_layers"`
	}
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	if j.Step != nil && *j.Step != 1 || len(j.Dense) > 0 {
		return errors.New("decoder_sparse_step and mlp_only_layers: layers without experts are not supported")
	}
	c.QKNorm = true
	c.Experts, c.ExpertsPerToken, c.ExpertWidth, c.NormExperts = j.Experts, j.PerToken, j.Width, j.Norm
	return nil
})

// mixture completes f. Read takes what config.json has beyond a dense decoder's.
func mixture(f Family, defaults denseJSON, read func(configJSON []byte, c *Config) error) Family {
	f.readHF = func(b []byte) (Config, error) {
		c, err := denseHF(b, defaults)
		if err != nil {
			return Config{}, err
		}
		err = read(b, &c)
		return c, err
	}
	f.readGGUF = func(m *metadata) Config {
		c := denseGGUF(m)
		c.QKNorm, c.NormExperts = true, true // GGUF's qwen3moe; llama.cpp norms without being told
		return c
	}
	f.layer = func(*Config, int) (Attention, FeedForward) { return GQA, Mixture }
	return f
}

// experts reads a mixture's sizes; none are left zero.
func (m *metadata) experts(c *Config) {
	key := func(k string) string { return m.arch + ".expert_" + k }
	if c.Experts = m.count(key("count"), 0); c.Experts == 0 {
		return
	}
	c.ExpertsPerToken = m.count(key("used_count"), -1)
	c.ExpertWidth = m.count(key("feed_forward_length"), c.Intermediate)
	m.same(key("shared_count"), 0)
	m.same(key("group_count"), 0)
	m.same(key("gating_func"), 1) // softmax
}

// onlyDense refuses a mixture where there should be none.
func (m *metadata) onlyDense(c *Config) {
	if c.Experts > 0 {
		m.fail(m.arch+".expert_count", fmt.Errorf("%d is not supported here (0 is)", c.Experts))
	}
}
