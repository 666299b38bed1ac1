package worker

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/gpustat"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// claim makes the GPU that the setting device names, if it names one, the only one that CUDA will show
// this process, and binds the process to the CPUs near it: before CUDA is opened, and before anything
// reads weights, which then come to memory near it. A process claims once: what CUDA has opened stays.
func claim(cfg *Config, list gpus.List, log *slog.Logger) error {
	d, err := gpus.ParseDevice(cfg.Device)
	if err != nil {
		return bad("device", "%v", err)
	}
	if len(d.GPUs) == 0 {
		return nil
	}
	m, err := gpus.Look(list, os.LookupEnv)
	if errors.Is(err, gpus.ErrNone) {
		err = fmt.Errorf("%w. %s", gpus.ErrNone, gpus.Lacks(list, os.Getenv(cuda.LibraryEnv)))
	}
	if err != nil {
		return bad("device", "%s: %v", d.GPUs[0], err)
	}
	g, err := m.Find(d.GPUs[0])
	if err != nil {
		return bad("device", "%v", err)
	}
	if err := os.Setenv(gpus.VisibleEnv, g.UUID); err != nil {
		return fmt.Errorf("set %s: %w", gpus.VisibleEnv, err)
	}
	bindTo(g.PCI, log)
	return nil
}

// isAt checks that the GPU which CUDA has opened, at that bus id, is the one that was claimed.
func isAt(named []gpus.Name, pci string, list gpus.List) error {
	if len(named) == 0 {
		return nil
	}
	m, err := gpus.Look(list, os.LookupEnv)
	if err != nil {
		return bad("device", "%s: %v", named[0], err)
	}
	g, err := m.Find(named[0])
	if err != nil {
		return bad("device", "%v", err)
	}
	if !gpus.SamePCI(pci, g.PCI) {
		return bad("device", "%s is at %s, and CUDA has opened the GPU at %s", named[0], g.PCI, pci)
	}
	return nil
}

// bindTo keeps this process on the CPUs of the GPU's NUMA node, if the machine has several. Without
// that it would still work, only slower.
func bindTo(pci string, log *slog.Logger) {
	sys := os.DirFS("/sys")
	cpus, err := gpus.Near(sys, pci)
	if err == nil && len(cpus) > 0 {
		var changed bool
		if changed, err = gpus.Bind(cpus); changed {
			log.Info("on the CPUs near the GPU", "pci", pci, "numa_node", gpus.NodeOf(sys, pci), "cpus", len(cpus))
		}
	}
	if err != nil {
		log.Warn("this process is not bound to the CPUs near its GPU", "pci", pci, "error", err)
	}
}

// whereIs is the bus id of the GPU that a backend computes on; "": it has none.
func whereIs(b kernels.Backend) string {
	if on, ok := b.(interface{ Memory() cuda.Memory }); ok {
		return on.Memory().PCI
	}
	return ""
}

// deviceAt describes the GPU at a bus id, by NVML if it can be asked.
func deviceAt(pci, model string, list gpus.List) fleet.Device {
	d := fleet.Device{PCI: pci, Model: model}
	m, err := gpus.Look(list, os.LookupEnv)
	if err != nil {
		return d
	}
	if g, ok := m.At(pci); ok {
		d.UUID, d.Model = g.UUID, g.Model
		if d.UUID != "" {
			d.Name = g.String()
		}
	}
	return d
}

// lacking adds to an error of somebody who wants a GPU what was looked for, if there is no CUDA.
func lacking(err error) error {
	if !errors.Is(err, cuda.ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w. %s", err, gpus.Lacks(gpustat.Cards, os.Getenv(cuda.LibraryEnv)))
}
