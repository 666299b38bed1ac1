package worker

import (
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/gpus/gpustest"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// TestClaim: the named GPU becomes the only one that CUDA shows this process; what cannot be is said
// in one line that names the setting, and changes nothing.
func TestClaim(t *testing.T) {
	machine := gpustest.FakeNVML(3, gpustest.Split(2, 2))
	f := func(visible, device string, list gpus.List, want, wrong string) {
		t.Helper()
		t.Setenv(gpus.VisibleEnv, visible)
		if visible == "-" {
			os.Unsetenv(gpus.VisibleEnv)
		}
		cfg := DefaultConfig(fleet.Decode)
		cfg.Device, cfg.TensorParallel = device, strings.Count(device, ",")+1
		_, err := claim(&cfg, list, slog.New(slog.DiscardHandler))
		now, set := os.LookupEnv(gpus.VisibleEnv)
		if wrong != "" {
			if err == nil || !strings.HasPrefix(err.Error(), "device: ") || !strings.Contains(err.Error(), wrong) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s of %q: %v, want %q", device, visible, err, wrong)
			}
			if set != (visible != "-") || set && now != visible {
				t.Errorf("%s of %q: then it is %q", device, visible, now)
			}
			return
		}
		if err != nil || now != want {
			t.Errorf("%s of %q: shown is %q, want %q, %v", device, visible, now, want, err)
		}
	}
	for _, unnamed := range []string{"auto", "cpu", "cuda"} {
		f("-", unnamed, gpustest.NoNVML, "", "") // nobody asks NVML
		f("1", unnamed, machine, "1", "")
	}
	f("-", "cuda:1", machine, gpustest.UUID(1), "")
	f("1,0", "cuda:0", machine, gpustest.UUID(0), "")
	f("-", "cuda:"+gpustest.UUID(1), machine, gpustest.UUID(1), "")
	f("2", "cuda:"+gpustest.PartUUID(2, 1), machine, gpustest.PartUUID(2, 1), "")
	f("-", "cuda:1,cuda:0", machine, gpustest.UUID(1)+","+gpustest.UUID(0), "")
	f("-", "cuda:1,cuda:1", machine, gpustest.UUID(1), "")
	f("-", "cuda:0,cuda:"+gpustest.PartUUID(2, 1), machine, "", "no more than one part of a GPU")
	f("-", "cuda:0,cuda:3", machine, "", "cuda:3: there is no such GPU")
	f("-", "cuda:3", machine, "", "cuda:3: there is no such GPU")
	f("1", "cuda:0", machine, "", "CUDA_VISIBLE_DEVICES=1 hides it")
	f("-", "cuda:2", machine, "", "is split (MIG)")
	f("-", "cuda:0", gpustest.NoNVML, "", "cuda:0: no GPU is found. Looked for GPUs of NVIDIA's driver (NVML is not available: libnvidia-ml.so.1 is not there)")
}

// TestOrdinals: by ranks, the numbers of their GPUs among those that CUDA is shown.
func TestOrdinals(t *testing.T) {
	f := func(device string, ranks int, want ...int) {
		t.Helper()
		t.Setenv(gpus.VisibleEnv, "0,1,2")
		cfg := DefaultConfig(fleet.Decode)
		cfg.Device, cfg.TensorParallel = device, ranks
		if got, err := claim(&cfg, gpustest.FakeNVML(3), slog.New(slog.DiscardHandler)); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s for %d ranks: %v, want %v, %v", device, ranks, got, want, err)
		}
	}
	f("cuda", 1)
	f("cuda:2", 1)
	f("auto", 3, 0, 1, 2)
	f("cuda", 2, 0, 1)
	f("cuda:2,cuda:0", 2, 0, 1)
	f("cuda:2,cuda:0,cuda:2,cuda:"+gpustest.UUID(0), 4, 0, 1, 0, 1)
}

// TestAreAt: what CUDA has opened is compared with what was claimed.
func TestAreAt(t *testing.T) {
	machine := gpustest.FakeNVML(3, gpustest.Split(2, 2))
	f := func(shown, device, pci, wrong string) {
		t.Helper()
		t.Setenv(gpus.VisibleEnv, shown)
		d, err := gpus.ParseDevice(device)
		if err != nil {
			t.Fatal(err)
		}
		if err = areAt(d.GPUs, strings.Fields(pci), machine); (err != nil) != (wrong != "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("%s at %s: %v, want %q", device, pci, err, wrong)
		}
	}
	f("1", "cuda", "0000:10:00.0", "") // nothing was claimed
	f(gpustest.UUID(1), "cuda:1", "00000000:11:00.0", "")
	f(gpustest.PartUUID(2, 1), "cuda:"+gpustest.PartUUID(2, 1), "0000:12:00.0", "")
	f(gpustest.UUID(1), "cuda:1", "0000:10:00.0", "device: cuda:1 is at 0000:11:00.0, and CUDA has opened the GPUs at 0000:10:00.0")
	f(gpustest.UUID(0), "cuda:1", "0000:10:00.0", "hides it")
	both := gpustest.UUID(1) + "," + gpustest.UUID(0)
	f(both, "cuda:1,cuda:0", "0000:11:00.0 0000:10:00.0", "")
	f(both, "cuda:1,cuda:0", "0000:11:00.0 0000:11:00.0", "device: cuda:0 is at 0000:10:00.0")
	f(both, "cuda:1,cuda:0", "0000:11:00.0", "device: cuda:0 is at 0000:10:00.0")
}

func TestDevicesAt(t *testing.T) {
	machine := gpustest.FakeNVML(2, gpustest.Split(1, 2))
	os.Unsetenv(gpus.VisibleEnv)
	f := func(pci string, list gpus.List, want fleet.Device) {
		t.Helper()
		if got := devicesAt([]string{pci, pci}, "Its name", list); !slices.Equal(got, []fleet.Device{want, want}) {
			t.Errorf("%+v, want %+v twice", got, want)
		}
	}
	f("00000000:10:00.0", machine, fleet.Device{Name: "cuda:0", UUID: gpustest.UUID(0), PCI: "00000000:10:00.0", Model: gpustest.Model})
	f("0000:11:00.0", machine, fleet.Device{PCI: "0000:11:00.0", Model: gpustest.Model + " MIG 1g.10gb"}) // which part is not known
	f("0000:99:00.0", machine, fleet.Device{PCI: "0000:99:00.0", Model: "Its name"})
	f("0000:10:00.0", gpustest.NoNVML, fleet.Device{PCI: "0000:10:00.0", Model: "Its name"})
	t.Setenv(gpus.VisibleEnv, gpustest.PartUUID(1, 1))
	f("0000:11:00.0", machine, fleet.Device{Name: "cuda:" + gpustest.PartUUID(1, 1), UUID: gpustest.PartUUID(1, 1), PCI: "0000:11:00.0", Model: gpustest.Model + " MIG 1g.10gb"})
}

// TestLacking: who wants a GPU and gets none hears what was looked for.
func TestLacking(t *testing.T) {
	other := errors.New("other")
	if err := lacking(other); err != other {
		t.Error(err)
	}
	err := lacking(cuda.ErrUnavailable)
	if !errors.Is(err, cuda.ErrUnavailable) || !strings.Contains(err.Error(), "libxpyd_cuda.so (") || !strings.Contains(err.Error(), "Looked for GPUs") {
		t.Error(err)
	}
}
