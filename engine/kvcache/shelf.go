package kvcache

import (
	"fmt"
	"slices"
)

// Shelve keeps blocks under name until Unshelve: owner's only references to blocks that the
// index does not know end. Like cached blocks they are nobody's, and evicted, all at once, when
// Alloc needs space, but no prefix leads to them. It is for the part of a sequence that has
// arrived. Blocks that were shelved under the same name are freed.
func (c *Cache) Shelve(name Hash, ids []int32, owner string) {
	c.mu.Lock()
	defer c.unlock()
	if old := c.shelf[name]; old != nil {
		c.drop(old)
	}
	if len(ids) == 0 {
		return
	}
	e := &entry{hash: name, blocks: slices.Clone(ids), leaf: true, shelved: true}
	for _, id := range ids {
		if b := c.at(id); b.refs != 1 || b.entry != nil {
			panic(fmt.Sprintf("kvcache: shelve of block %d: %d references, indexed %t, want one unindexed", id, b.refs, b.entry != nil))
		}
		c.blocks[id].entry = e
	}
	c.shelf[name] = e
	for _, id := range ids {
		c.release(id, owner, false)
	}
}

// Unshelve gives owner the blocks that are shelved under name, in their order; nil if they are
// gone.
func (c *Cache) Unshelve(name Hash, owner string) []int32 {
	c.mu.Lock()
	defer c.unlock()
	e := c.shelf[name]
	if e == nil {
		return nil
	}
	c.retain(e.blocks, owner)
	c.drop(e)
	return e.blocks
}
