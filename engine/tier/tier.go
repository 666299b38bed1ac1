// Package tier keeps KV blocks below the device pool: in host memory, below
// that on an SSD, and in a store that several workers share, so that the next
// turn of a chat, or the same prompt after a restart, is loaded and not
// computed again.
//
// What moves is the prefix index's unit (kvcache.UnitTokens tokens), under the
// hash that names it: model, numerics, salt and every token before it. A unit
// travels with the row digests that were made when its rows were; they are
// made again from the bytes each time it comes back into the pool. A unit that
// does not agree is forgotten, and its tokens are computed.
//
//	save   the index has learned of a unit, or it was asked for again, or is
//	       about to be evicted (WritePolicy): it is copied to host memory, and
//	       written to the SSD by the same policy; the store gets what
//	       host memory gets. Bounded queues: under pressure units are left
//	       out, nobody waits.
//	load   before a request is queued, units that the index lacks and a tier
//	       has are put into free blocks of the pool and indexed. Afterwards
//	       they are cached blocks like any other: nobody holds them, so loads
//	       can delay nobody and can never be waited for in a circle.
//	bring  on a device, from host memory: units are put into a request's own
//	       blocks when it has them, and it computes behind them layer by
//	       layer; see Bring.
//
// Non-goals: who runs, and matching prefixes (the engine and kvcache do).
package tier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/store"
	"github.com/xpyd/xpyd/engine/tier/uring"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Config says how much is kept, and where.
type Config struct {
	HostBytes int64  // host memory; at least one unit
	Dir       string // of the SSD tier, this worker's own; "": none
	DirBytes  int64  // what it may fill
	DirIO     IO     // how it is read and written; "": IOAuto
	// DirTimeout: an SSD that takes longer for one unit is left alone until it is
	// faster. 0: half of LoadTimeout, at least 100 ms.
	DirTimeout time.Duration
	// Identity is what units depend on besides their hash's salt and tokens;
	// a folder written under another one is emptied.
	Identity string
	// LoadTimeout bounds one request's load: what has not come by then is
	// computed.
	LoadTimeout time.Duration
	// MinLoadTokens: fewer are computed rather than loaded.
	MinLoadTokens int
	// LoadBlocks bounds the blocks that loads under way may take together, and
	// LoadQuota the bytes a second, a second's worth at once; 0: it does not.
	LoadBlocks int
	LoadQuota  int64

	Write     WritePolicy // "": Through
	WriteHits int         // of Selective; at least 1
	Eviction  Eviction    // of host memory; "": LRU
	// TTL: older units are not used; 0: however old.
	TTL time.Duration
	// PinShare of host memory, and of the SSD, is the most that pins may keep;
	// at most a half.
	PinShare float64
	// TenantShare of host memory, and of the SSD, is the most that units of one
	// cache salt, "" too, may fill: beyond, a new one takes the place of one of
	// theirs. 0: all.
	TenantShare float64

	// Store is what several workers share; nil: nothing. It is closed with the
	// tiers. StoreWrites: units are also written to it.
	Store       store.Store
	StoreWrites bool

	// Changed hears of each unit that comes into a tier or leaves it, in order,
	// under the tier's lock: it must not block, nor ask the tiers. Nil: nobody.
	Changed func(Change)
}

// Change is a unit that can be found in a tier from now on, or no more.
type Change struct {
	Tier         string // "host" or "ssd"
	Stored       bool
	Key          kvcache.Hash
	Parent, Root kvcache.Hash // of what is stored
	Pos          int          // tokens before it
	Tokens       []int32      // of what is stored, if they are at hand
}

