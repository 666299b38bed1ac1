package kvcache

// The methods below are for lower tiers (engine/tier): they look up units, hold them while they
// are copied out, and take blocks for units that come back.

// Reach returns how many leading tokens of the chain the index knows, at most maxTokens. It
// holds and counts nothing: a moment later it may be less.
func (c *Cache) Reach(ch *Chain, maxTokens int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, n, _ := c.find(ch, maxTokens)
	return n
}

// Hold gives owner a reference to each block of the unit h. It returns nil if the index does
// not know it.
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

// Borrow returns a table for the chain's first upto tokens, whole units: what the index has (n
// tokens), and up to most fresh blocks. It comes last: ErrNoSpace when somebody waits for
// blocks, or when it would take what the engine is about to need.
func (c *Cache) Borrow(ch *Chain, upto, most int, owner string) (ids []int32, n int, err error) {
	c.mu.Lock()
	defer c.unlock()
	_, n, _ = c.find(ch, upto)
	if blocks := (upto - n) / c.cfg.BlockTokens; len(c.waiters) > 0 || blocks > most {
		return nil, 0, ErrNoSpace
	}
	return c.reserve(ch, upto, upto/c.cfg.BlockTokens, c.demand.running+c.demand.next, owner)
}

// Name returns the hash of the chain's first tokens, a multiple of Grain.
func (ch *Chain) Name(tokens int) Hash { return ch.at(tokens / Grain) }

// Knows reports whether the index has the unit that ends with h.
func (c *Cache) Knows(h Hash) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.index[h] != nil
}

// HoldChain gives owner a reference to each block of the chain's first tokens, whole units,
// and returns them in order. It holds nothing and returns nil when the index does not have all
// of them (n is less than tokens), or, coming last as Borrow does, when cached ones among them
// are needed. It is for another worker, so it counts no hit, but Release makes it a use.
func (c *Cache) HoldChain(ch *Chain, tokens int, owner string) (ids []int32, n int) {
	c.mu.Lock()
	defer c.unlock()
	ids, n, idle := c.find(ch, tokens)
	if n != tokens || idle > 0 && c.needed(idle) {
		return nil, n
	}
	c.retain(ids, owner)
	return ids, n
}
