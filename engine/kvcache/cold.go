package kvcache

import "container/heap"

// What a lower tier hears in time for its write policy: that a unit is asked
// for again and again, and that it is about to be evicted. Evicting is then a
// matter of the index alone, as ever: who did not copy a unit after Cold, or
// was too slow, has lost it, and no allocation waits.

// HoldCold is Hold for whoever copies units that are about to be evicted. It
// stands behind everybody: nil also when somebody waits for blocks, or when
// what is left would be less than what the engine is about to need.
func (c *Cache) HoldCold(h Hash, owner string) []int32 {
	c.mu.Lock()
	defer c.unlock()
	e := c.index[h]
	if e == nil || len(c.waiters) > 0 || len(c.free)+c.cached-e.idle < c.demand.running+c.demand.next {
		return nil
	}
	c.retain(e.blocks, owner)
	return e.blocks
}

// PutBack is Release after Hold and HoldCold: to have been copied is no use,
// so the units are evicted no later than before.
func (c *Cache) PutBack(ids []int32, owner string) {
	c.mu.Lock()
	defer c.unlock()
	for i := len(ids) - 1; i >= 0; i-- {
		c.release(ids[i], owner, true)
	}
}

// found notes that a request of that priority has got the units that these blocks,
// all held now, are of.
func (c *Cache) found(ids []int32, priority int8) {
	for ; len(ids) > 0; ids = ids[c.unitBlocks:] {
		e := c.blocks[ids[0]].entry
		c.use(e)
		c.raise(e, priority)
		if e.hits++; e.hits == c.cfg.HotHits && c.cfg.Listener != nil {
			c.pending = append(c.pending, e.event(Hot))
		}
	}
}

// raise gives e a priority if it is higher than its own; it is in no heap, or about to
// be fixed there.
func (c *Cache) raise(e *entry, priority int8) {
	if priority <= e.priority {
		return
	}
	e.priority = priority
	if c.cfg.Listener != nil {
		c.pending = append(c.pending, e.event(Raised))
	}
}

// use notes a use of e; it is not in a heap, or about to be fixed there.
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

// announce tells of the units that are next to be evicted until, with the free
// blocks, there are Ahead blocks of them.
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
			c.pending = append(c.pending, e.event(Cold))
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

// isLeaf reports whether nothing extends e, among those that stay longer than e:
// cold entries go first, so that a prompt's units are announced from its end.
func (c *Cache) isLeaf(e *entry) bool {
	n := c.kids[e.hash]
	if !e.cold {
		n -= c.coldKids[e.hash]
	}
	return n == 0
}

// worst is the entry that is evicted next; there is one.
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
