package gpus_test

import (
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/gpus/gpustest"
)

func TestNear(t *testing.T) {
	f := func(name string, sys fs.FS, want string, pci ...string) {
		t.Helper()
		cpus, err := gpus.Near(sys, pci...)
		if got := fmt.Sprint(cpus); err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, want)
		}
	}
	two := []string{"0-1,8-9", "2-3,10"}
	f("node 0", gpustest.FakeSys(two, 0, 1), "[0 1 8 9]", gpustest.PCI(0))
	f("node 1", gpustest.FakeSys(two, 0, 1), "[2 3 10]", gpustest.PCI(1))
	f("NVML's and CUDA's bus ids", gpustest.FakeSys(two, 0, 1), "[2 3 10]", "00000000:11:00.0")
	f("two GPUs of two nodes", gpustest.FakeSys(two, 0, 1), "[0 1 2 3 8 9 10]", gpustest.PCI(0), gpustest.PCI(1))
	f("two of one", gpustest.FakeSys(two, 1, 1), "[2 3 10]", gpustest.PCI(0), gpustest.PCI(1))
	f("one node", gpustest.FakeSys([]string{"0-7"}, 0), "[]", gpustest.PCI(0))
	f("a second node without CPUs", gpustest.FakeSys([]string{"0-7", ""}, 0), "[]", gpustest.PCI(0))
	f("a GPU on a node without CPUs", gpustest.FakeSys([]string{"0-3", "4-7", ""}, 2), "[]", gpustest.PCI(0))
	f("a machine that does not tell", gpustest.FakeSys(two, -1), "[]", gpustest.PCI(0))
	f("a GPU that is not there", gpustest.FakeSys(two), "[]", gpustest.PCI(0))
	f("one of two that is not", gpustest.FakeSys(two, 0), "[]", gpustest.PCI(0), gpustest.PCI(1))
	f("no bus id", gpustest.FakeSys(two, 0), "[]", "")
	f("a bus id that leads elsewhere", gpustest.FakeSys(two, 0), "[]", "0000:../../x")
	f("no sysfs", fstest.MapFS{}, "[]", gpustest.PCI(0))

	for _, wrong := range []string{"x", "1-", "-1", "3-1", "1,,2", "0-70000", strings.Repeat("0-65535,", 2) + "1"} {
		if cpus, err := gpus.Near(gpustest.FakeSys([]string{wrong, "1"}, 0), gpustest.PCI(0)); err == nil || !strings.Contains(err.Error(), "node0/cpulist") {
			t.Errorf("%q: %v, %v", wrong, cpus, err)
		}
	}
}
