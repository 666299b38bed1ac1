package kvcache

import "context"

// Match finds the longest indexed prefix of tokens, at most maxTokens long, and gives owner a
// reference to each of its blocks. n is its length.
func (c *Cache) Match(tokens []int32, salt string, maxTokens int, owner string) (ids []int32, n int) {
	ch := c.NewChain(salt)
	ch.Extend(tokens[:min(len(tokens), max(maxTokens, 0))])
	return c.MatchChain(&ch, maxTokens, owner)
}

// MatchChain is Match for a sequence whose chain is at hand.
func (c *Cache) MatchChain(ch *Chain, maxTokens int, owner string) (ids []int32, n int) {
	c.mu.Lock()
	defer c.unlock()
	ids, n, _ = c.find(ch, maxTokens)
	c.retain(ids, owner)
	c.counted(ch, ids, n, maxTokens)
	return ids, n
}

// Insert is InsertChain for a sequence without a chain.
func (c *Cache) Insert(tokens []int32, salt string, ids []int32) {
	ch := c.NewChain(salt)
	ch.Extend(tokens)
	c.InsertChain(&ch, tokens, ids, 0)
}

// AllocWait is ReserveWait without a prefix to look for.
func (c *Cache) AllocWait(ctx context.Context, n int, owner string) ([]int32, error) {
	ids, _, err := c.ReserveWait(ctx, &Chain{}, 0, n, owner)
	return ids, err
}

// Generation is Generations of one block; false when the pool has no such block.
func (c *Cache) Generation(id int32) (uint32, bool) {
	if id < 0 || int(id) >= c.cfg.Blocks {
		return 0, false
	}
	return c.Generations([]int32{id})[0], true
}

// Hashes returns the hash of each prefix of 16, 32, … tokens.
func (ch *Chain) Hashes() []Hash { return ch.hashes }

// Root names the empty prefix.
func (ch *Chain) Root() Hash { return ch.root }
