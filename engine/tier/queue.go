package tier

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// queue is what one load reads, in order, some of it ahead.
//
// All loads share the lanes' tokens and the slots of host memory. One that has nothing
// under way waits for its turn, as long as its request may; one that has goes on when
// its own has come. So nobody is turned away because others read, and no two wait for
// each other: who waits has no slot, who has one waits for a level alone, and its answer
// gives the token back.
type queue struct {
	t      *Tiers
	chain  *kvcache.Chain
	tokens []int32
	found  *search
	stays  bool     // see came
	list   []int    // positions of units that are not begun
	ahead  []*fetch // under way, or here
	stuck  bool     // the next one cannot be had
}

// fetch is one unit on its way into a host slot.
type fetch struct {
	key   kvcache.Hash
	pos   int
	lane  *lane            // where it comes from; nil: it was in host memory
	got   chan level.Lease // one; nil when it failed
	left  atomic.Bool      // nobody waits any more
	stays bool             // it is to stay in host memory
	gone  bool             // it did not come
	out   <-chan struct{}  // closed when nobody is to wait for it any longer
	have  level.Lease      // it was in host memory
	into  level.Lease      // a slot to fill
	born  time.Time        // when what was read came into the tiers
}

// from is the level that the unit comes from.
func (t *Tiers) from(f *fetch) level.Base {
	if f.lane == nil {
		return t.host
	}
	return f.lane
}

// more begins to read, as far as the window goes, and tokens and slots of host
// memory are at hand; where nothing is ahead it waits for those of one, if wait.
func (q *queue) more(ctx context.Context, wait bool) {
	if len(q.ahead) > refill {
		return
	}
	var burst []*fetch // of one lane, which has its token
	begin := func() {
		if len(burst) > 0 {
			go q.t.read(burst[0].lane, burst)
			burst = nil
		}
	}
	for len(q.list) > 0 && len(q.ahead) < window {
		alone := wait && len(q.ahead) == 0
		f := q.begin(ctx, burst, alone)
		if f == nil {
			q.stuck = alone // nothing of our own will make it better
			break
		}
		q.list, q.ahead = q.list[1:], append(q.ahead, f)
		switch {
		case f.lane == nil:
		case f.lane.limits.Burst == 1:
			go q.t.read(f.lane, []*fetch{f})
		default:
			if len(burst) > 0 && burst[0].lane != f.lane {
				begin()
			}
			if burst = append(burst, f); len(burst) == f.lane.limits.Burst {
				begin()
			}
		}
	}
	begin()
}

// begin finds the next unit in host memory, or takes what it needs to be read: a token,
// unless it goes with the burst, and a slot. Nil: that cannot be now.
func (q *queue) begin(ctx context.Context, burst []*fetch, wait bool) *fetch {
	t, pos := q.t, q.list[0]
	f := &fetch{key: q.chain.Name(pos + t.shape.Tokens()), pos: pos, stays: q.stays}
	if f.have = t.host.Get(f.key); f.have != nil {
		return f
	}
	if f.lane = t.giver(f.key); f.lane == nil {
		f.lane = t.remote(q.found, pos)
	}
	l := f.lane
	if l == nil {
		return nil
	}
	paid := len(burst) > 0 && burst[0].lane == l
	if !paid && !t.token(ctx, l.reads, l.Breaker(), wait) {
		return nil
	}
	// The slot comes after the token, so that reads that wait hold none.
	if !q.slot(ctx, f, wait) {
		if !paid {
			t.untoken(l.reads)
		}
		if f.have == nil {
			return nil
		}
		f.lane = nil // it came while we waited
		return f
	}
	f.got = make(chan level.Lease, 1)
	if l.aborter != nil {
		f.out = l.Breaker().Opens()
	}
	return f
}