// Validate names what cannot be.
func (c *Config) Validate() error {
	switch {
	case c.HostBytes < 1:
		return fmt.Errorf("tier: %d bytes of host memory", c.HostBytes)
	case c.Dir != "" && c.DirBytes < 1:
		return fmt.Errorf("tier: %d bytes in %s", c.DirBytes, c.Dir)
	case !slices.Contains([]IO{"", IOAuto, IOUring, IOPread}, c.DirIO):
		return fmt.Errorf("tier: SSD by %q", c.DirIO)
	case !slices.Contains([]WritePolicy{"", Through, Selective, Back}, c.Write) || c.Write == Selective && c.WriteHits < 1:
		return fmt.Errorf("tier: write policy %q after %d hits", c.Write, c.WriteHits)
	case !slices.Contains([]Eviction{"", LRU, LFU, S3FIFO}, c.Eviction):
		return fmt.Errorf("tier: eviction %q", c.Eviction)
	case c.TTL < 0 || c.LoadQuota < 0 || !(c.PinShare >= 0 && c.PinShare <= 0.5) || !(c.TenantShare >= 0 && c.TenantShare <= 1):
		return fmt.Errorf("tier: ttl %v, %d bytes a second, shares of pins %v and tenants %v", c.TTL, c.LoadQuota, c.PinShare, c.TenantShare)
	case c.LoadTimeout <= 0 || c.DirTimeout < 0 || c.MinLoadTokens < 0 || c.LoadBlocks < 1:
		return fmt.Errorf("tier: load timeout %v, of a unit %v, at least %d tokens, %d blocks", c.LoadTimeout, c.DirTimeout, c.MinLoadTokens, c.LoadBlocks)
	}
	return nil
}

// Backend is what the tiers need of kernels.Backend.
type Backend interface {
	kernels.Pool
	Layout() kvlayout.Layout
}

const (
	saveQueue = 1 << 14 // units that wait to be copied to host memory
	diskQueue = 1 << 10 // units that wait to be written
	writers   = 4       // of the SSD tier
	spareMost = 64      // slots of host memory that Back keeps free, at most an eighth
	reads     = 32      // under way from the SSD at a time, of all loads
	window    = 16      // the same, of one load
	stages    = 32      // prefixes that are being read into host memory
)

// Tiers is host memory and, if configured, an SSD, under one worker's pool.
// It is the cache's Listener.
type Tiers struct {
	cfg      Config
	log      *slog.Logger
	backend  Backend
	shape    shape
	host     *host
	mover    mover
	disk     *disk                                     // nil: none
	io       diskIO                                    // of disk
	openFile func(path string, flag int) (file, error) // by io
	slow     breaker                                   // of disk, while it stalls
	shared   *shared                                   // nil: none
	pins     *pins
	spare    int // see spareMost
	batch    int // units that move together: few where host memory has few
	// patience is how long Back waits for an SSD that is slower than evictions.
	patience time.Duration
	grace    time.Duration // see await
	metrics  *metrics
	loading  claims
	bringing claims // Bring's: these end when the device is done, with a word to who waits

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	awake  context.Context // ends as Close begins
	rest   context.CancelFunc
	wg     sync.WaitGroup // savers, writers, reads
	saves  chan save
	writes chan write
	reads  chan struct{} // a token for each read under way
	stages chan struct{} // the same, of prefetch
	// clearing has a token while Flush deletes files.
	clearing chan struct{}
	repin    chan struct{} // a poke: pins have changed
	keep     chan struct{} // the same, for who writes them down
	unsaved  atomic.Int64  // units in saves and writes, and in the hands of who reads those

	mu     sync.Mutex
	cache  *kvcache.Cache // set by Attach, before any event
	taken  int            // blocks of loads under way
	said   time.Time      // when complain last did
	loads  int            // loads begun, ever: their owners' names
	closed bool           // no more loads, and no more reads
	sealed bool           // writes is closed
	quota  bucket         // of loads
}

type save struct {
	unit
	cold bool // it is about to be evicted from the pool
}

type write struct {
	key     kvcache.Hash
	leaving *lease // it goes from host memory with that; nil: it does not
}

