// Package shared is the level that workers share: one value per unit, its record without padding,
// in a store that is not trusted.
//
// Operations run on goroutines that no request waits for longer than its load may take. After one
// failure nobody asks until a probe finds that the store answers.
package shared

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/store"
	"github.com/xpyd/xpyd/kvlayout"
)

// Name is the level's label.
const Name = "store"

const (
	writers      = 2  // that write to the store
	flights      = 32 // questions and reads under way, of all loads
	burst        = 4  // units that one read asks for
	refusedPause = 10 * time.Second
	badPause     = time.Minute // by then a worker that may write will have deleted it
	badMost      = 1 << 12     // values that are remembered
)

// Config says which store it is.
type Config struct {
	Store  store.Store // it is closed with the level
	Writes bool        // units are also written to it
}

// ValueBytes is the size of a unit's value.
func ValueBytes(l kvlayout.Layout) int {
	s := level.NewShape(l, kvcache.UnitBlocks(l.BlockTokens))
	return valueBytes(&s)
}

func valueBytes(s *level.Shape) int { return level.HeaderSize + s.Payload() }

// Shared is the level.
type Shared struct {
	cfg     Config
	env     *level.Env
	prefix  string // of keys: whose they are
	mark    uint64 // the same, in a value's header
	breaker level.Breaker
	metrics level.Metrics
	errors  *prometheus.CounterVec   // by operation and kind
	bytes   *prometheus.CounterVec   // by operation
	seconds *prometheus.HistogramVec // by operation
	values  sync.Pool                // of *[]byte, to be written

	mu      sync.Mutex
	written uint64
	pause   time.Time                  // nothing is written until then: the store refused
	bad     map[kvcache.Hash]time.Time // until when values that we may not delete are taken for absent
}

var _ level.Remote = (*Shared)(nil)

// Open implements level.Config. It asks the store nothing.
func (c Config) Open(_ context.Context, env *level.Env) (level.Level, error) { return open(c, env) }

func open(c Config, env *level.Env) (*Shared, error) {
	sum := sha256.Sum256(env.Shape.Preamble("xpyd KV store 3", 0, env.Identity))
	s := &Shared{cfg: c, env: env, prefix: fmt.Sprintf("xpyd:kv1:%x:", sum[:16]), mark: binary.LittleEndian.Uint64(sum[16:])}
	s.metrics.Gauge("store_open", "1 while the shared store is left alone because an operation failed.", nil, s.breaker.Open)
	s.errors = s.metrics.Counters("store_errors_total", "Operations that the shared store refused, or that failed because it was not reached or did not answer in time.", "op", "kind")
	s.bytes = s.metrics.Counters("store_bytes_total", "Bytes of values that went to the shared store and came from it.", "op")
	s.seconds = s.metrics.Seconds("store_seconds", "Time of an operation of the shared store: a question about up to 512 units, a read of up to 4, a write of one.", 0.0001, 14, "op")
	s.values.New = func() any { return new(make([]byte, valueBytes(&env.Shape))) }
	s.breaker.Probe = func(ctx context.Context) error {
		_, err := c.Store.Exists(ctx, []string{s.prefix + "probe"})
		if errors.Is(err, store.ErrRefused) {
			return nil // it answers
		}
		return err
	}
	return s, nil
}

// Key is a unit's name in the store.
func (s *Shared) Key(unit kvcache.Hash) string { return fmt.Sprintf("%s%x", s.prefix, unit[:]) }

// Name implements level.Level, as do the methods below.
func (s *Shared) Name() string { return Name }

// Has returns false: callers must Ask.
func (s *Shared) Has(kvcache.Hash) bool { return false }

// Born is not known here.
func (s *Shared) Born(kvcache.Hash) time.Time { return time.Time{} }

// Breaker is open after an operation that failed.
func (s *Shared) Breaker() *level.Breaker { return &s.breaker }

// Metrics are of operations; units are counted by the tiers.
func (s *Shared) Metrics() level.Metrics { return s.metrics }

// Limits bounds operations.
func (s *Shared) Limits() level.Limits {
	l := level.Limits{Loads: flights, Burst: burst}
	if s.cfg.Writes {
		l.Writers = writers
	}
	return l
}

// Close ends the level, and the store with it.
func (s *Shared) Close(context.Context) error { return s.cfg.Store.Close() }

// Clear leaves the store alone: Purge is for that.
func (s *Shared) Clear() (erase func() error) { return nil }

// pack makes a unit's value of its record.
func (s *Shared) pack(u level.Unit, rec, value []byte) {
	s.env.Shape.Stamp(value, &u, s.mark, 0, rec)
	copy(value[level.HeaderSize:], rec[level.HeaderSize:])
}

// unpack puts a value into a record, if it says that it is the unit's, and returns
// when the unit came into the tiers, as it says.
func (s *Shared) unpack(r *level.Read, value []byte) (born time.Time, err error) {
	h, err := s.env.Shape.Stamped(value, r.Key, r.Pos, s.mark, 0)
	if err != nil || len(value) != valueBytes(&s.env.Shape) {
		return born, level.ErrCorrupt
	}
	copy(r.Rec, value)
	return h.Unit().Born, nil
}

