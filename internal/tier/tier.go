// Package tier keeps KV blocks below the device pool: in host memory, below
// that on an SSD, and in a store that several workers share, so that the next turn of a chat, or the same prompt
// after a restart, is loaded and not computed again.
//
// What moves is the prefix index's unit (kvcache.UnitTokens tokens), under the
// hash that names it: model, numerics, salt and every token before it. A unit
// travels with the row digests that were made when its rows were; they are
// made again from the bytes each time it comes back into the pool. A unit that
// does not agree is forgotten, and its tokens are computed.
//
//	save   the index has learned of a unit: it is copied to host memory, then
//	       written to the SSD and the store (write-through). Bounded queues: under pressure
//	       units are left out, nobody waits.
//	load   before a request is queued, units that the index lacks and a tier
//	       has are put into free blocks of the pool and indexed. Afterwards
//	       they are cached blocks like any other: nobody holds them, so loads
//	       can delay nobody and can never be waited for in a circle.
//
// Non-goals: who runs, and matching prefixes (the engine and kvcache do).
package tier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/kvcache"
	"github.com/xpyd/xpyd/internal/tier/store"
	"github.com/xpyd/xpyd/kernels"
)

// Config says how much is kept, and where.
type Config struct {
	HostBytes int64  // host memory; at least one unit
	Dir       string // of the SSD tier, this worker's own; "": none
	DirBytes  int64  // what it may fill
	// Identity is what units depend on besides their hash's salt and tokens;
	// a folder written under another one is emptied.
	Identity string
	// LoadTimeout bounds one request's load: what has not come by then is
	// computed.
	LoadTimeout time.Duration
	// MinLoadTokens: fewer are computed rather than loaded.
	MinLoadTokens int
	// LoadBlocks bounds the blocks that loads under way may take together.
	LoadBlocks int
	// Store is what several workers share; nil: nothing. It is closed with the
	// tiers. StoreWrites: units are also written to it.
	Store       store.Store
	StoreWrites bool
}

// Validate names what cannot be.
func (c *Config) Validate() error {
	switch {
	case c.HostBytes < 1:
		return fmt.Errorf("tier: %d bytes of host memory", c.HostBytes)
	case c.Dir != "" && c.DirBytes < 1:
		return fmt.Errorf("tier: %d bytes in %s", c.DirBytes, c.Dir)
	case c.LoadTimeout <= 0 || c.MinLoadTokens < 0 || c.LoadBlocks < 1:
		return fmt.Errorf("tier: load timeout %v, at least %d tokens, %d blocks", c.LoadTimeout, c.MinLoadTokens, c.LoadBlocks)
	}
	return nil
}

// Backend is what the tiers need of kernels.Backend.
type Backend interface {
	kernels.Pool
	Layout() kernels.Layout
}

const (
	saveQueue = 1 << 14 // units that wait to be copied to host memory
	diskQueue = 1 << 10 // units that wait to be written
	writers   = 4       // of the SSD tier
	reads     = 32      // under way from the SSD at a time, of all loads
	window    = 16      // the same, of one load
)

// Tiers is host memory and, if configured, an SSD, under one worker's pool.
// It is the cache's Listener.
type Tiers struct {
	cfg     Config
	log     *slog.Logger
	backend Backend
	shape   shape
	host    *host
	disk    *disk   // nil: none
	shared  *shared // nil: none
	metrics *metrics

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	wg      sync.WaitGroup // savers, writers, reads
	saves   chan save
	writes  chan write
	reads   chan struct{} // a token for each read under way
	unsaved atomic.Int64  // units in saves and writes, and in the hands of who reads those

	mu      sync.Mutex
	cache   *kvcache.Cache // set by Attach, before any event
	loading map[kvcache.Hash]chan struct{}
	taken   int       // blocks of loads under way
	said    time.Time // when complain last did
	loads   int       // loads begun, ever: their owners' names
	closed  bool      // no more loads, and no more reads
}

type save struct {
	key, parent kvcache.Hash
	pos         int
}

type write struct {
	key kvcache.Hash
	pos int
}

// New opens the tiers. They do nothing until Attach.
func New(cfg Config, backend Backend, unitBlocks int, log *slog.Logger, reg prometheus.Registerer) (*Tiers, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if free := memAvailable(); free > 0 && cfg.HostBytes > free {
		return nil, fmt.Errorf("tier: %d MiB of host memory wanted, the machine has %d MiB to give", cfg.HostBytes>>20, free>>20)
	}
	s := shape{backend.Layout(), unitBlocks}
	t := &Tiers{cfg: cfg, log: log, backend: backend, shape: s, saves: make(chan save, saveQueue), writes: make(chan write, diskQueue),
		reads: make(chan struct{}, reads), loading: make(map[kvcache.Hash]chan struct{})}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	var err error
	if t.host, err = newHost(s, cfg.HostBytes); err != nil {
		return nil, err
	}
	if cfg.Dir != "" {
		if t.disk, err = openDisk(cfg.Dir, cfg.DirBytes, s, cfg.Identity, openDirect, log); err != nil {
			t.host.close()
			return nil, err
		}
	}
	if cfg.Store != nil {
		t.shared, err = newShared(cfg.Store, s, cfg.Identity, cfg.StoreWrites)
	}
	if err == nil {
		t.metrics, err = newMetrics(t, reg)
	}
	if err != nil {
		t.host.close()
		return nil, errors.Join(err, t.disk.close())
	}
	return t, nil
}

// Attach starts saving what cache learns of. Once.
func (t *Tiers) Attach(cache *kvcache.Cache) {
	t.mu.Lock()
	t.cache = cache
	t.mu.Unlock()
	t.wg.Go(t.saver)
	if t.disk != nil {
		for range writers {
			t.wg.Go(t.writer)
		}
	}
	if t.shared != nil {
		for range sharers {
			t.wg.Go(t.sharer)
		}
	}
}

// Close writes what still waits for the SSD until ctx ends, and waits for
// everything that touches the pool. Loads after it load nothing.
func (t *Tiers) Close(ctx context.Context) error {
	t.mu.Lock()
	again := t.closed
	t.closed = true
	t.mu.Unlock()
	if again {
		return nil
	}
	stop := context.AfterFunc(ctx, t.cancel)
	defer stop()
	close(t.saves) // its saver closes the queues behind it; KVEvent sends no more
	t.wg.Wait()
	t.cancel()
	t.host.close()
	return errors.Join(t.disk.close(), t.shared.close())
}

// Flush forgets every unit of every tier that is this worker's own (Purge is
// for the shared store). What is being written at this moment may come after it.
func (t *Tiers) Flush() error {
	if t == nil {
		return nil
	}
	t.host.clear()
	return t.disk.clear()
}

// complain logs what goes wrong with the SSD, at most every ten seconds.
func (t *Tiers) complain(err error) {
	t.mu.Lock()
	quiet := time.Since(t.said) < 10*time.Second
	if !quiet {
		t.said = time.Now()
	}
	t.mu.Unlock()
	if !quiet {
		t.log.Warn("KV tier", "error", err)
	}
}
