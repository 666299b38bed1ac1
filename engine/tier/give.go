package tier

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// Errors of Give.
var (
	ErrAbsent = errors.New("not here, or not for this peer")
	ErrEnough = errors.New("gives as much as it may, or has no room to")
)

// Asked is a prefix that a peer wants.
type Asked struct {
	Peer    string
	Trusted bool // a member of the fleet over a private connection, which may know salts, or this one is no secret
	Tokens  []int32
	Salt    string
	Bytes   int64 // of rows that it lacks
}

// Give holds the blocks of a whole prefix until release is called. It loads what only this
// worker's own tiers have of it. A client's salt is its secret: prefixes under one are given
// to trusted peers only, so that nobody else learns whether they are here.
func (p *Peers) Give(ctx context.Context, a *Asked) (blocks []int32, release func(), err error) {
	refuse := func(reason string, err error) ([]int32, func(), error) {
		p.metrics.refused.WithLabelValues(reason).Inc()
		return nil, nil, err
	}
	n := len(a.Tokens)
	if a.Salt != "" && !a.Trusted {
		return refuse("salt", ErrAbsent)
	}
	if n == 0 || n%p.cache.UnitTokens() != 0 {
		return refuse("gone", ErrAbsent)
	}
	holds := n / p.cache.BlockTokens()
	owner, err := p.promise(a, holds)
	if err != nil {
		return refuse("quota", err)
	}
	chain := p.cache.NewChain(a.Salt)
	chain.Extend(a.Tokens)
	if p.tiers != nil && p.cache.Reach(&chain, n) < n {
		within, cancel := context.WithTimeout(ctx, p.cfg.LoadTimeout)
		p.tiers.LoadLocal(within, a.Tokens, a.Salt, n)
		cancel()
	}
	blocks, here := p.cache.HoldChain(&chain, n, owner)
	if blocks == nil {
		p.keep(holds, a.Bytes)
		if p.tiers.local(&chain, here, n, p.cache.UnitTokens()) == n { // it is here, but there is no room to give it
			return refuse("room", ErrEnough)
		}
		return refuse("gone", ErrAbsent)
	}
	p.metrics.given.Add(float64(n / p.cache.UnitTokens()))
	p.metrics.bytes.Add(float64(a.Bytes))
	return blocks, func() {
		p.cache.Release(blocks, owner)
		p.keep(holds, 0)
	}, nil
}

// promise books blocks and bytes that are about to be given.
func (p *Peers) promise(a *Asked, holds int) (owner string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held+holds > p.cfg.GiveBlocks || !p.giveaway.spend(a.Bytes, time.Now()) {
		return "", ErrEnough
	}
	p.held += holds
	p.gives++
	return fmt.Sprintf("peer/give-%d to %s", p.gives, a.Peer), nil
}

// keep takes promise back for blocks that are no longer held and bytes that were not given.
func (p *Peers) keep(holds int, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held -= holds
	p.giveaway.have += float64(bytes)
}

// Reach returns how many of a prompt's consecutive units are here, from the first on without
// a gap, in the pool or in this worker's own tiers. It holds nothing.
func (p *Peers) Reach(units []kvcache.Hash) int {
	for i, key := range units {
		if !p.cache.Knows(key) && !p.tiers.Knows(key) {
			return i
		}
	}
	return len(units)
}
