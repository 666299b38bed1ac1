package model

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// RopeScaling selects how rotary frequencies are stretched. Kind is "",
// "linear", "llama3" or "yarn"; the fields follow the names of Hugging Face's
// config.json.
type RopeScaling struct {
	Kind            string
	Factor          float64
	LowFreqFactor   float64 // llama3
	HighFreqFactor  float64 // llama3
	OriginalMaxPos  int     // llama3, yarn
	AttentionFactor float64 // yarn; 0 means derived from Factor
	BetaFast        float64 // yarn; 0 means 32
	BetaSlow        float64 // yarn; 0 means 1
	MScale          float64 // yarn; 0 means unset
	MScaleAllDim    float64 // yarn; 0 means unset
	NoTruncate      bool    // yarn; truncate=false in config.json
}

// Config is the architecture of a Llama-family decoder, with its end ids.
type Config struct {
	ModelType    string // "llama", "mistral", "qwen2", "qwen3"
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
	// RopeFreqFactors, when set, has HeadDim/2 divisors of the rotary
	// frequencies (GGUF's rope_freqs.weight: Llama 3 scaling, precomputed).
	RopeFreqFactors []float32
	QKVBias         bool // Qwen2
	QKNorm          bool // Qwen3: RMSNorm over each head of q and k before RoPE
	TiedHead        bool // no lm_head.weight: the head is the embedding
	BOS             []int32
	EOS             []int32
}

// GenerationConfig holds generation_config.json's sampling defaults; nil means
// that the file does not say. Its end ids are merged into Config.EOS.
type GenerationConfig struct {
	Temperature       *float32 `json:"temperature"`
	TopP              *float32 `json:"top_p"`
	TopK              *int     `json:"top_k"`
	MinP              *float32 `json:"min_p"`
	RepetitionPenalty *float32 `json:"repetition_penalty"`
	EOS               []int32  `json:"-"`
	Ignored           []string `json:"-"` // keys with values out of range, which are left out
}

// Bounds of what is taken for a model at all. They keep every product of two
// or three of them inside an int64.
const (
	maxLayers    = 1 << 12
	maxWidth     = 1 << 20
	maxVocab     = 1 << 24
	maxPositions = 1 << 30
)

// validate checks ranges and divisibility; errors name the field.
func (c *Config) validate() error {
	for _, f := range []struct {
		name    string
		v, high int
	}{
		{"number of layers", c.Layers, maxLayers},
		{"hidden size", c.Hidden, maxWidth},
		{"intermediate size", c.Intermediate, maxWidth},
		{"number of attention heads", c.Heads, 1 << 16},
		{"number of key/value heads", c.KVHeads, 1 << 16},
		{"head dimension", c.HeadDim, 1 << 14},
		{"vocabulary size", c.Vocab, maxVocab},
		{"maximum position", c.MaxPositions, maxPositions},
	} {
		if f.v < 1 || f.v > f.high {
			return fmt.Errorf("%s %d is not in 1..%d", f.name, f.v, f.high)
		}
	}
	if c.Heads%c.KVHeads != 0 {
		return fmt.Errorf("%d attention heads are no multiple of %d key/value heads", c.Heads, c.KVHeads)
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
	if n := len(c.RopeFreqFactors); n != 0 && n != c.HeadDim/2 {
		return fmt.Errorf("%d rope frequency factors for head dimension %d", n, c.HeadDim)
	}
	for _, f := range c.RopeFreqFactors {
		if !(f > 0) || math.IsInf(float64(f), 0) {
			return fmt.Errorf("rope frequency factor %v is not positive", f)
		}
	}
	for _, id := range append(c.BOS[:len(c.BOS):len(c.BOS)], c.EOS...) {
		if id < 0 {
			return fmt.Errorf("token id %d is negative", id)
		}
	}
	return c.Rope.validate()
}

func (r *RopeScaling) validate() error {
	pos := func(name string, v float64) error {
		if !(v > 0) || math.IsInf(v, 0) {
			return fmt.Errorf("rope scaling %s: %s %v is not positive", r.Kind, name, v)
		}
		return nil
	}
	switch r.Kind {
	case "":
		return nil
	case "linear":
		return pos("factor", r.Factor)
	case "llama3":
		for _, err := range []error{pos("factor", r.Factor), pos("low_freq_factor", r.LowFreqFactor),
			pos("high_freq_factor", r.HighFreqFactor), pos("original_max_position_embeddings", float64(r.OriginalMaxPos))} {
			if err != nil {
				return err
			}
		}
		if r.HighFreqFactor <= r.LowFreqFactor {
			return fmt.Errorf("rope scaling llama3: high_freq_factor %v is not above low_freq_factor %v", r.HighFreqFactor, r.LowFreqFactor)
		}
		return nil
	case "yarn":
		for _, err := range []error{pos("factor", r.Factor), pos("original_max_position_embeddings", float64(r.OriginalMaxPos))} {
			if err != nil {
				return err
			}
		}
		for _, v := range []float64{r.AttentionFactor, r.BetaFast, r.BetaSlow, r.MScale, r.MScaleAllDim} {
			if !(v >= 0) || math.IsInf(v, 0) {
				return fmt.Errorf("rope scaling yarn: parameter %v is negative", v)
			}
		}
		return nil
	}
	return fmt.Errorf("rope scaling %q is not supported (linear, llama3, yarn are)", r.Kind)
}

// canonical is the Config's part of the fingerprint: one "key=value" line a
// field, in this order, those of zero value left out, so that a field added
// later does not change the fingerprint of models that lack it.
func (c *Config) canonical() string {
	var b strings.Builder
	str := func(k, v string) {
		if v != "" {
			b.WriteString(k + "=" + strconv.Quote(v) + "\n")
		}
	}
	num := func(k string, v float64) {
		if v != 0 {
			b.WriteString(k + "=" + strconv.FormatFloat(v, 'g', -1, 64) + "\n")
		}
	}
	flag := func(k string, v bool) {
		if v {
			b.WriteString(k + "=true\n")
		}
	}
	list := func(k string, v []int32) {
		if len(v) > 0 {
			b.WriteString(k + "=" + strings.Trim(fmt.Sprint(v), "[]") + "\n")
		}
	}
	str("model_type", c.ModelType)
	num("layers", float64(c.Layers))
	num("hidden", float64(c.Hidden))
	num("intermediate", float64(c.Intermediate))
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
	num("rope.original_max_pos", float64(c.Rope.OriginalMaxPos))
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
