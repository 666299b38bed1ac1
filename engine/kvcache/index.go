package kvcache

import (
	"container/heap"
	"fmt"
	"slices"
	"time"
)

// entry is one indexed unit: UnitTokens tokens of a prefix, named by the chain hash at its end.
type entry struct {
	hash, parent Hash
	blocks       []int32
	idle         int    // its blocks that nobody holds
	used         uint64 // clock of the last release
	leaf         bool   // see isLeaf
	pos          int    // in Cache.idle or Cache.cold, if idle > 0
	shelved      bool   // in Cache.shelf, not in the index: hash is a name, and it has no parent
	root         Hash   // of its chain
	from         int    // tokens before it
	hits         int    // requests that found it
	priority     int8   // the highest of the requests that stored or found it
	cold         bool   // announced as about to be evicted; see cold.go
}

// before reports whether e is evicted before f.
func (e *entry) before(f *entry) bool {
	if e.leaf != f.leaf {
		return e.leaf
	}
	if e.priority != f.priority {
		return e.priority < f.priority
	}
	return e.used < f.used
}

// entryHeap orders entries with blocks to evict: leaves before inner entries, then by
// priority, then least recently used.
type entryHeap []*entry

func (h entryHeap) Len() int           { return len(h) }
func (h entryHeap) Less(i, j int) bool { return h[i].before(h[j]) }
func (h entryHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i, j
}
func (h *entryHeap) Push(x any) {
	e := x.(*entry)
	e.pos = len(*h)
	*h = append(*h, e)
}
func (h *entryHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return e
}

// Reserve makes a table of blocks for a chain: those of the longest indexed prefix, of n
// tokens and at most maxTokens, and fresh ones for the rest. It takes all or none: ErrNoSpace
// if fewer than spare blocks would be left available, or if a ReserveWait that began before
// since still waits; ErrTooLarge if the pool is too small.
func (c *Cache) Reserve(ch *Chain, maxTokens, blocks, spare int, since time.Time, owner string) (ids []int32, n int, err error) {
	c.mu.Lock()
	defer c.unlock()
	if len(c.waiters) > 0 && c.waiters[0].since.Before(since) {
		return nil, 0, ErrNoSpace
	}
	if ids, n, err = c.reserve(ch, maxTokens, blocks, spare, owner); err == nil {
		c.counted(ch, ids, n, maxTokens)
	}
	return ids, n, err
}

func (c *Cache) reserve(ch *Chain, maxTokens, blocks, spare int, owner string) (ids []int32, n int, err error) {
	if blocks > c.cfg.Blocks {
		return nil, 0, fmt.Errorf("reserve %d of %d blocks: %w", blocks, c.cfg.Blocks, ErrTooLarge)
	}
	ids, n, idle := c.find(ch, min(maxTokens, blocks*c.cfg.BlockTokens))
	missing := blocks - len(ids)
	if missing+spare > len(c.free)+c.cached-idle {
		return nil, 0, ErrNoSpace
	}
	c.retain(ids, owner) // first, so that alloc does not evict them
	more, err := c.alloc(missing, owner)
	if err != nil {
		return nil, 0, err // never: counted above
	}
	return append(ids, more...), n, nil
}

// find looks up the longest indexed prefix; idle is how many of its blocks nobody holds.
func (c *Cache) find(ch *Chain, maxTokens int) (ids []int32, n, idle int) {
	grains := c.unitTokens / Grain
	for i := grains; i <= len(ch.hashes) && i*Grain <= maxTokens; i += grains {
		e := c.index[ch.hashes[i-1]]
		if e == nil {
			break
		}
		ids = append(ids, e.blocks...)
		n = i * Grain
		idle += e.idle
	}
	return ids, n, idle
}

// counted notes that a request looked for so many tokens and found the first hit of them, in
// the table's first blocks.
func (c *Cache) counted(ch *Chain, table []int32, hit, asked int) {
	c.ever.HitTokens += uint64(hit)
	c.ever.AskTokens += uint64(max(asked, 0))
	c.found(table[:hit/c.cfg.BlockTokens], ch.Priority)
}

