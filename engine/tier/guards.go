package tier

import (
	"sync"
	"time"
)

const (
	// A peer that failed is left alone for guardFirst, doubling with each failure in a row
	// up to guardLast.
	guardFirst = time.Second
	guardLast  = 30 * time.Second
	guardsMost = 256 // peers that are remembered
)

// guardKey is one run of a worker: a restarted worker has a clean record.
type guardKey struct {
	id    string
	epoch uint64
}

// guard is a breaker without a probe: when its time is over, one fetch tries the peer, and
// the others skip the peer until that fetch is back.
type guard struct {
	failures int // in a row, at least 1
	until    time.Time
	trying   bool // while shut
	at       time.Time
	last     error
}

// guards are the breakers of peers that failed lately. The zero value has none.
type guards struct {
	mu sync.Mutex
	m  map[guardKey]*guard
}

// enter reports whether to try a peer now; done must then be called. came says that the peer
// gave something, err that it failed; neither says nothing about it.
func (g *guards) enter(key guardKey, now time.Time) (done func(came bool, err error, now time.Time), ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b := g.m[key]
	if !b.passes(now) {
		return nil, false
	}
	if b != nil {
		b.trying = true
	}
	return func(came bool, err error, now time.Time) { g.done(key, came, err, now) }, true
}

// open reports what enter would, without entering.
func (g *guards) open(key guardKey, now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.m[key].passes(now)
}

func (b *guard) passes(now time.Time) bool { return b == nil || !b.trying && !now.Before(b.until) }

func (g *guards) done(key guardKey, came bool, err error, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b := g.m[key]
	if err == nil {
		if came {
			delete(g.m, key)
		} else if b != nil { // the next one tries
			b.trying = false
		}
		return
	}
	if b == nil {
		if g.m == nil {
			g.m = make(map[guardKey]*guard)
		}
		g.makeRoom()
		b = &guard{}
		g.m[key] = b
	}
	b.trying = false
	if b.failures == 0 || !now.Before(b.until) { // those that failed together count once
		b.until = now.Add(min(guardFirst<<min(b.failures, 8), guardLast))
		b.failures++
	}
	b.at, b.last = now, err
}

// makeRoom forgets the peer that failed longest ago, if there is no room for one more.
func (g *guards) makeRoom() {
	if len(g.m) < guardsMost {
		return
	}
	var oldest guardKey
	var at time.Time
	for key, b := range g.m {
		if at.IsZero() || b.at.Before(at) {
			oldest, at = key, b.at
		}
	}
	delete(g.m, oldest)
}

// shut lists the peers that are left alone.
func (g *guards) shut(now time.Time) map[guardKey]guard {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make(map[guardKey]guard)
	for key, b := range g.m {
		if now.Before(b.until) || b.trying {
			out[key] = *b
		}
	}
	return out
}
