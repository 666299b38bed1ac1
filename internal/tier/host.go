package tier

import (
	"container/heap"
	"fmt"
	"sync"

	"github.com/xpyd/xpyd/internal/kvcache"
	"github.com/xpyd/xpyd/internal/memfd"
)

// host is the memory tier: slots of one record each. A slot is free, or being
// filled by one lease, or ready: then it is found by its key, and taken for
// another unit only while no lease holds it; units that nothing in memory
// extends first, of those the one not used for longest.
type host struct {
	shape shape
	mem   *memfd.Memory

	mu    sync.Mutex
	slots []slot
	free  []int32
	keys  map[kvcache.Hash]int32
	kids  map[kvcache.Hash]int // ready or filling slots by their parent's key
	idle  slotHeap             // ready slots without a lease
	clock uint64
	lost  uint64 // units taken back for others, ever
}

type slot struct {
	key, parent kvcache.Hash
	rec         []byte
	used        uint64
	leases      int
	ready       bool // to be found
	doomed      bool // to be freed with its last lease, whatever happens
	leaf        bool // nothing here extends it
	at          int  // in idle; -1: not there
}

func newHost(s shape, bytes int64) (*host, error) {
	n := bytes / int64(s.record())
	if n < 1 || n > 1<<30 {
		return nil, fmt.Errorf("tier: %d bytes of host memory, a unit of %d tokens needs %d", bytes, s.blocks*s.BlockTokens, s.record())
	}
	mem, err := memfd.New("xpyd-kv-host", int(n)*s.record())
	if err != nil {
		return nil, fmt.Errorf("tier: host memory: %w", err)
	}
	h := &host{shape: s, mem: mem, slots: make([]slot, n), keys: make(map[kvcache.Hash]int32), kids: make(map[kvcache.Hash]int)}
	h.idle.slots = h.slots
	for i := int(n) - 1; i >= 0; i-- {
		h.slots[i] = slot{rec: mem.Bytes[i*s.record():][:s.record():s.record()], at: -1}
		h.free = append(h.free, int32(i))
	}
	return h, nil
}

// close frees the memory; no lease may be held.
func (h *host) close() { h.mem.Close() }

// lease is a slot that stays what it is until it is given back.
type lease struct {
	h *host
	i int32
}

func (l *lease) record() []byte { return l.h.slots[l.i].rec }

// take returns a slot to fill with a new unit; nil when the unit is here
// already, or being filled, or every slot is leased.
func (h *host) take(key, parent kvcache.Hash) *lease {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.keys[key]; ok {
		return nil
	}
	if len(h.free) == 0 {
		if len(h.idle.order) == 0 {
			return nil
		}
		h.lost++
		h.forget(h.idle.order[0])
	}
	i := h.free[len(h.free)-1]
	h.free = h.free[:len(h.free)-1]
	s := &h.slots[i]
	s.key, s.parent, s.leases, s.ready, s.doomed, s.leaf = key, parent, 1, false, false, h.kids[key] == 0
	h.keys[key] = i
	h.kids[parent]++
	h.releaf(parent)
	return &lease{h, i}
}

// get returns a unit that is here; nil if it is not.
func (h *host) get(key kvcache.Hash) *lease {
	h.mu.Lock()
	defer h.mu.Unlock()
	i, ok := h.keys[key]
	if !ok || !h.slots[i].ready {
		return nil
	}
	s := &h.slots[i]
	if s.at >= 0 {
		heap.Remove(&h.idle, s.at)
	}
	s.leases++
	return &lease{h, i}
}

func (h *host) has(key kvcache.Hash) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	i, ok := h.keys[key]
	return ok && h.slots[i].ready
}

// publish makes a filled slot findable; the lease stays.
func (l *lease) publish() {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	s := &l.h.slots[l.i]
	s.ready = !s.doomed
}

// release gives the lease back; a slot that was not published is freed.
func (l *lease) release() {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	s := &l.h.slots[l.i]
	if s.leases--; s.leases > 0 {
		return
	}
	if !s.ready {
		l.h.forget(l.i)
		return
	}
	l.h.clock++
	s.used = l.h.clock
	heap.Push(&l.h.idle, l.i)
}

// drop forgets a unit, at once or when its leases end.
func (h *host) drop(key kvcache.Hash) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i, ok := h.keys[key]; ok && h.slots[i].ready {
		h.doom(i)
	}
}

// clear drops every unit.
func (h *host) clear() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, i := range h.keys {
		h.doom(i)
	}
}

func (h *host) doom(i int32) {
	if s := &h.slots[i]; s.leases > 0 {
		s.ready, s.doomed = false, true
		return
	}
	h.forget(i)
}

// forget frees a slot without leases.
func (h *host) forget(i int32) {
	s := &h.slots[i]
	if s.at >= 0 {
		heap.Remove(&h.idle, s.at)
	}
	delete(h.keys, s.key)
	if h.kids[s.parent]--; h.kids[s.parent] == 0 {
		delete(h.kids, s.parent)
	}
	h.free = append(h.free, i)
	h.releaf(s.parent)
}

// releaf notes that a unit's children changed.
func (h *host) releaf(key kvcache.Hash) {
	i, ok := h.keys[key]
	if !ok {
		return
	}
	s := &h.slots[i]
	s.leaf = h.kids[key] == 0
	if s.at >= 0 {
		heap.Fix(&h.idle, s.at)
	}
}

// slotHeap orders slots that could be taken: leaves first, then the one not
// used for longest.
type slotHeap struct {
	slots []slot
	order []int32
}

func (h *slotHeap) Len() int { return len(h.order) }
func (h *slotHeap) Less(i, j int) bool {
	a, b := &h.slots[h.order[i]], &h.slots[h.order[j]]
	if a.leaf != b.leaf {
		return a.leaf
	}
	return a.used < b.used
}
func (h *slotHeap) Swap(i, j int) {
	h.order[i], h.order[j] = h.order[j], h.order[i]
	h.slots[h.order[i]].at, h.slots[h.order[j]].at = i, j
}
func (h *slotHeap) Push(x any) {
	i := x.(int32)
	h.slots[i].at = len(h.order)
	h.order = append(h.order, i)
}
func (h *slotHeap) Pop() any {
	last := len(h.order) - 1
	i := h.order[last]
	h.order = h.order[:last]
	h.slots[i].at = -1
	return i
}
