package tier

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// WritePolicy says when a unit is copied to the level below. Pinned units are copied as soon as
// they are computed under all policies.
type WritePolicy string

const (
	// Through copies a unit when it is computed. It costs a copy of each unit, used again or
	// not, and loses nothing.
	Through WritePolicy = "through"
	// Selective copies a unit when WriteHits requests have found it: from the pool to host
	// memory when they found it in the pool, and on when they found it in host memory. It costs
	// the first hits after an eviction, and saves copies, and a device's wear, for units that
	// nobody asks for.
	Selective WritePolicy = "selective"
	// Back copies a unit when it is about to be evicted. It costs least, but copies when memory
	// is short: units evicted before their turn are lost to the tiers, as are the pool's units
	// when the worker ends.
	Back WritePolicy = "back"
)

// save is a unit of the pool to be copied to host memory.
type save struct {
	level.Unit
	cold bool // about to be evicted from the pool
}

// saveOwner owns blocks while they are copied out.
const saveOwner = "tier/save"

// Tune makes the cache announce what the write policy needs.
func (t *Tiers) Tune(c *kvcache.Config) {
	switch t.cfg.Write {
	case Selective:
		c.HotHits = t.cfg.WriteHits
	case Back:
		c.Ahead = max(c.Blocks/4, 1)
	}
}

// KVEvent implements kvcache.Listener: it queues units that the policy wants to be saved.
func (t *Tiers) KVEvent(ev kvcache.Event) {
	switch ev.Kind {
	case kvcache.Stored:
		if t.cfg.Write != Through && !t.pins.has(ev.Hash) {
			return
		}
	case kvcache.Hot, kvcache.Cold: // see Tune
	case kvcache.Raised:
		t.host.Raise(ev.Hash, ev.Priority)
		return
	case kvcache.Removed:
		if ev.Priority > 0 { // the unit may have been saved after it was Raised
			t.host.Raise(ev.Hash, ev.Priority)
		}
		if t.cfg.Write == Back && ev.Evicted && !t.has(ev.Hash) {
			t.dropped(t.host)
		}
		return
	default:
		return
	}
	t.enqueue(save{level.Unit{Key: ev.Hash, Parent: ev.Parent, Root: ev.Root, Pos: ev.Pos, Tokens: ev.Tokens, Priority: ev.Priority}, ev.Kind == kvcache.Cold})
}

func (t *Tiers) enqueue(s save) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	t.unsaved.Add(1)
	select {
	case t.saves <- s:
	default:
		t.unsaved.Add(-1)
		if !s.cold { // else it is counted when it is evicted
			t.dropped(t.host)
		}
	}
}

// saver copies units from the pool to host memory until saves is closed.
func (t *Tiers) saver() {
	defer t.seal()
	var list []save
	for s := range t.saves {
		list = append(list[:0], s)
		for len(list) < t.batch && len(t.saves) > 0 { // nobody else receives
			list = append(list, <-t.saves)
		}
		if t.ctx.Err() == nil {
			t.save(list)
		}
		t.unsaved.Add(-int64(len(list)))
	}
	if t.cfg.Write == Back && t.own != nil && t.own.Breaker().Allow() {
		t.writeAll()
	}
}

// seal ends the writers.
func (t *Tiers) seal() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sealed = true
	for _, l := range t.below {
		if l.jobs != nil {
			close(l.jobs)
		}
	}
}

func (t *Tiers) save(list []save) {
	var units []host.Move
	for _, s := range list {
		if u, ok := t.depart(s); ok {
			units = append(units, u)
		}
	}
	if len(units) == 0 {
		return
	}
	err := t.host.Gather(units)
	if err != nil {
		t.complain(fmt.Errorf("move out of the pool: %w", err))
	}
	for _, u := range units {
		if err == nil {
			u.Publish(time.Time{}) // before the blocks are released
			t.metrics.saved.WithLabelValues(t.host.Name()).Inc()
			key := u.Unit().Key
			own := t.cfg.Write == Through || t.pins.has(key)
			for _, l := range t.below {
				if own || l.remote != nil { // the shared level gets what host memory gets
					t.push(l, job{key: key})
				}
			}
		}
		u.Release()
		t.cache.PutBack(u.Blocks, saveOwner)
	}
	t.spill()
}

// depart holds a unit's blocks and takes a slot for it. It returns false if the unit is here
// or evicted, or there is no slot.
func (t *Tiers) depart(s save) (u host.Move, ok bool) {
	if t.host.Has(s.Key) {
		return u, false // mostly it came from there
	}
	t.awaitRoom()
	hold := t.cache.Hold
	if s.cold {
		hold = t.cache.HoldCold
	}
	ids := hold(s.Key, saveOwner)
	if ids == nil {
		return u, false // it was evicted
	}
	s.Born = t.born(s.Key)
	l, _ := t.host.Take(s.Unit)
	if l == nil {
		t.cache.PutBack(ids, saveOwner)
		t.spill()
		return u, false
	}
	return host.Move{Lease: l, Blocks: ids, Pos: s.Pos}, true
}

// has reports whether one of this worker's own levels has a unit, left alone or not.
func (t *Tiers) has(key kvcache.Hash) bool {
	return t.host.Has(key) || slices.ContainsFunc(t.below, func(l *lane) bool { return l.Has(key) })
}

// born is when a unit entered the tiers: now, if no level has it.
func (t *Tiers) born(key kvcache.Hash) time.Time {
	for _, l := range t.below {
		if at := l.Born(key); !at.IsZero() {
			return at
		}
	}
	return time.Now()
}

// spill keeps some of host memory free under Back: it writes the units that are evicted next to
// the level below. Those evicted before that are counted by lost.
func (t *Tiers) spill() {
	if t.cfg.Write != Back || t.own == nil {
		return
	}
	for {
		l := t.host.Leave(t.spare)
		if l == nil {
			return
		}
		key := l.Unit().Key
		if t.own.Has(key) {
			l.Release()
			continue
		}
		if !t.push(t.own, job{key: key, leaving: l}) {
			l.Stay()
			l.Release()
			return
		}
	}
}

// awaitRoom gives the level below a moment to write what leaves host memory, before a unit that
// it does not have yet is evicted.
func (t *Tiers) awaitRoom() {
	if !t.host.Leaving() {
		return
	}
	stalls := t.own.Breaker().Opens() // units leave for own, so it is there
	timer := time.NewTimer(t.patience)
	defer timer.Stop()
	for t.host.Leaving() {
		select {
		case <-t.host.Freed():
		case <-timer.C:
			return
		case <-stalls:
			return
		case <-t.ctx.Done():
			return
		}
	}
}

// lost counts units evicted from host memory that should have been written.
func (t *Tiers) lost(u level.Unit) {
	if t.cfg.Write == Back && t.own != nil && !t.own.Has(u.Key) {
		t.dropped(t.own)
	}
}

// writeAll writes what only host memory has, the beginnings of prompts first, until Close's
// context ends.
func (t *Tiers) writeAll() {
	list := t.host.Units()
	slices.SortFunc(list, func(a, b level.Unit) int { return cmp.Compare(a.Pos, b.Pos) })
	for _, u := range list {
		if t.own.Has(u.Key) {
			continue
		}
		t.unsaved.Add(1)
		select {
		case t.own.jobs <- job{key: u.Key}:
		case <-t.ctx.Done():
			t.unsaved.Add(-1)
			return
		}
	}
}
