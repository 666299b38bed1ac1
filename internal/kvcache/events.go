package kvcache

// EventKind says what happened to the prefix index.
type EventKind uint8

// Kinds of events.
const (
	Stored  EventKind = iota // a unit can be matched from now on
	Removed                  // a unit is gone
	Cleared                  // every unit is gone
)

// Event is one change of the prefix index. Slices are read only.
type Event struct {
	Kind   EventKind
	Hash   Hash
	Parent Hash    // Stored: what it extends; zero for the first unit
	Pos    int     // Stored: tokens before it
	Tokens []int32 // Stored: its UnitTokens token ids
	Blocks []int32
}

// Listener hears of index changes, in order, one call at a time, outside the
// cache's lock but on the goroutine that caused one: it must not block, and
// must not change the cache.
type Listener interface {
	KVEvent(Event)
}

// deliver tells the listener what is pending.
func (c *Cache) deliver() {
	c.deliverMu.Lock()
	defer c.deliverMu.Unlock()
	c.mu.Lock()
	events := c.pending
	c.pending = nil
	c.mu.Unlock()
	for _, ev := range events {
		c.cfg.Listener.KVEvent(ev)
	}
}
