package enginetest

import "github.com/xpyd/xpyd/engine/kvcache"

// HoldPrefix holds, for owner, the blocks of the first n of a prompt's tokens: what the index
// has of it.
func HoldPrefix(c *kvcache.Cache, tokens []int32, salt, owner string) (ids []int32, n int) {
	chain := c.NewChain(salt)
	chain.Extend(tokens)
	n = c.Reach(&chain, len(tokens))
	ids, _ = c.HoldChain(&chain, n, owner)
	return ids, n
}
