package tier

import (
	"context"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
)

// Load brings what the tiers have of a prompt's first upto tokens, and the prefix index
// lacks, into the pool and the index. It returns how many tokens were loaded. Whatever
// goes wrong, fewer are; LoadTimeout bounds it.
func (t *Tiers) Load(ctx context.Context, tokens []int32, salt string, upto int) int {
	return t.obtain(ctx, tokens, salt, upto, &search{}, false)
}

// LoadLocal is Load from this worker's own levels.
func (t *Tiers) LoadLocal(ctx context.Context, tokens []int32, salt string, upto int) int {
	return t.obtain(ctx, tokens, salt, upto, &search{local: true}, false)
}

// local returns how far this worker's own levels have a chain from a token on.
func (t *Tiers) local(chain *kvcache.Chain, from, upto, unit int) int {
	for from+unit <= upto && t.Knows(chain.Name(from+unit)) {
		from += unit
	}
	return from
}

// obtain loads what the index lacks, or with stage reads it into host memory.
func (t *Tiers) obtain(ctx context.Context, tokens []int32, salt string, upto int, s *search, stage bool) int {
	if t == nil || upto < t.shape.Tokens() {
		return 0
	}
	ctx, cancel := context.WithTimeout(ctx, t.cfg.LoadTimeout)
	defer cancel()
	chain := t.cache.NewChain(salt)
	chain.Extend(tokens[:min(upto, len(tokens))])
	for {
		from := t.cache.Reach(&chain, upto)
		least := max(t.cfg.MinLoadTokens, t.shape.Tokens())
		if upto-from < least {
			return 0
		}
		to := t.find(ctx, s, &chain, from, upto)
		staged := stage && (to-from)/t.shape.Tokens() <= t.slots/2
		if to-from < least || staged && t.inHost(&chain, from, to) == to {
			return 0
		}
		wait, end := t.loading.begin(chain.Name(from + t.shape.Tokens()))
		if end != nil {
			if staged {
				t.prefetch(ctx, &chain, tokens, from, to, s, end)
				return 0
			}
			defer end()
			return t.load(ctx, &chain, tokens, from, to, s)
		}
		select { // another load has the same; look again after it
		case <-wait:
		case <-ctx.Done():
			return 0
		}
	}
}

// load puts the units of tokens from .. to-1 into blocks and indexes them, as far as
// loads may take blocks.
func (t *Tiers) load(ctx context.Context, chain *kvcache.Chain, tokens []int32, from, to int, s *search) int {
	r := t.room(chain, from, to)
	if r == nil {
		return 0
	}
	unit, table := t.shape.Tokens(), r.table
	from, to = r.from, r.to
	good := from
	q := &queue{t: t, chain: chain, tokens: tokens, found: s}
	for pos := from; pos < to; pos += unit {
		q.list = append(q.list, pos)
	}
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
	from, to int     // tokens; the index has the first from
	blocks   int     // taken
}

// room takes blocks for a load of tokens from .. to-1, or as many as loads may have; nil
// means none.
func (t *Tiers) room(chain *kvcache.Chain, from, to int) *room {
	r := &room{began: time.Now()}
	unit := t.shape.Tokens()
	owner, most, ok := t.admit((to - from) / unit)
	if !ok {
		return nil
	}
	to = min(to, from+most/t.shape.Blocks*unit)
	table, from, err := t.cache.Borrow(chain, to, most, owner)
	if err != nil {
		t.metrics.noRoom.Inc()
		from = to // nothing was taken
	}
	r.owner, r.table, r.from, r.to, r.blocks = owner, table, from, to, (to-from)/t.shape.BlockTokens
	t.settle(r.blocks - most)
	t.credit((most-r.blocks)/t.shape.Blocks, t.shape.Record())
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

// admit names a load and takes the blocks of up to so many units out of what loads may
// have; settle gives them back.
func (t *Tiers) admit(units int) (owner string, most int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.loads++
	want := 0
	if !t.closed {
		want = max(min(units, (t.cfg.LoadBlocks-t.taken)/t.shape.Blocks), 0)
	}
	units = t.afford(want)
	most = units * t.shape.Blocks
	t.taken += most
	return fmt.Sprintf("tier/load-%d", t.loads), most, units > 0
}

// lend takes up to so many blocks out of what loads may have for a fetch from a peer;
// settle gives them back.
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

// credit gives back quota for what did not move.
func (t *Tiers) credit(n, bytes int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.quota.credit(n, bytes)
}

// landing is a run of units on their way into the pool.
type landing struct {
	units []*fetch
	from  []host.Move
	wait  func() (good int, err error)
}

// land waits for the first unit and begins to put it into its blocks, together with those
// behind it that have come. It returns nil if the unit does not come, or there is none.
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
		l.from = append(l.from, host.Move{Lease: lease, Blocks: table[f.pos/t.shape.BlockTokens:][:t.shape.Blocks], Pos: f.pos})
	}
	if len(l.from) == 0 {
		return nil
	}
	l.wait = t.host.Scatter(l.from)
	return l
}

// landed waits for a run, and returns how many of its units are in the pool and whether
// all are.
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
			from.Publish(f.born)
			if t.cfg.Write == Selective && from.Loads() == t.cfg.WriteHits {
				t.pushOwn(f.key)
			}
			t.metrics.hits.WithLabelValues(t.from(f).Name()).Inc()
		case i == good && err == nil:
			t.spoilt(f)
		}
		l.from[i].Release()
	}
	return good, good == len(l.units)
}

// abort waits for a run whose units are not wanted.
func (t *Tiers) abort(l *landing) {
	if l == nil {
		return
	}
	_, _ = l.wait() // nobody reads those blocks
	for _, u := range l.from {
		u.Release()
	}
}