// slot takes a slot of host memory for a unit; with wait it waits for others' reads
// to leave one. False: there is none, or the unit is here already.
func (q *queue) slot(ctx context.Context, f *fetch, wait bool) bool {
	t := q.t
	u := level.Unit{Key: f.key, Parent: q.chain.Name(f.pos), Root: q.chain.Name(0), Pos: f.pos, Tokens: q.tokens[f.pos : f.pos+t.shape.Tokens()]}
	for {
		var later <-chan struct{}
		if f.into, later = t.host.Take(u); f.into != nil {
			return true
		}
		if f.have = t.host.Get(f.key); f.have != nil || !wait || later == nil {
			return false
		}
		select {
		case <-later:
		case <-ctx.Done():
			return false
		case <-f.lane.Breaker().Opens():
			return false
		case <-t.awake.Done():
			return false
		}
	}
}

// ended reports whether nothing more comes, where the first ahead has not.
func (q *queue) ended() bool { return q.stuck || len(q.ahead) > 0 || len(q.list) == 0 }

// abandon gives back what is under way or has not been asked for, and counts it.
func (q *queue) abandon(ctx context.Context) {
	q.t.leftOut(ctx, len(q.ahead)+len(q.list))
	q.t.credit(len(q.list), q.t.shape.Record())
	for _, f := range q.ahead {
		f.abandon()
	}
}

// leftOut counts units that a load does without; those of a request that has left
// are none.
func (t *Tiers) leftOut(ctx context.Context, units int) {
	if !errors.Is(ctx.Err(), context.Canceled) {
		t.metrics.left.Add(float64(units))
	}
}

// came ends a read. A unit that nobody waits for, or that is to stay in host
// memory, is verified and can be found there.
func (t *Tiers) came(f *fetch, good bool) {
	if good && (f.stays || f.left.Load()) {
		if good = t.shape.Right(f.pos, f.into.Record()); good {
			f.into.Publish(f.born)
			t.metrics.prefetched.WithLabelValues(t.from(f).Name()).Inc()
		} else {
			t.spoilt(f)
		}
	}
	f.deliver(good)
}

// deliver ends a read: the unit is in its slot, or does not come.
func (f *fetch) deliver(good bool) {
	l := f.into
	if !good {
		l.Release()
		l = nil
	}
	f.got <- l
	if f.left.Load() {
		f.drain()
	}
}

// here reports whether the unit, or word that it does not come, is at hand.
func (f *fetch) here() bool { return f.have != nil || len(f.got) > 0 }

// wait returns the unit; nil when it does not come, then and ever after.
func (f *fetch) wait(ctx context.Context) level.Lease {
	switch {
	case f.have != nil:
		return f.have
	case f.gone:
		return nil
	}
	select {
	case l := <-f.got:
		f.gone = l == nil
		return l
	case <-ctx.Done():
	case <-f.out:
	}
	f.gone = true
	f.abandon()
	return nil
}

// abandon gives back what has come or will come.
func (f *fetch) abandon() {
	if f.have != nil {
		f.have.Release()
		return
	}
	f.left.Store(true)
	f.drain()
}

func (f *fetch) drain() {
	select {
	case l := <-f.got:
		if l != nil {
			l.Release()
		}
	default:
	}
}

// spoilt reports a unit that is not what its digests say, and forgets it everywhere.
func (t *Tiers) spoilt(f *fetch) {
	name := t.from(f).Name()
	t.metrics.corrupt.WithLabelValues(name).Inc()
	t.log.Error("KV in a tier does not agree with its digests; it is computed instead", "tier", name, "unit", fmt.Sprintf("%x", f.key))
	t.forget(f)
}

// forget has no level of this worker's own find a unit again, nor the one that it came
// from.
func (t *Tiers) forget(f *fetch) {
	t.host.Forget(f.key)
	for _, l := range t.below {
		if l.remote == nil || l == f.lane {
			l.Forget(f.key)
		}
	}
	if f.lane != nil && f.lane.remote != nil {
		t.push(f.lane, job{key: f.key, remove: true})
	}
}
