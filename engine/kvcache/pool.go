package kvcache

import "fmt"

// Alloc takes n blocks for owner, evicting cached ones if it must, or none: ErrNoSpace,
// ErrTooLarge. It is for sequences that run and grow, so it does not queue behind ReserveWait.
func (c *Cache) Alloc(n int, owner string) ([]int32, error) {
	c.mu.Lock()
	defer c.unlock()
	return c.alloc(n, owner)
}

func (c *Cache) alloc(n int, owner string) ([]int32, error) {
	switch {
	case n > c.cfg.Blocks:
		return nil, fmt.Errorf("allocate %d of %d blocks: %w", n, c.cfg.Blocks, ErrTooLarge)
	case n > len(c.free)+c.cached:
		return nil, ErrNoSpace
	case n <= 0:
		return nil, nil
	}
	for len(c.free) < n {
		c.evict()
	}
	ids := make([]int32, n)
	h := c.holding(owner, n)
	for i := range ids {
		id := c.free[len(c.free)-1]
		c.free = c.free[:len(c.free)-1]
		c.blocks[id].refs = 1
		h.refs[id]++
		ids[i] = id
	}
	return ids, nil
}

// Retain gives owner a reference to each block. All of them must be held already.
func (c *Cache) Retain(ids []int32, owner string) {
	c.mu.Lock()
	defer c.unlock()
	for _, id := range ids {
		if c.at(id).refs == 0 {
			panic(fmt.Sprintf("kvcache: retain of block %d, which nobody holds", id))
		}
	}
	c.retain(ids, owner)
}

func (c *Cache) retain(ids []int32, owner string) {
	if len(ids) == 0 {
		return
	}
	h := c.holding(owner, len(ids))
	for _, id := range ids {
		b := &c.blocks[id]
		if b.refs == 0 { // cached
			c.cached--
			c.entryBusy(b.entry)
		}
		b.refs++
		h.refs[id]++
	}
}

// Release drops one of owner's references to each block. A block that nobody holds any more
// becomes cached if the index knows it, else free, and its generation changes.
func (c *Cache) Release(ids []int32, owner string) {
	c.mu.Lock()
	defer c.unlock()
	// Last first, so that the end of a sequence is evicted before its start.
	for i := len(ids) - 1; i >= 0; i-- {
		c.release(ids[i], owner, false)
	}
}

// ReleaseAll drops every reference that owner has, except to quarantined blocks, and returns
// how many there were.
func (c *Cache) ReleaseAll(owner string) int {
	c.mu.Lock()
	defer c.unlock()
	h := c.owners[owner]
	if h == nil {
		return 0
	}
	n := 0
	for id, refs := range h.refs {
		for range refs {
			c.release(id, owner, false)
			n++
		}
	}
	return n
}

func (c *Cache) release(id int32, owner string, quietly bool) {
	c.disown(id, owner)
	b := &c.blocks[id]
	if b.refs--; b.refs > 0 {
		return
	}
	b.gen++
	if b.quarantined {
		return
	}
	c.freed = true
	if b.entry != nil {
		c.cached++
		c.entryIdle(b.entry, quietly)
		return
	}
	c.free = append(c.free, id)
}

// Unshare makes a block that owner holds safe to write. It returns the same id if owner's is
// the only reference and the block is not in quarantine; the index then forgets the block.
// Otherwise it moves owner's reference to a fresh block and returns its id, and the caller
// copies the rows. ErrNoSpace leaves everything as it was.
func (c *Cache) Unshare(id int32, owner string) (int32, error) {
	c.mu.Lock()
	defer c.unlock()
	b := c.at(id)
	if b.refs == 1 && !b.quarantined {
		if b.entry != nil {
			c.drop(b.entry)
		}
		return id, nil
	}
	fresh, err := c.alloc(1, owner)
	if err != nil {
		return 0, err
	}
	c.release(id, owner, false)
	return fresh[0], nil
}

// Generations returns the generation of each block. It changes when the block is freed or
// revoked, so a write that names an old one must be refused.
func (c *Cache) Generations(ids []int32) []uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	gens := make([]uint32, len(ids))
	for i, id := range ids {
		gens[i] = c.at(id).gen
	}
	return gens
}

// Revoke changes the generation of blocks that owner holds, so that writes under the old one
// are refused. The references stay.
func (c *Cache) Revoke(ids []int32, owner string) {
	c.mu.Lock()
	defer c.unlock()
	for _, id := range ids {
		if c.held(id, owner) == 0 {
			panic(fmt.Sprintf("kvcache: revoke of block %d, which %q does not hold", id, owner))
		}
		c.blocks[id].gen++
	}
}

// Quarantine takes blocks out of use, under a new generation, until Unquarantine. Owner must
// have one reference to each, and none may be indexed. It is for revoked blocks whose writer
// has not acknowledged. Others who hold them must not use their rows, and may release them at
// any time.
func (c *Cache) Quarantine(ids []int32, owner string) {
	c.mu.Lock()
	defer c.unlock()
	for _, id := range ids {
		b := c.at(id)
		refs := c.held(id, owner)
		if refs != 1 || b.entry != nil || b.quarantined {
			panic(fmt.Sprintf("kvcache: quarantine of block %d: %d references of %q, indexed %t, in quarantine %t; want one unindexed",
				id, refs, owner, b.entry != nil, b.quarantined))
		}
		c.owners[owner].quarantine(id) // first, so that the account stays open
		c.disown(id, owner)
		b.refs--
		b.quarantined = true
		b.gen++
		c.quarantined++
	}
}

// Unquarantine ends owner's Quarantine of blocks, and frees those that nobody holds: their
// writer acknowledged, or is proven gone.
func (c *Cache) Unquarantine(ids []int32, owner string) {
	c.mu.Lock()
	defer c.unlock()
	for _, id := range ids {
		h := c.owners[owner]
		if h == nil || !h.quarantined[id] {
			panic(fmt.Sprintf("kvcache: block %d is not in quarantine for %q", id, owner))
		}
		delete(h.quarantined, id)
		c.forget(owner, h)
		b := &c.blocks[id]
		b.quarantined = false
		b.gen++
		c.quarantined--
		if b.refs == 0 {
			c.free = append(c.free, id)
			c.freed = true
		}
	}
}

// at returns the block, and panics on an id outside the pool.
func (c *Cache) at(id int32) *block {
	if id < 0 || int(id) >= len(c.blocks) {
		panic(fmt.Sprintf("kvcache: block %d of %d", id, len(c.blocks)))
	}
	return &c.blocks[id]
}
