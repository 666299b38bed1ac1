package tier

import (
	"context"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// Stage is Load for a request whose engine calls Bring: its prefix is left in host
// memory, or read into it, and moved when the request has its blocks. So a request that
// waits for memory takes none, and its prefix is not evicted before its turn. A prefix too
// long for that is loaded.
func (t *Tiers) Stage(ctx context.Context, tokens []int32, salt string, upto int) int {
	return t.obtain(ctx, tokens, salt, upto, &search{}, t != nil && t.host.Arrives())
}

// inHost returns how far host memory has a chain.
func (t *Tiers) inHost(chain *kvcache.Chain, from, upto int) int {
	for unit := t.shape.Tokens(); from+unit <= upto && t.host.Has(chain.Name(from+unit)); {
		from += unit
	}
	return from
}

// prefetch makes stage read tokens from .. to-1 and waits for it until ctx ends. Units that the
// request did not wait for are there when it is placed, or for the next request. ended is called
// when all is read. If too many prefixes are being read it first waits for its turn, also until
// ctx ends.
func (t *Tiers) prefetch(ctx context.Context, chain *kvcache.Chain, tokens []int32, from, to int, s *search, ended func()) {
	if !t.token(ctx, t.stages, nil, true) {
		t.leftOut(ctx, (to-from)/t.shape.Tokens())
		ended()
		return
	}
	done := make(chan struct{})
	go func() {
		defer t.untoken(t.stages)
		defer close(done)
		defer ended()
		within, cancel := context.WithTimeout(t.awake, prefetchTime)
		defer cancel()
		t.stage(within, chain, tokens, from, to, s)
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// prefetchTime bounds what is read for one request, waited for or not.
const prefetchTime = 30 * time.Second

// stage reads what host memory lacks of tokens from .. to-1 into it, until ctx ends; what
// comes later stays there too. It takes no blocks of the pool and holds nothing afterwards.
func (t *Tiers) stage(ctx context.Context, chain *kvcache.Chain, tokens []int32, from, to int, s *search) {
	unit := t.shape.Tokens()
	var missing []int
	for pos := from; pos < to; pos += unit {
		if !t.host.Has(chain.Name(pos + unit)) {
			missing = append(missing, pos)
		}
	}
	t.mu.Lock()
	missing = missing[:t.afford(len(missing))]
	t.mu.Unlock()
	q := &queue{t: t, chain: chain, tokens: tokens, found: s, stays: true, list: missing}
	for q.more(ctx, true); len(q.ahead) > 0; q.more(ctx, true) {
		l := q.ahead[0].wait(ctx)
		if l == nil {
			break // what follows is of no use now
		}
		q.ahead = q.ahead[1:]
		l.Release()
	}
	q.abandon(ctx)
}

// afford takes kv.load_quota for up to so many units, and counts a load that it cuts
// short; mu is held.
func (t *Tiers) afford(units int) int {
	n := t.quota.take(units, t.shape.Record(), time.Now())
	if n < units {
		t.metrics.noQuota.Inc()
	}
	return n
}
