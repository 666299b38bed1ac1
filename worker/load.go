package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kvlayout"
)

// loadTokenizer makes the model's tokenizer, from GGUF or tokenizer.json.
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

// newBackend puts the model on the device that cfg names; "auto" is a GPU if one can be used,
// else the CPU. share asks for a pool that other processes can map.
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
	a := m.Config
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
	b, err := cpu.New(a, m.Weights(false), cpu.Options{Blocks: blocks, BlockTokens: cfg.BlockTokens, Threads: threads, Share: share})
	if err != nil {
		return nil, poolError(cfg, fmt.Errorf("model %s: %w", m.Name, err))
	}
	return b, nil
}

// populate takes all memory of a pool on the host now, so that a lack of it shows at start
// and not with a request.
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

// poolError adds to the error of a pool that is too large for the machine which key asked
// for it.
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

// fp16 reports whether a GPU computes in fp16: if asked to, or if the checkpoint is fp16 and
// nothing is asked for that has no fp16 form.
func fp16(cfg *Config, m *model.Model) bool {
	if cfg.DType != dtypeAuto {
		return cfg.DType == dtypeFP16
	}
	return m.TorchDType == "float16" && cfg.KVCacheDType == kvAuto && !fp8Weights(cfg, m)
}

// fp8Weights reports whether the layers' projections are kept in FP8: if asked for, or if the
// checkpoint has them so, unless batch_invariant rules FP8 out.
func fp8Weights(cfg *Config, m *model.Model) bool {
	return cfg.Quantization == quantFP8 || m.StoredF8() && cfg.Quantization == quantAuto && !cfg.BatchInvariant
}

func newCUDA(cfg *Config, m *model.Model) (kernels.Backend, error) {
	a := m.Config
	opt := cuda.Options{BlockTokens: cfg.BlockTokens, Blocks: cfg.Blocks, MemoryPart: cfg.GPUMemory, BatchInvariant: cfg.BatchInvariant, KVFP8: cfg.KVCacheDType == kvFP8, WeightsFP8: fp8Weights(cfg, m), FP16: fp16(cfg, m),
		Tune: !cfg.BatchInvariant}
	if cache, err := os.UserCacheDir(); err == nil {
		opt.Choices = filepath.Join(cache, "xpyd", "projections")
	}
	steps := engineConfig(cfg, true)
	opt.MaxTokens, opt.MaxSeqs = steps.MostTokens(), steps.MaxRunning
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
	b, err := cuda.New(a, m.Weights(opt.WeightsFP8), opt)
	if err != nil {
		return nil, fmt.Errorf("model %s: device cuda: %w", m.Name, err)
	}
	return b, nil
}

// cpuMemory is kv_memory on the CPU by default.
const cpuMemory = 256 << 20

// poolBlocks is the pool's size in blocks: as set, or what size bytes hold of rows of that
// dtype, at most 64 whole contexts.
func poolBlocks(cfg *Config, a *arch.Config, dtype kvlayout.DType, size int64) (int, error) {
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
