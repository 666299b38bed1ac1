package kvcache

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// waiter is one ReserveWait call in the queue.
type waiter struct {
	chain     *Chain
	maxTokens int
	blocks    int
	owner     string
	since     time.Time
	ids       []int32       // with hit: set before granted is closed
	hit       int           // tokens
	granted   chan struct{} // closed under Cache.mu
}

// ReserveWait is Reserve that waits its turn, first come first served, until ctx ends: then it
// returns ErrNoSpace and the context's cause. ErrTooManyWaiters: the queue is full.
// ErrTooLarge: it can never fit. The chain must not change meanwhile.
func (c *Cache) ReserveWait(ctx context.Context, ch *Chain, maxTokens, blocks int, owner string) (ids []int32, n int, err error) {
	w := &waiter{chain: ch, maxTokens: maxTokens, blocks: blocks, owner: owner, since: time.Now(), granted: make(chan struct{})}
	if err := c.enqueue(w); err != nil {
		return nil, 0, err
	}
	select {
	case <-w.granted:
		return w.ids, w.hit, nil
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.unlock()
	select {
	case <-w.granted: // in the meantime
		return w.ids, w.hit, nil
	default:
	}
	i := slices.Index(c.waiters, w)
	c.waiters = slices.Delete(c.waiters, i, i+1)
	c.grant() // those behind it may need less
	return nil, 0, fmt.Errorf("wait for %d blocks: %w: %w", blocks, ErrNoSpace, context.Cause(ctx))
}

// enqueue appends a waiter to the queue, and serves it at once if it is first and there is space.
func (c *Cache) enqueue(w *waiter) error {
	c.mu.Lock()
	defer c.unlock()
	switch {
	case w.blocks > c.cfg.Blocks:
		return fmt.Errorf("reserve %d of %d blocks: %w", w.blocks, c.cfg.Blocks, ErrTooLarge)
	case len(c.waiters) >= c.cfg.MaxWaiters:
		return ErrTooManyWaiters
	}
	c.waiters = append(c.waiters, w)
	if len(c.waiters) == 1 {
		c.grant()
	}
	c.queued = len(c.waiters) > 0
	return nil
}

// Wanted is how many blocks the first ReserveWait in the queue waits for; 0 if none waits.
func (c *Cache) Wanted() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waiters) == 0 {
		return 0
	}
	return c.waiters[0].blocks
}

// Prioritise says what the engine is about to need, so that blocks it frees by preemption do
// not go to waiters first: each waiter leaves running blocks available, and next more unless it
// came before since.
func (c *Cache) Prioritise(running, next int, since time.Time) {
	c.mu.Lock()
	defer c.unlock()
	c.demand = demand{running, next, since}
	c.grant()
}

// demand is what Prioritise was told.
type demand struct {
	running, next int
	since         time.Time
}

// grant serves waiters from the front while there is space.
func (c *Cache) grant() {
	for len(c.waiters) > 0 {
		w := c.waiters[0]
		spare := c.demand.running
		if c.demand.next > 0 && c.demand.since.Before(w.since) {
			spare += c.demand.next
		}
		ids, hit, err := c.reserve(w.chain, w.maxTokens, w.blocks, spare, w.owner)
		if err != nil {
			return
		}
		c.counted(w.chain, ids, hit, w.maxTokens)
		w.ids, w.hit = ids, hit
		c.waiters = slices.Delete(c.waiters, 0, 1)
		close(w.granted)
	}
}
