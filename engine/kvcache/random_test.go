package kvcache_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// table is a held sequence: prefix of one of a few texts.
type table struct {
	toks  []int32
	ids   []int32
	owner string
}

// actor does random things that the contract allows.
type actor struct {
	c           *kvcache.Cache
	next        func(n int) int
	name        string
	held        []table
	quarantined []table
	made        int
}

func (a *actor) act() {
	switch op := a.next(10); {
	case op < 4:
		a.begin()
	case op == 4 && len(a.held) > 0: // a decode step: one more block
		t := a.pick()
		if ids, err := a.c.Alloc(1, t.owner); err == nil {
			t.ids = append(t.ids, ids...)
		}
	case op == 5 && len(a.held) > 0: // another choice
		t := a.pick()
		a.c.Retain(t.ids, a.name+"-fork")
		a.held = append(a.held, table{t.toks, slices.Clone(t.ids), a.name + "-fork"})
	case op == 6 && len(a.held) > 0:
		t := a.pick()
		i := a.next(len(t.ids))
		if id, err := a.c.Unshare(t.ids[i], t.owner); err == nil {
			t.ids[i] = id
		}
	case op == 7 && a.next(8) == 0:
		a.c.Clear()
	case op == 7 && len(a.quarantined) > 0:
		t := a.quarantined[0]
		a.quarantined = a.quarantined[1:]
		a.c.Unquarantine(t.ids, t.owner)
	case op == 8: // a transfer that was revoked
		owner := a.owner()
		if ids, err := a.c.Alloc(1+a.next(2), owner); err == nil {
			if a.next(2) == 0 { // into the blocks of one who still holds them
				sharer := a.owner()
				a.c.Retain(ids, sharer)
				a.held = append(a.held, table{nil, slices.Clone(ids), sharer})
			}
			a.c.Revoke(ids, owner)
			a.c.Quarantine(ids, owner)
			a.quarantined = append(a.quarantined, table{nil, ids, owner})
		}
	default:
		a.end()
	}
}

func (a *actor) owner() string {
	a.made++
	return fmt.Sprint(a.name, a.made)
}

func (a *actor) pick() *table { return &a.held[a.next(len(a.held))] }

func (a *actor) begin() {
	toks := tokens(1+a.next(120), int32(a.next(3)*1000))
	t := table{toks: toks, owner: a.owner()}
	ch := a.c.NewChain("")
	ch.Priority = int8(a.next(3) - 1)
	ch.Extend(toks)
	ids, n, err := a.c.Reserve(&ch, len(toks)-1, a.c.BlocksFor(len(toks)), a.next(3), time.Time{}, t.owner)
	if err != nil {
		return
	}
	t.ids = ids
	done := n + a.next(len(toks)-n+1)
	a.c.InsertChain(&ch, toks[:done], ids, n)
	a.held = append(a.held, t)
}

func (a *actor) end() {
	if len(a.held) == 0 {
		return
	}
	i := a.next(len(a.held))
	t := a.held[i]
	a.held = slices.Delete(a.held, i, i+1)
	a.c.Release(t.ids, t.owner)
}

func (a *actor) leave() {
	for len(a.held) > 0 {
		a.end()
	}
	for _, t := range a.quarantined {
		a.c.Unquarantine(t.ids, t.owner)
	}
	a.quarantined = nil
}

func FuzzOperations(f *testing.F) {
	f.Add([]byte("a few bytes to begin with"))
	f.Add([]byte{3, 0, 200, 1, 2, 0, 90, 0, 0, 9, 0, 4, 0, 5, 0, 7, 0, 8, 1})
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) < 2 || len(script) > 4096 {
			return
		}
		blockTokens := []int{1, 4, 16, 24, 32, 256}[int(script[0])%6]
		r := &recorder{t: t, have: make(map[kvcache.Hash]bool)}
		c := newListened(t, 1+int(script[1])%40, blockTokens, r)
		script = script[2:]
		a := &actor{c: c, name: "f", next: func(n int) int {
			if len(script) == 0 {
				return 0
			}
			b := script[0]
			script = script[1:]
			return int(b) % n
		}}
		for len(script) > 0 {
			a.act()
			check(t, c)
			if s := c.Stats(); len(r.have) != s.Entries {
				t.Fatalf("events say %d units, the index has %d", len(r.have), s.Entries)
			}
		}
		a.leave()
		empty(t, c)
	})
}

func TestRandomOperations(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 2))
		c := newCache(t, 1+rng.IntN(60), []int{1, 4, 16, 24, 32}[rng.IntN(5)])
		a := &actor{c: c, name: "r", next: rng.IntN}
		for range 300 {
			a.act()
			check(t, c)
		}
		a.leave()
		empty(t, c)
	}
}

// TestConcurrentOperations is for the race detector.
func TestConcurrentOperations(t *testing.T) {
	r := &recorder{t: t, have: make(map[kvcache.Hash]bool)}
	c := newListened(t, 48, 16, r)
	var wg sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // and no longer, if one is forgotten
	defer cancel()
	for i := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 3))
			a := &actor{c: c, name: fmt.Sprint("c", i, "-"), next: rng.IntN}
			for range 500 {
				a.act()
			}
			a.leave()
		})
		wg.Go(func() {
			for range 100 {
				owner := fmt.Sprint("w", i)
				ids, err := c.AllocWait(ctx, 5, owner)
				if err != nil {
					t.Error(err)
				}
				c.Release(ids, owner)
				c.Holders()
			}
		})
	}
	wg.Wait()
	empty(t, c)
	if s := c.Stats(); s.Entries != 0 || len(r.have) != 0 {
		t.Errorf("after clear: %d entries, events say %d", s.Entries, len(r.have))
	}
}

// empty expects that nothing is held and, after Clear, that all is free.
func empty(t testing.TB, c *kvcache.Cache) {
	t.Helper()
	check(t, c)
	if h := c.Holders(); len(h) != 0 {
		t.Fatalf("still held: %+v", h)
	}
	c.Clear()
	check(t, c)
	if s := c.Stats(); s.Free != s.Blocks {
		t.Fatalf("not all free: %+v", s)
	}
}
