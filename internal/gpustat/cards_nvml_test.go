//go:build cgo && linux

package gpustat

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// fakeNVML lists fakeCards; a nil one cannot be opened.
type fakeNVML struct {
	list  []*fakeCard
	count nvml.Return
}

func (f fakeNVML) DeviceGetCount() (int, nvml.Return) { return len(f.list), f.count }
func (f fakeNVML) DeviceGetHandleByIndex(i int) (nvml.Device, nvml.Return) {
	if f.list[i] == nil {
		return nil, nvml.ERROR_GPU_IS_LOST
	}
	return f.list[i], nvml.SUCCESS
}

// fakeCard answers as a GPU, or as a part of one; what is in refuse fails.
type fakeCard struct {
	nvml.Device // what is not asked for
	uuid, name  string
	bus         uint32
	mig         int
	parts       []*fakeCard // nil: a gap
	refuse      map[string]nvml.Return
}

func (c *fakeCard) GetUUID() (string, nvml.Return) { return c.uuid, c.refuse["uuid"] }
func (c *fakeCard) GetName() (string, nvml.Return) { return c.name, c.refuse["name"] }
func (c *fakeCard) GetPciInfo() (nvml.PciInfo, nvml.Return) {
	return nvml.PciInfo{Domain: 1, Bus: c.bus}, c.refuse["pci"]
}
func (c *fakeCard) GetMigMode() (now, pending int, r nvml.Return) {
	return c.mig, c.mig, c.refuse["mig"]
}
func (c *fakeCard) GetMaxMigDeviceCount() (int, nvml.Return) { return len(c.parts), c.refuse["parts"] }
func (c *fakeCard) GetMigDeviceHandleByIndex(i int) (nvml.Device, nvml.Return) {
	if c.parts[i] == nil {
		return nil, nvml.ERROR_NOT_FOUND
	}
	return c.parts[i], c.refuse["part"]
}

func TestCards(t *testing.T) {
	const no = nvml.ERROR_NOT_SUPPORTED
	whole := &fakeCard{uuid: "GPU-a", name: "A GPU", bus: 0xca, refuse: map[string]nvml.Return{"mig": no}}
	split := &fakeCard{uuid: "GPU-b", name: "B", bus: 2, mig: nvml.DEVICE_MIG_ENABLE, parts: []*fakeCard{
		nil, {uuid: "MIG-1", name: "B MIG 1g.10gb"}, nil, {uuid: "MIG-2", refuse: map[string]nvml.Return{"name": no}}}}
	got, err := cards(fakeNVML{list: []*fakeCard{whole, nil, split}})
	if err != nil || len(got) != 3 {
		t.Fatal(got, err)
	}
	if got[1].Index != 1 || got[1].Err == nil || !strings.Contains(got[1].Err.Error(), "the GPU is lost") {
		t.Errorf("a lost GPU: %+v", got[1])
	}
	if want := (Card{Index: 0, UUID: "GPU-a", Name: "A GPU", PCI: "0001:ca:00.0"}); !reflect.DeepEqual(got[0], want) {
		t.Errorf("%+v, want %+v", got[0], want)
	}
	if want := (Card{Index: 2, UUID: "GPU-b", Name: "B", PCI: "0001:02:00.0", Split: true, Parts: []Part{{"MIG-1", "B MIG 1g.10gb"}, {"MIG-2", "B MIG"}}}); !reflect.DeepEqual(got[2], want) {
		t.Errorf("%+v, want %+v", got[2], want)
	}

	f := func(what string, c fakeCard) {
		t.Helper()
		c.refuse = map[string]nvml.Return{what: no}
		list, err := cards(fakeNVML{list: []*fakeCard{&c}})
		if err != nil || len(list) != 1 || list[0].Err == nil {
			t.Errorf("without %s: %+v, %v", what, list, err)
		}
	}
	f("uuid", *whole)
	f("name", *whole)
	f("pci", *whole)
	f("parts", *split)
	f("part", *split)
	f("uuid", fakeCard{mig: nvml.DEVICE_MIG_ENABLE})
	if list, err := cards(fakeNVML{count: nvml.ERROR_UNKNOWN}); err == nil {
		t.Errorf("%v of an NVML that fails", list)
	}
}

// TestCardsWithout: without a driver the error says so; with one there is a list.
func TestCardsWithout(t *testing.T) {
	if list, err := Cards(); err != nil && !errors.Is(err, ErrUnavailable) {
		t.Error(list, err)
	}
}
