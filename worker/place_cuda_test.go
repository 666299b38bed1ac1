//go:build cuda && cgo && linux

package worker_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/gpustat"
	"github.com/xpyd/xpyd/worker"
)

// TestNamedGPU: a worker is on the GPU that it was told, and says so; its threads are on the CPUs near
// that, where there are several nodes; another GPU is hidden from it then. It runs in a process of its
// own, in which CUDA is not yet open.
func TestNamedGPU(t *testing.T) {
	m, err := gpus.Look(gpustat.Cards, os.LookupEnv)
	if err != nil {
		t.Fatal(err)
	}
	all := m.Visible()
	g := all[len(all)-1]
	w := start(t, func(c *worker.Config) { c.Device, c.GPUMemory, c.KVMemory = g.String(), 0.3, 64<<20 })
	i := w.Instance()
	if len(i.Devices) != 1 || !gpus.SamePCI(i.Devices[0].PCI, g.PCI) {
		t.Fatalf("%+v, want %+v", i.Devices, g)
	}
	if want := (fleet.Device{Name: g.String(), UUID: g.UUID, PCI: i.Devices[0].PCI, Model: g.Model}); i.Devices[0] != want {
		t.Errorf("%+v, want %+v", i.Devices[0], want)
	}
	if a := complete(t, w, nil, `{"prompt":"Once upon a time","max_tokens":20,"temperature":0}`); !strings.Contains(a.Choices[0].Text, "there was a little girl named Lily") {
		t.Errorf("%+v", a)
	}
	if near, err := gpus.Near(os.DirFS("/sys"), g.PCI); err != nil {
		t.Error(err)
	} else if changed, err := gpus.Bind(near); changed || err != nil {
		t.Errorf("the process was not on the CPUs near its GPU, %v (%v)", near, err)
	}
	files, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]int{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		for line := range strings.Lines(string(b)) {
			if v, ok := strings.CutPrefix(line, "Cpus_allowed_list:"); ok {
				by[strings.TrimSpace(v)]++
			}
		}
	}
	if t.Logf("%s at %s; threads by their CPUs: %v", g, g.PCI, by); len(by) != 1 {
		t.Errorf("threads by the CPUs on which they may run: %v", by)
	}
	if again, err := gpus.Look(gpustat.Cards, os.LookupEnv); err != nil || len(again.Visible()) != 1 {
		t.Errorf("CUDA shows %v, %v", again.Visible(), err)
	}
}