// New opens the tiers. They do nothing until Attach. Much host memory takes seconds,
// in which ctx may end. A *SettingError says which setting this machine does not allow.
func New(ctx context.Context, cfg Config, backend Backend, unitBlocks int, log *slog.Logger, reg prometheus.Registerer) (*Tiers, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Write == "" {
		cfg.Write = Through
	}
	if cfg.DirTimeout == 0 {
		cfg.DirTimeout = max(cfg.LoadTimeout/2, 100*time.Millisecond)
	}
	if cfg.Eviction == "" {
		cfg.Eviction = LRU
	}
	s := newShape(backend.Layout(), unitBlocks)
	if s.payload() >= 1<<32 {
		return nil, fmt.Errorf("tier: a unit of %d bytes, want less than 4 GiB", s.payload())
	}
	t := &Tiers{cfg: cfg, log: log, backend: backend, shape: s, saves: make(chan save, saveQueue), writes: make(chan write, diskQueue),
		reads: make(chan struct{}, reads), clearing: make(chan struct{}, 1), stages: make(chan struct{}, stages),
		pins: newPins(), repin: make(chan struct{}, 1), keep: make(chan struct{}, 1), quota: bucket{rate: cfg.LoadQuota}}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.awake, t.rest = context.WithCancel(t.ctx)
	t.slow.probe = t.probe
	if cfg.HostBytes >= 1<<30 {
		log.Info("taking host memory", "mib", cfg.HostBytes>>20)
	}
	var err error
	if t.host, err = newHost(ctx, s, cfg.HostBytes, cfg.Eviction, t.pins); err != nil {
		if ctx.Err() == nil {
			err = &SettingError{HostBytes, err}
		}
		return nil, err
	}
	if t.mover, err = newMover(s, backend, t.host); err != nil {
		t.host.close()
		return nil, err
	}
	slots := len(t.host.slots)
	t.patience, t.grace = 100*time.Millisecond, time.Second
	t.spare = min(spareMost, max(1, slots/8))
	t.batch = min(t.mover.most(), t.spare)
	t.pins.most = int(cfg.PinShare * float64(slots))
	t.host.ttl, t.host.went, t.host.changed = cfg.TTL, t.lost, t.teller(tierHost)
	if cfg.TenantShare > 0 {
		t.host.limit = max(1, int(cfg.TenantShare*float64(slots)))
	}
	if cfg.Dir != "" {
		if err = t.openDisk(s); err != nil {
			return nil, errors.Join(err, t.closeHost())
		}
		t.disk.ttl, t.disk.pinned, t.disk.changed = cfg.TTL, t.pins.has, t.teller(tierSSD)
		t.pins.most = min(t.pins.most, int(cfg.PinShare*float64(t.disk.most*t.disk.slots)))
		t.loadPins()
		if err = t.disk.trim(); err != nil { // the log is shorter all the same
			log.Warn("KV on the SSD", "dir", cfg.Dir, "error", err)
		}
	}
	if cfg.Store != nil {
		t.shared, err = newShared(cfg.Store, s, cfg.Identity, cfg.StoreWrites)
	}
	if err == nil {
		t.metrics, err = newMetrics(t, reg)
	}
	if err != nil {
		return nil, errors.Join(err, t.closeHost(), t.disk.close(), t.io.close(t.ctx))
	}
	return t, nil
}

// openDisk opens the SSD tier, and says how it is read and written.
func (t *Tiers) openDisk(s shape) (err error) {
	if t.io, err = newDiskIO(t.cfg.DirIO, reads+writers, s.record(), uring.Open); err != nil {
		return &SettingError{DirIO, err}
	}
	t.openFile = t.io.open
	if t.disk, err = openDisk(t.cfg.Dir, t.cfg.DirBytes, s, t.cfg.Identity, t.cfg.TenantShare, t.watch, t.log); err != nil {
		return errors.Join(err, t.io.close(t.ctx))
	}
	if t.io.why != nil {
		t.log.Info("KV on the SSD", "dir", t.cfg.Dir, "io", t.io.way(), "because", t.io.why)
	} else {
		t.log.Info("KV on the SSD", "dir", t.cfg.Dir, "io", t.io.way())
	}
	return nil
}

