package model

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
)

// hfConfig is the part of config.json that decides what is computed.
type hfConfig struct {
	ModelType    string   `json:"model_type"`
	Vocab        int      `json:"vocab_size"`
	Hidden       int      `json:"hidden_size"`
	Intermediate int      `json:"intermediate_size"`
	Layers       int      `json:"num_hidden_layers"`
	Heads        int      `json:"num_attention_heads"`
	KVHeads      *int     `json:"num_key_value_heads"`
	HeadDim      *int     `json:"head_dim"`
	MaxPositions int      `json:"max_position_embeddings"`
	NormEps      *float64 `json:"rms_norm_eps"`
	RopeTheta    *float64 `json:"rope_theta"`
	RopeScaling  *hfRope  `json:"rope_scaling"`
	RopeParams   *hfRope  `json:"rope_parameters"`
	Tied         bool     `json:"tie_word_embeddings"`
	BOS          ids      `json:"bos_token_id"`
	EOS          ids      `json:"eos_token_id"`

	AttentionBias    *bool           `json:"attention_bias"`
	MLPBias          bool            `json:"mlp_bias"`
	Activation       string          `json:"hidden_act"`
	PartialRotary    *float64        `json:"partial_rotary_factor"`
	UseSliding       *bool           `json:"use_sliding_window"`
	SlidingWindow    *int            `json:"sliding_window"`
	Quantization     json.RawMessage `json:"quantization_config"`
	NoRopeLayers     json.RawMessage `json:"no_rope_layers"`
	LayerTypes       []string        `json:"layer_types"`
	ResidualMultiply *float64        `json:"residual_multiplier"`
}

// hfRope is rope_scaling or, since transformers 5, rope_parameters.
type hfRope struct {
	Type            string   `json:"rope_type"`
	LegacyType      string   `json:"type"`
	Theta           *float64 `json:"rope_theta"`
	PartialRotary   *float64 `json:"partial_rotary_factor"`
	Factor          float64  `json:"factor"`
	LowFreqFactor   float64  `json:"low_freq_factor"`
	HighFreqFactor  float64  `json:"high_freq_factor"`
	OriginalMaxPos  float64  `json:"original_max_position_embeddings"`
	AttentionFactor *float64 `json:"attention_factor"`
	BetaFast        *float64 `json:"beta_fast"`
	BetaSlow        *float64 `json:"beta_slow"`
	MScale          *float64 `json:"mscale"`
	MScaleAllDim    *float64 `json:"mscale_all_dim"`
	Truncate        *bool    `json:"truncate"`
}

