// Package host is the level in host memory: slots of one record each, which a device may
// read and write itself. The levels below are read into its slots and written from them.
package host

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/internal/memfd"
)

// Name is the level's label.
const Name = "host"

// SettingBytes is the setting that a level.SettingError may name.
const SettingBytes = "HostBytes"

// Config says how much memory to take, and which unit is evicted first.
type Config struct {
	Bytes    int64    // at least one unit
	Eviction Eviction // "": LRU
}

// Memory is the level. A slot is free, being filled under one lease, or ready. A ready slot
// is found by its key. It may be evicted while it is idle: not pinned and under no lease.
// order decides which one is.
type Memory struct {
	mover
	env   *level.Env
	mem   *memfd.Memory
	limit int // slots for the units of one root; 0: all

	mu      sync.Mutex
	slots   []slot
	free    []int32
	keys    map[kvcache.Hash]int32
	kids    map[kvcache.Hash]int // slots in use that are not leaving, by parent
	tenants map[kvcache.Hash]*tenant
	order   *order
	leaving int
	leased  int           // slots under a lease
	freed   chan struct{} // poked when a slot is freed
	turn    chan struct{} // closed when a slot's last lease ends; nil: nobody waits
	lost    uint64        // units evicted, ever
	over    uint64        // those of them whose tenant had its share
}

var _ level.Base = (*Memory)(nil)

type slot struct {
	level.Unit
	rec     []byte
	leases  int
	loads   int
	ready   bool // can be found
	doomed  bool // is freed with its last lease
	leaving bool // is freed with its last lease, unless somebody gets the unit before
	pinned  bool
	tenant  *tenant // nil without a limit
}

// tenant counts the units of one root.
type tenant struct {
	units int
	idle  pile
}

// Open takes the memory. That may take seconds, until ctx ends.
func (c Config) Open(ctx context.Context, env *level.Env) (m *Memory, err error) {
	switch c.Eviction {
	case "":
		c.Eviction = LRU
	case LRU, LFU, S3FIFO:
	default:
		return nil, level.Bad("Eviction", "eviction %q", c.Eviction)
	}
	size := env.Shape.Record()
	n := c.Bytes / int64(size)
	if n < 1 || n > 1<<30 {
		return nil, level.Bad(SettingBytes, "%d bytes of host memory: want room for 1 to 2^30 units of %d tokens, %d bytes each", c.Bytes, env.Shape.Tokens(), size)
	}
	if c.Bytes >= 1<<30 {
		env.Log.Info("taking host memory", "mib", c.Bytes>>20)
	}
	mem, err := memfd.Private(int(n) * size)
	if err == nil {
		if err = mem.Populate(ctx); err != nil {
			mem.Close()
		}
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, fmt.Errorf("tier: host memory: %w", err)
	case err != nil:
		return nil, level.Bad(SettingBytes, "host memory: %w", err)
	}
	// A size that the machine does not have has been refused by now, so the slots fit too.
	m = &Memory{env: env, mem: mem, limit: env.Share(int(n)), slots: make([]slot, n), keys: make(map[kvcache.Hash]int32), kids: make(map[kvcache.Hash]int),
		tenants: make(map[kvcache.Hash]*tenant), order: newOrder(c.Eviction, int(n)), freed: make(chan struct{}, 1)}
	for i := int(n) - 1; i >= 0; i-- {
		m.slots[i] = slot{rec: m.mem.Bytes[i*size:][:size:size]}
		m.free = append(m.free, int32(i))
	}
	if m.mover, err = newMover(env.Shape, env.Pool, m.mem.Bytes, int(n)); err != nil {
		m.mem.Close()
		return nil, err
	}
	return m, nil
}

// Name implements level.Base, as do the methods below.
func (m *Memory) Name() string { return Name }

// Close frees the memory. No lease may be held.
func (m *Memory) Close(context.Context) error {
	err := m.mover.close()
	m.mem.Close()
	return err
}

// Stats counts the units and, if asked, adds up their ages.
func (m *Memory) Stats(ages bool) level.Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	st := level.Stats{Tier: Name, Units: len(m.keys), Capacity: len(m.slots), UnitBytes: m.env.Shape.Record(), Evicted: m.lost, Tenants: len(m.tenants), Over: m.over}
	if ages {
		var a level.Ages
		for _, i := range m.keys {
			if s := &m.slots[i]; s.ready {
				a.Add(s.Born.Unix())
			}
		}
		a.Report(&st)
	}
	return st
}

// Has reports whether a unit can be found.
func (m *Memory) Has(key kvcache.Hash) bool { return !m.Born(key).IsZero() }

