package tier

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/store"
)

const (
	shareQueue   = 1 << 10 // units that wait for the store
	sharers      = 2       // that write to it
	flights      = 32      // questions and reads under way, of all loads
	burst        = 4       // units that one read asks for
	lookupKeys   = 512     // units that one question is about
	refusedPause = 10 * time.Second
	badPause     = time.Minute // somebody who may write will have deleted it
	badMost      = 1 << 12     // values that are remembered
)

// shared is the tier that several workers have together: one value a unit, its
// record without the padding (record.go), in a store that is not believed.
//
// Loads ask it after host memory and the SSD. Every operation is the business
// of a goroutine that no request waits for longer than its load may take; one
// failure, and nobody asks until a probe has found the store well.
type shared struct {
	store   store.Store
	shape   shape
	prefix  string // of keys: whose they are
	mark    uint64 // the same, in a value's header
	writes  bool
	breaker breaker
	metrics *sharedMetrics
	flights chan struct{} // a token for each under way
	queue   chan share

	mu      sync.Mutex
	written uint64
	pause   time.Time                  // nothing is written until then: the store refused
	bad     map[kvcache.Hash]time.Time // until when values that we may not delete are taken for absent
}

// share is something to be done to a unit's value.
type share struct {
	key  kvcache.Hash
	drop bool // it is bad, or too old
}

// ValueBytes is the size of a unit's value in a shared store.
func ValueBytes(b Backend, unitBlocks int) int {
	s := newShape(b.Layout(), unitBlocks)
	return headerSize + s.payload()
}

func newShared(st store.Store, s shape, identity string, writes bool) (*shared, error) {
	sum := sha256.Sum256(s.preamble("xpyd KV store 3", 0, identity))
	sh := &shared{store: st, shape: s, prefix: fmt.Sprintf("xpyd:kv1:%x:", sum[:16]), mark: binary.LittleEndian.Uint64(sum[16:]),
		writes: writes, flights: make(chan struct{}, flights), queue: make(chan share, shareQueue)}
	sh.breaker.probe = func(ctx context.Context) error {
		_, err := st.Exists(ctx, []string{sh.prefix + "probe"})
		if errors.Is(err, store.ErrRefused) {
			return nil // it answers
		}
		return err
	}
	return sh, nil
}

func (s *shared) name(key kvcache.Hash) string { return fmt.Sprintf("%s%x", s.prefix, key[:]) }

// bytes is a value's size.
func (s *shared) bytes() int { return headerSize + s.shape.payload() }

// pack makes a unit's value of its record.
func (s *shared) pack(u unit, rec, value []byte) {
	h := header{key: u.key, payload: s.shape.payload(), segment: s.mark, pos: uint32(u.pos), born: u.born.Unix(), tenant: u.tag(), sum: s.shape.sum(rec)}
	h.encode(value)
	copy(value[headerSize:s.bytes()], rec[headerSize:])
}

// unpack puts a value into a record, if it says that it is the unit's; and
// tells when the unit came into the tiers, as it says.
func (s *shared) unpack(key kvcache.Hash, pos int, value, rec []byte) (born time.Time, good bool) {
	h, err := s.shape.whole(value)
	want := header{key: key, payload: s.shape.payload(), segment: s.mark, pos: uint32(pos), born: h.born, tenant: h.tenant, sum: h.sum}
	if err != nil || h != want || len(value) != s.bytes() {
		return born, false
	}
	copy(rec, value)
	return h.unit().born, true
}

// done counts an operation, and says whether it went well.
func (s *shared) done(ctx context.Context, op string, began time.Time, err error) bool {
	s.metrics.seconds.WithLabelValues(op).Observe(time.Since(began).Seconds())
	switch {
	case err == nil:
		return true
	case ctx.Err() != nil: // we are closing
	case errors.Is(err, store.ErrRefused):
		s.metrics.errors.WithLabelValues(op, "refused").Inc()
		s.breaker.note(err)
	case errors.Is(err, store.ErrForeign): // one value's fault, seen to already
	default:
		s.metrics.errors.WithLabelValues(op, "failed").Inc()
		s.breaker.failed(ctx, err)
	}
	return false
}

// lookup is what the shared store has of one prompt, as far as it was asked.
type lookup struct {
	from, to int // tokens asked about
	have     []bool
	over     bool // it will not be asked again
}

// has says whether the store has the chain's unit at pos; those after it are
// asked about in the same breath.
func (t *Tiers) has(ctx context.Context, l *lookup, chain *kvcache.Chain, pos, upto int) bool {
	unit := t.cacheUnit()
	if pos >= l.from && pos < l.to {
		return l.have[(pos-l.from)/unit]
	}
	if t.shared == nil || l.over || !t.token(ctx, t.shared.flights, &t.shared.breaker, true) {
		return false
	}
	n := min((upto-pos)/unit, lookupKeys)
	keys := make([]string, n)
	for i := range keys {
		keys[i] = t.shared.name(chain.Name(pos + (i+1)*unit))
	}
	answer := make(chan []bool, 1)
	go func() {
		defer t.untoken(t.shared.flights)
		began := time.Now()
		have, err := t.shared.store.Exists(t.ctx, keys)
		if !t.shared.done(t.ctx, "exists", began, err) {
			have = nil
		}
		answer <- have
	}()
	select {
	case l.have = <-answer:
	case <-ctx.Done():
		l.have = nil
	}
	if l.have == nil {
		l.over = true
		return false
	}
	for i := range l.have {
		l.have[i] = l.have[i] && !t.shared.shuns(chain.Name(pos+(i+1)*unit))
	}
	l.from, l.to = pos, pos+n*unit
	return l.have[0]
}

