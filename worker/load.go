package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/gpustat"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kvlayout"
)

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

// newBackend puts the model on the device that cfg names; "auto" is a GPU if one can be used, else
// the CPU. ordinals are of claim; share asks for a pool that other processes can map.
func newBackend(cfg *Config, m *model.Model, ordinals []int, share bool, report func(model.Progress), log *slog.Logger) (kernels.Backend, error) {
	device, err := gpus.ParseDevice(cfg.Device)
	if err != nil {
		return nil, bad("device", "%v", err)
	}
	if err := cpu.CheckRanks(&m.Config, cfg.TensorParallel); err != nil { // nor could a GPU
		return nil, bad("tensor_parallel", "model %s: %v", m.Name, err)
	}
	if !device.CPU && !(device.Auto && len(ordinals) > cuda.MaxRanks) {
		b, err := newCUDA(cfg, m, ordinals, report)
		if err == nil {
			at := whereAre(b)
			if err = areAt(device.GPUs, at, gpustat.Cards); err != nil {
				return nil, errors.Join(err, b.Close())
			}
			bindTo(at[0], log) // as claim has done for one that is named
			return b, nil
		}
		// Nor would the CPU be what is meant, where there are GPUs and the model could be served there.
		several := len(ordinals) > 0 && !errors.Is(err, cuda.ErrAbsent) && !errors.Is(err, cuda.ErrUnserved)
		switch {
		case several && errors.Is(err, cuda.ErrUnavailable):
			return nil, bad("tensor_parallel", "%d ranks want as many GPUs; one that device names twice, as cuda:0,cuda:0, is shared by two ranks: %v", len(ordinals), lacking(err))
		case !device.Auto && errors.Is(err, cuda.ErrUnavailable):
			return nil, bad("device", "%v", lacking(err))
		case several || !device.Auto:
			return nil, lacking(err)
		}
		level := slog.LevelWarn
		if errors.Is(err, cuda.ErrAbsent) { // nobody said that there should be a GPU
			level = slog.LevelInfo
		}
		if cfg.DType != dtypeAuto {
			return nil, bad("dtype", "%s needs a GPU: %v", cfg.DType, err)
		}
		if cfg.KVCacheDType != kvAuto {
			return nil, bad("kv_cache_dtype", "%s needs a GPU: %v", cfg.KVCacheDType, err)
		}
		if cfg.Quantization == quantFP8 {
			return nil, bad("quantization", "%s needs a GPU: %v", cfg.Quantization, err)
		}
		log.Log(context.Background(), level, "device auto: taking the CPU", "reason", err)
	}
	a := m.Config
	blocks, err := poolBlocks(cfg, &a, cpu.KVDType, cmp.Or(int64(cfg.KVMemory), cpuMemory))
	if err != nil {
		return nil, err
	}
	b, err := cpu.New(a, m.Weights(false), cpu.Options{Blocks: blocks, BlockTokens: cfg.BlockTokens, Threads: cmp.Or(cfg.Threads, runtime.GOMAXPROCS(0)), Ranks: cfg.TensorParallel, Share: share})
	if err != nil {
		return nil, poolError(cfg, fmt.Errorf("model %s: %w", m.Name, err))
	}
	return b, nil
}

// Opened is a model on its device.
type Opened struct {
	Model   *model.Model
	Backend kernels.Backend
	Engine  engine.Config // how a worker would step it
}

// Open puts the model that cfg names on its device as Start does, for who measures it without a
// worker.
func Open(ctx context.Context, cfg *Config, log *slog.Logger, progress func(model.Progress)) (*Opened, error) {
	ordinals, err := claim(cfg, gpustat.Cards, log)
	if err != nil {
		return nil, err
	}
	m, err := model.Open(ctx, cfg.Model, model.Options{Log: log, Progress: progress})
	if err != nil {
		return nil, err
	}
	b, err := newBackend(cfg, m, ordinals, false, progress, log)
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return &Opened{Model: m, Backend: b, Engine: EngineConfig(cfg, b.Info().Name == "cuda")}, nil
}

// Close frees the device, and then the model.
func (o *Opened) Close() error { return errors.Join(o.Backend.Close(), o.Model.Close()) }

// watch ends the worker when a rank of the backend hangs.
func (w *Worker) watch() {
	b, ok := w.backend.(kernels.Watched)
	if !ok || b.Hung() == nil {
		return
	}
	w.wg.Go(func() {
		select {
		case err := <-b.Hung():
			w.log.Error("the worker ends", "error", err)
			w.fail(err)
		case <-w.ctx.Done():
		}
	})
}

// populate allocates all memory of a pool on the host now, so that a lack of it shows at start and
// not during a request.
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

// poolError turns the error of a pool that is too large for the machine into one of its setting.
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

// fp16 reports whether a GPU computes in fp16: if asked to, or if the checkpoint is fp16 and no
// setting lacks an fp16 form.
func fp16(cfg *Config, m *model.Model) bool {
	if cfg.DType != dtypeAuto {
		return cfg.DType == dtypeFP16
	}
	return m.TorchDType == "float16" && cfg.KVCacheDType == kvAuto && !fp8Weights(cfg, m)
}

