package tier

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/memfd"
)

// host is the memory tier: slots of one record each. A slot is free, or being
// filled by one lease, or ready: then it is found by its key, and may go for
// another unit only while it is idle, which is to say not pinned and under no
// lease. Who goes is order's to say.
type host struct {
	shape   shape
	mem     *memfd.Memory
	ttl     time.Duration // 0: none
	limit   int           // slots that units of one root may take; 0: all
	pins    *pins
	changed func(u unit, stored bool) // told what can be found and what not, under mu; nil: nobody
	went    func(u unit)              // told what went for another unit, the same

	mu      sync.Mutex
	slots   []slot
	free    []int32
	keys    map[kvcache.Hash]int32
	kids    map[kvcache.Hash]int // ready or filling slots, those leaving excepted, by their parent's key
	tenants map[kvcache.Hash]*tenant
	order   *order
	leaving int
	leased  int           // slots under a lease
	freed   chan struct{} // a poke: a slot is free
	turn    chan struct{} // closed when a slot's last lease ends; nil: nobody waits for that
	lost    uint64        // units that went for others, ever
	over    uint64        // those of them that went because their tenant had too many
}

// unit names what is kept.
type unit struct {
	key, parent kvcache.Hash
	root        kvcache.Hash // of its chain: one for each cache salt
	pos         int          // tokens before it
	tokens      []int32      // its own, while it comes; nil when they are not at hand
	born        time.Time    // when it came into the tiers
	priority    int8         // the highest of the requests that had stored or found it when it came
}

type slot struct {
	unit
	rec     []byte
	leases  int
	loads   int
	ready   bool // to be found
	doomed  bool // to be freed with its last lease, whatever happens
	leaving bool // to be freed with its last lease unless somebody asks for it
	pinned  bool
	tenant  *tenant // nil without a limit
}

// tenant is the units of one root.
type tenant struct {
	units int
	idle  pile
}

func newHost(ctx context.Context, s shape, bytes int64, policy Eviction, p *pins) (*host, error) {
	n := bytes / int64(s.record())
	if n < 1 || n > 1<<30 {
		return nil, fmt.Errorf("tier: %d bytes of host memory: want room for 1 to 2^30 units of %d tokens, %d bytes each", bytes, s.blocks*s.BlockTokens, s.record())
	}
	mem, err := memfd.Private(int(n) * s.record())
	if err != nil {
		return nil, fmt.Errorf("tier: host memory: %w", err)
	}
	if err := mem.Populate(ctx); err != nil {
		mem.Close()
		return nil, fmt.Errorf("tier: host memory: %w", err)
	}
	h := &host{shape: s, mem: mem, pins: p, slots: make([]slot, n), keys: make(map[kvcache.Hash]int32), kids: make(map[kvcache.Hash]int),
		tenants: make(map[kvcache.Hash]*tenant), order: newOrder(policy, int(n)),
		freed: make(chan struct{}, 1)}
	for i := int(n) - 1; i >= 0; i-- {
		h.slots[i] = slot{rec: mem.Bytes[i*s.record():][:s.record():s.record()]}
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
func (l *lease) unit() unit     { return l.h.slots[l.i].unit }

// take returns a slot to fill with a new unit; nil when the unit is here
// already, or being filled, or no slot can be had for it.
func (h *host) take(u unit) *lease {
	l, _ := h.takeOr(u)
	return l
}

// takeOr is take; later is closed when it may be otherwise, nil if nothing is under way
// that would make it so.
func (h *host) takeOr(u unit) (l *lease, later <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l = h.tryTake(u); l != nil || h.leased == 0 {
		return l, nil
	}
	if h.turn == nil {
		h.turn = make(chan struct{})
	}
	return nil, h.turn
}

func (h *host) tryTake(u unit) *lease {
	h.expire(u.key)
	if _, ok := h.keys[u.key]; ok {
		return nil
	}
	t := h.tenants[u.root]
	if !h.room(t) {
		return nil
	}
	i := h.free[len(h.free)-1]
	h.free = h.free[:len(h.free)-1]
	s := &h.slots[i]
	*s = slot{unit: u, rec: s.rec}
	h.hold(s)
	h.keys[u.key] = i
	var own *pile
	if h.limit > 0 {
		if t = h.tenants[u.root]; t == nil { // room may have forgotten it
			t = &tenant{idle: h.order.pile(1)}
			h.tenants[u.root] = t
		}
		t.units++
		s.tenant, own = t, &t.idle
	}
	h.order.enter(i, u.key, u.priority, h.kids[u.key] == 0, own)
	h.link(s)
	return &lease{h, i}
}

// raise notes a higher priority of a unit, if it is here.
func (h *host) raise(key kvcache.Hash, priority int8) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i, ok := h.keys[key]; ok {
		h.order.raise(i, priority)
	}
}

// room makes sure that a slot is free for one more unit of a tenant.
func (h *host) room(t *tenant) bool {
	if t != nil && t.units >= h.limit {
		if !h.evict(h.order.victim(&t.idle)) {
			return false
		}
		h.over++
		return true
	}
	return len(h.free) > 0 || h.evict(h.order.victim(&h.order.all))
}

// get returns a unit that is here, for a request; nil if it is not.
func (h *host) get(key kvcache.Hash) *lease { return h.lease(key, true) }

// peek is get for the tiers' own purposes, which are no use of the unit.
func (h *host) peek(key kvcache.Hash) *lease { return h.lease(key, false) }

func (h *host) lease(key kvcache.Hash, use bool) *lease {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.expire(key)
	i, ok := h.keys[key]
	if !ok || !h.slots[i].ready {
		return nil
	}
	s := &h.slots[i]
	h.hold(s)
	h.settle(i)
	if use {
		s.loads++
		h.order.use(i)
		h.stay(s)
	}
	return &lease{h, i}
}

func (h *host) has(key kvcache.Hash) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.expire(key)
	i, ok := h.keys[key]
	return ok && h.slots[i].ready
}

