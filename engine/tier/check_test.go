package tier

import (
	"fmt"
	"maps"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// check verifies that every unit of the index is where its segment says, and
// that tenants' books agree.
func (d *disk) check() error {
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

// check verifies that every slot is in one place and the orders agree.
func (h *host) check() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	kids, tenants := map[kvcache.Hash]int{}, map[kvcache.Hash]int{}
	idle, leaving, small, leased := 0, 0, 0, 0
	for key, i := range h.keys {
		s, r := &h.slots[i], &h.order.ranks[i]
		if !s.leaving {
			kids[s.parent]++
		} else {
			leaving++
		}
		if s.leases > 0 {
			leased++
		}
		if h.limit > 0 {
			tenants[s.root]++
		}
		if h.order.policy == S3FIFO && !r.main {
			small++
		}
		q := 0
		if r.main {
			q = 1
		}
		switch free := s.leases == 0 && !s.pinned; {
		case s.key != key:
			return fmt.Errorf("slot %d has another key", i)
		case s.leases == 0 && !s.ready:
			return fmt.Errorf("slot %d is of no use", i)
		case free != (r.at[0] >= 0) || free && h.order.all[q].ids[r.at[0]] != i:
			return fmt.Errorf("slot %d: %d leases, pinned %t, at %d of the heap", i, s.leases, s.pinned, r.at[0])
		case free && h.limit > 0 && s.tenant.idle[q].ids[r.at[1]] != i:
			return fmt.Errorf("slot %d: not in its tenant's heap", i)
		case s.ready && s.pinned != h.pins.has(key):
			return fmt.Errorf("slot %d: pinned %t", i, s.pinned)
		case free:
			idle++
		}
	}
	for key, i := range h.keys {
		if h.order.ranks[i].leaf != (kids[key] == 0) {
			return fmt.Errorf("slot %d: leaf %t, %d children", i, h.order.ranks[i].leaf, kids[key])
		}
	}
	if !maps.Equal(kids, h.kids) || leaving != h.leaving || small != h.order.small {
		return fmt.Errorf("%d parents, counted %d; %d leaving, counted %d; %d on trial, counted %d", len(kids), len(h.kids), leaving, h.leaving, small, h.order.small)
	}
	if n := len(h.order.all[0].ids) + len(h.order.all[1].ids); idle != n || len(h.keys)+len(h.free) != len(h.slots) {
		return fmt.Errorf("%d idle, heaps %d; %d keys and %d free of %d slots", idle, n, len(h.keys), len(h.free), len(h.slots))
	}
	if leased != h.leased {
		return fmt.Errorf("%d slots under a lease, counted %d", leased, h.leased)
	}
	for root, t := range h.tenants {
		if t.units != tenants[root] || t.units > h.limit {
			return fmt.Errorf("a tenant has %d units, counted %d, %d allowed", tenants[root], t.units, h.limit)
		}
	}
	if len(tenants) != len(h.tenants) {
		return fmt.Errorf("%d tenants, counted %d", len(tenants), len(h.tenants))
	}
	return nil
}
