package ssd

import (
	"fmt"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// Check verifies that every unit of the index is where its segment says, and that
// tenants' books agree: for tests. also, unless nil, is called under the lock with the
// units that can be found.
func (d *Disk) Check(also func(has map[kvcache.Hash]bool) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	units := map[uint32]int{}
	for key, p := range d.index {
		if p.seg.keys[p.slot] != key {
			return fmt.Errorf("slot %d of %s has another key", p.slot, p.seg.path)
		}
		units[p.seg.tags[p.slot]]++
	}
	for p, n := range d.reading {
		if n < 1 {
			return fmt.Errorf("%d reads of slot %d of %s", n, p.slot, p.seg.path)
		}
	}
	if also != nil {
		has := make(map[kvcache.Hash]bool)
		for key := range d.index {
			has[key] = true
		}
		if err := also(has); err != nil {
			return err
		}
	}
	if d.limit == 0 {
		return nil
	}
	for tag, h := range d.tenants {
		queued := 0
		for _, e := range h.queue {
			if d.index[e.key] == e.at {
				queued++
			}
		}
		if h.units != units[tag] || queued != h.units || len(d.pending) == 0 && h.writing != 0 || h.units+h.writing == 0 {
			return fmt.Errorf("a tenant has %d units, counted %d, queued %d; %d on their way", units[tag], h.units, queued, h.writing)
		}
		delete(units, tag)
	}
	if len(units) > 0 {
		return fmt.Errorf("%d tenants unknown", len(units))
	}
	return nil
}
