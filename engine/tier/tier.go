// Package tier keeps KV blocks below the device pool, so that the next turn of a chat,
// or the same prompt after a restart, is loaded instead of computed. The places are levels
// (engine/tier/level): host memory, an SSD, a store that workers share. This package is
// the policy: what is kept, where it is looked for, how long anybody waits, and what other
// workers are given. It knows host memory, and no level below it by name.
//
// What moves is the prefix index's unit (kvcache.UnitTokens tokens), named by the hash of
// model, numerics, salt and every token up to its end. A unit travels with the digests of
// its rows; they are recomputed from the bytes each time it comes back into the pool. A
// unit that does not agree is forgotten, and its tokens are computed.
//
//	save   when the index has learned of a unit, or it was asked for again, or is
//	       about to be evicted (WritePolicy), it is copied to host memory, and from
//	       there to this worker's own levels by the same policy. A shared level gets
//	       what host memory gets. Queues are bounded: under pressure units are left
//	       out, and nobody waits.
//	load   before a request is queued, units that a level has and the index lacks are
//	       put into free blocks of the pool and indexed. Then they are cached blocks
//	       like any other: nobody holds them, so loads delay nobody and cannot
//	       deadlock.
//	bring  on a device, from host memory: units are put into a request's own blocks
//	       once it has them, and it computes behind them layer by layer; see Bring.
//
// Non-goals: scheduling requests and matching prefixes (the engine and kvcache do).
package tier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Config says what is kept and where.
type Config struct {
	Host   host.Config
	Levels []level.Config // below host memory, nearest first; at most one level.Remote
	// Identity is what units depend on besides salt and tokens. Units of another identity
	// are not used.
	Identity string
	// LoadTimeout bounds one request's load: what has not come by then is computed.
	LoadTimeout time.Duration
	// MinLoadTokens is the least that is loaded; fewer tokens are computed.
	MinLoadTokens int
	// LoadBlocks bounds the blocks of all loads under way, and LoadQuota their bytes a
	// second, with a second's worth at once; 0: no limit.
	LoadBlocks int
	LoadQuota  int64

	Write     WritePolicy // "": Through
	WriteHits int         // of Selective; at least 1
	// TTL is the age at which units are no longer used; 0: no limit.
	TTL time.Duration
	// PinShare of each of this worker's own levels is the most that pins may keep, at most
	// a half.
	PinShare float64
	// TenantShare of each of this worker's own levels is the most that units of one cache
	// salt ("" is one) may fill. Beyond it a new unit replaces one of theirs. 0: all.
	TenantShare float64

	// Changed is told of each unit that enters or leaves a level, in order and under the
	// level's lock: it must not block, or call the tiers. It may be nil.
	Changed func(Change)
}

// Change is a unit that entered a level or left it.
type Change struct {
	Tier         string // the level's name
	Memory       bool   // it is host memory
	Stored       bool
	Key          kvcache.Hash
	Parent, Root kvcache.Hash // of what is stored
	Pos          int          // tokens before it
	Tokens       []int32      // of what is stored, if they are at hand
}

// Validate reports what is wrong with the configuration.
func (c *Config) Validate() error {
	switch {
	case !slices.Contains([]WritePolicy{"", Through, Selective, Back}, c.Write) || c.Write == Selective && c.WriteHits < 1:
		return fmt.Errorf("tier: write policy %q after %d hits", c.Write, c.WriteHits)
	case c.TTL < 0 || c.LoadQuota < 0 || !(c.PinShare >= 0 && c.PinShare <= 0.5) || !(c.TenantShare >= 0 && c.TenantShare <= 1):
		return fmt.Errorf("tier: ttl %v, %d bytes a second, shares of pins %v and tenants %v", c.TTL, c.LoadQuota, c.PinShare, c.TenantShare)
	case c.LoadTimeout <= 0 || c.MinLoadTokens < 0 || c.LoadBlocks < 1:
		return fmt.Errorf("tier: load timeout %v, at least %d tokens, %d blocks", c.LoadTimeout, c.MinLoadTokens, c.LoadBlocks)
	}
	return nil
}

// Backend is what the tiers need of kernels.Backend.
type Backend interface {
	kernels.Pool
	Layout() kvlayout.Layout
}

const (
	saveQueue  = 1 << 14 // units waiting to be copied to host memory
	writeQueue = 1 << 10 // units waiting to be written to one level below it
	spareMost  = 64      // slots of host memory that Back keeps free, at most an eighth
	window     = 16      // units that one load has under way
	refill     = 12      // units under way when more are begun, so that reads go together
	stages     = 32      // prefixes being read into host memory
)