// Born is when a unit entered the tiers; zero if it is not here.
func (m *Memory) Born(key kvcache.Hash) (at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i, ok := m.find(key); ok {
		at = m.slots[i].Born
	}
	return at
}

// Forget forgets a unit. Its slot is freed at once, or with its last lease.
func (m *Memory) Forget(key kvcache.Hash) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i, ok := m.find(key); ok {
		m.doom(i)
	}
}

// Clear forgets every unit, and leaves nothing to erase.
func (m *Memory) Clear() (erase func() error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, i := range m.keys {
		m.doom(i)
	}
	return nil
}

// Take returns a slot to fill with a new unit. It returns nil if the unit is here or being
// filled, or if there is no slot for it; later is closed when a slot may have become free,
// and nil if nothing is under way that would free one.
func (m *Memory) Take(u level.Unit) (l *Lease, later <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l := m.tryTake(u); l != nil || m.leased == 0 {
		return l, nil
	}
	if m.turn == nil {
		m.turn = make(chan struct{})
	}
	return nil, m.turn
}

func (m *Memory) tryTake(u level.Unit) *Lease {
	m.find(u.Key) // drops it if it is too old
	if _, ok := m.keys[u.Key]; ok {
		return nil
	}
	t := m.tenants[u.Root]
	if !m.room(t) {
		return nil
	}
	i := m.free[len(m.free)-1]
	m.free = m.free[:len(m.free)-1]
	s := &m.slots[i]
	*s = slot{Unit: u, rec: s.rec}
	m.hold(s)
	m.keys[u.Key] = i
	var own *pile
	if m.limit > 0 {
		if t = m.tenants[u.Root]; t == nil { // room may have deleted it
			t = &tenant{idle: m.order.pile(1)}
			m.tenants[u.Root] = t
		}
		t.units++
		s.tenant, own = t, &t.idle
	}
	m.order.enter(i, u.Key, u.Priority, m.kids[u.Key] == 0, own)
	m.link(s)
	return &Lease{m, i}
}

// room makes sure that a slot is free for one more unit of a tenant.
func (m *Memory) room(t *tenant) bool {
	if t != nil && t.units >= m.limit {
		if !m.evict(m.order.victim(&t.idle)) {
			return false
		}
		m.over++
		return true
	}
	return len(m.free) > 0 || m.evict(m.order.victim(&m.order.all))
}

// Get returns a unit for a request; nil if it is not here.
func (m *Memory) Get(key kvcache.Hash) *Lease { return m.lease(key, true) }

// Peek is Get for the tiers themselves: it does not count as a use of the unit.
func (m *Memory) Peek(key kvcache.Hash) *Lease { return m.lease(key, false) }

func (m *Memory) lease(key kvcache.Hash, use bool) *Lease {
	m.mu.Lock()
	defer m.mu.Unlock()
	i, ok := m.find(key)
	if !ok {
		return nil
	}
	s := &m.slots[i]
	m.hold(s)
	m.settle(i)
	if use {
		s.loads++
		m.order.use(i)
		m.stay(s)
	}
	return &Lease{m, i}
}

// Leave returns the unit that is evicted next, if fewer than spare slots are free or
// leaving. Its slot is freed with the lease, unless somebody gets the unit before.
func (m *Memory) Leave(spare int) *Lease {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.free)+m.leaving >= spare {
		return nil
	}
	i := m.order.victim(&m.order.all)
	if i < 0 {
		return nil
	}
	s := &m.slots[i]
	m.hold(s)
	m.settle(i)
	s.leaving = true
	m.leaving++
	m.unlink(s) // what it extends may leave as well
	return &Lease{m, i}
}

// Leaving reports whether no slot is free but some are leaving.
func (m *Memory) Leaving() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.free) == 0 && m.leaving > 0
}

// Freed is poked when a slot is freed.
func (m *Memory) Freed() <-chan struct{} { return m.freed }

// Raise raises the priority of a unit, if it is here.
func (m *Memory) Raise(key kvcache.Hash, priority int8) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i, ok := m.keys[key]; ok {
		m.order.raise(i, priority)
	}
}

// Repin checks again whether units are pinned.
func (m *Memory) Repin(keys []kvcache.Hash) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range keys {
		if i, ok := m.find(key); ok {
			s := &m.slots[i]
			if s.pinned = m.env.IsPinned(key); s.pinned {
				m.stay(s)
			}
			m.settle(i)
		}
	}
}

// Units lists the units that are here.
func (m *Memory) Units() []level.Unit {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []level.Unit
	for _, i := range m.keys {
		if s := &m.slots[i]; s.ready {
			all = append(all, s.Unit)
		}
	}
	return all
}

