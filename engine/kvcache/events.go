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
	Root   Hash    // of all but Cleared: the name of the empty prefix, one for each salt
	Parent Hash    // of all but Removed and Cleared: the unit before it; zero for the first one
	Pos    int     // the same: tokens before it
	Tokens []int32 // of Stored: its UnitTokens token ids
	Blocks []int32
	// Priority is the highest of the requests that stored or found it; of all but Cleared.
	Priority int8
	// Evicted says that it was Removed to make room, not because its rows or the index changed.
	Evicted bool
}

// Listener hears of index changes, in order, one call at a time, outside the cache's lock but
// on the goroutine that caused one: it must not block, and must not change the cache.
type Listener interface {
	KVEvent(Event)
}

// tell makes an event pending, if anybody listens.
func (c *Cache) tell(ev Event) {
	if c.cfg.Listener != nil {
		c.pending = append(c.pending, ev)
	}
}

// deliver passes pending events to the listener.
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