// Tiers are the levels under one worker's pool. It is the cache's Listener.
type Tiers struct {
	cfg    Config
	log    *slog.Logger
	shape  level.Shape
	host   *host.Memory
	below  []*lane // the levels below host memory, nearest first
	own    *lane   // the first of those that is this worker's own; nil: none
	shared *lane   // the one that workers share; nil: none
	keeper level.Keeper
	pins   *pins
	slots  int // of host memory
	spare  int // see spareMost
	batch  int // units that move together; few if host memory is small
	// patience is how long Back waits for a level that is slower than evictions.
	patience time.Duration
	grace    time.Duration // see await
	metrics  *metrics
	loading  claims
	bringing claims // of Bring; they end when the device is done

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	awake  context.Context // ends as Close begins
	rest   context.CancelFunc
	wg     sync.WaitGroup // savers, writers, reads
	saves  chan save
	stages chan struct{} // a token for each prefix that is being read ahead
	// clearing holds a token while Flush erases files.
	clearing chan struct{}
	repin    chan struct{} // poked when pins have changed, for expirer
	keep     chan struct{} // the same, for pinKeeper
	unsaved  atomic.Int64  // units in saves and lanes' jobs, and those being saved

	mu     sync.Mutex
	cache  *kvcache.Cache // set by Attach, before any event
	taken  int            // blocks of loads under way
	said   time.Time      // when complain last did
	loads  int            // loads begun, ever: their owners' names
	closed bool           // no more loads and reads
	sealed bool           // the lanes' jobs are closed
	quota  bucket         // of loads
}

// New opens the levels. They do nothing until Attach. Taking much host memory takes seconds, in
// which ctx may end. A *level.SettingError names a setting that this machine does not allow.
func New(ctx context.Context, cfg Config, backend Backend, unitBlocks int, log *slog.Logger, reg prometheus.Registerer) (*Tiers, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Write == "" {
		cfg.Write = Through
	}
	s := level.NewShape(backend.Layout(), unitBlocks)
	if s.Payload() >= 1<<32 {
		return nil, fmt.Errorf("tier: a unit of %d bytes, want less than 4 GiB", s.Payload())
	}
	t := &Tiers{cfg: cfg, log: log, shape: s, saves: make(chan save, saveQueue), clearing: make(chan struct{}, 1), stages: make(chan struct{}, stages),
		pins: newPins(), repin: make(chan struct{}, 1), keep: make(chan struct{}, 1), quota: bucket{rate: cfg.LoadQuota},
		patience: 100 * time.Millisecond, grace: time.Second}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.awake, t.rest = context.WithCancel(t.ctx)
	err := t.open(ctx, backend)
	if err == nil {
		t.metrics, err = newMetrics(t, reg)
	}
	if err != nil {
		t.cancel()
		return nil, errors.Join(err, t.closeLevels(context.Background(), t.levels()))
	}
	return t, nil
}

// open opens the levels and takes over the pins that one of them kept.
func (t *Tiers) open(ctx context.Context, pool kernels.Pool) error {
	env := &level.Env{Shape: t.shape, Identity: t.cfg.Identity, Pool: pool, LoadTimeout: t.cfg.LoadTimeout, TTL: t.cfg.TTL, TenantShare: t.cfg.TenantShare,
		Pinned: t.pins.has, Went: t.lost, Complain: t.complain, Log: t.log, Awake: t.awake}
	if t.cfg.Changed != nil {
		env.Changed = func(name string, u level.Unit, stored bool) {
			t.cfg.Changed(Change{name, name == t.host.Name(), stored, u.Key, u.Parent, u.Root, u.Pos, u.Tokens})
		}
	}
	var err error
	if t.host, err = t.cfg.Host.Open(ctx, env); err != nil {
		return err
	}
	t.slots = t.host.Stats(false).Capacity
	t.spare = min(spareMost, max(1, t.slots/8))
	t.batch = min(t.host.Batch(), t.spare)
	t.pins.most = int(t.cfg.PinShare * float64(t.slots))
	for _, c := range t.cfg.Levels {
		l, err := c.Open(ctx, env)
		if err != nil {
			return err
		}
		t.addLane(l)
	}
	if t.keeper == nil {
		return nil
	}
	t.loadPins()
	if err := t.keeper.Trim(); err != nil { // it is smaller all the same
		t.log.Warn("KV tier", "error", err)
	}
	return nil
}

// levels lists the levels that are open, nearest first.
func (t *Tiers) levels() (all []level.Base) {
	if t.host != nil {
		all = append(all, t.host)
	}
	for _, l := range t.below {
		all = append(all, l.Level)
	}
	return all
}

