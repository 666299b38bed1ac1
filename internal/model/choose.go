package model

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// TensorSpec is one tensor that an architecture needs.
type TensorSpec struct {
	Name  string // Hugging Face name
	Shape []int
}

// Tensors lists every tensor of c's architecture, in forward order.
func (c *Config) Tensors() []TensorSpec {
	q, kv := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	ws := []TensorSpec{{"model.embed_tokens.weight", []int{c.Vocab, c.Hidden}}}
	for l := range c.Layers {
		add := func(name string, shape ...int) {
			ws = append(ws, TensorSpec{"model.layers." + strconv.Itoa(l) + "." + name, shape})
		}
		add("input_layernorm.weight", c.Hidden)
		add("self_attn.q_proj.weight", q, c.Hidden)
		add("self_attn.k_proj.weight", kv, c.Hidden)
		add("self_attn.v_proj.weight", kv, c.Hidden)
		if c.QKVBias {
			add("self_attn.q_proj.bias", q)
			add("self_attn.k_proj.bias", kv)
			add("self_attn.v_proj.bias", kv)
		}
		if c.QKNorm {
			add("self_attn.q_norm.weight", c.HeadDim)
			add("self_attn.k_norm.weight", c.HeadDim)
		}
		add("self_attn.o_proj.weight", c.Hidden, q)
		add("post_attention_layernorm.weight", c.Hidden)
		add("mlp.gate_proj.weight", c.Intermediate, c.Hidden)
		add("mlp.up_proj.weight", c.Intermediate, c.Hidden)
		add("mlp.down_proj.weight", c.Hidden, c.Intermediate)
	}
	ws = append(ws, TensorSpec{"model.norm.weight", []int{c.Hidden}})
	if !c.TiedHead {
		ws = append(ws, TensorSpec{"lm_head.weight", []int{c.Vocab, c.Hidden}})
	}
	return ws
}

// stored is a tensor that a file offers, before it is known to be needed.
type stored struct {
	entry
	file string // for errors
	why  string // non-empty: it cannot be read, and why
}

// choose takes from have what c needs, checks shapes, and refuses tensors of
// a decoder layer that c's architecture would leave unused: a model that has
// them computes something else.
func (c *Config) choose(source string, have map[string]stored) (map[string]entry, error) {
	out := make(map[string]entry)
	for _, w := range c.Tensors() {
		s, ok := have[w.Name]
		switch {
		case !ok:
			return nil, fmt.Errorf("%s: tensor %s is missing", source, w.Name)
		case s.why != "":
			return nil, fmt.Errorf("%s: tensor %s: %s", s.file, w.Name, s.why)
		case !slices.Equal(s.shape, w.Shape):
			return nil, fmt.Errorf("%s: tensor %s has shape %v, the configuration needs %v", s.file, w.Name, s.shape, w.Shape)
		}
		if s.stored == storedF8 {
			scale, err := s.findScale(w.Name, have)
			if err != nil {
				return nil, err
			}
			out[w.Name+scaleSuffix] = scale // of the fingerprint, too
		}
		out[w.Name] = s.entry
	}
	if err := c.checkF8(source, out); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(have)) {
		if _, ok := out[name]; ok || !strings.HasPrefix(name, "model.layers.") || harmless.MatchString(name) {
			continue
		}
		s := have[name]
		if strings.HasSuffix(name, ".bias") && s.why == "" && zero(s.raw) {
			continue
		}
		return nil, fmt.Errorf("%s: tensor %s has no place in a %s decoder of %d layers: this architecture is not supported", s.file, name, c.ModelType, c.Layers)
	}
	return out, nil
}

// harmless names buffers that some exporters save: rotary tables are derived.
// Scales of activations and of KV in an FP8 checkpoint are found anew, a row at a
// time.
var harmless = regexp.MustCompile(`\.rotary_emb\.|\.masked_bias$|\.attn\.bias$|\.(input|output|k|v|q|kv)_scale$`)

func zero(b []byte) bool {
	return len(bytes.TrimLeft(b, "\x00")) == 0
}