// readBurst brings units from the store; its caller has taken a token.
func (t *Tiers) readBurst(units []*fetch) {
	defer t.untoken(t.shared.flights)
	s := t.shared
	keys := make([]string, len(units))
	for i, f := range units {
		keys[i] = s.name(f.key)
	}
	began := time.Now()
	next := 0
	err := s.store.Read(t.ctx, keys, func(i int, value []byte, err error) {
		f := units[i]
		next = i + 1
		s.metrics.bytes.WithLabelValues("read").Add(float64(len(value)))
		born, good := s.unpack(f.key, f.pos, value, f.into.record())
		switch {
		case good && t.cfg.TTL > 0 && time.Since(born) >= t.cfg.TTL:
			good = false
			t.unshare(f.key)
		case good:
			f.into.since(born)
		case value != nil || errors.Is(err, store.ErrForeign):
			t.spoilt(f)
		case err != nil:
			s.metrics.errors.WithLabelValues("read", "refused").Inc()
			s.breaker.note(err)
		}
		t.came(f, good)
	})
	s.done(t.ctx, "read", began, err)
	for _, f := range units[next:] {
		f.deliver(false)
	}
}

// since notes when a unit that is not published yet came into the tiers.
func (l *lease) since(born time.Time) {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	l.h.slots[l.i].born = born
}

// spoilt reports a unit that is not what it should be. The store's is deleted.
func (t *Tiers) spoilt(f *fetch) {
	t.metrics.corrupt.WithLabelValues(f.tier).Inc()
	t.log.Error("KV in a tier does not agree with its digests; it is computed instead", "tier", f.tier, "unit", fmt.Sprintf("%x", f.key))
	if f.tier == tierStore {
		t.unshare(f.key)
	}
}

// shun takes a value that cannot be deleted for absent, for a while.
func (s *shared) shun(key kvcache.Hash) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bad == nil || len(s.bad) == badMost {
		s.bad = make(map[kvcache.Hash]time.Time)
	}
	s.bad[key] = time.Now().Add(badPause)
}

func (s *shared) shuns(key kvcache.Hash) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Before(s.bad[key])
}

// unshare has a unit deleted from the store, or not read again where that may not be.
func (t *Tiers) unshare(key kvcache.Hash) {
	if !t.shared.writes {
		t.shared.shun(key)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.sealed { // else the queue is closed
		t.share(share{key: key, drop: true})
	}
}

// share queues something for the store; too much is left out.
func (t *Tiers) share(w share) {
	if t.shared == nil || !t.shared.writes {
		return
	}
	t.unsaved.Add(1)
	select {
	case t.shared.queue <- w:
	default:
		t.unsaved.Add(-1)
		t.metrics.dropped.WithLabelValues(tierStore).Inc()
	}
}

// sharer writes units from host memory to the store until its queue is closed.
func (t *Tiers) sharer() {
	value := make([]byte, t.shared.bytes())
	for w := range t.shared.queue {
		if t.ctx.Err() == nil {
			t.put(w, value)
		}
		t.unsaved.Add(-1)
	}
}

func (t *Tiers) put(w share, value []byte) {
	s := t.shared
	s.mu.Lock()
	paused := time.Now().Before(s.pause)
	s.mu.Unlock()
	if paused || !s.breaker.allow() {
		t.metrics.dropped.WithLabelValues(tierStore).Inc()
		return
	}
	name, began := s.name(w.key), time.Now()
	if w.drop {
		s.done(t.ctx, "delete", began, s.store.Delete(t.ctx, name))
		return
	}
	// Mostly somebody has written it: prefill, which gave it to decode.
	have, err := s.store.Exists(t.ctx, []string{name})
	if !s.done(t.ctx, "exists", began, err) || have[0] {
		return
	}
	l := t.host.peek(w.key)
	if l == nil {
		t.metrics.dropped.WithLabelValues(tierStore).Inc() // evicted since
		return
	}
	s.pack(l.unit(), l.record(), value)
	l.release()
	began = time.Now()
	stored, err := s.store.Write(t.ctx, name, value)
	if !s.done(t.ctx, "write", began, err) && errors.Is(err, store.ErrRefused) {
		s.mu.Lock()
		s.pause = time.Now().Add(refusedPause) // a full store is not asked with each unit
		s.mu.Unlock()
	}
	if stored {
		s.metrics.bytes.WithLabelValues("write").Add(float64(len(value)))
		t.metrics.saved.WithLabelValues(tierStore).Inc()
		s.mu.Lock()
		s.written++
		s.mu.Unlock()
	}
}

// close ends it when nothing is under way.
func (s *shared) close() error {
	if s == nil {
		return nil
	}
	s.breaker.close()
	return s.store.Close()
}
