//go:build cgo && linux

package gpustat

import (
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// card answers as NVML does; what is in refuse is not supported.
type card struct{ refuse map[string]nvml.Return }

func (c card) GetUtilizationRates() (nvml.Utilization, nvml.Return) {
	return nvml.Utilization{Gpu: 87}, c.refuse["busy"]
}
func (c card) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	return nvml.Memory{Total: 80 << 30, Used: 61 << 30}, c.refuse["memory"]
}
func (c card) GetPowerUsage() (uint32, nvml.Return) { return 540_500, c.refuse["power"] }
func (c card) GetTemperature(nvml.TemperatureSensors) (uint32, nvml.Return) {
	return 63, c.refuse["temperature"]
}
func (c card) GetFieldValues(f []nvml.FieldValue) nvml.Return {
	for i := range f {
		if f[i].ScopeId != math.MaxUint32 {
			return nvml.ERROR_INVALID_ARGUMENT
		}
		f[i].NvmlReturn = uint32(c.refuse["link"])
		binary.NativeEndian.PutUint64(f[i].Value[:], uint64(f[i].FieldId))
	}
	return c.refuse["fields"]
}

func TestRead(t *testing.T) {
	n := math.NaN()
	const no = nvml.ERROR_NOT_SUPPORTED
	f := func(refuse map[string]nvml.Return, want Sample, wantErr string) {
		t.Helper()
		got, err := newDevice(card{refuse}, nil).Read()
		if (err != nil) != (wantErr != "") || err != nil && !strings.Contains(err.Error(), wantErr) {
			t.Errorf("%v: %v, want %q", refuse, err, wantErr)
		}
		a := [...]float64{got.Busy, got.MemoryUsed, got.MemoryTotal, got.Power, got.Temperature, got.NVLinkSent, got.NVLinkRead}
		b := [...]float64{want.Busy, want.MemoryUsed, want.MemoryTotal, want.Power, want.Temperature, want.NVLinkSent, want.NVLinkRead}
		for i := range a {
			if a[i] != b[i] && !(math.IsNaN(a[i]) && math.IsNaN(b[i])) {
				t.Errorf("%v: %+v, want %+v", refuse, got, want)
			}
		}
	}
	f(nil, Sample{0.87, 61 << 30, 80 << 30, 540.5, 63, 138 << 10, 139 << 10}, "")
	f(map[string]nvml.Return{"link": no}, Sample{0.87, 61 << 30, 80 << 30, 540.5, 63, n, n}, "")
	f(map[string]nvml.Return{"fields": no, "busy": no}, Sample{n, 61 << 30, 80 << 30, 540.5, 63, n, n}, "")
	f(map[string]nvml.Return{"fields": no, "busy": no, "power": no, "temperature": no}, Sample{n, 61 << 30, 80 << 30, n, n, n, n}, "")
	lost := nvml.ERROR_GPU_IS_LOST
	f(map[string]nvml.Return{"fields": lost, "busy": lost, "power": lost, "temperature": lost, "memory": lost}, Sample{n, n, n, n, n, n, n}, "the GPU is lost")
}

// asked keeps where it was asked to write.
type asked struct {
	card
	at *[]*nvml.FieldValue
}

func (a asked) GetFieldValues(f []nvml.FieldValue) nvml.Return {
	*a.at = append(*a.at, &f[0])
	return a.card.GetFieldValues(f)
}

// TestFieldsStay: what NVML writes later, where an earlier call had it, hits nothing else.
func TestFieldsStay(t *testing.T) {
	var at []*nvml.FieldValue
	d := newDevice(asked{at: &at}, nil)
	for range 3 {
		s, err := d.Read()
		if err != nil || s.NVLinkSent != 138<<10 {
			t.Fatalf("%+v, %v", s, err)
		}
		at[0].Timestamp, at[0].LatencyUsec = 1795370511710977, 479
		runtime.GC()
	}
	if at[1] != at[0] || at[2] != at[0] {
		t.Errorf("asked to write at %p, %p and %p", at[0], at[1], at[2])
	}
}

// TestOpenWithout: without a driver the error says so, and nothing crashes.
func TestOpenWithout(t *testing.T) {
	d, err := Open("0000:ff:1f.7") // also a machine with GPUs has none there
	if err == nil {
		d.Close()
		t.Fatal("there is such a GPU")
	}
	if !errors.Is(err, ErrUnavailable) && !strings.Contains(err.Error(), "GPU") {
		t.Error(err)
	}
}