// fp8Weights reports whether the layers' projections are kept in FP8: if asked to, or if the
// checkpoint has them in FP8 and batch_invariant does not rule it out.
func fp8Weights(cfg *Config, m *model.Model) bool {
	return cfg.Quantization == quantFP8 || m.StoredF8() && cfg.Quantization == quantAuto && !cfg.BatchInvariant
}

func newCUDA(cfg *Config, m *model.Model, ordinals []int, report func(model.Progress)) (kernels.Backend, error) {
	a := m.Config
	opt := cuda.Options{Devices: ordinals, BlockTokens: cfg.BlockTokens, Blocks: cfg.Blocks, MemoryPart: cfg.GPUMemory, BatchInvariant: cfg.BatchInvariant, KVFP8: cfg.KVCacheDType == kvFP8, WeightsFP8: fp8Weights(cfg, m), FP16: fp16(cfg, m),
		Tune: !cfg.BatchInvariant}
	if report != nil {
		opt.Loaded = func(done, total int64) { report(model.Progress{Phase: "load", What: m.Name, Done: done, Total: total}) }
	}
	if cache, err := os.UserCacheDir(); err == nil {
		opt.Choices = filepath.Join(cache, "xpyd", "projections")
	}
	steps := EngineConfig(cfg, true)
	opt.MaxTokens, opt.MaxSeqs = steps.MostTokens(), steps.MaxRunning
	if cfg.Blocks == 0 && cfg.KVMemory != 0 {
		var err error
		if opt.Blocks, err = poolBlocks(cfg, &a, opt.KVDType(), int64(cfg.KVMemory)); err != nil {
			return nil, err
		}
	}
	b, err := cuda.Open(a, m.Weights(opt.WeightsFP8), opt)
	if err != nil {
		return nil, fmt.Errorf("model %s: device %s: %w", m.Name, cfg.Device, err)
	}
	return b, nil
}

const cpuMemory = 256 << 20

// poolBlocks is the pool's size in blocks: as set, or as many of that dtype as size bytes hold; where
// nothing is set at most 64 whole contexts, since a tiny model fills no more.
func poolBlocks(cfg *Config, a *arch.Config, dtype kvlayout.DType, size int64) (int, error) {
	if cfg.Blocks != 0 {
		return cfg.Blocks, nil
	}
	ranks, err := kernels.Layout(a, cfg.BlockTokens, dtype).Ranks(cfg.TensorParallel)
	if err != nil {
		return 0, err
	}
	block := 0 // with the heads that several ranks keep
	for _, r := range ranks {
		block += r.BlockBytes()
	}
	blocks := int(size / int64(block))
	if cfg.KVMemory == 0 {
		blocks = min(blocks, 64*((a.MaxPositions+cfg.BlockTokens-1)/cfg.BlockTokens))
	}
	if blocks < 1 {
		return 0, bad("kv_memory", "%d bytes hold no block of %d tokens", size, cfg.BlockTokens)
	}
	return blocks, nil
}

// startGPU logs where the GPU's memory went and begins to watch the GPU, if the model is on one. A
// GPU that cannot be watched is no failure.
func (w *Worker) startGPU() error {
	b, ok := w.backend.(interface{ Memory() cuda.Memory })
	if !ok {
		return nil
	}
	m := b.Memory()
	w.devices = devicesAt(whereAre(w.backend), m.Device, gpustat.Cards)
	w.log.Info("GPU memory", "gpu", w.devices[0].Name, "device", m.Device, "pci", m.PCI, "total_mib", m.Total>>20, "part", w.cfg.GPUMemory,
		"weights_mib", m.Weights>>20, "scratch_mib", m.Scratch>>20, "kv_mib", m.Pool>>20, "kv_tokens", w.backend.Blocks()*w.cfg.BlockTokens)
	if c, ok := w.backend.(interface{ Choices() string }); ok && c.Choices() != "" {
		w.log.Info("kernels of the projections", "choices", c.Choices())
	}
	if e, ok := w.backend.(interface{ Exchange() string }); ok {
		w.log.Info("ranks exchange", "through", e.Exchange())
	}
	if s, ok := w.backend.(interface{ SlowProjections() []string }); ok && len(s.SlowProjections()) > 0 {
		w.log.Warn("batch_invariant: no fast kernel keeps the bits of these projections", "projections", s.SlowProjections())
	}
	dev, err := gpustat.Open(m.PCI)
	if err != nil {
		w.log.Info("the GPU's load, power and temperature are not shown", "reason", err)
		return nil
	}
	w.gpu = gpustat.Poll(dev, w.log)
	w.free("stop watching the GPU", w.gpu.Close)
	if err := w.registry.Register(w.gpu); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	return nil
}

// gpuLoad is the GPU's part of a heartbeat.
func (w *Worker) gpuLoad() fleet.GPU {
	s, ok := w.gpu.Latest()
	if !ok {
		return fleet.GPU{}
	}
	known := func(v float64) float64 {
		if v != v { // NaN, which JSON does not have
			return 0
		}
		return v
	}
	return fleet.GPU{Busy: known(s.Busy), MemoryUsed: int64(known(s.MemoryUsed)), MemoryTotal: int64(known(s.MemoryTotal)),
		Watts: known(s.Power), Celsius: known(s.Temperature)}
}
