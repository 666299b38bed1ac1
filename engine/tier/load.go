package tier

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// Load brings what the tiers have of a prompt into the pool and the prefix
// index, as far as it is not there, at most its first upto tokens; it returns
// how many were loaded. It is only ever a help: whatever goes wrong, fewer
// tokens are loaded, and LoadTimeout bounds it.
func (t *Tiers) Load(ctx context.Context, tokens []int32, salt string, upto int) int {
	return t.bring(ctx, tokens, salt, upto, lookup{}, false)
}

// LoadLocal is Load from this worker's own tiers, the shared store left out.
func (t *Tiers) LoadLocal(ctx context.Context, tokens []int32, salt string, upto int) int {
	return t.bring(ctx, tokens, salt, upto, lookup{over: true}, false)
}

// Knows says whether a tier of this worker's own has a unit.
func (t *Tiers) Knows(key kvcache.Hash) bool {
	return t != nil && (t.host.has(key) || t.onSSD(key))
}

// local is how far host memory and the SSD have a chain from a token on.
func (t *Tiers) local(chain *kvcache.Chain, from, upto, unit int) int {
	for from+unit <= upto && t.Knows(chain.Name(from+unit)) {
		from += unit
	}
	return from
}

func (t *Tiers) bring(ctx context.Context, tokens []int32, salt string, upto int, far lookup, stage bool) int {
	if t == nil || upto < t.cacheUnit() {
		return 0
	}
	ctx, cancel := context.WithTimeout(ctx, t.cfg.LoadTimeout)
	defer cancel()
	chain := t.cache.NewChain(salt)
	chain.Extend(tokens[:min(upto, len(tokens))])
	for {
		from := t.cache.Reach(&chain, upto)
		least := max(t.cfg.MinLoadTokens, t.cacheUnit())
		if upto-from < least {
			return 0
		}
		to := t.reach(ctx, &far, &chain, from, upto)
		staged := stage && (to-from)/t.cacheUnit() <= len(t.host.slots)/2
		if to-from < least || staged && t.inHost(&chain, from, to) == to {
			return 0
		}
		wait, mine := t.loading.begin(chain.Name(from + t.cacheUnit()))
		if mine != nil {
			if staged {
				t.prefetch(ctx, &chain, tokens, from, to, mine)
				return 0
			}
			defer mine()
			return t.load(ctx, &chain, tokens, from, to)
		}
		select { // somebody loads the same; what is then missing is looked up anew
		case <-wait:
		case <-ctx.Done():
			return 0
		}
	}
}

func (t *Tiers) cacheUnit() int { return t.shape.blocks * t.shape.BlockTokens }

// reach returns how far the tiers have the chain, without a gap.
func (t *Tiers) reach(ctx context.Context, far *lookup, chain *kvcache.Chain, from, upto int) int {
	unit := t.cacheUnit()
	upto = min(upto, chain.Tokens())
	for from+unit <= upto {
		key := chain.Name(from + unit)
		if !t.host.has(key) && !t.onSSD(key) && !t.has(ctx, far, chain, from, upto) {
			break
		}
		from += unit
	}
	return from
}

// load fills blocks with units and indexes them: those of tokens from .. to-1,
// as far as loads may take blocks for them.
func (t *Tiers) load(ctx context.Context, chain *kvcache.Chain, tokens []int32, from, to int) int {
	r := t.room(chain, from, to)
	if r == nil {
		return 0
	}
	unit, table := t.cacheUnit(), r.table
	from, to = r.from, r.to
	good := from
	q := t.queue(chain, tokens, positions(from, to, unit), false)
	var under *landing
	for {
		q.more(ctx, under == nil)
		l := t.land(ctx, q, table)
		n, all := t.landed(under)
		good += n * unit
		if under = l; !all || l == nil && q.ended() {
			break
		}
	}
	t.abort(under)
	q.abandon(ctx)
	t.cache.InsertChain(chain, tokens[:good], table[:good/t.shape.BlockTokens], from)
	t.cache.ReleaseAll(r.owner)
	t.settle(-r.blocks)
	t.filled(r.began, good-from)
	return good - from
}

// room is blocks for a load.
type room struct {
	began    time.Time
	owner    string
	table    []int32 // of the first to tokens
	from, to int     // the index has the first from
	blocks   int     // that were taken
}

// room takes blocks for a load of tokens from .. to-1, or less if that is what
// loads may have; nil: there is none.
func (t *Tiers) room(chain *kvcache.Chain, from, to int) *room {
	r := &room{began: time.Now()}
	unit := t.cacheUnit()
	owner, most, ok := t.admit((to - from) / unit)
	if !ok {
		return nil
	}
	to = min(to, from+most/t.shape.blocks*unit)
	table, from, err := t.cache.Borrow(chain, to, most, owner)
	if err != nil {
		t.metrics.noRoom.Inc()
		from = to // nothing was taken
	}
	r.owner, r.table, r.from, r.to, r.blocks = owner, table, from, to, (to-from)/t.shape.BlockTokens
	t.settle(r.blocks - most)
	t.credit((most-r.blocks)/t.shape.blocks, t.shape.record())
	if err != nil {
		return nil
	}
	t.cache.SetState(owner, kvcache.StateReceiving)
	return r
}

