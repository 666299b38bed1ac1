package host

import (
	"fmt"
	"maps"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// Check verifies, for tests, that every slot is in one place and the orders agree. also, unless
// nil, is called under the lock with the units that can be found.
func (m *Memory) Check(also func(has map[kvcache.Hash]bool) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	has := make(map[kvcache.Hash]bool)
	kids, tenants := map[kvcache.Hash]int{}, map[kvcache.Hash]int{}
	idle, leaving, small, leased := 0, 0, 0, 0
	for key, i := range m.keys {
		s, r := &m.slots[i], &m.order.ranks[i]
		if s.ready {
			has[key] = true
		}
		if !s.leaving {
			kids[s.Parent]++
		} else {
			leaving++
		}
		if s.leases > 0 {
			leased++
		}
		if m.limit > 0 {
			tenants[s.Root]++
		}
		if m.order.policy == S3FIFO && !r.main {
			small++
		}
		q := r.queue()
		switch free := s.leases == 0 && !s.pinned; {
		case s.Key != key:
			return fmt.Errorf("slot %d has another key", i)
		case s.leases == 0 && !s.ready:
			return fmt.Errorf("slot %d is of no use", i)
		case free != (r.at[0] >= 0) || free && m.order.all[q].ids[r.at[0]] != i:
			return fmt.Errorf("slot %d: %d leases, pinned %t, at %d of the heap", i, s.leases, s.pinned, r.at[0])
		case free && m.limit > 0 && s.tenant.idle[q].ids[r.at[1]] != i:
			return fmt.Errorf("slot %d: not in its tenant's heap", i)
		case s.ready && s.pinned != m.env.IsPinned(key):
			return fmt.Errorf("slot %d: pinned %t", i, s.pinned)
		case free:
			idle++
		}
	}
	for key, i := range m.keys {
		if m.order.ranks[i].leaf != (kids[key] == 0) {
			return fmt.Errorf("slot %d: leaf %t, %d children", i, m.order.ranks[i].leaf, kids[key])
		}
	}
	if !maps.Equal(kids, m.kids) || leaving != m.leaving || small != m.order.small {
		return fmt.Errorf("%d parents, counted %d; %d leaving, counted %d; %d on trial, counted %d", len(kids), len(m.kids), leaving, m.leaving, small, m.order.small)
	}
	if n := len(m.order.all[0].ids) + len(m.order.all[1].ids); idle != n || len(m.keys)+len(m.free) != len(m.slots) {
		return fmt.Errorf("%d idle, heaps %d; %d keys and %d free of %d slots", idle, n, len(m.keys), len(m.free), len(m.slots))
	}
	if leased != m.leased {
		return fmt.Errorf("%d slots under a lease, counted %d", leased, m.leased)
	}
	for root, t := range m.tenants {
		if t.units != tenants[root] || t.units > m.limit {
			return fmt.Errorf("a tenant has %d units, counted %d, %d allowed", tenants[root], t.units, m.limit)
		}
	}
	if len(tenants) != len(m.tenants) {
		return fmt.Errorf("%d tenants, counted %d", len(tenants), len(m.tenants))
	}
	if also == nil {
		return nil
	}
	return also(has)
}
