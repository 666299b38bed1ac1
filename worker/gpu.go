package worker

import (
	"fmt"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpustat"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// startGPU logs where the GPU's memory went and begins to watch it, if the model is on one.
// A GPU that cannot be watched is no failure.
func (w *Worker) startGPU() error {
	b, ok := w.backend.(interface{ Memory() cuda.Memory })
	if !ok {
		return nil
	}
	m := b.Memory()
	w.log.Info("GPU memory", "device", m.Device, "pci", m.PCI, "total_mib", m.Total>>20, "part", w.cfg.GPUMemory,
		"weights_mib", m.Weights>>20, "scratch_mib", m.Scratch>>20, "kv_mib", m.Pool>>20, "kv_tokens", w.backend.Blocks()*w.cfg.BlockTokens)
	if c, ok := w.backend.(interface{ Choices() string }); ok && c.Choices() != "" {
		w.log.Info("kernels of the projections", "choices", c.Choices())
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
