package tier

import (
	"context"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// Coming is a prefix on its way into a request's blocks: an engine.Arriving.
type Coming interface {
	Move() kernels.Arrival
	Upto() int
	Begun() bool
	Over() bool
	Good() (tokens int, lost bool)
}

// Bringer is a Collector whose prefixes can be computed with while they come.
type Bringer interface {
	Collector
	// Prepare opens a session with a fetch's peer. The Bring that it returns begins to bring the
	// prefix into blocks that the caller holds, as decode.Bringing.Bring does, must not wait, and
	// returns nil when nothing comes. Nil, nil: the fetch is to be collected.
	Prepare(ctx context.Context, f *Fetch) (bring Bring, err error)
}

// Bring is a fetch that only lacks blocks.
type Bring func(f *Fetch, table []int32, from int, wake func(), ended func(tokens int, err error)) Coming

// Ahead is a prefix that a peer gives once the request has its blocks.
type Ahead struct {
	p     *Peers
	f     Fetch
	bring Bring
}

// Stage is Load for a request whose engine calls Bring: what one peer can give, and nothing here
// has, is left there until then. Nil: it was loaded, as far as possible.
func (p *Peers) Stage(ctx context.Context, requestID string, tokens []int32, salt string, upto int, peers []Peer) *Ahead {
	if a := p.ahead(ctx, requestID, tokens, salt, upto, peers); a != nil {
		return a
	}
	p.Load(ctx, requestID, tokens, salt, upto, peers)
	return nil
}

// ahead opens a session with the peer that reaches furthest, if our own tiers have nothing of it.
func (p *Peers) ahead(ctx context.Context, requestID string, tokens []int32, salt string, upto int, peers []Peer) *Ahead {
	from, ok := p.from.(Bringer)
	if !ok || len(peers) == 0 {
		return nil
	}
	best := slices.MaxFunc(peers, func(a, b Peer) int { return a.Tokens - b.Tokens })
	if upto = min(upto, best.Tokens, len(tokens)); upto < p.least() || !p.guards.open(guardKey{best.ID, best.Epoch}, time.Now()) {
		return nil
	}
	chain := p.cache.NewChain(salt)
	chain.Extend(tokens[:upto])
	here := p.cache.Reach(&chain, upto)
	if upto-here < p.least() || p.tiers.local(&chain, here, upto, p.cache.UnitTokens()) > here {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.LoadTimeout)
	defer cancel()
	a := &Ahead{p: p, f: Fetch{Peer: best, RequestID: requestID, Tokens: tokens, Salt: salt, Chain: &chain, Upto: upto, Least: p.least()}}
	var err error
	if a.bring, err = from.Prepare(ctx, &a.f); err != nil || a.bring == nil {
		return nil // Load will have the same error, and count it
	}
	return a
}

// Bring begins to fetch the prefix from token from on, as Tiers.Bring does.
func (a *Ahead) Bring(table []int32, from int, ended func()) (c Coming, busy bool) {
	if a == nil || a.f.Upto-from < a.f.Least {
		return nil, false
	}
	p, f := a.p, a.f
	first := f.Chain.Name(from + p.cache.UnitTokens())
	wait, mine := p.bringing.begin(first)
	if wait != nil {
		return nil, true
	}
	over, ok := p.enter(&f, from)
	if !ok || p.cache.Knows(first) { // since the caller looked
		if ok {
			over(0, nil)
		}
		mine()
		ended()
		return nil, ok
	}
	f.Deadline = time.Now().Add(p.cfg.LoadTimeout)
	c = a.bring(&f, table, from, ended, func(tokens int, err error) {
		over(tokens, err)
		mine()
		ended()
	})
	if c == nil {
		over(0, nil)
		mine()
	}
	return c, false
}
