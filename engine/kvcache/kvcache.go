// Package kvcache tracks who owns each KV block: a pool of block ids with generations,
// reference counts and owners, and an index of computed prefixes that later requests reuse. It
// is safe for concurrent use: HTTP handlers reserve blocks while the engine runs.
//
// Every block is in exactly one state:
//
//	free        nobody holds it, its content means nothing
//	held        one or more references, each booked on an owner's label
//	cached      no references, but the prefix index, or a shelf, knows its content;
//	            evicted, least recently used leaf first, when Alloc needs it
//	quarantined revoked while a peer may still write to it; not reusable
//	            until Unquarantine
//
// Non-goals: moving or reading KV rows (kernels.Pool does), and deciding who runs (the engine
// does). Callers are not trusted: releasing a block that is not held would mix two requests'
// memory, so it panics.
package kvcache

import (
	"errors"
	"fmt"
	"sync"

	"github.com/xpyd/xpyd/kvlayout"
)

// Errors of Alloc, Reserve and ReserveWait.
var (
	// ErrNoSpace: not enough free or evictable blocks now.
	ErrNoSpace = errors.New("no free KV blocks")
	// ErrTooLarge: more blocks than the pool has.
	ErrTooLarge = errors.New("more KV blocks than the pool has")
	// ErrTooManyWaiters: ReserveWait's queue is full.
	ErrTooManyWaiters = errors.New("too many requests wait for KV blocks")
)

// Config describes the pool. It must match the backend's.
type Config struct {
	Blocks      int // blocks in the pool, ids 0 .. Blocks-1
	BlockTokens int // positions a block, 1 to kvlayout.MaxBlockTokens
	// Fingerprint and Numerics go into every hash, so that blocks of another model or of
	// other numerics never match.
	Fingerprint string
	Numerics    string
	MaxWaiters  int      // ReserveWait calls that may queue; 0 means 1024
	Listener    Listener // told about index changes; may be nil
	// HotHits is how often a unit is found before it is announced, once, as Hot; 0: never.
	HotHits int
	// Ahead is how many blocks are kept free or of units that were announced as Cold; 0: no
	// announcements.
	Ahead int
}

// Validate checks the ranges.
func (c *Config) Validate() error {
	switch {
	case c.Blocks < 1 || c.Blocks > 1<<30:
		return fmt.Errorf("kv cache: blocks is %d, want at least 1", c.Blocks)
	case c.BlockTokens < 1 || c.BlockTokens > kvlayout.MaxBlockTokens:
		return fmt.Errorf("kv cache: block_tokens is %d, want 1 to %d", c.BlockTokens, kvlayout.MaxBlockTokens)
	case c.HotHits < 0 || c.Ahead < 0:
		return fmt.Errorf("kv cache: announcements after %d hits, %d blocks ahead, want 0 or more", c.HotHits, c.Ahead)
	case c.MaxWaiters < 0:
		return fmt.Errorf("kv cache: max waiters is %d, want 0 or more", c.MaxWaiters)
	}
	return nil
}

// block is what the pool knows of one id.
type block struct {
	gen         uint32
	refs        int32
	quarantined bool
	entry       *entry // the index entry it belongs to
}

// Cache is the pool and its prefix index.
type Cache struct {
	cfg        Config
	unitTokens int // lcm(BlockTokens, Grain)
	unitBlocks int

	deliverMu sync.Mutex // taken before mu; held while the listener runs

	mu          sync.Mutex // guards all below
	blocks      []block
	free        []int32 // stack
	cached      int     // blocks in state cached
	quarantined int
	owners      map[string]*holding
	index       map[Hash]*entry
	kids        map[Hash]int    // indexed entries by their parent's hash
	coldKids    map[Hash]int    // the cold ones of them
	shelf       map[Hash]*entry // by name; see Shelve
	idle, cold  entryHeap       // entries with at least one cached block; in cold those announced as Cold
	coldBlocks  int             // cached blocks of entries in cold
	clock       uint64          // orders uses, for LRU
	waiters     []*waiter       // first come, first served
	demand      demand
	pending     []Event // index changes not yet told
	freed       bool    // blocks became available since the last unlock
	queued      bool    // a ReserveWait began to wait since the last unlock
	notify      func()
	wanted      func()
	ever        Stats // what it counts since the start
}

