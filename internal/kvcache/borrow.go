package kvcache

import (
	"fmt"
	"slices"
	"time"
)

// What lower tiers (internal/tier) need of the index: to look without
// touching, to hold a unit while it is copied out, and to take room for units
// that come back.

// Reach returns how many leading tokens of the chain the index knows, at most
// maxTokens. Nothing is held or counted: it may be less a moment later.
func (c *Cache) Reach(ch *Chain, maxTokens int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, n, _ := c.find(ch, maxTokens)
	return n
}

// Hold gives owner a reference to each block of the indexed unit that ends
// with h; nil when the index does not know it (any more).
func (c *Cache) Hold(h Hash, owner string) []int32 {
	c.mu.Lock()
	defer c.unlock()
	e := c.index[h]
	if e == nil {
		return nil
	}
	c.retain(e.blocks, owner)
	return e.blocks
}

// Borrow returns a table for the chain's first upto tokens, whole units: what
// the index has (n tokens), and at most most fresh blocks. It stands behind
// everybody: ErrNoSpace when somebody waits for blocks, or when it would take
// what the engine is about to need.
func (c *Cache) Borrow(ch *Chain, upto, most int, owner string) (ids []int32, n int, err error) {
	c.mu.Lock()
	defer c.unlock()
	_, n, _ = c.find(ch, upto)
	if blocks := (upto - n) / c.cfg.BlockTokens; c.waiters.first != nil || blocks > most {
		return nil, 0, ErrNoSpace
	}
	return c.reserve(ch, upto, upto/c.cfg.BlockTokens, c.demand.running+c.demand.next, owner)
}

// Name returns the hash of the chain's first tokens, a multiple of Grain.
func (ch *Chain) Name(tokens int) Hash { return ch.at(tokens / Grain) }

// Knows says whether the index has the unit that ends with h.
func (c *Cache) Knows(h Hash) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.index[h] != nil
}

// HoldChain gives owner a reference to each block of the chain's first tokens,
// whole units, and returns them in order; nil, and nothing held, when the index
// does not have all of them. It is for another worker's sake, so it is no hit
// of ours, but Release makes it a use. It stands behind everybody, as Borrow
// does: nil also when somebody waits for blocks, or when what is left would be
// less than what the engine is about to need.
func (c *Cache) HoldChain(ch *Chain, tokens int, owner string) []int32 {
	c.mu.Lock()
	defer c.unlock()
	ids, n, idle := c.find(ch, tokens)
	if n != tokens || c.waiters.first != nil || len(c.free)+c.cached-idle < c.demand.running+c.demand.next {
		return nil
	}
	c.retain(ids, owner)
	return ids
}

// ReserveBehind is Reserve for a table whose first blocks somebody holds: those
// of a prefix that is on its way into the pool, and that the index does not
// know yet. Owner gets a reference to each.
func (c *Cache) ReserveBehind(held []int32, blocks, spare int, since time.Time, owner string) ([]int32, error) {
	c.mu.Lock()
	defer c.unlock()
	missing := blocks - len(held)
	switch w := c.waiters.first; {
	case missing < 0 || blocks > c.cfg.Blocks:
		return nil, fmt.Errorf("reserve %d of %d blocks behind %d: %w", blocks, c.cfg.Blocks, len(held), ErrTooLarge)
	case w != nil && w.since.Before(since), missing+spare > len(c.free)+c.cached:
		return nil, ErrNoSpace
	}
	for _, id := range held {
		if c.at(id).refs == 0 {
			panic(fmt.Sprintf("kvcache: a table on block %d, which nobody holds", id))
		}
	}
	more, err := c.alloc(missing, owner)
	if err != nil {
		return nil, err
	}
	c.retain(held, owner)
	n := len(held) * c.cfg.BlockTokens
	c.counters.hitTokens += uint64(n)
	c.counters.askedTokens += uint64(n)
	return append(slices.Clone(held), more...), nil
}
