// Package gpustest has a fake NVML and a fake sysfs, for tests on machines without a GPU.
package gpustest

import (
	"fmt"
	"io/fs"
	"testing/fstest"

	"github.com/xpyd/xpyd/internal/gpustat"
)

// Model is that of FakeNVML's GPUs.
const Model = "Fake H100"

// UUID is that of FakeNVML's i-th GPU; PCI is its bus id.
func UUID(i int) string { return fmt.Sprintf("GPU-%08x-0000-0000-0000-000000000000", 0xfa000000+i) }

// PCI is the bus id of FakeNVML's i-th GPU.
func PCI(i int) string { return fmt.Sprintf("0000:%02x:00.0", 0x10+i) }

// PartUUID is that of the j-th part of FakeNVML's i-th GPU, if that is split.
func PartUUID(i, j int) string {
	return fmt.Sprintf("MIG-%08x-%04x-0000-0000-000000000000", 0xfa000000+i, j)
}

// FakeNVML lists n fake GPUs. change may change each.
func FakeNVML(n int, change ...func(i int, c *gpustat.Card)) func() ([]gpustat.Card, error) {
	return func() ([]gpustat.Card, error) {
		var list []gpustat.Card
		for i := range n {
			c := gpustat.Card{Index: i, UUID: UUID(i), Name: Model, PCI: PCI(i)}
			for _, f := range change {
				f(i, &c)
			}
			list = append(list, c)
		}
		return list, nil
	}
}

// Split puts FakeNVML's i-th GPU in MIG mode, with so many parts.
func Split(i, parts int) func(int, *gpustat.Card) {
	return func(at int, c *gpustat.Card) {
		if at != i {
			return
		}
		c.Split = true
		for j := range parts {
			c.Parts = append(c.Parts, gpustat.Part{UUID: PartUUID(i, j), Name: Model + " MIG 1g.10gb"})
		}
	}
}

// NoNVML is a machine without the driver's library.
func NoNVML() ([]gpustat.Card, error) {
	return nil, fmt.Errorf("%w: libnvidia-ml.so.1 is not there", gpustat.ErrUnavailable)
}

// Env is an environment for gpus.Look.
func Env(vars map[string]string) func(string) (string, bool) {
	return func(key string) (string, bool) {
		v, ok := vars[key]
		return v, ok
	}
}

// FakeSys is the sysfs of a machine: cpus are each NUMA node's, as the kernel writes them, and nodes
// are those of FakeNVML's GPUs.
func FakeSys(cpus []string, nodes ...int) fs.FS {
	sys := fstest.MapFS{"devices/system/node/online": {Data: []byte("0\n")}}
	for n, list := range cpus {
		sys[fmt.Sprintf("devices/system/node/node%d/cpulist", n)] = &fstest.MapFile{Data: []byte(list + "\n")}
	}
	for i, n := range nodes {
		sys["bus/pci/devices/"+PCI(i)+"/numa_node"] = &fstest.MapFile{Data: []byte(fmt.Sprintf("%d\n", n))}
	}
	return sys
}
