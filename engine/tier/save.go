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

// WritePolicy says when a unit is copied to the level below.
type WritePolicy string

// The policies. Pinned units are copied as soon as they are computed under all
// of them.
const (
	// Through: when it is computed. Costs a copy of each unit, used again or
	// not, and loses nothing.
	Through WritePolicy = "through"
	// Selective: when WriteHits requests have found it, in the pool for host
	// memory, in host memory for what is below. Costs the first hits after an
	// eviction; spares the copies, and an SSD's wear, of what nobody asks for.
	Selective WritePolicy = "selective"
	// Back: when it is about to make room for another. Costs least, but the
	// copy is made when memory is short: what is evicted before its turn is
	// lost to the tiers, as are the pool's units when the worker ends.
	Back WritePolicy = "back"
)

// save is a unit of the pool that is to be copied to host memory.
type save struct {
	level.Unit
	cold bool // it is about to be evicted from the pool
}

// saveOwner holds blocks while they are copied out.
const saveOwner = "tier/save"

// Tune sets what the cache tells its listener, as the write policy needs it.
func (t *Tiers) Tune(c *kvcache.Config) {
	switch t.cfg.Write {
	case Selective:
		c.HotHits = t.cfg.WriteHits
	case Back:
		c.Ahead = max(c.Blocks/4, 1)
	}
}

// KVEvent implements kvcache.Listener: what the policy wants to be saved is,
// unless too much waits already.
func (t *Tiers) KVEvent(ev kvcache.Event) {
	switch ev.Kind {
	case kvcache.Stored:
		if t.cfg.Write != Through && !t.pins.has(ev.Hash) {
			return
		}
	case kvcache.Hot, kvcache.Cold: // told under the other two only
	case kvcache.Raised:
		t.host.Raise(ev.Hash, ev.Priority)
		return
	case kvcache.Removed:
		if ev.Priority > 0 { // it may have been raised before it was saved
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
		if !s.cold { // those are counted when they are evicted
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
		for len(list) < t.batch && len(t.saves) > 0 { // nobody else takes them
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
			u.Publish(time.Time{}) // found before the blocks are let go
			t.metrics.saved.WithLabelValues(t.host.Name()).Inc()
			key := u.Unit().Key
			own := t.cfg.Write == Through || t.pins.has(key)
			for _, l := range t.below {
				if own || l.remote != nil { // what others share has what host memory has
					t.push(l, job{key: key})
				}
			}
		}
		u.Release()
		t.cache.PutBack(u.Blocks, saveOwner)
	}
	t.spill()
}

// depart holds a unit's blocks and takes a slot for it; not ok: it is not
// wanted, or there is none.
func (t *Tiers) depart(s save) (u host.Move, ok bool) {
	if t.host.Has(s.Key) {
		return u, false // it came from there, mostly
	}
	t.awaitRoom()
	hold := t.cache.Hold
	if s.cold {
		hold = t.cache.HoldCold
	}
	ids := hold(s.Key, saveOwner)
	if ids == nil {
		return u, false // evicted since
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

// has reports whether a level of this worker's own has a unit, left alone or not.
func (t *Tiers) has(key kvcache.Hash) bool {
	return t.host.Has(key) || slices.ContainsFunc(t.below, func(l *lane) bool { return l.Has(key) })
}

// born is when a unit came into the tiers: now, if no level has it.
func (t *Tiers) born(key kvcache.Hash) time.Time {
	for _, l := range t.below {
		if at := l.Born(key); !at.IsZero() {
			return at
		}
	}
	return time.Now()
}

// spill keeps some of host memory free under Back: what goes next is written
// below first. What goes before it could be is counted by lost.
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

// awaitRoom gives the level below a moment to take what leaves host memory, before a
// unit that it does not have yet is taken for another.
func (t *Tiers) awaitRoom() {
	if !t.host.Leaving() {
		return
	}
	stalls := t.own.Breaker().Opens() // nothing is leaving without it
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

// lost counts what goes from host memory for good, where it should have been
// written.
func (t *Tiers) lost(u level.Unit) {
	if t.cfg.Write == Back && t.own != nil && !t.own.Has(u.Key) {
		t.dropped(t.own)
	}
}

// writeAll writes what only host memory has, prompts from their beginning,
// until Close's time is over.
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