// teller makes Changes of what a tier says.
func (t *Tiers) teller(tier string) func(unit, bool) {
	if t.cfg.Changed == nil {
		return nil
	}
	return func(u unit, stored bool) {
		t.cfg.Changed(Change{tier, stored, u.key, u.parent, u.root, u.pos, u.tokens})
	}
}

// Attach starts saving what cache learns of. Once.
func (t *Tiers) Attach(cache *kvcache.Cache) {
	t.mu.Lock()
	t.cache = cache
	t.mu.Unlock()
	t.wg.Go(t.expirer)
	t.wg.Go(t.saver)
	if t.disk != nil {
		t.wg.Go(t.pinKeeper)
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

// ErrHung says that reads or writes of the SSD do not end; ErrClosed that the
// tiers are being closed.
var (
	ErrHung   = errors.New("the SSD does not answer")
	ErrClosed = errors.New("the KV tiers are closed")
)

// Close writes what still waits for the SSD (under Back: what only host memory
// has) until ctx ends, and waits for everything that touches the pool. Loads
// after it load nothing. ErrHung: transfers were still under way a moment after
// ctx ended; their memory and files stay with the process, and nothing else.
func (t *Tiers) Close(ctx context.Context) error {
	t.mu.Lock()
	again := t.closed
	t.closed = true
	t.rest()
	t.mu.Unlock()
	if again {
		return nil
	}
	stop := context.AfterFunc(ctx, t.cancel)
	defer stop()
	close(t.saves) // its saver closes the queues behind it; KVEvent sends no more
	if err := t.await(ctx); err != nil {
		t.cancel()
		return errors.Join(err, t.shared.close())
	}
	t.cancel()
	return errors.Join(t.closeHost(), t.disk.close(), t.io.close(context.Background()), t.shared.close())
}

// await waits for the goroutines of the tiers: a while longer than ctx lasts,
// since by then only transfers that have begun are waited for.
func (t *Tiers) await(ctx context.Context) error {
	ended := make(chan struct{})
	go func() { // ends with them
		t.wg.Wait()
		t.slow.close()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.Background(), t.grace)
	defer cancel()
	select {
	case <-ended:
		return nil
	case <-last.Done():
	}
	rest, cancel := context.WithTimeout(context.Background(), t.grace)
	defer cancel()
	err := t.io.close(rest) // a ring can cancel what the kernel has not begun
	select {
	case <-ended:
		return nil
	case <-rest.Done():
		return fmt.Errorf("tier: %w: %s: %w", ErrHung, t.cfg.Dir, err)
	}
}

func (t *Tiers) closeHost() error {
	err := t.mover.close()
	t.host.close()
	return err
}

// Flush forgets every unit of every tier that is this worker's own (Purge is
// for the shared store), at once; then it deletes the SSD's files. ErrHung: those
// are not deleted yet as ctx ends; they will be when the SSD answers, and until then
// a worker that starts anew would find their units, as it would with any other
// error: then some cannot be deleted. What is being written at this
// moment may come after it.
func (t *Tiers) Flush(ctx context.Context) error {
	if t == nil {
		return nil
	}
	t.host.clear()
	if t.disk == nil {
		return nil
	}
	t.disk.forgetAll()
	hung := func() error { return fmt.Errorf("%w: %s: its files are not deleted yet", ErrHung, t.cfg.Dir) }
	select {
	case t.clearing <- struct{}{}:
	case <-ctx.Done(): // that of an earlier flush is under way
		return hung()
	}
	cleared := make(chan error, 1)
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		<-t.clearing
		return ErrClosed
	}
	t.wg.Go(func() {
		cleared <- t.disk.clear()
		<-t.clearing
	})
	t.mu.Unlock()
	select {
	case err := <-cleared:
		return err
	case <-ctx.Done():
		return hung()
	}
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
