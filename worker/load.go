package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kvlayout"
)

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
// Projections in FP8 stay so if fp8, and are widened else.
func weights(m *model.Model, fp8 bool) kernels.Weights {
	get := func(name string) kernels.Tensor {
		if t, scale, ok := m.F8(name); ok && fp8 {
			return kernels.Tensor{DType: kernels.F8, Shape: t.Shape, Data: t.Data, Scale: scale}
		}
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

// newBackend puts the model on the device that cfg names. "auto" takes a GPU
// where there is one that can be used, else the CPU, and says so. share asks
// for a pool that other processes can map.
func newBackend(cfg *Config, m *model.Model, share bool, log *slog.Logger) (kernels.Backend, error) {
	if cfg.Device != "cpu" {
		b, err := newCUDA(cfg, m)
		if err == nil || cfg.Device == "cuda" {
			return b, err
		}
		level := slog.LevelWarn
		if errors.Is(err, cuda.ErrAbsent) { // nobody has said that there should be a GPU
			level = slog.LevelInfo
		}
		if cfg.DType != dtypeAuto {
			return nil, fmt.Errorf("dtype %s needs a GPU: %w", cfg.DType, err)
		}
		if cfg.KVCacheDType != kvAuto {
			return nil, fmt.Errorf("kv_cache_dtype %s needs a GPU: %w", cfg.KVCacheDType, err)
		}
		if cfg.Quantization == quantFP8 {
			return nil, fmt.Errorf("quantization %s needs a GPU: %w", cfg.Quantization, err)
		}
		log.Log(context.Background(), level, "device auto: taking the CPU", "reason", err)
	}
	a := arch(&m.Config)
	threads := cfg.Threads
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	size := int64(cfg.KVMemory)
	if size == 0 {
		size = cpuMemory
	}
	blocks, err := poolBlocks(cfg, &a, kvlayout.F32, size)
	if err != nil {
		return nil, err
	}
	b, err := cpu.New(a, weights(m, false), cpu.Options{Blocks: blocks, BlockTokens: cfg.BlockTokens, Threads: threads, Share: share})
	if err != nil {
		return nil, poolError(cfg, fmt.Errorf("model %s: %w", m.Name, err))
	}
	return b, nil
}

// populate takes the memory of a pool that is the host's, so that no request is the
// first to learn that the machine has less.
func (w *Worker) populate(ctx context.Context) error {
	pool, ok := w.backend.(interface{ Populate(context.Context) error })
	if !ok {
		return nil
	}
	if size := w.poolBytes(); size >= 1<<30 {
		w.log.Info("taking memory for the KV pool", "bytes", config.Size(size).String())
	}
	return poolError(&w.cfg, pool.Populate(ctx))
}

// poolError is err; of a pool that the machine has no memory for, with the key that
// has made it so large.
func poolError(cfg *Config, err error) error {
	var large *cpu.PoolError
	if !errors.As(err, &large) {
		return err
	}
	key := "kv_memory"
	if cfg.Blocks != 0 {
		key = "blocks"
	}
	return bad(key, "%s", large)
}

// fp16 tells whether a GPU computes in fp16: as asked, and where the checkpoint's
// makers do and nothing is asked for that has no fp16 form.
func fp16(cfg *Config, m *model.Model) bool {
	if cfg.DType != dtypeAuto {
		return cfg.DType == dtypeFP16
	}
	return m.TorchDType == "float16" && cfg.KVCacheDType == kvAuto && !fp8Weights(cfg, m)
}

// fp8Weights tells whether the layers' projections are kept in FP8: as asked, and
// where the checkpoint has them so and the promise of equal bits, which FP8 has
// not, is not asked for.
func fp8Weights(cfg *Config, m *model.Model) bool {
	_, _, stored := m.F8("model.layers.0.self_attn.q_proj.weight")
	return cfg.Quantization == quantFP8 || stored && cfg.Quantization == quantAuto && !cfg.BatchInvariant
}

func newCUDA(cfg *Config, m *model.Model) (kernels.Backend, error) {
	a := arch(&m.Config)
	opt := cuda.Options{BlockTokens: cfg.BlockTokens, Blocks: cfg.Blocks, MemoryPart: cfg.GPUMemory, BatchInvariant: cfg.BatchInvariant, KVFP8: cfg.KVCacheDType == kvFP8, WeightsFP8: fp8Weights(cfg, m), FP16: fp16(cfg, m),
		MaxSeqs: cfg.MaxBatch}
	steps := engineConfig(cfg, &a, true)
	opt.MaxTokens = steps.MostTokens()
	if cfg.Blocks == 0 && cfg.KVMemory != 0 {
		dtype := kvlayout.BF16
		if opt.KVFP8 {
			dtype = kvlayout.F8E4M3
		}
		var err error
		if opt.Blocks, err = poolBlocks(cfg, &a, dtype, int64(cfg.KVMemory)); err != nil {
			return nil, err
		}
	}
	b, err := cuda.New(a, weights(m, opt.WeightsFP8), opt)
	if err != nil {
		return nil, fmt.Errorf("model %s: device cuda: %w", m.Name, err)
	}
	return b, nil
}

// cpuMemory is what kv_memory is on the CPU when nobody says.
const cpuMemory = 256 << 20

// poolBlocks is the pool's size: as set, or what size bytes hold of rows of that
// dtype, at most 64 whole contexts.
func poolBlocks(cfg *Config, a *kernels.Arch, dtype kvlayout.DType, size int64) (int, error) {
	if cfg.Blocks != 0 {
		return cfg.Blocks, nil
	}
	block := kvlayout.Plain(a.Layers, a.KVHeads, a.HeadDim, cfg.BlockTokens, dtype).BlockBytes()
	blocks := int(size / int64(block))
	blocks = min(blocks, 64*((a.MaxPositions+cfg.BlockTokens-1)/cfg.BlockTokens))
	if blocks < 1 {
		return 0, &config.KeyError{Key: "kv_memory", Msg: fmt.Sprintf("%d bytes hold no block of %d tokens", size, cfg.BlockTokens)}
	}
	return blocks, nil
}
