package tier

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// lane is a level below host memory with the operations under way in it.
type lane struct {
	level.Level
	limits  level.Limits
	remote  level.Remote  // nil: the level is this worker's own
	aborter level.Aborter // nil: its operations end by themselves
	reads   chan struct{} // a token for each Load and Ask under way
	jobs    chan job      // of its writers; nil: nothing is written to it
}

// job is a unit that a lane's writer saves or deletes.
type job struct {
	key     kvcache.Hash
	leaving *host.Lease // of a unit that leaves host memory once it is saved; nil: it stays
	remove  bool        // delete the unit: it is bad or too old
}

// addLane adds a level below host memory.
func (t *Tiers) addLane(l level.Level) {
	n := &lane{Level: l, limits: l.Limits()}
	n.remote, _ = l.(level.Remote)
	n.aborter, _ = l.(level.Aborter)
	n.reads = make(chan struct{}, n.limits.Loads)
	if n.limits.Writers > 0 {
		n.jobs = make(chan job, writeQueue)
	}
	t.below = append(t.below, n)
	if n.remote != nil {
		t.shared = n
		return
	}
	if t.own == nil {
		t.own = n
	}
	t.pins.most = min(t.pins.most, int(t.cfg.PinShare*float64(l.Stats(false).Capacity)))
	if t.keeper == nil {
		t.keeper, _ = l.(level.Keeper)
	}
}

// Knows reports whether one of this worker's own levels has a unit.
func (t *Tiers) Knows(key kvcache.Hash) bool {
	return t != nil && (t.host.Has(key) || t.giver(key) != nil)
}

// giver returns the nearest lane that is known to have a unit and may be used; nil if none.
func (t *Tiers) giver(key kvcache.Hash) *lane {
	for _, l := range t.below {
		if l.Has(key) && l.Breaker().Allow() {
			return l
		}
	}
	return nil
}

// search is what one load knows about the shared level. The zero value has asked nothing.
type search struct {
	local bool         // the shared level is left out
	asked int          // the first token that it was not asked about
	has   map[int]bool // by position: units that it has
}

// find returns how far the levels have the chain from a token on without a gap.
func (t *Tiers) find(ctx context.Context, s *search, chain *kvcache.Chain, from, upto int) int {
	unit := t.shape.Tokens()
	upto = min(upto, chain.Tokens())
	for from+unit <= upto && (t.Knows(chain.Name(from+unit)) || t.askFor(ctx, s, chain, from, upto)) {
		from += unit
	}
	return from
}

// askFor reports whether the shared level has the chain's unit at pos. It asks about the
// units after it at the same time.
func (t *Tiers) askFor(ctx context.Context, s *search, chain *kvcache.Chain, pos, upto int) bool {
	if t.remote(s) == nil || pos < s.asked {
		return s.has[pos]
	}
	unit := t.shape.Tokens()
	keys := make([]kvcache.Hash, min((upto-pos)/unit, level.AskMost))
	for k := range keys {
		keys[k] = chain.Name(pos + (k+1)*unit)
	}
	have := t.ask(ctx, t.shared, keys)
	if s.asked = pos + len(keys)*unit; have == nil {
		s.asked = math.MaxInt // do not ask again
	}
	if s.has == nil {
		s.has = make(map[int]bool)
	}
	for k, ok := range have {
		s.has[pos+k*unit] = ok
	}
	return s.has[pos]
}

// remote returns the lane of the shared level, which may also have units that were nearer a
// moment ago; nil if there is none or the search leaves it out.
func (t *Tiers) remote(s *search) *lane {
	if s.local {
		return nil
	}
	return t.shared
}