// InsertChain tells the index that blocks ids, all held, contain the KV rows of tokens, whose
// chain is ch; the first from tokens are indexed already. It leaves out a last incomplete unit
// and returns how many tokens are done: pass that as from next time. A prefix that the index
// has keeps its blocks, and the caller's stay private copies.
func (c *Cache) InsertChain(ch *Chain, tokens, ids []int32, from int) int {
	whole := min(len(tokens), len(ids)*c.cfg.BlockTokens, ch.Tokens())
	if from+c.unitTokens > whole {
		return from
	}
	c.mu.Lock()
	defer c.unlock()
	for ; from+c.unitTokens <= whole; from += c.unitTokens {
		b := from / c.cfg.BlockTokens
		c.insert(ch, from, tokens[from:from+c.unitTokens], ids[b:b+c.unitBlocks])
	}
	return from
}

func (c *Cache) insert(ch *Chain, from int, tokens, ids []int32) {
	hash := ch.at((from + c.unitTokens) / Grain)
	if e := c.index[hash]; e != nil {
		if c.raise(e, ch.Priority); e.idle > 0 {
			heap.Fix(c.heapOf(e), e.pos)
		}
		return
	}
	for _, id := range ids {
		b := c.at(id)
		if b.refs == 0 {
			panic("kvcache: insert of a block that nobody holds")
		}
		// A unit of several blocks may share its first ones with a forked sibling's: a block
		// is indexed once. A block in quarantine may still change.
		if b.entry != nil || b.quarantined {
			return
		}
	}
	e := &entry{hash: hash, parent: ch.at(from / Grain), blocks: slices.Clone(ids), root: ch.root, from: from, priority: ch.Priority}
	e.leaf = c.isLeaf(e)
	c.index[hash] = e
	c.kids[e.parent]++
	c.releaf(e.parent)
	for _, id := range ids {
		c.blocks[id].entry = e
	}
	if c.cfg.Listener != nil {
		ev := e.event(Stored)
		ev.Tokens = slices.Clone(tokens)
		c.tell(ev)
	}
}

// Clear empties the index and the shelf: cached blocks are freed, held ones stay held.
func (c *Cache) Clear() {
	c.mu.Lock()
	defer c.unlock()
	for _, entries := range []map[Hash]*entry{c.index, c.shelf} {
		for _, e := range entries {
			c.unindex(e)
		}
		clear(entries)
	}
	clear(c.kids)
	clear(c.coldKids)
	clear(c.idle)
	clear(c.cold)
	c.idle, c.cold, c.coldBlocks = c.idle[:0], c.cold[:0], 0
	c.tell(Event{Kind: Cleared})
}

// evict drops the entry that is worth least. At least one block must be cached.
func (c *Cache) evict() {
	e := c.worst()
	c.ever.Evicted += uint64(e.idle)
	c.remove(e, true)
}

// drop takes an entry out of the index. Entries that extend it stay and match again once it
// is back.
func (c *Cache) drop(e *entry) { c.remove(e, false) }

func (c *Cache) remove(e *entry, evicted bool) {
	c.unheap(e)
	c.setCold(e, false)
	c.unindex(e)
	if e.shelved {
		delete(c.shelf, e.hash)
		return
	}
	delete(c.index, e.hash)
	if c.kids[e.parent]--; c.kids[e.parent] == 0 {
		delete(c.kids, e.parent)
	}
	c.releaf(e.parent)
	c.tell(Event{Kind: Removed, Hash: e.hash, Root: e.root, Blocks: e.blocks, Priority: e.priority, Evicted: evicted})
}

// unindex separates an entry from its blocks, and frees the idle ones.
func (c *Cache) unindex(e *entry) {
	for _, id := range e.blocks {
		b := &c.blocks[id]
		b.entry = nil
		if b.refs == 0 {
			b.gen++
			c.cached--
			c.free = append(c.free, id)
		}
	}
}

// releaf updates whether the entry of that hash is a leaf, if it is indexed.
func (c *Cache) releaf(hash Hash) {
	e := c.index[hash]
	if e == nil {
		return
	}
	e.leaf = c.isLeaf(e)
	if e.idle > 0 {
		heap.Fix(c.heapOf(e), e.pos)
	}
}

// entryBusy records that one more block of e is held.
func (c *Cache) entryBusy(e *entry) {
	if e.cold {
		c.coldBlocks--
	}
	if e.idle--; e.idle == 0 {
		heap.Remove(c.heapOf(e), e.pos)
	}
}

// entryIdle records that one block of e is no longer held. quietly: that is no use of e.
func (c *Cache) entryIdle(e *entry, quietly bool) {
	if !quietly {
		c.use(e)
	}
	if e.cold {
		c.coldBlocks++
	}
	if e.idle++; e.idle == 1 {
		heap.Push(c.heapOf(e), e)
		return
	}
	heap.Fix(c.heapOf(e), e.pos)
}
