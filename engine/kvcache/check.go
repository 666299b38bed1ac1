package kvcache

import (
	"errors"
	"fmt"
	"maps"
)

// Check verifies the cache's invariants: every block is in exactly one state,
// references equal the owners' accounts, and the index agrees with the blocks
// and with its own orders. It is for tests and for an idle engine's audit.
func (c *Cache) Check() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	refs := make([]int32, len(c.blocks))
	quarantined := make([]bool, len(c.blocks))
	for owner, h := range c.owners {
		if len(h.refs) == 0 && len(h.quarantined) == 0 {
			return fmt.Errorf("owner %q has an empty account", owner)
		}
		for id, n := range h.refs {
			refs[id] += int32(n)
		}
		for id := range h.quarantined {
			if quarantined[id] {
				return fmt.Errorf("block %d is in quarantine twice", id)
			}
			quarantined[id] = true
		}
	}
	free := make([]bool, len(c.blocks))
	for _, id := range c.free {
		if free[id] {
			return fmt.Errorf("block %d is free twice", id)
		}
		free[id] = true
	}
	cached, barred := 0, 0
	for i := range c.blocks {
		b := &c.blocks[i]
		states := 0
		for _, is := range []bool{free[i], b.refs > 0 && !b.quarantined, b.refs == 0 && b.entry != nil, b.quarantined} {
			if is {
				states++
			}
		}
		switch {
		case states != 1:
			return fmt.Errorf("block %d: in %d states: free %t, refs %d, indexed %t, quarantined %t",
				i, states, free[i], b.refs, b.entry != nil, b.quarantined)
		case b.refs != refs[i]:
			return fmt.Errorf("block %d: %d references, owners have %d", i, b.refs, refs[i])
		case b.quarantined != quarantined[i]:
			return fmt.Errorf("block %d: quarantine %t, owners say %t", i, b.quarantined, quarantined[i])
		case b.entry != nil && (free[i] || b.quarantined):
			return fmt.Errorf("block %d: indexed though not in use", i)
		case b.entry != nil && c.index[b.entry.hash] != b.entry && c.shelf[b.entry.hash] != b.entry:
			return fmt.Errorf("block %d: its entry is not in the index", i)
		}
		if b.refs == 0 && b.entry != nil {
			cached++
		}
		if b.quarantined {
			barred++
		}
	}
	if cached != c.cached || barred != c.quarantined {
		return fmt.Errorf("%d blocks cached, counted %d; %d in quarantine, counted %d", cached, c.cached, barred, c.quarantined)
	}
	if len(c.waiters) > c.cfg.MaxWaiters {
		return fmt.Errorf("%d waiters, at most %d may wait", len(c.waiters), c.cfg.MaxWaiters)
	}
	return c.checkIndex()
}

func (c *Cache) checkIndex() error {
	kids := make(map[Hash]int)
	coldKids := make(map[Hash]int)
	idle, cold := 0, 0
	entries := maps.Clone(c.index)
	maps.Copy(entries, c.shelf)
	if len(entries) != len(c.index)+len(c.shelf) {
		return errors.New("a name on the shelf is in the index")
	}
	for hash, e := range entries {
		if !e.shelved {
			kids[e.parent]++
			if e.cold {
				coldKids[e.parent]++
			}
		}
		n := 0
		for _, id := range e.blocks {
			b := &c.blocks[id]
			if b.entry != e {
				return fmt.Errorf("block %d: indexed under an entry it does not know", id)
			}
			if b.refs == 0 {
				n++
			}
		}
		switch {
		case hash != e.hash || !e.shelved && len(e.blocks) != c.unitBlocks:
			return fmt.Errorf("entry %x: hash %x, %d blocks", hash, e.hash, len(e.blocks))
		case n != e.idle:
			return fmt.Errorf("entry %x: %d blocks idle, counted %d", hash, n, e.idle)
		case n > 0 && (e.pos >= len(*c.heapOf(e)) || (*c.heapOf(e))[e.pos] != e):
			return fmt.Errorf("entry %x: not where its heap position says", hash)
		case e.leaf != c.isLeaf(e):
			return fmt.Errorf("entry %x: leaf %t with %d children", hash, e.leaf, c.kids[hash])
		}
		if n > 0 {
			idle++
		}
		if e.cold {
			cold += n
		}
	}
	if idle != len(c.idle)+len(c.cold) || cold != c.coldBlocks {
		return fmt.Errorf("%d entries evictable, heaps have %d and %d; %d cold blocks, counted %d", idle, len(c.idle), len(c.cold), cold, c.coldBlocks)
	}
	if c.cfg.Listener != nil && len(c.free)+c.coldBlocks < c.cfg.Ahead && len(c.idle) > 0 {
		return fmt.Errorf("%d blocks free and %d cold, %d more entries could be announced", len(c.free), c.coldBlocks, len(c.idle))
	}
	if len(kids) != len(c.kids) {
		return fmt.Errorf("%d parents, counted %d", len(kids), len(c.kids))
	}
	for hash, n := range kids {
		if c.kids[hash] != n {
			return fmt.Errorf("entry %x: %d children, counted %d", hash, n, c.kids[hash])
		}
	}
	if !maps.Equal(coldKids, c.coldKids) {
		return fmt.Errorf("%d parents of cold entries, counted %d", len(coldKids), len(c.coldKids))
	}
	for _, h := range []entryHeap{c.idle, c.cold} {
		for i := 1; i < len(h); i++ {
			if h.Less(i, (i-1)/2) {
				return fmt.Errorf("eviction heap out of order at %d", i)
			}
		}
	}
	return nil
}
