// Package host is the level in host memory: slots of one record each, which a device may
// read and write itself. What the levels below have is read into it.
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

// Memory is the level: slots of one record each. A slot is free, being filled by one
// lease, or ready. A ready slot is found by its key; it may be evicted only while it is
// idle: not pinned and under no lease. order decides which one is.
type Memory struct {
	mover
	env   *level.Env
	mem   *memfd.Memory
	limit int // slots that units of one root may take; 0: all

	mu      sync.Mutex
	slots   []slot
	free    []int32
	keys    map[kvcache.Hash]int32
	kids    map[kvcache.Hash]int // ready and filling slots that are not leaving, by parent
	tenants map[kvcache.Hash]*tenant
	order   *order
	leaving int
	leased  int           // slots under a lease
	freed   chan struct{} // a poke: a slot is free
	turn    chan struct{} // closed when a slot's last lease ends; nil: nobody waits
	lost    uint64        // units evicted, ever
	over    uint64        // of them, those whose tenant had its share
}

var _ level.Memory = (*Memory)(nil)

type slot struct {
	level.Unit
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

// Open implements level.MemoryConfig. Taking much memory takes seconds, in which ctx may end.
func (c Config) Open(ctx context.Context, env *level.Env) (level.Memory, error) {
	return open(ctx, c, env)
}

func open(ctx context.Context, c Config, env *level.Env) (m *Memory, err error) {
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
	// Slots come after the memory: a size that the machine does not have is refused by now.
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

// Name implements level.Base, as does what follows.
func (m *Memory) Name() string { return Name }

// Close frees the memory; no lease may be held.
func (m *Memory) Close(context.Context) error {
	err := m.mover.close()
	m.mem.Close()
	return err
}

// Stats counts the units, and their ages.
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

// lease implements level.Lease.
type lease struct {
	m *Memory
	i int32
}

func (l *lease) Record() []byte   { return l.m.slots[l.i].rec }
func (l *lease) Unit() level.Unit { return l.m.slots[l.i].Unit }

// Take implements level.Memory, as does what follows.
func (m *Memory) Take(u level.Unit) (l level.Lease, later <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l := m.tryTake(u); l != nil {
		return l, nil
	}
	if m.leased == 0 {
		return nil, nil
	}
	if m.turn == nil {
		m.turn = make(chan struct{})
	}
	return nil, m.turn
}

func (m *Memory) tryTake(u level.Unit) *lease {
	m.expire(u.Key)
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
		if t = m.tenants[u.Root]; t == nil { // room may have forgotten it
			t = &tenant{idle: m.order.pile(1)}
			m.tenants[u.Root] = t
		}
		t.units++
		s.tenant, own = t, &t.idle
	}
	m.order.enter(i, u.Key, u.Priority, m.kids[u.Key] == 0, own)
	m.link(s)
	return &lease{m, i}
}

// Raise notes a higher priority of a unit, if it is here.
func (m *Memory) Raise(key kvcache.Hash, priority int8) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i, ok := m.keys[key]; ok {
		m.order.raise(i, priority)
	}
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

// Get leases a unit for a request.
func (m *Memory) Get(key kvcache.Hash) level.Lease { return m.lease(key, true) }

// Peek leases a unit without using it.
func (m *Memory) Peek(key kvcache.Hash) level.Lease { return m.lease(key, false) }

// lease returns no lease, not a nil one, where the unit is not here.
func (m *Memory) lease(key kvcache.Hash, use bool) level.Lease {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire(key)
	i, ok := m.keys[key]
	if !ok || !m.slots[i].ready {
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
	return &lease{m, i}
}

// Has reports whether a unit is here, and ready.
func (m *Memory) Has(key kvcache.Hash) bool { return !m.Born(key).IsZero() }

// Born is when a unit came into the tiers.
func (m *Memory) Born(key kvcache.Hash) (at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire(key)
	if i, ok := m.keys[key]; ok && m.slots[i].ready {
		at = m.slots[i].Born
	}
	return at
}

// Publish makes a filled slot findable; the lease stays.
func (l *lease) Publish(born time.Time) {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	s := &l.m.slots[l.i]
	if !born.IsZero() && !s.ready {
		s.Born = born
	}
	s.pinned = l.m.env.IsPinned(s.Key)
	l.m.setReady(s, !s.doomed)
}

// Release gives the lease back; a slot that was not published, or is leaving,
// is freed.
func (l *lease) Release() {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	s := &l.m.slots[l.i]
	if s.leases--; s.leases > 0 {
		return
	}
	l.m.leased--
	if l.m.turn != nil {
		close(l.m.turn)
		l.m.turn = nil
	}
	switch {
	case s.leaving:
		l.m.lost++
		l.m.forget(l.i, true)
	case !s.ready:
		l.m.forget(l.i, false)
	default:
		l.m.settle(l.i)
	}
}

// Loads is how often the unit was asked for since it came here.
func (l *lease) Loads() int {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	return l.m.slots[l.i].loads
}

// Leave returns the unit that goes next, if fewer than spare slots are free or
// becoming so; it is freed with its lease, unless somebody gets it before.
func (m *Memory) Leave(spare int) level.Lease {
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
	m.unlink(s) // what it extends may go as well
	return &lease{m, i}
}

// Freed is poked when a slot is free.
func (m *Memory) Freed() <-chan struct{} { return m.freed }

// Leaving reports whether no slot is free, and some will be.
func (m *Memory) Leaving() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.free) == 0 && m.leaving > 0
}

// Stay takes Leave back.
func (l *lease) Stay() {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	l.m.stay(&l.m.slots[l.i])
}

func (m *Memory) stay(s *slot) {
	if s.leaving {
		s.leaving = false
		m.leaving--
		m.link(s)
	}
}

// Forget forgets a unit, at once or when its leases end.
func (m *Memory) Forget(key kvcache.Hash) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i, ok := m.keys[key]; ok && m.slots[i].ready {
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

// expire drops a unit that is too old.
func (m *Memory) expire(key kvcache.Hash) {
	if i, ok := m.keys[key]; ok && m.slots[i].ready && m.env.Old(m.slots[i].Born) {
		m.doom(i)
	}
}

// Repin looks anew whether units are pinned.
func (m *Memory) Repin(keys []kvcache.Hash) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range keys {
		if i, ok := m.keys[key]; ok && m.slots[i].ready {
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

// What follows is called under mu.

func (m *Memory) hold(s *slot) {
	if s.leases++; s.leases == 1 {
		m.leased++
	}
}

// settle makes a slot idle or busy in the order, as it is.
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

// evict frees an idle slot, if there is one.
func (m *Memory) evict(i int32) bool {
	if i < 0 {
		return false
	}
	m.lost++
	m.forget(i, true)
	return true
}

func (m *Memory) doom(i int32) {
	s := &m.slots[i]
	if s.leases == 0 {
		m.forget(i, false)
		return
	}
	s.doomed = true
	m.setReady(s, false)
}

// forget frees a slot without leases; went: for another unit.
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

// link and unlink count a unit as one that extends its parent.
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
