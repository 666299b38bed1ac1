package kvcache_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// announced keeps what was told.
type announced struct {
	cold, hot []kvcache.Hash
	lost      int // evicted without having been announced
	told      map[kvcache.Hash]bool
}

func (a *announced) KVEvent(ev kvcache.Event) {
	switch ev.Kind {
	case kvcache.Cold:
		a.cold = append(a.cold, ev.Hash)
		a.told[ev.Hash] = true
	case kvcache.Hot:
		a.hot = append(a.hot, ev.Hash)
	case kvcache.Removed:
		if ev.Evicted && !a.told[ev.Hash] {
			a.lost++
		}
	}
}

func newAnnounced(t *testing.T, blocks, blockTokens, hits, ahead int) (*kvcache.Cache, *announced) {
	t.Helper()
	a := &announced{told: make(map[kvcache.Hash]bool)}
	c, err := kvcache.New(kvcache.Config{Blocks: blocks, BlockTokens: blockTokens, Fingerprint: "f", HotHits: hits, Ahead: ahead, Listener: a})
	if err != nil {
		t.Fatal(err)
	}
	return c, a
}

// TestCold: units are announced in the order of their eviction, before it; a
// copy changes nothing, a use takes the announcement back.
func TestCold(t *testing.T) {
	c, a := newAnnounced(t, 8, 16, 0, 2)
	first, second := tokens(48, 0), tokens(48, 5000)
	cached(t, c, first)
	cached(t, c, second) // two free blocks are left
	if len(a.cold) != 0 {
		t.Fatalf("%d units announced too early", len(a.cold))
	}
	ids := alloc(t, c, 1, "a")
	name := func(toks []int32, n int) kvcache.Hash {
		ch := c.NewChain("")
		ch.Extend(toks)
		return ch.Name(n)
	}
	told := func(want ...kvcache.Hash) {
		t.Helper()
		if !slices.Equal(a.cold, want) {
			t.Fatalf("announced %x, want %x", a.cold, want)
		}
	}
	told(name(first, 48))
	held := c.HoldCold(a.cold[0], "copy")
	if len(held) != 1 {
		t.Fatal("not to be held")
	}
	c.PutBack(held, "copy")
	told(name(first, 48), name(first, 32)) // while it could not be evicted, another one took its place
	if _, n := c.Match(first, "", 48, "b"); n != 48 {
		t.Fatal(n)
	}
	c.ReleaseAll("b") // used: now the other prompt's time comes first, from its end on
	c.Release(alloc(t, c, 1, "x"), "x")
	told(name(first, 48), name(first, 32), name(second, 48), name(second, 32))
	more := alloc(t, c, 7, "a") // more at once than are announced
	if a.lost == 0 {
		t.Error("seven blocks at once, and none was lost?")
	}
	c.Release(ids, "a")
	c.Release(more, "a")
	empty(t, c)
}

// TestColdWaits: a block that the engine is about to need, or that somebody waits for, is not held for a copy.
func TestColdWaits(t *testing.T) {
	c, a := newAnnounced(t, 4, 16, 0, 4)
	cached(t, c, tokens(64, 0))
	c.Prioritise(4, 0, time.Now())
	if c.HoldCold(a.cold[0], "copy") != nil {
		t.Error("held what the engine is about to need")
	}
	c.Prioritise(0, 0, time.Now())
	c.PutBack(c.HoldCold(a.cold[0], "copy"), "copy")
	synctest.Test(t, func(t *testing.T) {
		held := c.HoldCold(a.cold[0], "copy")
		done := make(chan []int32, 1)
		go func() {
			ids, err := c.AllocWait(t.Context(), 4, "r")
			if err != nil {
				t.Error(err)
			}
			done <- ids
		}()
		synctest.Wait()
		if c.HoldCold(a.cold[1], "copy") != nil {
			t.Error("held what somebody waits for")
		}
		c.PutBack(held, "copy")
		c.Release(<-done, "r")
	})
	empty(t, c)
}

// TestHot: the second request that finds a unit makes it hot, once.
func TestHot(t *testing.T) {
	c, a := newAnnounced(t, 8, 16, 2, 0)
	toks := tokens(48, 0)
	cached(t, c, toks)
	for i, step := range []struct{ tokens, hot int }{{32, 0}, {32, 2}, {32, 2}, {48, 2}, {48, 3}, {48, 3}} {
		c.Match(toks, "", step.tokens, "r")
		if len(a.hot) != step.hot {
			t.Errorf("after %d requests %d units are hot, want %d", i+1, len(a.hot), step.hot)
		}
	}
	c.ReleaseAll("r")
	empty(t, c)
}

// TestRandomCold: whatever happens, what can be announced is, and the orders agree.
func TestRandomCold(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 4))
		ahead := 1 + rng.IntN(30)
		c, said := newAnnounced(t, 1+rng.IntN(60), []int{1, 4, 16, 24, 32}[rng.IntN(5)], 1+rng.IntN(3), ahead)
		a := &actor{c: c, name: "r", next: rng.IntN}
		for range 300 {
			a.act()
			if rng.IntN(3) == 0 && len(said.cold) > 0 {
				held := c.HoldCold(said.cold[0], "copy")
				said.cold = said.cold[1:]
				a.act()
				check(t, c)
				c.PutBack(held, "copy")
			}
			check(t, c)
		}
		a.leave()
		empty(t, c)
	}
}
