package grammar

import (
	"container/list"
	"context"
	"sync"
)

// Cache keeps compiled grammars of one Vocabulary, and why others were refused. It is safe for
// many goroutines, has none of its own, and drops what was not asked for the longest while it
// is over its bound.
type Cache struct {
	v      *Vocabulary
	limits Limits
	bytes  int64

	mu      sync.Mutex
	entries map[Spec]*list.Element // of *entry
	recent  list.List              // the last asked for first
}

type entry struct {
	spec Spec
	done chan struct{} // closed once grammar and err are there
	g    *Grammar
	err  error
}

// NewCache keeps grammars of v, compiled within limits, of together about bytes.
func NewCache(v *Vocabulary, limits Limits, bytes int64) *Cache {
	return &Cache{v: v, limits: limits.withDefaults(), bytes: bytes, entries: map[Spec]*list.Element{}}
}

// Get returns the grammar of s. The first caller compiles it, within Limits and whatever
// becomes of its ctx; others that come meanwhile wait for it until their ctx is done. The
// error is an *Error, or of a waiting caller its ctx's.
func (c *Cache) Get(ctx context.Context, s Spec) (*Grammar, error) {
	if s.Kind == JSONObject {
		s.Text = ""
	}
	c.mu.Lock()
	if el, ok := c.entries[s]; ok {
		c.recent.MoveToFront(el)
		c.mu.Unlock()
		e := el.Value.(*entry)
		select {
		case <-e.done:
			return e.g, e.err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	e := &entry{spec: s, done: make(chan struct{})}
	c.entries[s] = c.recent.PushFront(e)
	c.mu.Unlock()

	defer func() { // also if Compile panics: nobody waits for ever
		if e.g == nil && e.err == nil {
			e.err = &Error{Reason: "the grammar could not be compiled"}
		}
		close(e.done)
		c.mu.Lock()
		c.evict()
		c.mu.Unlock()
	}()
	e.g, e.err = Compile(s, c.v, c.limits)
	return e.g, e.err
}

// evict drops entries until what is left is within the bound, but not the newest and none
// that is being compiled. The caller holds mu.
func (c *Cache) evict() {
	var total int64
	for el := c.recent.Front(); el != nil; {
		next := el.Next()
		e := el.Value.(*entry)
		select {
		case <-e.done:
			total += e.size()
			if total > c.bytes && el != c.recent.Front() {
				c.recent.Remove(el)
				delete(c.entries, e.spec)
			}
		default:
		}
		el = next
	}
}

// size is about the bytes that the entry holds, once it is done. A grammar grows while it is used.
func (e *entry) size() int64 {
	n := int64(2*len(e.spec.Text)) + 500
	if e.g != nil {
		n += e.g.Size()
	}
	return n
}

// Len is the number of entries.
func (c *Cache) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.recent.Len()
}