// ask asks a remote level until ctx ends; nil means no answer.
func (t *Tiers) ask(ctx context.Context, l *lane, keys []kvcache.Hash) []bool {
	if !t.token(ctx, l.reads, l.Breaker(), true) {
		return nil
	}
	answer := make(chan []bool, 1)
	go func() {
		defer t.untoken(l.reads)
		have, ok := l.remote.Ask(t.ctx, keys)
		if !ok {
			have = nil
		}
		answer <- have
	}()
	select {
	case have := <-answer:
		return have
	case <-ctx.Done():
		return nil
	}
}

// token takes a token for one more read and counts its goroutine in wg, if the breaker
// allows it. With wait it waits for a token until ctx ends.
func (t *Tiers) token(ctx context.Context, from chan struct{}, by *level.Breaker, wait bool) bool {
	select {
	case from <- struct{}{}:
	default:
		if !wait {
			return false
		}
		select {
		case from <- struct{}{}:
		case <-ctx.Done():
			return false
		case <-by.Opens():
			return false
		case <-t.awake.Done(): // Close begins
			return false
		}
	}
	if !t.enter() {
		<-from
		return false
	}
	if !by.Allow() {
		t.untoken(from)
		return false
	}
	return true
}

// untoken gives a token back.
func (t *Tiers) untoken(to <-chan struct{}) {
	<-to
	t.wg.Done()
}

// read reads units from a lane. Its caller has taken a token.
func (t *Tiers) read(l *lane, units []*fetch) {
	defer t.untoken(l.reads)
	reads := make([]level.Read, len(units))
	for i, f := range units {
		reads[i] = level.Read{Key: f.key, Pos: f.pos, Rec: f.into.Record()}
	}
	l.Load(t.ctx, reads, func(i int, born time.Time, err error) {
		f := units[i]
		f.born = born
		switch {
		case errors.Is(err, level.ErrCorrupt):
			t.spoilt(f)
		case err == nil && t.cfg.TTL > 0 && time.Since(born) >= t.cfg.TTL:
			err = level.ErrGone
			t.forget(f)
		}
		t.came(f, err == nil)
	})
}

// push queues a job for the lane's writers.
func (t *Tiers) push(l *lane, j job) bool {
	if l.jobs == nil || !j.remove && l.Has(j.key) {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sealed {
		return false
	}
	if l.Breaker().Allow() {
		t.unsaved.Add(1)
		select {
		case l.jobs <- j:
			return true
		default:
			t.unsaved.Add(-1)
		}
	}
	if j.leaving == nil {
		t.dropped(l)
	}
	return false
}

// pushOwn has a unit written to this worker's own levels.
func (t *Tiers) pushOwn(key kvcache.Hash) {
	for _, l := range t.below {
		if l.remote == nil {
			t.push(l, job{key: key})
		}
	}
}

// dropped counts a unit that a level does not get.
func (t *Tiers) dropped(l level.Base) { t.metrics.dropped.WithLabelValues(l.Name()).Inc() }

// writer does a lane's jobs until the queue is closed.
func (t *Tiers) writer(l *lane) {
	for j := range l.jobs {
		if !j.remove {
			t.write(l, j)
		} else if t.ctx.Err() == nil && l.Breaker().Allow() {
			l.remote.Delete(t.ctx, j.key)
		}
		t.unsaved.Add(-1)
	}
}

// write saves a unit from host memory.
func (t *Tiers) write(l *lane, j job) {
	lease := j.leaving
	if lease == nil {
		lease = t.host.Peek(j.key)
	}
	if lease == nil { // evicted since
		if l.remote != nil && t.ctx.Err() == nil {
			t.dropped(l)
		}
		return
	}
	defer lease.Release()
	if t.ctx.Err() != nil {
		return
	}
	saved, err := false, level.ErrLeftOut
	if l.Breaker().Allow() {
		saved, err = l.Save(t.ctx, lease.Unit(), lease.Record())
	} else if j.leaving != nil {
		lease.Stay()
		return
	}
	switch {
	case saved:
		t.metrics.saved.WithLabelValues(l.Name()).Inc()
	case errors.Is(err, level.ErrLeftOut):
		t.dropped(l)
	}
}
