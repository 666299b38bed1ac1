package tier

import (
	"context"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// queue is what one load reads, in order, some of it ahead.
//
// All loads share reads, flights and the slots of host memory. One that has nothing
// under way waits for its turn, as long as its request may; one that has goes on when
// its own has come. So nobody is turned away because others read, and no two wait for
// each other: who waits has no slot, who has one waits for the disk or the store alone,
// and their answer gives the token back.
type queue struct {
	t      *Tiers
	chain  *kvcache.Chain
	tokens []int32
	stays  bool     // see came
	list   []int    // positions of units that are not begun
	ahead  []*fetch // under way, or here
	stuck  bool     // the next one cannot be had
}

func (t *Tiers) queue(chain *kvcache.Chain, tokens []int32, list []int, stays bool) *queue {
	return &queue{t: t, chain: chain, tokens: tokens, stays: stays, list: list}
}

// positions are those of the units of tokens from .. to-1.
func positions(from, to, unit int) []int {
	list := make([]int, 0, (to-from)/unit)
	for ; from < to; from += unit {
		list = append(list, from)
	}
	return list
}

// more begins to read, as far as the window goes, and tokens and slots of host
// memory are at hand; where nothing is ahead it waits for those of one, if wait.
func (q *queue) more(ctx context.Context, wait bool) {
	if len(q.ahead) > window-burst { // reads from a shared store go together
		return
	}
	var some []*fetch // a burst, which has its token
	for len(q.list) > 0 && len(q.ahead) < window {
		alone := wait && len(q.ahead) == 0
		f := q.begin(ctx, len(some) > 0, alone)
		if f == nil {
			q.stuck = alone // nothing of our own will make it better
			break
		}
		q.list, q.ahead = q.list[1:], append(q.ahead, f)
		if f.tier == tierStore {
			some = append(some, f)
		}
		if len(some) == burst {
			go q.t.readBurst(some)
			some = nil
		}
	}
	if len(some) > 0 {
		go q.t.readBurst(some)
	}
}

// begin finds the next unit in host memory, or begins to read it; the caller does
// from the store, in bursts. Nil: that cannot be now.
func (q *queue) begin(ctx context.Context, bursting, wait bool) *fetch {
	t, pos := q.t, q.list[0]
	key := q.chain.Name(pos + t.cacheUnit())
	f := &fetch{key: key, pos: pos, tier: tierHost, stays: q.stays}
	if f.have = t.host.get(key); f.have != nil {
		return f
	}
	at, by := t.reads, &t.slow
	f.tier = tierSSD
	if !t.onSSD(key) {
		if t.shared == nil {
			return nil
		}
		at, by = t.shared.flights, &t.shared.breaker
		f.tier = tierStore
	}
	paid := bursting && f.tier == tierStore
	if !paid && !t.token(ctx, at, by, wait) {
		return nil
	}
	// The slot comes after the token, so that reads that wait hold none.
	if !q.slot(ctx, f, by, wait) {
		if !paid {
			t.untoken(at)
		}
		if f.have == nil {
			return nil
		}
		f.tier = tierHost // it came while we waited
		return f
	}
	f.got = make(chan *lease, 1)
	if f.tier == tierSSD {
		f.out = t.slow.opens()
		go t.readDisk(f)
	}
	return f
}

// slot takes a slot of host memory for a unit; with wait it waits for others' reads
// to leave one. False: there is none, or the unit is here already.
func (q *queue) slot(ctx context.Context, f *fetch, by *breaker, wait bool) bool {
	t := q.t
	u := unit{key: f.key, parent: q.chain.Name(f.pos), root: q.chain.Name(0), pos: f.pos, tokens: q.tokens[f.pos : f.pos+t.cacheUnit()], born: t.disk.born(f.key)}
	for {
		var later <-chan struct{}
		if f.into, later = t.host.takeOr(u); f.into != nil {
			return true
		}
		if f.have = t.host.get(f.key); f.have != nil || !wait || later == nil {
			return false
		}
		select {
		case <-later:
		case <-ctx.Done():
			return false
		case <-by.opens():
			return false
		case <-t.awake.Done():
			return false
		}
	}
}

// ended says whether nothing more comes, where the first ahead has not.
func (q *queue) ended() bool { return q.stuck || len(q.ahead) > 0 || len(q.list) == 0 }

// abandon gives back what is under way or has not been asked for, and counts it.
func (q *queue) abandon(ctx context.Context) {
	q.t.leftOut(ctx, len(q.ahead)+len(q.list))
	q.t.credit(len(q.list), q.t.shape.record())
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

// token takes the right to one more read, whose goroutine is counted in wg, if a
// breaker (nil: none) lets it through. With wait it waits for one, as long as ctx lasts.
func (t *Tiers) token(ctx context.Context, from chan struct{}, by *breaker, wait bool) bool {
	select {
	case from <- struct{}{}:
	default:
		if !wait || !t.awaitToken(ctx, from, by) {
			return false
		}
	}
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		<-from
		return false
	}
	t.wg.Add(1)
	t.mu.Unlock()
	if by != nil && !by.allow() {
		t.untoken(from)
		return false
	}
	return true
}

func (t *Tiers) awaitToken(ctx context.Context, from chan<- struct{}, by *breaker) bool {
	var opens <-chan struct{}
	if by != nil {
		opens = by.opens()
	}
	select {
	case from <- struct{}{}:
		return true
	case <-ctx.Done():
	case <-opens:
	case <-t.awake.Done(): // Close begins
	}
	return false
}

// untoken gives a token back.
func (t *Tiers) untoken(to <-chan struct{}) {
	<-to
	t.wg.Done()
}

// readDisk reads a unit from the SSD; its caller has taken a token.
func (t *Tiers) readDisk(f *fetch) {
	defer t.untoken(t.reads)
	err := t.disk.read(f.key, f.pos, f.into.record())
	if err != nil && !errors.Is(err, errGone) {
		t.metrics.errors.WithLabelValues("read").Inc()
		t.complain(fmt.Errorf("read from %s: %w", t.cfg.Dir, err))
		t.disk.drop(f.key)
	}
	t.came(f, err == nil)
}
