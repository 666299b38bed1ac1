package kvcache

import "container/heap"

// A lower tier hears, in time for its write policy, that a unit is found again and again
// (Hot), and that it is about to be evicted (Cold). Eviction waits for nobody: a unit that was
// not copied after Cold is lost.

// HoldCold is Hold for a copy of a unit that is about to be evicted. It comes last: it also
// returns nil when somebody waits for blocks, or when too few would be left for what the
// engine is about to need.
func (c *Cache) HoldCold(h Hash, owner string) []int32 {
	c.mu.Lock()
	defer c.unlock()
	e := c.index[h]
	if e == nil || c.needed(e.idle) {
		return nil
	}
	c.retain(e.blocks, owner)
	return e.blocks
}

// needed reports whether holding idle more cached blocks would take what somebody waits for or
// the engine is about to need.
func (c *Cache) needed(idle int) bool {
	return len(c.waiters) > 0 || len(c.free)+c.cached-idle < c.demand.running+c.demand.next
}

// PutBack is Release after Hold and HoldCold. A copy is not a use: the units are evicted no
// later than before.
func (c *Cache) PutBack(ids []int32, owner string) {
	c.mu.Lock()
	defer c.unlock()
	for i := len(ids) - 1; i >= 0; i-- {
		c.release(ids[i], owner, true)
	}
}

// found notes that a request of that priority got the units of these blocks, all held now.
func (c *Cache) found(ids []int32, priority int8) {
	for ; len(ids) > 0; ids = ids[c.unitBlocks:] {
		e := c.blocks[ids[0]].entry
		c.use(e)
		c.raise(e, priority)
		if e.hits++; e.hits == c.cfg.HotHits {
			c.tell(e.event(Hot))
		}
	}
}

// raise raises the priority of e, which is in no heap or about to be fixed there.
func (c *Cache) raise(e *entry, priority int8) {
	if priority > e.priority {
		e.priority = priority
		c.tell(e.event(Raised))
	}
}

// use notes a use of e, which is in no heap or about to be fixed there.
func (c *Cache) use(e *entry) {
	c.clock++
	e.used = c.clock
	if e.cold {
		c.rewarm(e)
	}
}

// rewarm takes Cold back.
func (c *Cache) rewarm(e *entry) {
	in := e.idle > 0
	c.unheap(e)
	c.setCold(e, false)
	if in {
		heap.Push(&c.idle, e)
	}
}

// announce announces the next units to be evicted until Ahead blocks are free or announced.
func (c *Cache) announce() {
	if c.cfg.Listener == nil {
		return
	}
	for len(c.free)+c.coldBlocks < c.cfg.Ahead && len(c.idle) > 0 {
		e := c.idle[0]
		c.unheap(e)
		c.setCold(e, true)
		c.coldBlocks += e.idle
		heap.Push(&c.cold, e)
		if !e.shelved {
			c.tell(e.event(Cold))
		}
	}
}

// setCold marks an entry that is in no heap.
func (c *Cache) setCold(e *entry, cold bool) {
	if e.cold == cold {
		return
	}
	e.cold = cold
	if e.shelved {
		return
	}
	e.leaf = c.isLeaf(e)
	if cold {
		c.coldKids[e.parent]++
	} else if c.coldKids[e.parent]--; c.coldKids[e.parent] == 0 {
		delete(c.coldKids, e.parent)
	}
	c.releaf(e.parent)
}

// isLeaf reports whether no entry extends e that is evicted after e. Cold ones are evicted
// first, so that a prompt's units are announced from its end.
func (c *Cache) isLeaf(e *entry) bool {
	n := c.kids[e.hash]
	if !e.cold {
		n -= c.coldKids[e.hash]
	}
	return n == 0
}

// worst is the entry that is evicted next. There must be one.
func (c *Cache) worst() *entry {
	if len(c.cold) == 0 || len(c.idle) > 0 && !c.cold[0].leaf && c.idle[0].leaf {
		return c.idle[0]
	}
	return c.cold[0]
}

// heapOf is the heap of an entry with cached blocks.
func (c *Cache) heapOf(e *entry) *entryHeap {
	if e.cold {
		return &c.cold
	}
	return &c.idle
}

// unheap takes an entry out of its heap, if it is in one.
func (c *Cache) unheap(e *entry) {
	if e.idle == 0 {
		return
	}
	heap.Remove(c.heapOf(e), e.pos)
	if e.cold {
		c.coldBlocks -= e.idle
	}
}

// event describes an entry.
func (e *entry) event(kind EventKind) Event {
	ev := Event{Kind: kind, Hash: e.hash, Root: e.root, Pos: e.from, Blocks: e.blocks, Priority: e.priority}
	if e.from > 0 {
		ev.Parent = e.parent
	}
	return ev
}
