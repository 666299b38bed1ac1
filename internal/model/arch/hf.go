package arch

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
)

// ReadHF reads a Hugging Face config.json. Errors name the key.
func ReadHF(b []byte) (Config, error) {
	// model_type first: another architecture's keys may have other types.
	var head struct {
		ModelType string `json:"model_type"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return Config{}, err
	}
	f, err := find("model_type", head.ModelType, func(f *Family) []string { return append([]string{f.Name}, f.Also...) })
	if err != nil {
		return Config{}, err
	}
	c, err := f.readHF(b)
	if err != nil {
		return Config{}, err
	}
	c.ModelType = f.Name
	return c, c.Validate()
}

// denseJSON is the part of a dense decoder's config.json that decides what is
// computed.
type denseJSON struct {
	Vocab        int             `json:"vocab_size"`
	Hidden       int             `json:"hidden_size"`
	Intermediate int             `json:"intermediate_size"`
	Layers       int             `json:"num_hidden_layers"`
	Heads        int             `json:"num_attention_heads"`
	KVHeads      *int            `json:"num_key_value_heads"`
	HeadDim      *int            `json:"head_dim"`
	MaxPositions int             `json:"max_position_embeddings"`
	NormEps      float64         `json:"rms_norm_eps"`
	RopeTheta    float64         `json:"rope_theta"`
	Rope         json.RawMessage `json:"rope_scaling"`
	RopeParams   json.RawMessage `json:"rope_parameters"` // since transformers 5
	Tied         bool            `json:"tie_word_embeddings"`
	BOS          IDs             `json:"bos_token_id"`
	EOS          IDs             `json:"eos_token_id"`

	AttentionBias    bool            `json:"attention_bias"`
	MLPBias          bool            `json:"mlp_bias"`
	Activation       string          `json:"hidden_act"`
	PartialRotary    float64         `json:"partial_rotary_factor"`
	UseSliding       bool            `json:"use_sliding_window"`
	SlidingWindow    *int            `json:"sliding_window"`
	Quantization     json.RawMessage `json:"quantization_config"`
	NoRopeLayers     json.RawMessage `json:"no_rope_layers"`
	LayerTypes       []string        `json:"layer_types"`
	ResidualMultiply float64         `json:"residual_multiplier"`

	windows bool // the family reads layer_types itself
}

// denseHF reads a dense decoder. h holds the family's defaults for absent keys.
func denseHF(b []byte, h denseJSON) (Config, error) {
	h.NormEps, h.RopeTheta, h.PartialRotary, h.ResidualMultiply = 1e-6, 10000, 1, 1
	if h.HeadDim != nil {
		h.HeadDim = new(*h.HeadDim) // decoding writes through the pointer
	}
	if err := json.Unmarshal(b, &h); err != nil {
		return Config{}, err
	}
	if err := h.refuse(); err != nil {
		return Config{}, err
	}
	c := Config{
		Layers: h.Layers, Hidden: h.Hidden, Intermediate: h.Intermediate, Heads: h.Heads, KVHeads: h.Heads,
		Vocab: h.Vocab, MaxPositions: h.MaxPositions, NormEps: float32(h.NormEps), RopeTheta: h.RopeTheta,
		QKVBias: h.AttentionBias, TiedHead: h.Tied, BOS: h.BOS, EOS: h.EOS,
	}
	if h.KVHeads != nil {
		c.KVHeads = *h.KVHeads
	}
	switch {
	case h.HeadDim != nil:
		c.HeadDim = *h.HeadDim
	case h.Heads > 0 && h.Hidden%h.Heads == 0:
		c.HeadDim = h.Hidden / h.Heads
	default:
		return Config{}, fmt.Errorf("head_dim is missing, and hidden_size %d is not a multiple of num_attention_heads %d", h.Hidden, h.Heads)
	}
	rope, key := h.RopeParams, "rope_parameters"
	if !set(rope) {
		rope, key = h.Rope, "rope_scaling"
	}
	if set(rope) {
		if err := readRope(rope, &c); err != nil {
			return Config{}, fmt.Errorf("%s: %w", key, err)
		}
	}
	return c, nil
}

// refuse rejects what a dense decoder would silently compute differently.
func (h *denseJSON) refuse() error {
	switch {
	case !slices.Contains([]string{"", "silu", "swish"}, h.Activation):
		return fmt.Errorf("hidden_act %.40q is not supported (silu is)", h.Activation)
	case h.MLPBias:
		return fmt.Errorf("mlp_bias is not supported")
	case set(h.NoRopeLayers):
		return fmt.Errorf("no_rope_layers is not supported")
	case h.PartialRotary != 1:
		return fmt.Errorf("partial_rotary_factor %v is not supported", h.PartialRotary)
	case h.ResidualMultiply != 1:
		return fmt.Errorf("residual_multiplier %v is not supported", h.ResidualMultiply)
	case h.UseSliding && h.SlidingWindow != nil && *h.SlidingWindow < h.MaxPositions:
		return fmt.Errorf("sliding_window %d below max_position_embeddings %d is not supported", *h.SlidingWindow, h.MaxPositions)
	}
	for _, kind := range h.LayerTypes {
		if kind != "full_attention" && !h.windows {
			return fmt.Errorf("layer_types: %.40q is not supported (full_attention is)", kind)
		}
	}
	if set(h.Quantization) {
		return checkQuantization(h.Quantization)
	}
	return nil
}

// set reports whether a key is present and not null.
func set(m json.RawMessage) bool { return len(m) > 0 && !bytes.Equal(m, []byte("null")) }

// checkQuantization accepts the quantization_config of FP8 checkpoints. Their tensors are
// checked when they are read.
func checkQuantization(raw json.RawMessage) error {
	var q struct {
		Method string          `json:"quant_method"`
		Format string          `json:"format"`            // compressed-tensors
		Block  json.RawMessage `json:"weight_block_size"` // fp8
		Groups map[string]struct {
			Weights *struct {
				Bits      int    `json:"num_bits"`
				Type      string `json:"type"`
				Strategy  string `json:"strategy"`
				Symmetric *bool  `json:"symmetric"`
			} `json:"weights"`
		} `json:"config_groups"`
	}
	if err := json.Unmarshal(raw, &q); err != nil {
		return fmt.Errorf("quantization_config: %w", err)
	}
	switch q.Method {
	case "fp8":
		if set(q.Block) {
			var sides []int
			if json.Unmarshal(q.Block, &sides) != nil || !slices.Equal(sides, []int{128, 128}) {
				return fmt.Errorf("quantization_config: weight_block_size %.40s is not supported ([128, 128] is, and scales a tensor or a channel)", q.Block)
			}
		}
		return nil
	case "compressed-tensors":
		for name, g := range q.Groups {
			w := g.Weights
			if w == nil || w.Bits != 8 || w.Type != "float" || w.Strategy != "tensor" && w.Strategy != "channel" || w.Symmetric != nil && !*w.Symmetric {
				return fmt.Errorf("quantization_config: weights of %.40q are not supported (8 bits of type float, symmetric, a scale a tensor or a channel, are)", name)
			}
		}
		if len(q.Groups) > 0 && (q.Format == "" || q.Format == "float-quantized" || q.Format == "naive-quantized") {
			return nil
		}
	}
	return fmt.Errorf("quantization_config: quantised safetensors of method %.40q are not supported (F32, F16, BF16, and FP8 by \"fp8\" or \"compressed-tensors\" are; or a GGUF file)", q.Method)
}

// IDs is a token id or a list of them; null is none.
type IDs []int32

// UnmarshalJSON implements json.Unmarshaler.
func (v *IDs) UnmarshalJSON(b []byte) error {
	var list []int64
	var one *int64
	if err := json.Unmarshal(b, &one); err == nil {
		if one != nil {
			list = []int64{*one}
		}
	} else if err := json.Unmarshal(b, &list); err != nil {
		return fmt.Errorf("token id %.40q is neither a number nor a list of numbers", b)
	}
	*v = nil
	for _, id := range list {
		if id < 0 || id > math.MaxInt32 {
			return fmt.Errorf("token id %d is out of range", id)
		}
		*v = v.With(int32(id))
	}
	return nil
}

// With returns the ids with those of more that they lack.
func (v IDs) With(more ...int32) IDs {
	v = slices.Clone(v)
	for _, id := range more {
		if !slices.Contains(v, id) {
			v = append(v, id)
		}
	}
	return v
}
