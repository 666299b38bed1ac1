//go:build cgo && linux

package gpustat

// #include <stdlib.h>
import "C"

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// handle is the part of an nvml.Device in use.
type handle interface {
	GetUtilizationRates() (nvml.Utilization, nvml.Return)
	GetMemoryInfo() (nvml.Memory, nvml.Return)
	GetPowerUsage() (uint32, nvml.Return)
	GetTemperature(nvml.TemperatureSensors) (uint32, nvml.Return)
	GetFieldValues([]nvml.FieldValue) nvml.Return
}

// device reads one GPU through NVML.
type device struct {
	handle   handle
	shutdown func() nvml.Return
	fields   []nvml.FieldValue
}

// newDevice keeps the fields in C memory for good: NVML of driver 580 was seen to write a field's
// time where an earlier call had it, which Go's memory had given to something else by then.
func newDevice(h handle, shutdown func() nvml.Return) *device {
	const n = 2
	at := C.calloc(n, C.size_t(unsafe.Sizeof(nvml.FieldValue{}))) // never nil: cgo ends the process then
	return &device{h, shutdown, unsafe.Slice((*nvml.FieldValue)(at), n)}
}

// Open finds the GPU with the bus id, such as "0000:17:00.0". The library is
// opened now, not linked: without it the error is ErrUnavailable.
func Open(pci string) (Device, error) {
	lib := nvml.New()
	if r := lib.Init(); r != nvml.SUCCESS {
		return nil, fmt.Errorf("%w: %s", ErrUnavailable, text(r))
	}
	h, r := lib.DeviceGetHandleByPciBusId(pci)
	if r != nvml.SUCCESS {
		return nil, errors.Join(fmt.Errorf("NVML: GPU %s: %s", pci, text(r)), failure("shutdown", lib.Shutdown()))
	}
	return newDevice(h, lib.Shutdown), nil
}

// texts name codes; NVML's own names need the library.
var texts = map[nvml.Return]string{
	nvml.ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not there",
	nvml.ERROR_DRIVER_NOT_LOADED: "the driver is not loaded",
	nvml.ERROR_NOT_FOUND:         "there is no such GPU",
	nvml.ERROR_GPU_IS_LOST:       "the GPU is lost",
	nvml.ERROR_NO_PERMISSION:     "no permission",
}

func text(r nvml.Return) string { return cmp.Or(texts[r], fmt.Sprintf("code %d", int(r))) }

func failure(call string, r nvml.Return) error {
	if r == nvml.SUCCESS {
		return nil
	}
	return fmt.Errorf("NVML %s: %s", call, text(r))
}

// allLinks asks for the sum over a GPU's links.
const allLinks = math.MaxUint32

// Read asks for each value by itself, as a GPU may lack some (MIG slices, cards without NVLink).
// It fails only if the GPU has none.
func (d *device) Read() (Sample, error) {
	s, known := none(), 0
	var worst error
	take := func(call string, r nvml.Return, put func()) {
		if r == nvml.SUCCESS {
			put()
			known++
		} else if worst == nil {
			worst = failure(call, r)
		}
	}
	u, r := d.handle.GetUtilizationRates()
	take("utilisation", r, func() { s.Busy = float64(u.Gpu) / 100 })
	m, r := d.handle.GetMemoryInfo()
	take("memory", r, func() { s.MemoryUsed, s.MemoryTotal = float64(m.Used), float64(m.Total) })
	mw, r := d.handle.GetPowerUsage()
	take("power", r, func() { s.Power = float64(mw) / 1000 })
	c, r := d.handle.GetTemperature(nvml.TEMPERATURE_GPU)
	take("temperature", r, func() { s.Temperature = float64(c) })
	f := d.fields
	f[0] = nvml.FieldValue{FieldId: nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ScopeId: allLinks}
	f[1] = nvml.FieldValue{FieldId: nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ScopeId: allLinks}
	if d.handle.GetFieldValues(f) == nvml.SUCCESS {
		for i, to := range []*float64{&s.NVLinkSent, &s.NVLinkRead} {
			if nvml.Return(f[i].NvmlReturn) == nvml.SUCCESS {
				*to = float64(binary.NativeEndian.Uint64(f[i].Value[:])) * 1024 // it counts KiB
			}
		}
	}
	if known == 0 {
		return s, worst
	}
	return s, nil
}

// Close implements Device.
func (d *device) Close() error { return failure("shutdown", d.shutdown()) }
