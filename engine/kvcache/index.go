package kvcache

import (
	"container/heap"
	"fmt"
	"time"
)

// entry is one indexed unit of a prefix: UnitTokens tokens in unitBlocks
// blocks, named by the chain hash at its end.
type entry struct {
	hash, parent Hash
	blocks       []int32
	idle         int    // its blocks that nobody holds
	used         uint64 // clock of the last release
	leaf         bool   // no indexed entry extends it; but see isLeaf
	pos          int    // in Cache.idle or Cache.cold, when idle > 0
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

// entryHeap orders entries with something to evict: leaves before inner
// entries, then those of less priority, then least recently used.
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

// find looks a prefix up; idle is how many of its blocks nobody holds.
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

// counted notes that somebody asked for so many tokens of a sequence and found the
// first hit of them, in a table's first blocks.
func (c *Cache) counted(ch *Chain, table []int32, hit, asked int) {
	c.counters.hitTokens += uint64(hit)
	c.counters.askedTokens += uint64(max(asked, 0))
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
		if b.entry != nil || b.quarantined {
			// A unit of several blocks that shares its first ones with a
			// forked sibling's unit: a block is indexed once. One in quarantine
			// may still change.
			return
		}
	}
	e := &entry{
		hash:   hash,
		parent: ch.at(from / Grain),
		blocks: append([]int32(nil), ids...),
		root:   ch.root,
		from:   from,

		priority: ch.Priority,
	}
	e.leaf = c.isLeaf(e)
	c.index[hash] = e
	c.kids[e.parent]++
	c.releaf(e.parent)
	for _, id := range ids {
		c.blocks[id].entry = e
	}
	if c.cfg.Listener != nil {
		ev := e.event(Stored)
		ev.Tokens = append([]int32(nil), tokens...)
		c.pending = append(c.pending, ev)
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
	if c.cfg.Listener != nil {
		c.pending = append(c.pending, Event{Kind: Cleared})
	}
}

// evict drops the entry that is worth least. The caller knows that at least
// one block is cached.
func (c *Cache) evict() {
	e := c.worst()
	c.counters.evicted += uint64(e.idle)
	c.remove(e, true)
}

// drop takes an entry out of the index. Entries that extend it stay: they
// match again once it is back.
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
	if c.cfg.Listener != nil {
		c.pending = append(c.pending, Event{Kind: Removed, Hash: e.hash, Root: e.root, Blocks: e.blocks, Priority: e.priority, Evicted: evicted})
	}
}

// unindex parts an entry from its blocks; idle ones become free.
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

// releaf updates whether the entry of that hash, if indexed, is a leaf.
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

// entryBusy and entryIdle record that one more block of e is held, or no
// longer is. quietly: that was no use of it.
func (c *Cache) entryBusy(e *entry) {
	if e.cold {
		c.coldBlocks--
	}
	if e.idle--; e.idle == 0 {
		heap.Remove(c.heapOf(e), e.pos)
	}
}

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
