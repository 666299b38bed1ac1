//go:build cgo && linux

package gpustat

import (
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// lister is the part of an nvml.Interface in use.
type lister interface {
	DeviceGetCount() (int, nvml.Return)
	DeviceGetHandleByIndex(int) (nvml.Device, nvml.Return)
}

// Cards lists the GPUs of this machine, or of this container, in NVML's order. Without the driver's
// library the error is ErrUnavailable.
func Cards() (list []Card, err error) {
	lib := nvml.New()
	if r := lib.Init(); r != nvml.SUCCESS {
		return nil, fmt.Errorf("%w: %s", ErrUnavailable, text(r))
	}
	defer func() { err = errors.Join(err, failure("shutdown", lib.Shutdown())) }()
	return cards(lib)
}

func cards(lib lister) ([]Card, error) {
	n, r := lib.DeviceGetCount()
	if r != nvml.SUCCESS {
		return nil, failure("count", r)
	}
	list := make([]Card, n)
	for i := range list {
		list[i] = Card{Index: i}
		d, r := lib.DeviceGetHandleByIndex(i)
		if r != nvml.SUCCESS {
			list[i].Err = failure("handle", r)
			continue
		}
		list[i].Err = list[i].read(d)
	}
	return list, nil
}

// read asks a device who it is.
func (c *Card) read(d nvml.Device) error {
	uuid, r := d.GetUUID()
	if r != nvml.SUCCESS {
		return failure("UUID", r)
	}
	at, r := d.GetPciInfo()
	if r != nvml.SUCCESS {
		return failure("bus id", r)
	}
	if c.Name, r = d.GetName(); r != nvml.SUCCESS {
		return failure("name", r)
	}
	c.UUID, c.PCI = uuid, fmt.Sprintf("%04x:%02x:%02x.0", at.Domain, at.Bus, at.Device)
	mode, _, r := d.GetMigMode()
	if c.Split = r == nvml.SUCCESS && mode == nvml.DEVICE_MIG_ENABLE; !c.Split {
		return nil
	}
	return c.readParts(d)
}

// readParts lists the MIG instances. Their numbers may have gaps.
func (c *Card) readParts(d nvml.Device) error {
	most, r := d.GetMaxMigDeviceCount()
	if r != nvml.SUCCESS {
		return failure("MIG count", r)
	}
	for i := range most {
		p, r := d.GetMigDeviceHandleByIndex(i)
		if r == nvml.ERROR_NOT_FOUND {
			continue
		}
		if r != nvml.SUCCESS {
			return failure("MIG handle", r)
		}
		uuid, r := p.GetUUID()
		if r != nvml.SUCCESS {
			return failure("MIG UUID", r)
		}
		name, r := p.GetName()
		if r != nvml.SUCCESS {
			name = c.Name + " MIG"
		}
		c.Parts = append(c.Parts, Part{uuid, name})
	}
	c.Parts = slices.Clip(c.Parts)
	return nil
}