// Attach starts saving what cache learns of. It is called once.
func (t *Tiers) Attach(cache *kvcache.Cache) {
	t.mu.Lock()
	t.cache = cache
	t.mu.Unlock()
	t.wg.Go(t.expirer)
	t.wg.Go(t.saver)
	if t.keeper != nil {
		t.wg.Go(t.pinKeeper)
	}
	for _, l := range t.below {
		for range l.limits.Writers {
			t.wg.Go(func() { t.writer(l) })
		}
	}
}

// Errors of Close, Flush and Purge.
var (
	ErrHung    = errors.New("a level of the KV tiers does not answer")
	ErrClosed  = errors.New("the KV tiers are closed")
	ErrNoStore = errors.New("no shared store to write to")
)

// Close writes what still waits for a level below host memory (under Back: what only host
// memory has) until ctx ends, and waits for everything that touches the pool. Later loads
// load nothing. ErrHung: transfers were still under way a moment after ctx ended; only
// their memory and files stay open.
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
	close(t.saves) // saver then closes the lanes' queues; KVEvent sends no more
	err := t.await(ctx)
	t.cancel()
	if err == nil {
		return t.closeLevels(context.Background(), t.levels())
	}
	var well []level.Base
	for _, l := range t.below {
		if l.aborter == nil {
			well = append(well, l.Level)
		}
	}
	return errors.Join(err, t.closeLevels(ctx, well))
}

func (t *Tiers) closeLevels(ctx context.Context, list []level.Base) (err error) {
	for _, l := range list {
		err = errors.Join(err, l.Close(ctx))
	}
	return err
}

// await waits for the goroutines of the tiers, a while longer than ctx lasts: by then only
// transfers that have begun are left.
func (t *Tiers) await(ctx context.Context) error {
	ended := make(chan struct{})
	go func() { // ends with them
		t.wg.Wait()
		for _, l := range t.below {
			l.Breaker().Close()
		}
		close(ended)
	}()
	within := func(ctx context.Context) bool {
		select {
		case <-ended:
			return true
		case <-ctx.Done():
			return false
		}
	}
	if within(ctx) {
		return nil
	}
	last, cancel := context.WithTimeout(context.Background(), t.grace)
	defer cancel()
	if within(last) {
		return nil
	}
	rest, cancel := context.WithTimeout(context.Background(), t.grace)
	defer cancel()
	var err error
	for _, l := range t.below {
		if l.aborter != nil {
			err = errors.Join(err, l.aborter.Abort(rest))
		}
	}
	if within(rest) {
		return nil
	}
	return fmt.Errorf("tier: %w: %w", ErrHung, err)
}

// Flush forgets every unit of this worker's own levels at once (Purge is for the shared
// store), then deletes their files. ErrHung: ctx ended first; the files are deleted when
// the level answers. Any other error: some could not be deleted. A worker that restarts finds
// the units of files that are left. Units being written at this moment may survive.
func (t *Tiers) Flush(ctx context.Context) error {
	if t == nil {
		return nil
	}
	var (
		erases []func() error
		names  []string
	)
	for _, l := range t.levels() {
		if erase := l.Clear(); erase != nil {
			erases, names = append(erases, erase), append(names, l.Name())
		}
	}
	if len(erases) == 0 {
		return nil
	}
	hung := fmt.Errorf("%w: the files of %s are not deleted yet", ErrHung, strings.Join(names, ", "))
	select {
	case t.clearing <- struct{}{}:
	case <-ctx.Done(): // an earlier flush is under way
		return hung
	}
	cleared := make(chan error, 1)
	if !t.enter() {
		<-t.clearing
		return ErrClosed
	}
	go func() {
		defer t.wg.Done()
		var err error
		for _, erase := range erases {
			err = errors.Join(err, erase())
		}
		cleared <- err
		<-t.clearing
	}()
	select {
	case err := <-cleared:
		return err
	case <-ctx.Done():
		return hung
	}
}

// enter counts a goroutine in wg; it returns false if the tiers are being closed.
func (t *Tiers) enter() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.wg.Add(1)
	}
	return !t.closed
}

// Purge deletes from the shared store, for all workers, the units of this model, numerics and
// layout that it finds until ctx ends. After an error there may be more. ErrNoStore: there is
// no store, or this worker may not write to it.
func (t *Tiers) Purge(ctx context.Context) (deleted int, err error) {
	if t == nil || t.shared == nil || t.shared.jobs == nil {
		return 0, ErrNoStore
	}
	return t.shared.remote.Purge(ctx)
}

// complain logs a level's failures, at most one every ten seconds.
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
