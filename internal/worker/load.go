package worker

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// errNoCUDA answers --device cuda: this build has the CPU backend only.
var errNoCUDA = errors.New("device cuda: this build has no CUDA backend; use --device cpu")

// loadTokenizer makes the model's tokenizer, whatever kind of files it has.
func loadTokenizer(m *model.Model) (*tokenizer.Tokenizer, error) {
	if meta := m.GGUFMeta(); meta != nil {
		return tokenizer.FromGGUF(meta)
	}
	files, config, template := m.TokenizerFiles()
	if files == nil {
		return nil, fmt.Errorf("model %s has no tokenizer.json", m.Name)
	}
	tok, err := tokenizer.FromJSON(files, config)
	if err != nil || template == nil {
		return tok, err
	}
	return tok.WithChatTemplate(string(template)) // chat_template.jinja wins
}

// arch maps the reader's architecture to the backend's.
func arch(c *model.Config) kernels.Arch {
	return kernels.Arch{
		Layers: c.Layers, Hidden: c.Hidden, Intermediate: c.Intermediate,
		Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, Vocab: c.Vocab,
		MaxPositions: c.MaxPositions, NormEps: c.NormEps, RopeTheta: c.RopeTheta,
		Rope: kernels.RopeScaling(c.Rope), RopeFreqFactors: c.RopeFreqFactors,
		QKVBias: c.QKVBias, QKNorm: c.QKNorm, TiedHead: c.TiedHead,
	}
}

// weights maps tensor names to the backend's places. Absent ones stay empty;
// the reader has already checked that what the architecture needs is there.
func weights(m *model.Model) kernels.Weights {
	get := func(name string) kernels.Tensor {
		t, ok := m.Tensor(name)
		if !ok {
			return kernels.Tensor{}
		}
		return kernels.Tensor{DType: kernels.DType(t.DType), Shape: t.Shape, Data: t.Data}
	}
	w := kernels.Weights{
		Embed: get("model.embed_tokens.weight"), Norm: get("model.norm.weight"),
		Layers: make([]kernels.LayerWeights, m.Config.Layers),
	}
	if !m.Config.TiedHead {
		w.Head = get("lm_head.weight")
	}
	for i := range w.Layers {
		layer := func(name string) kernels.Tensor { return get(fmt.Sprintf("model.layers.%d.%s", i, name)) }
		w.Layers[i] = kernels.LayerWeights{
			AttnNorm: layer("input_layernorm.weight"), MLPNorm: layer("post_attention_layernorm.weight"),
			Q: layer("self_attn.q_proj.weight"), K: layer("self_attn.k_proj.weight"), V: layer("self_attn.v_proj.weight"),
			QBias: layer("self_attn.q_proj.bias"), KBias: layer("self_attn.k_proj.bias"), VBias: layer("self_attn.v_proj.bias"),
			QNorm: layer("self_attn.q_norm.weight"), KNorm: layer("self_attn.k_norm.weight"),
			O: layer("self_attn.o_proj.weight"), Gate: layer("mlp.gate_proj.weight"),
			Up: layer("mlp.up_proj.weight"), Down: layer("mlp.down_proj.weight"),
		}
	}
	return w
}

// newBackend puts the model on the device that cfg names.
func newBackend(cfg *Config, m *model.Model) (kernels.Backend, error) {
	if cfg.Device == "cuda" {
		return nil, errNoCUDA
	}
	a := arch(&m.Config)
	threads := cfg.Threads
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	blocks := cfg.Blocks
	if blocks == 0 {
		perToken := int64(2*4) * int64(a.Layers*a.KVHeads*a.HeadDim) // K and V rows, f32
		blocks = int(int64(cfg.KVMemory) / (perToken * int64(cfg.BlockTokens)))
		most := 64 * ((a.MaxPositions + cfg.BlockTokens - 1) / cfg.BlockTokens) // 64 whole contexts
		blocks = min(blocks, most)
	}
	if blocks < 1 {
		return nil, &config.KeyError{Key: "kv_memory", Msg: fmt.Sprintf("%d bytes hold no block of %d tokens", cfg.KVMemory, cfg.BlockTokens)}
	}
	b, err := cpu.New(a, weights(m), cpu.Options{Blocks: blocks, BlockTokens: cfg.BlockTokens, Threads: threads})
	if err != nil {
		return nil, fmt.Errorf("model %s: %w", m.Name, err)
	}
	return b, nil
}
