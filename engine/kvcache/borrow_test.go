package kvcache_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// TestBorrow: KV brought for later takes blocks for what the index lacks, within its own
// bound, and none that the engine is about to need or that somebody waits for.
func TestBorrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, 8, 16)
		toks := tokens(64, 0)
		had := cached(t, c, toks[:32])
		ch := c.NewChain("")
		ch.Extend(toks)
		f := func(what string, upto, most int, err error) {
			t.Helper()
			ids, n, got := c.Borrow(&ch, upto, most, "b")
			if !errors.Is(got, err) {
				t.Errorf("%s: %v, want %v", what, got, err)
			}
			if err == nil && (n != 32 || len(ids) != upto/16 || !slices.Equal(ids[:2], had)) {
				t.Errorf("%s: %v with %d tokens, the index has %v", what, ids, n, had)
			}
			if n := c.ReleaseAll("b"); err != nil && n > 0 {
				t.Errorf("%s: %d blocks are held", what, n)
			}
		}
		f("all", 64, 2, nil)
		f("more than its bound", 64, 1, kvcache.ErrNoSpace)
		f("what is there already", 32, 0, nil)
		c.Prioritise(3, 1, time.Now()) // 8 less 4 are left, and it needs those of the index and 2
		f("what is left", 64, 2, nil)
		c.Prioritise(4, 1, time.Now())
		f("what the engine needs", 64, 2, kvcache.ErrNoSpace)
		c.Prioritise(0, 0, time.Time{})

		big := alloc(t, c, 4, "a")
		ctx, cancel := context.WithCancel(t.Context())
		go c.AllocWait(ctx, 5, "w")
		synctest.Wait()
		f("what somebody waits for", 48, 2, kvcache.ErrNoSpace)
		cancel()
		synctest.Wait()
		f("nobody waits any more", 48, 2, nil)
		c.Release(big, "a")
		check(t, c)
	})
}

// TestHoldChain: for another worker's sake all of a prefix is held, or nothing, and
// nothing that would be missed here.
func TestHoldChain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, 8, 16)
		toks := tokens(64, 0)
		had := cached(t, c, toks[:32])
		ch := c.NewChain("")
		ch.Extend(toks)
		f := func(what string, upto int, want []int32) {
			t.Helper()
			ids, _ := c.HoldChain(&ch, upto, "h")
			if !slices.Equal(ids, want) || (len(c.Holders()) > 0) != (len(want) > 0) {
				t.Errorf("%s: %v, want %v; %+v", what, ids, want, c.Holders())
			}
			c.ReleaseAll("h")
		}
		f("all", 32, had)
		f("its beginning", 16, had[:1])
		f("more than there is", 48, nil)
		c.Prioritise(5, 1, time.Now())
		f("what is left", 32, had)
		c.Prioritise(5, 2, time.Now())
		f("what the engine needs", 32, nil)
		if ids := c.Hold(ch.Name(16), "other"); len(ids) != 1 {
			t.Fatal(ids)
		}
		if ids := c.Hold(ch.Name(32), "other"); len(ids) != 1 {
			t.Fatal(ids)
		}
		if ids, n := c.HoldChain(&ch, 32, "h"); n != 32 || !slices.Equal(ids, had) { // which takes nothing
			t.Errorf("held already: %v, %d", ids, n)
		}
		c.ReleaseAll("h")
		c.ReleaseAll("other")
		if c.Hold(ch.Name(64), "other") != nil || c.Knows(ch.Name(64)) || !c.Knows(ch.Name(32)) {
			t.Error("the index knows what was never put there, or not what was")
		}
		check(t, c)
	})
}