// filled counts a load of so many tokens.
func (t *Tiers) filled(began time.Time, tokens int) {
	t.spill()
	t.metrics.loaded.Add(float64(tokens))
	t.metrics.loadTime.Observe(time.Since(began).Seconds())
}

// admit names a load of so many units and takes blocks, as many as it may have, out of
// what loads may; settle gives them back.
func (t *Tiers) admit(units int) (owner string, most int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.loads++
	want := 0
	if !t.closed {
		want = max(min(units, (t.cfg.LoadBlocks-t.taken)/t.shape.blocks), 0)
	}
	if units = t.quota.take(want, t.shape.record(), time.Now()); units < want {
		t.metrics.noQuota.Inc()
	}
	most = units * t.shape.blocks
	t.taken += most
	return fmt.Sprintf("tier/load-%d", t.loads), most, units > 0
}

// lend takes up to so many blocks out of what loads may have, for a fetch from
// a peer; settle gives them back.
func (t *Tiers) lend(blocks, bytes int) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	blocks = t.quota.take(max(min(blocks, t.cfg.LoadBlocks-t.taken), 0), bytes, time.Now())
	t.taken += blocks
	return blocks
}

func (t *Tiers) settle(blocks int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.taken += blocks
}

// credit gives back bytes that loads may take, of what did not move.
func (t *Tiers) credit(n, bytes int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.quota.credit(n, bytes)
}

// landing is a run of units on their way into the pool.
type landing struct {
	units []*fetch
	from  []moving
	wait  func() (good int, err error)
}

// land waits for the first unit, and begins to put it into its blocks, with
// those behind it that have come as well, as many as go together. Nil: it does
// not come, or there is none.
func (t *Tiers) land(ctx context.Context, q *queue, table []int32) *landing {
	l := &landing{}
	for len(l.from) < t.batch && len(q.ahead) > 0 && (len(l.from) == 0 || q.ahead[0].here()) {
		f := q.ahead[0]
		lease := f.wait(ctx)
		if lease == nil {
			break
		}
		q.ahead = q.ahead[1:]
		l.units = append(l.units, f)
		l.from = append(l.from, moving{lease, table[f.pos/t.shape.BlockTokens:][:t.shape.blocks], f.pos})
	}
	if len(l.from) == 0 {
		return nil
	}
	l.wait = t.mover.scatter(l.from)
	return l
}

// landed waits for a run, and says how many of its units are in the pool, and
// whether all are.
func (t *Tiers) landed(l *landing) (good int, all bool) {
	if l == nil {
		return 0, true
	}
	good, err := l.wait()
	if err != nil {
		t.complain(fmt.Errorf("move to the pool: %w", err))
	}
	for i, f := range l.units {
		switch from := l.from[i]; {
		case i < good:
			from.publish()
			if t.cfg.Write == Selective && from.loads() == t.cfg.WriteHits {
				t.push(write{key: f.key})
			}
			t.metrics.hits.WithLabelValues(f.tier).Inc()
		case i == good && err == nil:
			t.spoilt(f)
			t.host.drop(f.key)
			t.disk.drop(f.key)
		}
		l.from[i].release()
	}
	return good, good == len(l.units)
}

// abort waits for a run whose units nobody wants.
func (t *Tiers) abort(l *landing) {
	if l == nil {
		return
	}
	_, _ = l.wait() // nobody reads those blocks
	for _, u := range l.from {
		u.release()
	}
}

// fetch is one unit on its way into a host slot.
type fetch struct {
	key   kvcache.Hash
	pos   int
	tier  string
	got   chan *lease     // one; nil when it failed
	left  atomic.Bool     // nobody waits any more
	stays bool            // it is to stay in host memory
	gone  bool            // it did not come
	out   <-chan struct{} // closed when nobody is to wait for it any longer
	have  *lease          // it was in host memory
	into  *lease          // a slot to fill
}

// deliver ends a read: the unit is in its slot, or does not come.
func (f *fetch) deliver(good bool) {
	l := f.into
	if !good {
		l.release()
		l = nil
	}
	f.got <- l
	if f.left.Load() {
		f.drain()
	}
}

// here says whether the unit, or word that it does not come, is at hand.
func (f *fetch) here() bool { return f.have != nil || len(f.got) > 0 }

// wait returns the unit; nil when it does not come, then and ever after.
func (f *fetch) wait(ctx context.Context) *lease {
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
		f.have.release()
		return
	}
	f.left.Store(true)
	f.drain()
}

func (f *fetch) drain() {
	select {
	case l := <-f.got:
		if l != nil {
			l.release()
		}
	default:
	}
}
