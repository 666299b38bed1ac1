package kvcache

import (
	"context"
	"fmt"
)

// waiter is one AllocWait call in the queue.
type waiter struct {
	n          int
	owner      string
	ids        []int32       // set before granted is closed
	granted    chan struct{} // closed under Cache.mu
	prev, next *waiter
}

// waiterList is a FIFO with removal from the middle.
type waiterList struct {
	first, last *waiter
	len         int
}

func (l *waiterList) push(w *waiter) {
	if w.prev = l.last; w.prev == nil {
		l.first = w
	} else {
		w.prev.next = w
	}
	l.last = w
	l.len++
}

func (l *waiterList) remove(w *waiter) {
	if w.prev == nil {
		l.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		l.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.prev, w.next = nil, nil
	l.len--
}

// AllocWait is Alloc that waits its turn, first come first served, until ctx
// ends: then ErrNoSpace wrapped together with the context's cause.
// ErrTooManyWaiters when the queue is full, ErrTooLarge when n can never fit.
func (c *Cache) AllocWait(ctx context.Context, n int, owner string) ([]int32, error) {
	w, ids, err := c.enqueue(n, owner)
	if w == nil {
		return ids, err
	}
	select {
	case <-w.granted:
		return w.ids, nil
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.unlock()
	select {
	case <-w.granted: // in the meantime
		return w.ids, nil
	default:
	}
	c.waiters.remove(w)
	c.grant() // who stood behind may need less
	return nil, fmt.Errorf("wait for %d blocks: %w: %w", n, ErrNoSpace, context.Cause(ctx))
}

// enqueue allocates at once when nobody waits and there is space; otherwise
// it returns a queued waiter, or an error.
func (c *Cache) enqueue(n int, owner string) (*waiter, []int32, error) {
	c.mu.Lock()
	defer c.unlock()
	if n > c.cfg.Blocks || c.waiters.len == 0 && n <= len(c.free)+c.cached {
		ids, err := c.alloc(n, owner)
		return nil, ids, err
	}
	if c.waiters.len >= c.cfg.MaxWaiters {
		return nil, nil, ErrTooManyWaiters
	}
	w := &waiter{n: n, owner: owner, granted: make(chan struct{})}
	c.waiters.push(w)
	return w, nil, nil
}

// grant serves waiters from the front while there is space.
func (c *Cache) grant() {
	for w := c.waiters.first; w != nil && w.n <= len(c.free)+c.cached; w = c.waiters.first {
		w.ids, _ = c.alloc(w.n, w.owner)
		c.waiters.remove(w)
		close(w.granted)
	}
}
