package worker

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/gpustat"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// claim makes the GPUs that the setting device names, if it names any, the only ones that CUDA will show
// this process, and binds the process to the CPUs near the first: before CUDA is opened, and before anything
// reads weights, which then come to memory near it. It returns what CUDA then calls the GPU of each rank; nil
// for one rank. A process claims once: what CUDA has opened stays.
func claim(cfg *Config, list gpus.List, log *slog.Logger) (ordinals []int, err error) {
	d, err := gpus.ParseDevice(cfg.Device)
	if err != nil {
		return nil, bad("device", "%v", err)
	}
	if len(d.GPUs) == 0 {
		for i := range cfg.TensorParallel {
			ordinals = append(ordinals, i)
		}
		return severalOf(ordinals), nil
	}
	found, err := find(d.GPUs, list)
	if err != nil {
		return nil, err
	}
	var shown []string // in the order in which CUDA counts them
	for _, g := range found {
		at := slices.Index(shown, g.UUID)
		if at < 0 {
			at = len(shown)
			shown = append(shown, g.UUID)
		}
		ordinals = append(ordinals, at)
	}
	if len(shown) > 1 && slices.ContainsFunc(found, gpus.GPU.Part) {
		return nil, bad("device", "CUDA shows a process no more than one part of a GPU (MIG)")
	}
	if err := os.Setenv(gpus.VisibleEnv, strings.Join(shown, ",")); err != nil {
		return nil, fmt.Errorf("set %s: %w", gpus.VisibleEnv, err)
	}
	bindTo(found[0].PCI, log)
	return severalOf(ordinals), nil
}

// severalOf is nil for one rank.
func severalOf(ordinals []int) []int {
	if len(ordinals) < 2 {
		return nil
	}
	return ordinals
}

// find finds the GPUs of names.
func find(names []gpus.Name, list gpus.List) (found []gpus.GPU, err error) {
	m, err := gpus.Look(list, os.LookupEnv)
	if errors.Is(err, gpus.ErrNone) {
		err = fmt.Errorf("%w. %s", gpus.ErrNone, gpus.Lacks(list, os.Getenv(cuda.LibraryEnv)))
	}
	if err != nil {
		return nil, bad("device", "%s: %v", names[0], err)
	}
	for _, n := range names {
		g, err := m.Find(n)
		if err != nil {
			return nil, bad("device", "%v", err)
		}
		found = append(found, g)
	}
	return found, nil
}

// areAt checks that the GPUs which CUDA has opened, at these bus ids by rank, are those that were claimed.
func areAt(named []gpus.Name, pci []string, list gpus.List) error {
	if len(named) == 0 {
		return nil
	}
	found, err := find(named, list)
	if err != nil {
		return err
	}
	for i, g := range found {
		if i >= len(pci) || !gpus.SamePCI(pci[i], g.PCI) {
			return bad("device", "%s is at %s, and CUDA has opened the GPUs at %s", named[i], g.PCI, strings.Join(pci, ", "))
		}
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

// whereAre are the bus ids of the GPUs that a backend's ranks compute on; none: it has none.
func whereAre(b kernels.Backend) []string {
	if on, ok := b.(interface{ PCI() []string }); ok {
		return on.PCI()
	}
	return nil
}

// devicesAt describes the GPUs at bus ids, by NVML if it can be asked.
func devicesAt(pci []string, model string, list gpus.List) (devices []fleet.Device) {
	m, err := gpus.Look(list, os.LookupEnv)
	for _, at := range pci {
		d := fleet.Device{PCI: at, Model: model}
		if err == nil {
			if g, ok := m.At(at); ok {
				d.UUID, d.Model = g.UUID, g.Model
				if d.UUID != "" {
					d.Name = g.String()
				}
			}
		}
		devices = append(devices, d)
	}
	return devices
}

// lacking adds to an error of somebody who wants a GPU what was looked for, if there is no CUDA.
func lacking(err error) error {
	if !errors.Is(err, cuda.ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w. %s", err, gpus.Lacks(gpustat.Cards, os.Getenv(cuda.LibraryEnv)))
}
