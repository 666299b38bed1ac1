package arch

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
)

// gemma3 is the text model of Gemma 3: windows in all but every sixth layer, norms before and
// behind each half of a layer, and a scaled embedding.
var gemma3 = Family{Name: "gemma3_text", Class: "Gemma3ForCausalLM", GGUF: gemma3GGUF,
	readHF: readGemma3HF, readGGUF: readGemma3GGUF,
	tensors: func(c *Config) []Tensor { return tensors(c, gemma3Names, nil) },
	layer: func(c *Config, l int) (Attention, FeedForward) {
		if c.Window > 0 && c.FullEvery > 0 && (l+1)%c.FullEvery != 0 {
			return WindowGQA, GeGLU
		}
		return GQA, GeGLU
	}}

const gemma3GGUF = "gemma3"

// Its norm before the feed-forward has another name, as the usual one is that behind attention.
var gemma3Names = func() names {
	n := maps.Clone(denseNames)
	n[MLPNorm] = struct{ hf, gguf string }{"model.layers.{}.pre_feedforward_layernorm.weight", "blk.{}.ffn_norm.weight"}
	return n
}()

func gemma3Of(c Config) Config {
	c.QKNorm, c.PostNorms = true, true
	c.EmbedScale = float32(math.Sqrt(float64(c.Hidden)))
	return c
}

func readGemma3HF(b []byte) (Config, error) {
	var j struct {
		Activation  string                     `json:"hidden_activation"`
		Scalar      *float64                   `json:"query_pre_attn_scalar"`
		Window      *int                       `json:"sliding_window"`
		Pattern     *int                       `json:"sliding_window_pattern"`
		LayerTypes  []string                   `json:"layer_types"`
		LocalTheta  *float64                   `json:"rope_local_base_freq"`
		AttnSoftcap *float64                   `json:"attn_logit_softcapping"`
		Softcap     *float64                   `json:"final_logit_softcapping"`
		BothWays    bool                       `json:"use_bidirectional_attention"`
		Positions   int                        `json:"max_position_embeddings"`
		Rope        map[string]json.RawMessage `json:"rope_parameters"`
	}
	if err := json.Unmarshal(b, &j); err != nil {
		return Config{}, err
	}
	switch {
	case j.Activation != "" && j.Activation != "gelu_pytorch_tanh":
		return Config{}, fmt.Errorf("hidden_activation %.40q is not supported (gelu_pytorch_tanh is)", j.Activation)
	case j.AttnSoftcap != nil || j.Softcap != nil:
		return Config{}, errors.New("attn_logit_softcapping and final_logit_softcapping are not supported")
	case j.BothWays:
		return Config{}, errors.New("use_bidirectional_attention is not supported")
	}
	c, err := denseHF(b, denseJSON{HeadDim: new(256), Tied: true, windows: true})
	if err != nil {
		return Config{}, err
	}
	c = gemma3Of(c)
	c.NormsFromOne, c.MaxPositions = true, j.Positions // which scaled rotations are meant for
	scalar := 256.0
	if j.Scalar != nil {
		scalar = *j.Scalar
	}
	if !(scalar > 0) {
		return Config{}, fmt.Errorf("query_pre_attn_scalar %v is not positive", scalar)
	}
	if scalar != float64(c.HeadDim) {
		c.ScoreScale = 1 / math.Sqrt(scalar)
	}
	c.Window, c.FullEvery, c.WindowTheta = 4096, 6, 10000
	if j.Window != nil {
		c.Window = *j.Window
	}
	if j.Pattern != nil {
		c.FullEvery = *j.Pattern
	}
	if c.Window < 1 {
		return Config{}, fmt.Errorf("sliding_window %d is not positive", c.Window)
	}
	if c.FullEvery < 1 {
		return Config{}, fmt.Errorf("sliding_window_pattern %d is not positive", c.FullEvery)
	}
	if j.LocalTheta != nil {
		c.WindowTheta = *j.LocalTheta
	}
	if err := gemma3Rope(j.Rope, &c); err != nil {
		return Config{}, fmt.Errorf("rope_parameters: %w", err)
	}
	if len(j.LayerTypes) > 0 {
		c.FullEvery, err = fullEvery(j.LayerTypes, c.Layers)
	}
	return c, err
}

// gemma3Rope reads what transformers 5 writes: rotations by kind of layer.
func gemma3Rope(kinds map[string]json.RawMessage, c *Config) error {
	if full := kinds["full_attention"]; set(full) {
		if err := readRope(full, c); err != nil {
			return fmt.Errorf("full_attention: %w", err)
		}
	}
	if local := kinds["sliding_attention"]; set(local) {
		w := Config{RopeTheta: c.WindowTheta}
		if err := readRope(local, &w); err != nil {
			return fmt.Errorf("sliding_attention: %w", err)
		}
		if w.Rope.Kind != "" {
			return fmt.Errorf("sliding_attention: rope_type %.40q is not supported (default is)", w.Rope.Kind)
		}
		c.WindowTheta = w.RopeTheta
	}
	return nil
}

// fullEvery is the n for which every n-th layer attends to all positions and the others in windows.
func fullEvery(kinds []string, layers int) (int, error) {
	if len(kinds) != layers {
		return 0, fmt.Errorf("layer_types: %d for %d layers", len(kinds), layers)
	}
	every := layers + 1 // none
	for i, k := range kinds {
		if k == "full_attention" {
			every = i + 1
			break
		}
	}
	for i, k := range kinds {
		want := "sliding_attention"
		if (i+1)%every == 0 {
			want = "full_attention"
		}
		if k != want {
			return 0, fmt.Errorf("layer_types: layer %d is %.40q (full_attention in every %d. layer, sliding_attention in the others, is supported)", i, k, every)
		}
	}
	return every, nil
}

// readGemma3GGUF: llama.cpp's converter adds the 1 to the norms' weights.
func readGemma3GGUF(m *metadata) Config {
	c := gemma3Of(denseGGUF(m))
	m.onlyDense(&c)
	c.Window, c.FullEvery, c.WindowTheta = m.count(m.arch+".attention.sliding_window", -1), 6, 10000
	if c.Layers == 62 { // the 27B, whose query_pre_attn_scalar files do not have: its width over its heads
		c.ScoreScale = 1 / math.Sqrt(float64(c.Hidden)/float64(max(1, c.Heads)))
	}
	return c
}