// publish makes a filled slot findable; the lease stays.
func (l *lease) publish() {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	s := &l.h.slots[l.i]
	s.pinned = l.h.pins.has(s.key)
	l.h.setReady(s, !s.doomed)
}

// release gives the lease back; a slot that was not published, or is leaving,
// is freed.
func (l *lease) release() {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	s := &l.h.slots[l.i]
	if s.leases--; s.leases > 0 {
		return
	}
	l.h.leased--
	if l.h.turn != nil {
		close(l.h.turn)
		l.h.turn = nil
	}
	switch {
	case s.leaving:
		l.h.lost++
		l.h.forget(l.i, true)
	case !s.ready:
		l.h.forget(l.i, false)
	default:
		l.h.settle(l.i)
	}
}

// loads is how often the unit was asked for since it came here.
func (l *lease) loads() int {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	return l.h.slots[l.i].loads
}

// leave returns the unit that goes next, if fewer than spare slots are free or
// becoming so; it is freed with its lease, unless somebody gets it before.
func (h *host) leave(spare int) *lease {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.free)+h.leaving >= spare {
		return nil
	}
	i := h.order.victim(&h.order.all)
	if i < 0 {
		return nil
	}
	s := &h.slots[i]
	h.hold(s)
	h.settle(i)
	s.leaving = true
	h.leaving++
	h.unlink(s) // what it extends may go as well
	return &lease{h, i}
}

// awaits says whether no slot is free, and some will be.
func (h *host) awaits() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.free) == 0 && h.leaving > 0
}

// stay takes leave back.
func (l *lease) stay() {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	l.h.stay(&l.h.slots[l.i])
}

func (h *host) stay(s *slot) {
	if s.leaving {
		s.leaving = false
		h.leaving--
		h.link(s)
	}
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

// expire drops a unit that is too old.
func (h *host) expire(key kvcache.Hash) {
	if h.ttl == 0 {
		return
	}
	if i, ok := h.keys[key]; ok && h.slots[i].ready && time.Since(h.slots[i].born) >= h.ttl {
		h.doom(i)
	}
}

// repin looks anew whether units are pinned.
func (h *host) repin(keys []kvcache.Hash) (here int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, key := range keys {
		if i, ok := h.keys[key]; ok && h.slots[i].ready {
			s := &h.slots[i]
			if s.pinned = h.pins.has(key); s.pinned {
				h.stay(s)
			}
			h.settle(i)
			here++
		}
	}
	return here
}

// ready lists the units that are here.
func (h *host) ready() []unit {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []unit
	for _, i := range h.keys {
		if s := &h.slots[i]; s.ready {
			all = append(all, s.unit)
		}
	}
	return all
}

// What follows is called under mu.

func (h *host) hold(s *slot) {
	if s.leases++; s.leases == 1 {
		h.leased++
	}
}

// settle makes a slot idle or busy in the order, as it is.
func (h *host) settle(i int32) {
	s := &h.slots[i]
	idle := s.ready && s.leases == 0 && !s.pinned
	switch is := h.order.ranks[i].at[0] >= 0; {
	case idle && !is:
		h.order.idle(i)
	case !idle && is:
		h.order.busy(i)
	}
}

func (h *host) setReady(s *slot, ready bool) {
	if s.ready == ready {
		return
	}
	s.ready = ready
	if h.changed != nil {
		h.changed(s.unit, ready)
	}
	if ready { // nobody else has a lease yet
		s.tokens = nil
	}
}

// evict frees an idle slot, if there is one.
func (h *host) evict(i int32) bool {
	if i < 0 {
		return false
	}
	h.lost++
	h.forget(i, true)
	return true
}

func (h *host) doom(i int32) {
	s := &h.slots[i]
	if s.leases == 0 {
		h.forget(i, false)
		return
	}
	s.doomed = true
	h.setReady(s, false)
}

// forget frees a slot without leases; went: for another unit.
func (h *host) forget(i int32, went bool) {
	s := &h.slots[i]
	h.setReady(s, false)
	if went && h.went != nil {
		h.went(s.unit)
	}
	h.settle(i)
	if s.leaving {
		h.leaving--
	} else {
		h.unlink(s)
	}
	s.leaving = false
	h.order.leave(i, s.key, went)
	delete(h.keys, s.key)
	h.free = append(h.free, i)
	select {
	case h.freed <- struct{}{}:
	default:
	}
	if t := s.tenant; t != nil {
		if t.units--; t.units == 0 {
			delete(h.tenants, s.root)
		}
	}
}

// link and unlink count a unit as one that extends its parent.
func (h *host) link(s *slot) {
	h.kids[s.parent]++
	h.releaf(s.parent)
}

func (h *host) unlink(s *slot) {
	if h.kids[s.parent]--; h.kids[s.parent] == 0 {
		delete(h.kids, s.parent)
	}
	h.releaf(s.parent)
}

func (h *host) releaf(key kvcache.Hash) {
	if i, ok := h.keys[key]; ok {
		h.order.setLeaf(i, h.kids[key] == 0)
	}
}
