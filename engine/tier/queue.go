package tier

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// queue reads the units of one load in order, some of them ahead.
//
// All loads share the lanes' tokens and the slots of host memory. A load with nothing under
// way waits for its turn, as long as its request may; another goes on when its own reads
// have come. So no load is turned away because others read, and there is no deadlock: a
// load that waits for a slot holds none, and one that holds a slot waits only for a level,
// whose answer gives the token back.
type queue struct {
	t      *Tiers
	chain  *kvcache.Chain
	tokens []int32
	found  *search
	stays  bool     // see came
	list   []int    // positions of units not yet begun
	ahead  []*fetch // under way, or here
	stuck  bool     // the next unit cannot be had
}

// fetch is one unit on its way into a host slot.
type fetch struct {
	key   kvcache.Hash
	pos   int
	lane  *lane            // where it comes from; nil: it was in host memory
	got   chan *host.Lease // receives one; nil if the read failed
	left  atomic.Bool      // nobody waits any more
	stays bool             // it is to stay in host memory
	gone  bool             // it did not come
	out   <-chan struct{}  // closed when waiting is pointless
	have  *host.Lease      // it was in host memory
	into  *host.Lease      // the slot to fill
	born  time.Time        // when it entered the tiers
}

// from returns the level that the unit comes from.
func (t *Tiers) from(f *fetch) level.Base {
	if f.lane == nil {
		return t.host
	}
	return f.lane
}

// more begins reads, as far as the window, tokens and slots of host memory allow. With
// wait, and nothing ahead, it waits until it can begin one.
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
			q.stuck = alone // no read of our own will change that
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

// begin finds the next unit in host memory, or takes what reading it needs: a token,
// unless it joins the burst, and a slot. It returns nil if it cannot.
func (q *queue) begin(ctx context.Context, burst []*fetch, wait bool) *fetch {
	t, pos := q.t, q.list[0]
	f := &fetch{key: q.chain.Name(pos + t.shape.Tokens()), pos: pos, stays: q.stays}
	if f.have = t.host.Get(f.key); f.have != nil {
		return f
	}
	if f.lane = t.giver(f.key); f.lane == nil {
		f.lane = t.remote(q.found)
	}
	l := f.lane
	if l == nil {
		return nil
	}
	paid := len(burst) > 0 && burst[0].lane == l
	if !paid && !t.token(ctx, l.reads, l.Breaker(), wait) {
		return nil
	}
	// The slot comes after the token, so that waiting reads hold none.
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
	f.got = make(chan *host.Lease, 1)
	if l.aborter != nil {
		f.out = l.Breaker().Opens()
	}
	return f
}

// slot takes a slot of host memory for a unit; with wait it waits for other reads to free
// one. It returns false if there is none, or the unit is here by now.
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

// ended reports, after land found nothing, whether nothing more comes.
func (q *queue) ended() bool { return q.stuck || len(q.ahead) > 0 || len(q.list) == 0 }

// abandon gives up and counts what is under way or not yet begun.
func (q *queue) abandon(ctx context.Context) {
	q.t.leftOut(ctx, len(q.ahead)+len(q.list))
	q.t.credit(len(q.list), q.t.shape.Record())
	for _, f := range q.ahead {
		f.abandon()
	}
}

// leftOut counts units that a load does without, unless its request has left.
func (t *Tiers) leftOut(ctx context.Context, units int) {
	if !errors.Is(ctx.Err(), context.Canceled) {
		t.metrics.left.Add(float64(units))
	}
}

// came ends a read. A unit that is to stay in host memory, or that nobody waits for any
// more, is verified and published there.
func (t *Tiers) came(f *fetch, good bool) {
	if good && (f.stays || f.left.Load()) {
		if good = t.shape.Right(f.pos, f.into.Record()); good {
			f.into.Publish(f.born)
			t.metrics.prefetched.WithLabelValues(t.from(f).Name()).Inc()
		} else {
			t.spoilt(f)
		}
	}
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

// here reports whether wait returns at once.
func (f *fetch) here() bool { return f.have != nil || len(f.got) > 0 }

// wait returns the unit, or nil, from then on, if it does not come.
func (f *fetch) wait(ctx context.Context) *host.Lease {
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

// abandon releases what has come or will come.
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

// spoilt reports a unit that does not agree with its digests, and forgets it everywhere.
func (t *Tiers) spoilt(f *fetch) {
	name := t.from(f).Name()
	t.metrics.corrupt.WithLabelValues(name).Inc()
	t.log.Error("KV in a tier does not agree with its digests; it is computed instead", "tier", name, "unit", fmt.Sprintf("%x", f.key))
	t.forget(f)
}

// forget forgets a unit in all of this worker's own levels and in the one it came from.
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