// parseConfig reads config.json. Errors name the key.
func parseConfig(b []byte) (Config, error) {
	var h hfConfig
	// model_type first: another architecture's keys may have other types.
	var head struct {
		ModelType string `json:"model_type"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return Config{}, err
	}
	switch head.ModelType {
	case "llama", "smollm", "mistral", "qwen2", "qwen3":
	default:
		return Config{}, fmt.Errorf("model_type %.60q is not supported (llama, mistral without sliding window, qwen2, qwen3 are)", head.ModelType)
	}
	if err := json.Unmarshal(b, &h); err != nil {
		return Config{}, err
	}
	if err := h.refuse(); err != nil {
		return Config{}, err
	}
	c := Config{
		ModelType: h.ModelType, Layers: h.Layers, Hidden: h.Hidden, Intermediate: h.Intermediate,
		Heads: h.Heads, KVHeads: h.Heads, Vocab: h.Vocab, MaxPositions: h.MaxPositions,
		NormEps: 1e-6, RopeTheta: 10000, TiedHead: h.Tied, BOS: h.BOS, EOS: h.EOS,
	}
	if c.ModelType == "smollm" {
		c.ModelType = "llama"
	}
	c.QKNorm = c.ModelType == "qwen3"
	c.QKVBias = c.ModelType == "qwen2"
	if h.AttentionBias != nil && c.ModelType != "qwen2" {
		c.QKVBias = *h.AttentionBias
	}
	if h.KVHeads != nil {
		c.KVHeads = *h.KVHeads
	}
	switch {
	case h.HeadDim != nil:
		c.HeadDim = *h.HeadDim
	case c.ModelType == "qwen3":
		c.HeadDim = 128 // transformers' default
	case h.Heads > 0 && h.Hidden%h.Heads == 0:
		c.HeadDim = h.Hidden / h.Heads
	default:
		return Config{}, fmt.Errorf("head_dim is missing, and hidden_size %d is no multiple of num_attention_heads %d", h.Hidden, h.Heads)
	}
	if h.NormEps != nil {
		c.NormEps = float32(*h.NormEps)
	}
	if h.RopeTheta != nil {
		c.RopeTheta = *h.RopeTheta
	}
	r := h.RopeParams
	if r == nil {
		r = h.RopeScaling
	}
	if r != nil {
		if err := r.apply(&c); err != nil {
			return Config{}, err
		}
	}
	return c, c.validate()
}

// torchDType reads what config.json says of the type to compute in: dtype, which
// was torch_dtype before transformers 5. It is a hint: what is no name is none.
func torchDType(b []byte) string {
	var c struct {
		Old any `json:"torch_dtype"`
		New any `json:"dtype"`
	}
	if json.Unmarshal(b, &c) != nil {
		return ""
	}
	name, _ := c.New.(string)
	old, _ := c.Old.(string)
	return cmp.Or(name, old)
}

// refuse rejects what our decoder would silently compute differently.
func (h *hfConfig) refuse() error {
	switch {
	case h.Activation != "" && h.Activation != "silu" && h.Activation != "swish":
		return fmt.Errorf("hidden_act %.40q is not supported (silu is)", h.Activation)
	case h.MLPBias:
		return fmt.Errorf("mlp_bias is not supported")
	case set(h.NoRopeLayers):
		return fmt.Errorf("no_rope_layers is not supported")
	case h.PartialRotary != nil && *h.PartialRotary != 1:
		return fmt.Errorf("partial_rotary_factor %v is not supported", *h.PartialRotary)
	case h.ResidualMultiply != nil && *h.ResidualMultiply != 1:
		return fmt.Errorf("residual_multiplier %v is not supported", *h.ResidualMultiply)
	}
	if set(h.Quantization) {
		if err := checkQuantization(h.Quantization); err != nil {
			return err
		}
	}
	for _, kind := range h.LayerTypes {
		if kind != "full_attention" {
			return fmt.Errorf("layer_types: %.40q is not supported (full_attention is)", kind)
		}
	}
	// Mistral's window is in use when it is given; Qwen has a switch for it.
	window := h.ModelType == "mistral"
	if h.UseSliding != nil {
		window = *h.UseSliding
	}
	if window && h.SlidingWindow != nil && *h.SlidingWindow < h.MaxPositions {
		return fmt.Errorf("sliding_window %d below max_position_embeddings %d is not supported", *h.SlidingWindow, h.MaxPositions)
	}
	return nil
}

// set tells a value from an absent key and from null.
func set(m json.RawMessage) bool { return len(m) > 0 && !bytes.Equal(m, []byte("null")) }

// apply moves r into c. Like vLLM it takes max_position_embeddings as the
// length before stretching for linear and yarn, where nothing else is said.
func (r *hfRope) apply(c *Config) error {
	if r.Theta != nil {
		c.RopeTheta = *r.Theta
	}
	if r.PartialRotary != nil && *r.PartialRotary != 1 {
		return fmt.Errorf("rope_parameters: partial_rotary_factor %v is not supported", *r.PartialRotary)
	}
	kind := r.Type
	if kind == "" {
		kind = r.LegacyType
	}
	s := RopeScaling{Kind: kind, Factor: r.Factor}
	switch kind {
	case "", "default":
		return nil
	case "linear":
	case "llama3":
		s.LowFreqFactor, s.HighFreqFactor = r.LowFreqFactor, r.HighFreqFactor
	case "yarn":
		for _, f := range []struct {
			to   *float64
			from *float64
		}{{&s.AttentionFactor, r.AttentionFactor}, {&s.BetaFast, r.BetaFast}, {&s.BetaSlow, r.BetaSlow},
			{&s.MScale, r.MScale}, {&s.MScaleAllDim, r.MScaleAllDim}} {
			if f.from != nil {
				*f.to = *f.from
			}
		}
		s.NoTruncate = r.Truncate != nil && !*r.Truncate
		if r.OriginalMaxPos == 0 {
			r.OriginalMaxPos = float64(c.MaxPositions)
		}
	default:
		return fmt.Errorf("rope_scaling: type %.40q is not supported (linear, llama3, yarn are)", kind)
	}
	if kind != "linear" {
		if o := r.OriginalMaxPos; !(o >= 1 && o <= maxPositions) {
			return fmt.Errorf("rope_scaling: original_max_position_embeddings %v is not in 1..%d", o, maxPositions)
		}
		s.OriginalMaxPos = int(r.OriginalMaxPos)
	}
	if err := s.validate(); err != nil {
		return err
	}
	c.Rope = s
	stretched := 0.0
	switch kind {
	case "linear":
		stretched = float64(c.MaxPositions) * s.Factor
	case "yarn":
		stretched = float64(s.OriginalMaxPos) * s.Factor
	}
	c.MaxPositions = max(c.MaxPositions, int(math.Min(stretched, maxPositions)))
	return nil
}