// Lease keeps a slot from being freed until it is released.
type Lease struct {
	m *Memory
	i int32
}

// Record is the slot's memory.
func (l *Lease) Record() []byte { return l.m.slots[l.i].rec }

// Unit is the unit in the slot.
func (l *Lease) Unit() level.Unit { return l.m.slots[l.i].Unit }

func (l *Lease) lock() *slot {
	l.m.mu.Lock()
	return &l.m.slots[l.i]
}

// Loads is how often Get returned the unit since it came here.
func (l *Lease) Loads() int {
	defer l.m.mu.Unlock()
	return l.lock().loads
}

// Publish makes a filled slot findable. born, unless zero, is when its unit was born.
func (l *Lease) Publish(born time.Time) {
	s := l.lock()
	defer l.m.mu.Unlock()
	if !born.IsZero() && !s.ready {
		s.Born = born
	}
	s.pinned = l.m.env.IsPinned(s.Key)
	l.m.setReady(s, !s.doomed)
}

// Stay takes Leave back.
func (l *Lease) Stay() {
	s := l.lock()
	defer l.m.mu.Unlock()
	l.m.stay(s)
}

// Release ends the lease. It frees a slot that was not published, or is leaving.
func (l *Lease) Release() {
	m, s := l.m, l.lock()
	defer m.mu.Unlock()
	if s.leases--; s.leases > 0 {
		return
	}
	m.leased--
	if m.turn != nil {
		close(m.turn)
		m.turn = nil
	}
	switch {
	case s.leaving:
		m.evict(l.i)
	case !s.ready:
		m.forget(l.i, false)
	default:
		m.settle(l.i)
	}
}

// The methods below are called under mu.

// find returns the slot of a unit that is ready. It drops one that is too old.
func (m *Memory) find(key kvcache.Hash) (i int32, ok bool) {
	i, ok = m.keys[key]
	if !ok || !m.slots[i].ready {
		return 0, false
	}
	if m.env.Old(m.slots[i].Born) {
		m.doom(i)
		return 0, false
	}
	return i, true
}

func (m *Memory) hold(s *slot) {
	if s.leases++; s.leases == 1 {
		m.leased++
	}
}

func (m *Memory) stay(s *slot) {
	if s.leaving {
		s.leaving = false
		m.leaving--
		m.link(s)
	}
}

// settle tells the order whether a slot is idle.
func (m *Memory) settle(i int32) {
	s := &m.slots[i]
	idle := s.ready && s.leases == 0 && !s.pinned
	switch is := m.order.ranks[i].at[0] >= 0; {
	case idle && !is:
		m.order.idle(i)
	case !idle && is:
		m.order.busy(i)
	}
}

func (m *Memory) setReady(s *slot, ready bool) {
	if s.ready == ready {
		return
	}
	s.ready = ready
	m.env.Tell(Name, s.Unit, ready)
	if ready { // nobody else has a lease yet
		s.Tokens = nil
	}
}

// evict frees a slot without leases for another unit; none if i is negative.
func (m *Memory) evict(i int32) bool {
	if i < 0 {
		return false
	}
	m.lost++
	m.forget(i, true)
	return true
}

// doom frees a slot at once, or with its last lease.
func (m *Memory) doom(i int32) {
	s := &m.slots[i]
	if s.leases == 0 {
		m.forget(i, false)
		return
	}
	s.doomed = true
	m.setReady(s, false)
}

// forget frees a slot without leases. went says that another unit needs it.
func (m *Memory) forget(i int32, went bool) {
	s := &m.slots[i]
	m.setReady(s, false)
	if went && m.env.Went != nil {
		m.env.Went(s.Unit)
	}
	m.settle(i)
	if s.leaving {
		m.leaving--
	} else {
		m.unlink(s)
	}
	s.leaving = false
	m.order.leave(i, s.Key, went)
	delete(m.keys, s.Key)
	m.free = append(m.free, i)
	select {
	case m.freed <- struct{}{}:
	default:
	}
	if t := s.tenant; t != nil {
		if t.units--; t.units == 0 {
			delete(m.tenants, s.Root)
		}
	}
}

// link counts a unit as one that extends its parent; unlink takes that back.
func (m *Memory) link(s *slot) {
	m.kids[s.Parent]++
	m.releaf(s.Parent)
}

func (m *Memory) unlink(s *slot) {
	if m.kids[s.Parent]--; m.kids[s.Parent] == 0 {
		delete(m.kids, s.Parent)
	}
	m.releaf(s.Parent)
}

func (m *Memory) releaf(key kvcache.Hash) {
	if i, ok := m.keys[key]; ok {
		m.order.setLeaf(i, m.kids[key] == 0)
	}
}
