package kvcache

// EventKind says what happened to the prefix index.
type EventKind uint8

// Kinds of events.
const (
	Stored  EventKind = iota // a unit can be matched from now on
	Removed                  // a unit is gone
	Cleared                  // every unit is gone
	Hot                      // a unit was found Config.HotHits times
	Cold                     // a unit is about to be evicted; see Config.Ahead
	Raised                   // a unit has got a higher priority
)

// Event is one change of the prefix index. Slices are read only.
type Event struct {
	Kind   EventKind
	Hash   Hash
	Root   Hash    // not of Cleared: the empty prefix's name, one for each salt
	Parent Hash    // not of Removed, Cleared: what it extends; zero for the first unit
	Pos    int     // the same: tokens before it
	Tokens []int32 // Stored: its UnitTokens token ids
	Blocks []int32
	// Priority is the highest of the requests that stored or found it; not of Cleared.
	Priority int8
	// Evicted: Removed to make room, not because its rows or the index changed.
	Evicted bool
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