// New makes an empty cache.
func New(cfg Config) (*Cache, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.MaxWaiters == 0 {
		cfg.MaxWaiters = 1024
	}
	unit := UnitTokens(cfg.BlockTokens)
	c := &Cache{
		cfg:        cfg,
		unitTokens: unit,
		unitBlocks: unit / cfg.BlockTokens,
		blocks:     make([]block, cfg.Blocks),
		free:       make([]int32, 0, cfg.Blocks),
		owners:     make(map[string]*holding),
		index:      make(map[Hash]*entry),
		kids:       make(map[Hash]int),
		coldKids:   make(map[Hash]int),
		shelf:      make(map[Hash]*entry),
	}
	for id := cfg.Blocks - 1; id >= 0; id-- {
		c.free = append(c.free, int32(id))
	}
	return c, nil
}

// UnitBlocks returns how many blocks of a size make one unit of the index: the fewest
// whose tokens are a multiple of Grain (Grain is a power of two).
func UnitBlocks(blockTokens int) int { return Grain / min(Grain, blockTokens&-blockTokens) }

// UnitTokens returns how many tokens they have.
func UnitTokens(blockTokens int) int { return blockTokens * UnitBlocks(blockTokens) }

// Blocks returns the pool's size.
func (c *Cache) Blocks() int { return c.cfg.Blocks }

// BlockTokens returns the positions a block holds.
func (c *Cache) BlockTokens() int { return c.cfg.BlockTokens }

// UnitTokens returns the tokens of a unit: prefixes match in multiples of it.
func (c *Cache) UnitTokens() int { return c.unitTokens }

// BlocksFor returns how many blocks hold n positions.
func (c *Cache) BlocksFor(n int) int {
	return (n + c.cfg.BlockTokens - 1) / c.cfg.BlockTokens
}

// Notify sets the function that is called, outside all locks, when blocks have become
// available. It must not block.
func (c *Cache) Notify(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.notify = f
}

// OnWait sets the function that is called, outside all locks, when a ReserveWait begins to wait;
// see Wanted. It must not block.
func (c *Cache) OnWait(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wanted = f
}

// Stats is a snapshot of counts.
type Stats struct {
	Blocks, Free, Held, Cached, Quarantined int

	Entries   int    // prefix index entries
	Waiters   int    // ReserveWait calls in the queue
	Evicted   uint64 // blocks evicted, ever
	HitTokens uint64 // tokens that Reserve found in the index, ever
	AskTokens uint64 // tokens that it looked for, ever
}

// Available is how many blocks an Alloc could get.
func (s Stats) Available() int { return s.Free + s.Cached }

// Stats returns current counts.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.ever
	s.Blocks, s.Free, s.Cached, s.Quarantined = c.cfg.Blocks, len(c.free), c.cached, c.quarantined
	s.Held = s.Blocks - s.Free - s.Cached - s.Quarantined
	s.Entries, s.Waiters = len(c.index), len(c.waiters)
	return s
}

// unlock ends a mutation: it serves waiters, unlocks, then calls the listener and the notifier.
func (c *Cache) unlock() {
	if c.freed {
		c.grant()
	}
	c.announce()
	freed, notify, events := c.freed, c.notify, len(c.pending) > 0
	queued, wanted := c.queued, c.wanted
	c.freed, c.queued = false, false
	c.mu.Unlock()
	if events {
		c.deliver()
	}
	if freed && notify != nil {
		notify()
	}
	if queued && wanted != nil {
		wanted()
	}
}
