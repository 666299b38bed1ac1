package gpus_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/gpus/gpustest"
	"github.com/xpyd/xpyd/internal/gpustat"
)

// look is Look with a CUDA_VISIBLE_DEVICES; "-": it is not set.
func look(t *testing.T, list gpus.List, visible string, more ...string) *gpus.Machine {
	t.Helper()
	env := map[string]string{}
	if visible != "-" {
		env[gpus.VisibleEnv] = visible
	}
	for _, m := range more {
		key, v, _ := strings.Cut(m, "=")
		env[key] = v
	}
	m, err := gpus.Look(list, gpustest.Env(env))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestVisible: CUDA_VISIBLE_DEVICES hides GPUs and orders them as CUDA does.
func TestVisible(t *testing.T) {
	four := gpustest.FakeNVML(4, gpustest.Split(3, 2))
	f := func(visible, want string) {
		t.Helper()
		if got := fmt.Sprint(look(t, four, visible).Visible()); got != want {
			t.Errorf("%q: %s, want %s", visible, got, want)
		}
	}
	parts := "cuda:" + gpustest.PartUUID(3, 0) + " cuda:" + gpustest.PartUUID(3, 1)
	f("-", "[cuda:0 cuda:1 cuda:2 "+parts+"]")
	f("", "[]")
	f("-1", "[]")
	f("NoDevFiles", "[]")
	f("2,0", "[cuda:2 cuda:0]")
	f(" 1 , 2 ", "[cuda:1 cuda:2]")
	f("1,1,2", "[cuda:1 cuda:2]")
	f("1,9,2", "[cuda:1]") // as far as the first wrong one
	f("1,-1,2", "[cuda:1]")
	f(gpustest.UUID(2)+",0", "[cuda:2 cuda:0]")
	f("GPU-fa000001", "[cuda:1]") // its beginning is enough
	f("GPU-fa00000", "[]")        // of several
	f("GPU-", "[]")
	f("3", "["+parts+"]")
	f(gpustest.UUID(3), "["+parts+"]")
	f(gpustest.PartUUID(3, 1), "[cuda:"+gpustest.PartUUID(3, 1)+"]")
}

// TestMixedOrder: of different models CUDA's numbers are NVML's only if it is told to take the bus's
// order; UUIDs are the same always.
func TestMixedOrder(t *testing.T) {
	mixed := gpustest.FakeNVML(2, func(i int, c *gpustat.Card) { c.Name = fmt.Sprint("Model ", i) })
	_, err := gpus.Look(mixed, gpustest.Env(map[string]string{gpus.VisibleEnv: "1"}))
	if err == nil || !strings.Contains(err.Error(), "CUDA_DEVICE_ORDER=PCI_BUS_ID") {
		t.Error(err)
	}
	if got := fmt.Sprint(look(t, mixed, "1", "CUDA_DEVICE_ORDER=PCI_BUS_ID").Visible()); got != "[cuda:1]" {
		t.Error(got)
	}
	if got := fmt.Sprint(look(t, mixed, gpustest.UUID(1)).Visible()); got != "[cuda:1]" {
		t.Error(got)
	}
}

// TestForbidden: CUDA does not count GPUs that it may not use; NVML does.
func TestForbidden(t *testing.T) {
	second := gpustest.FakeNVML(3, func(i int, c *gpustat.Card) {
		if i == 1 {
			*c = gpustat.Card{Index: 1, Err: errors.New("no permission")}
		}
	})
	for visible, want := range map[string]string{"0": "[cuda:0]", "1": "[cuda:2]", "2": "[]", gpustest.UUID(2): "[cuda:2]", "-": "[cuda:0 cuda:2]"} {
		if got := fmt.Sprint(look(t, second, visible).Visible()); got != want {
			t.Errorf("%q: %s, want %s", visible, got, want)
		}
	}
}

func TestFind(t *testing.T) {
	lost := func(i int, c *gpustat.Card) {
		if i == 2 {
			*c = gpustat.Card{Index: 2, Err: errors.New("the GPU is lost")}
		}
	}
	machine := gpustest.FakeNVML(5, lost, gpustest.Split(3, 2), gpustest.Split(4, 0))
	f := func(visible, name, want, wrong string) {
		t.Helper()
		m := look(t, machine, visible)
		names, err := gpus.ParseNames(name)
		if err != nil {
			t.Fatal(err)
		}
		g, err := m.Find(names[0])
		if (err != nil) != (wrong != "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("%s of %q: %v, want %q", name, visible, err, wrong)
		}
		if err == nil && g.UUID != want {
			t.Errorf("%s of %q: %+v, want %s", name, visible, g, want)
		}
	}
	f("-", "cuda:1", gpustest.UUID(1), "")
	f("-", "cuda:"+gpustest.UUID(1), gpustest.UUID(1), "")
	f("-", "cuda:GPU-fa000001", gpustest.UUID(1), "")
	f("-", "cuda:"+gpustest.PartUUID(3, 1), gpustest.PartUUID(3, 1), "")
	f("1,0", "cuda:0", gpustest.UUID(0), "") // NVML's index, not CUDA's ordinal
	f("-", "cuda:5", "", "cuda:5: there is no such GPU; there are cuda:0, cuda:1, cuda:MIG-")
	f("-", "cuda:GPU-beef", "", "cuda:GPU-beef: no GPU has this UUID; there are cuda:0, cuda:1, ")
	f("-", "cuda:GPU-fa00000", "", "several GPUs have UUIDs that begin so")
	f("-", "cuda:2", "", "cuda:2: the GPU is lost")
	f("-", "cuda:3", "", "cuda:3 is split (MIG): name one of its parts, cuda:"+gpustest.PartUUID(3, 0)+", cuda:"+gpustest.PartUUID(3, 1))
	f("-", "cuda:"+gpustest.UUID(3), "", "is split (MIG)")
	f("-", "cuda:4", "", "cuda:4 is in MIG mode and has no parts")
	f("1", "cuda:0", "", "cuda:0: CUDA_VISIBLE_DEVICES=1 hides it; it leaves cuda:1 (Fake H100)")
	f("", "cuda:0", "", "cuda:0: CUDA_VISIBLE_DEVICES= hides it; CUDA_VISIBLE_DEVICES= hides every GPU")
	f(gpustest.PartUUID(3, 1), "cuda:"+gpustest.PartUUID(3, 0), "", "hides it; it leaves cuda:"+gpustest.PartUUID(3, 1))
}

func TestChoose(t *testing.T) {
	machine := gpustest.FakeNVML(3)
	f := func(visible, choice, want, wrong string) {
		t.Helper()
		c, err := gpus.ParseChoice(choice)
		if err != nil {
			t.Fatal(err)
		}
		list, err := look(t, machine, visible).Choose(c)
		if (err != nil) != (wrong != "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("%s of %q: %v, want %q", choice, visible, err, wrong)
		}
		if got := fmt.Sprint(list); err == nil && got != want {
			t.Errorf("%s of %q: %s, want %s", choice, visible, got, want)
		}
	}
	f("-", "all", "[cuda:0 cuda:1 cuda:2]", "")
	f("2,1", "all", "[cuda:2 cuda:1]", "")
	f("2,1", "1", "[cuda:2]", "")
	f("-", "2", "[cuda:0 cuda:1]", "")
	f("-", "cuda:2,cuda:0,cuda:2", "[cuda:2 cuda:0 cuda:2]", "")
	f("-", "", "[]", "")
	f("-", "4", "", "4 GPUs are too many: there are cuda:0, cuda:1, cuda:2 (Fake H100)")
	f("1", "2", "", "2 GPUs are too many: it leaves cuda:1")
	f("", "all", "", "CUDA_VISIBLE_DEVICES= hides every GPU")
	f("-", "cuda:0,cuda:7", "", "cuda:7: there is no such GPU")
}

// TestLookWithout: without NVML or GPUs there is no machine.
func TestLookWithout(t *testing.T) {
	if _, err := gpus.Look(gpustest.NoNVML, gpustest.Env(nil)); !errors.Is(err, gpustat.ErrUnavailable) || !errors.Is(err, gpus.ErrNone) {
		t.Error(err)
	}
	if _, err := gpus.Look(gpustest.FakeNVML(0), gpustest.Env(nil)); !errors.Is(err, gpus.ErrNone) {
		t.Error(err)
	}
	broken := gpustest.FakeNVML(1, func(_ int, c *gpustat.Card) { c.Err = errors.New("lost") })
	if _, err := look(t, broken, "-").Choose(gpus.Choice{All: true}); err == nil || !strings.Contains(err.Error(), "no GPU that CUDA can run on (cuda:0: lost)") {
		t.Error(err)
	}
}

// TestAt: the bus id that CUDA tells leads to NVML's GPU, and among several visible parts to none of them.
func TestAt(t *testing.T) {
	machine := gpustest.FakeNVML(3, gpustest.Split(2, 2))
	f := func(visible, pci, want string, is bool) {
		t.Helper()
		g, ok := look(t, machine, visible).At(pci)
		if ok != is || g.UUID != want {
			t.Errorf("%s of %q: %+v %v", pci, visible, g, ok)
		}
	}
	f("-", "0000:11:00.0", gpustest.UUID(1), true)
	f("-", "00000000:11:00.0", gpustest.UUID(1), true)
	f("-", "0000:12:00.0", "", true)
	f(gpustest.PartUUID(2, 1), "0000:12:00.0", gpustest.PartUUID(2, 1), true)
	f("0", "0000:11:00.0", "", false)
	f("-", "", "", false)
	if !gpus.SamePCI("0000:CA:00.0", "00000000:ca:00.0") || gpus.SamePCI("0001:ca:00.0", "0000:ca:00.0") || gpus.SamePCI("", "") {
		t.Error("bus ids are compared wrongly")
	}
}

// TestLacks: who gets no GPU hears what was looked for, and where.
func TestLacks(t *testing.T) {
	lib := filepath.Join(t.TempDir(), "libxpyd_cuda.so")
	f := func(list gpus.List, library string, want ...string) {
		t.Helper()
		got := gpus.Lacks(list, library)
		for _, w := range append(want, "Looked for GPUs", "CGO_ENABLED=1", "scripts/build-cuda") {
			if !strings.Contains(got, w) || strings.Contains(got, "\n") {
				t.Errorf("no %q in %q", w, got)
			}
		}
	}
	f(gpustest.NoNVML, lib, "libnvidia-ml.so.1 is not there", lib+": not there)")
	if err := os.WriteFile(lib, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f(gpustest.FakeNVML(2), lib, "it has 2, such as Fake H100", lib+": there)")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f(gpustest.FakeNVML(0), "", "it has no GPU", filepath.Join(filepath.Dir(self), "libxpyd_cuda.so")+": not there, else the loader's path")
}
