package arch

import (
	"strconv"
	"strings"
)

// Shared by decoders of the Llama kind: every layer is grouped-query attention and a
// SwiGLU, or a mixture of them, each with a norm before it.

// dense completes f: defaults stand for keys that config.json lacks; set, if not nil, sets
// what files of the family need not say.
func dense(f Family, defaults denseJSON, set func(*Config)) Family {
	if set == nil {
		set = func(*Config) {}
	}
	f.readHF = func(b []byte) (Config, error) {
		c, err := denseHF(b, defaults)
		set(&c)
		return c, err
	}
	f.readGGUF = func(m *metadata) Config {
		c := denseGGUF(m)
		if set(&c); c.ModelType == "" {
			m.onlyDense(&c)
		}
		return c
	}
	f.layer = func(*Config, int) (Attention, FeedForward) { return GQA, SwiGLU }
	if f.tensors == nil {
		f.tensors = denseTensors
	}
	return f
}

// names are tensors' names in Hugging Face and llama.cpp. {} is the layer, [] the expert.
type names map[Role]struct{ hf, gguf string }

var denseNames = names{
	Embed:        {"model.embed_tokens.weight", "token_embd.weight"},
	AttnNorm:     {"model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"},
	Q:            {"model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"},
	K:            {"model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"},
	V:            {"model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"},
	QBias:        {"model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias"},
	KBias:        {"model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias"},
	VBias:        {"model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias"},
	QNorm:        {"model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"},
	KNorm:        {"model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"},
	O:            {"model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"},
	MLPNorm:      {"model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"},
	Gate:         {"model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"},
	Up:           {"model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"},
	Down:         {"model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"},
	AttnPostNorm: {"model.layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight"},
	MLPPostNorm:  {"model.layers.{}.post_feedforward_layernorm.weight", "blk.{}.post_ffw_norm.weight"},
	QA:           {"model.layers.{}.self_attn.q_a_proj.weight", "blk.{}.attn_q_a.weight"},
	QANorm:       {"model.layers.{}.self_attn.q_a_layernorm.weight", "blk.{}.attn_q_a_norm.weight"},
	QB:           {"model.layers.{}.self_attn.q_b_proj.weight", "blk.{}.attn_q_b.weight"},
	KVA:          {"model.layers.{}.self_attn.kv_a_proj_with_mqa.weight", "blk.{}.attn_kv_a_mqa.weight"},
	KVANorm:      {"model.layers.{}.self_attn.kv_a_layernorm.weight", "blk.{}.attn_kv_a_norm.weight"},
	KVB:          {"model.layers.{}.self_attn.kv_b_proj.weight", "blk.{}.attn_kv_b.weight"},
	Norm:         {"model.norm.weight", "output_norm.weight"},
	Head:         {"lm_head.weight", "output.weight"},
}

func denseTensors(c *Config) []Tensor { return tensors(c, denseNames, denseNames) }

// tensors lists the model's: those of a mixture go by the names of mixed, all others by those of plain.
func tensors(c *Config, plain, mixed names) []Tensor {
	var ts []Tensor
	layer := 0
	put := func(p Place, of names, shape ...int) {
		name := strings.NewReplacer("{}", strconv.Itoa(p.Layer), "[]", strconv.Itoa(p.Expert)).Replace
		ts = append(ts, Tensor{Place: p, Name: name(of[p.Role].hf), GGUF: name(of[p.Role].gguf), Shape: shape})
	}
	add := func(r Role, shape ...int) { put(r.At(layer), plain, shape...) }
	expert := func(p Place, shape ...int) {
		put(p, mixed, shape...)
		ts[len(ts)-1].Stacked = c.Experts
	}
	q, kv := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	add(Embed, c.Vocab, c.Hidden)
	for layer = range c.Layers {
		add(AttnNorm, c.Hidden)
		if c.KVRank > 0 {
			q = c.latentTensors(add)
		} else {
			add(Q, q, c.Hidden)
			add(K, kv, c.Hidden)
			add(V, kv, c.Hidden)
		}
		if c.QKVBias {
			add(QBias, q)
			add(KBias, kv)
			add(VBias, kv)
		}
		if c.QKNorm {
			add(QNorm, c.HeadDim)
			add(KNorm, c.HeadDim)
		}
		add(O, c.Hidden, q)
		if c.PostNorms {
			add(AttnPostNorm, c.Hidden)
			add(MLPPostNorm, c.Hidden)
		}
		add(MLPNorm, c.Hidden)
		if c.Experts > 0 && layer >= c.DenseLayers {
			put(Router.At(layer), mixed, c.Experts, c.Hidden)
			if c.Routing == SigmoidBias {
				put(RouterBias.At(layer), mixed, c.Experts)
			}
			if width := c.SharedExperts * c.ExpertWidth; width > 0 {
				put(SharedGate.At(layer), mixed, width, c.Hidden)
				put(SharedUp.At(layer), mixed, width, c.Hidden)
				put(SharedDown.At(layer), mixed, c.Hidden, width)
			}
			for e := range c.Experts {
				expert(Gate.Of(layer, e), c.ExpertWidth, c.Hidden)
				expert(Up.Of(layer, e), c.ExpertWidth, c.Hidden)
				expert(Down.Of(layer, e), c.Hidden, c.ExpertWidth)
			}
			continue
		}
		add(Gate, c.Intermediate, c.Hidden)
		add(Up, c.Intermediate, c.Hidden)
		add(Down, c.Hidden, c.Intermediate)
	}
	layer = 0
	add(Norm, c.Hidden)
	if !c.TiedHead {
		add(Head, c.Vocab, c.Hidden)
	}
	return ts
}
