package tier

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// WritePolicy says when a unit is copied to the tier below.
type WritePolicy string

// The policies. Pinned units are copied as soon as they are computed under all
// of them.
const (
	// Through: when it is computed. Costs a copy of each unit, used again or
	// not, and loses nothing.
	Through WritePolicy = "through"
	// Selective: when WriteHits requests have found it, in the pool for host
	// memory, in host memory for the SSD. Costs the first hits after an
	// eviction; spares the copies, and the SSD's wear, of what nobody asks for.
	Selective WritePolicy = "selective"
	// Back: when it is about to make room for another. Costs least, but the
	// copy is made when memory is short: what is evicted before its turn is
	// lost to the tiers, as are the pool's units when the worker ends.
	Back WritePolicy = "back"
)

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
		t.host.raise(ev.Hash, ev.Priority)
		return
	case kvcache.Removed:
		if ev.Priority > 0 { // it may have been raised before it was saved
			t.host.raise(ev.Hash, ev.Priority)
		}
		if t.cfg.Write == Back && ev.Evicted && !t.host.has(ev.Hash) && !t.disk.has(ev.Hash) {
			t.metrics.dropped.WithLabelValues(tierHost).Inc()
		}
		return
	default:
		return
	}
	t.enqueue(save{unit{key: ev.Hash, parent: ev.Parent, root: ev.Root, pos: ev.Pos, tokens: ev.Tokens, priority: ev.Priority}, ev.Kind == kvcache.Cold})
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
			t.metrics.dropped.WithLabelValues(tierHost).Inc()
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
	if t.cfg.Write == Back && t.disk != nil && t.slow.allow() {
		t.writeAll()
	}
}

// seal ends the writers.
func (t *Tiers) seal() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sealed = true
	close(t.writes)
	if t.shared != nil {
		close(t.shared.queue)
	}
}

func (t *Tiers) save(list []save) {
	var units []moving
	for _, s := range list {
		if u, ok := t.depart(s); ok {
			units = append(units, u)
		}
	}
	if len(units) == 0 {
		return
	}
	err := t.mover.gather(units)
	if err != nil {
		t.complain(fmt.Errorf("move out of the pool: %w", err))
	}
	for _, u := range units {
		if err == nil {
			u.publish() // found before the blocks are let go
			t.metrics.saved.WithLabelValues(tierHost).Inc()
			key := u.unit().key
			t.share(share{key: key})
			if t.cfg.Write == Through || t.pins.has(key) {
				t.push(write{key: key})
			}
		}
		u.release()
		t.cache.PutBack(u.ids, saveOwner)
	}
	t.spill()
}

// depart holds a unit's blocks and takes a slot for it; not ok: it is not
// wanted, or there is none.
func (t *Tiers) depart(s save) (u moving, ok bool) {
	if t.host.has(s.key) {
		return u, false // it came from there, mostly
	}
	t.awaitRoom()
	hold := t.cache.Hold
	if s.cold {
		hold = t.cache.HoldCold
	}
	ids := hold(s.key, saveOwner)
	if ids == nil {
		return u, false // evicted since
	}
	if s.born = t.disk.born(s.key); s.born.IsZero() {
		s.born = time.Now()
	}
	l := t.host.take(s.unit)
	if l == nil {
		t.cache.PutBack(ids, saveOwner)
		t.spill()
		return u, false
	}
	return moving{l, ids, s.pos}, true
}

// push hands a unit to the writers.
func (t *Tiers) push(w write) bool {
	if t.disk == nil || t.disk.has(w.key) {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sealed {
		return false
	}
	if t.slow.allow() {
		t.unsaved.Add(1)
		select {
		case t.writes <- w:
			return true
		default:
			t.unsaved.Add(-1)
		}
	}
	if w.leaving == nil {
		t.metrics.dropped.WithLabelValues(tierSSD).Inc()
	}
	return false
}

// spill keeps some of host memory free under Back: what goes next is written
// to the SSD first. What goes before it could be is counted by lost.
func (t *Tiers) spill() {
	if t.cfg.Write != Back || t.disk == nil {
		return
	}
	for {
		l := t.host.leave(t.spare)
		if l == nil {
			return
		}
		u := l.unit()
		if t.disk.has(u.key) {
			l.release()
			continue
		}
		if !t.push(write{u.key, l}) {
			l.stay()
			l.release()
			return
		}
	}
}

// awaitRoom gives the SSD a moment to take what leaves host memory, before a
// unit that it does not have yet is taken for another.
func (t *Tiers) awaitRoom() {
	if !t.host.awaits() {
		return
	}
	stalls := t.slow.opens()
	timer := time.NewTimer(t.patience)
	defer timer.Stop()
	for t.host.awaits() {
		select {
		case <-t.host.freed:
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
func (t *Tiers) lost(u unit) {
	if t.cfg.Write == Back && t.disk != nil && !t.disk.has(u.key) {
		t.metrics.dropped.WithLabelValues(tierSSD).Inc()
	}
}

// writeAll writes what only host memory has, prompts from their beginning,
// until Close's time is over.
func (t *Tiers) writeAll() {
	list := t.host.ready()
	slices.SortFunc(list, func(a, b unit) int { return cmp.Compare(a.pos, b.pos) })
	for _, u := range list {
		if t.disk.has(u.key) {
			continue
		}
		t.unsaved.Add(1)
		select {
		case t.writes <- write{key: u.key}:
		case <-t.ctx.Done():
			t.unsaved.Add(-1)
			return
		}
	}
}

// writer writes units from host memory to the SSD until writes is closed.
func (t *Tiers) writer() {
	for w := range t.writes {
		t.write(w)
		t.unsaved.Add(-1)
	}
}

func (t *Tiers) write(w write) {
	l := w.leaving
	if l == nil {
		l = t.host.peek(w.key)
	}
	if l == nil {
		return // evicted since
	}
	defer l.release()
	if t.ctx.Err() != nil {
		return
	}
	if !t.slow.allow() {
		if w.leaving != nil {
			l.stay()
		} else {
			t.metrics.dropped.WithLabelValues(tierSSD).Inc()
		}
		return
	}
	written, err := t.disk.write(l.unit(), l.record())
	if err != nil {
		t.metrics.errors.WithLabelValues("write").Inc()
		t.complain(fmt.Errorf("write to %s: %w", t.cfg.Dir, err))
	}
	if written {
		t.metrics.saved.WithLabelValues(tierSSD).Inc()
	}
}