// done counts an operation, and reports whether it went well.
func (s *Shared) done(ctx context.Context, op string, began time.Time, err error) bool {
	s.seconds.WithLabelValues(op).Observe(time.Since(began).Seconds())
	switch {
	case err == nil:
		return true
	case ctx.Err() != nil: // we are closing
	case errors.Is(err, store.ErrRefused):
		s.errors.WithLabelValues(op, "refused").Inc()
		s.breaker.Note(err)
	case errors.Is(err, store.ErrForeign): // one value's fault, seen to already
	default:
		s.errors.WithLabelValues(op, "failed").Inc()
		s.breaker.Failed(s.env.Awake, err)
	}
	return false
}

// Ask implements level.Remote. Units that were found bad are absent for a while.
func (s *Shared) Ask(ctx context.Context, units []kvcache.Hash) (have []bool, ok bool) {
	keys := make([]string, len(units))
	for i, unit := range units {
		keys[i] = s.Key(unit)
	}
	began := time.Now()
	have, err := s.cfg.Store.Exists(ctx, keys)
	if !s.done(ctx, "exists", began, err) {
		return nil, false
	}
	for i, unit := range units {
		have[i] = have[i] && !s.shuns(unit)
	}
	return have, true
}

// Load reads all units in one pipeline.
func (s *Shared) Load(ctx context.Context, reads []level.Read, got func(i int, born time.Time, err error)) {
	keys := make([]string, len(reads))
	for i := range reads {
		keys[i] = s.Key(reads[i].Key)
	}
	began := time.Now()
	next := 0
	err := s.cfg.Store.Read(ctx, keys, func(i int, value []byte, err error) {
		next = i + 1
		s.bytes.WithLabelValues("read").Add(float64(len(value)))
		var born time.Time
		switch {
		case value != nil || errors.Is(err, store.ErrForeign):
			born, err = s.unpack(&reads[i], value)
		case err != nil:
			s.errors.WithLabelValues("read", "refused").Inc()
			s.breaker.Note(err)
		default:
			err = level.ErrGone
		}
		got(i, born, err)
	})
	s.done(ctx, "read", began, err)
	for ; next < len(reads); next++ {
		got(next, time.Time{}, level.ErrGone)
	}
}

// Save writes a unit, unless another worker has: mostly the prefill worker that sent it.
func (s *Shared) Save(ctx context.Context, u level.Unit, rec []byte) (saved bool, err error) {
	s.mu.Lock()
	paused := time.Now().Before(s.pause)
	s.mu.Unlock()
	if paused {
		return false, level.ErrLeftOut
	}
	key, began := s.Key(u.Key), time.Now()
	have, err := s.cfg.Store.Exists(ctx, []string{key})
	if !s.done(ctx, "exists", began, err) || have[0] {
		return false, err
	}
	value := s.values.Get().(*[]byte)
	defer s.values.Put(value)
	s.pack(u, rec, *value)
	began = time.Now()
	saved, err = s.cfg.Store.Write(ctx, key, *value)
	s.done(ctx, "write", began, err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if errors.Is(err, store.ErrRefused) {
		s.pause = time.Now().Add(refusedPause) // a full store is not asked with each unit
	}
	if saved {
		s.bytes.WithLabelValues("write").Add(float64(len(*value)))
		s.written++
	}
	return saved, err
}

// Forget takes a unit for absent for a while, if its value may not be deleted.
func (s *Shared) Forget(unit kvcache.Hash) {
	if s.cfg.Writes {
		return // Delete does it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bad == nil || len(s.bad) == badMost {
		s.bad = make(map[kvcache.Hash]time.Time)
	}
	s.bad[unit] = time.Now().Add(badPause)
}

func (s *Shared) shuns(unit kvcache.Hash) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Before(s.bad[unit])
}

// Delete implements level.Remote.
func (s *Shared) Delete(ctx context.Context, unit kvcache.Hash) {
	began := time.Now()
	s.done(ctx, "delete", began, s.cfg.Store.Delete(ctx, s.Key(unit)))
}

// Purge implements level.Remote.
func (s *Shared) Purge(ctx context.Context) (deleted int, err error) {
	return s.cfg.Store.Purge(ctx, s.prefix)
}

// Stats says how the store stands.
func (s *Shared) Stats(bool) level.Stats {
	open, at, last := s.breaker.State()
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &level.RemoteStats{URL: s.cfg.Store.String(), Prefix: s.prefix, UnitBytes: valueBytes(&s.env.Shape), Reachable: !open, Writes: s.cfg.Writes, Written: s.written}
	if last != nil {
		r.LastError, r.LastAt = last.Error(), &at
	}
	return level.Stats{Tier: Name, Remote: r}
}
