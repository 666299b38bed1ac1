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

func TestAllocWaitIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, 4, 16)
		all := alloc(t, c, 4, "a")
		var order []string
		ask := func(n int, owner string) {
			go func() {
				if _, err := c.AllocWait(t.Context(), n, owner); err != nil {
					t.Error(err)
				}
				order = append(order, owner)
			}()
			synctest.Wait()
		}
		if n := c.Wanted(); n != 0 {
			t.Errorf("%d blocks are wanted by nobody", n)
		}
		ask(3, "big")
		ask(1, "small")
		if n := c.Wanted(); n != 3 {
			t.Errorf("the first wants %d blocks", n)
		}
		c.Release(all[:2], "a")
		synctest.Wait()
		if len(order) != 0 {
			t.Errorf("%v overtook", order)
		}
		c.Release(all[2:3], "a")
		synctest.Wait()
		c.Release(all[3:], "a")
		synctest.Wait()
		if !slices.Equal(order, []string{"big", "small"}) {
			t.Errorf("order is %v", order)
		}
		c.ReleaseAll("big")
		c.ReleaseAll("small")
	})
}

func TestAllocWaitGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, 4, 16)
		held := alloc(t, c, 3, "a")
		served := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		go func() {
			synctest.Wait() // behind the big one
			_, err := c.AllocWait(t.Context(), 1, "small")
			served <- err
		}()
		_, err := c.AllocWait(ctx, 2, "big")
		if !errors.Is(err, kvcache.ErrNoSpace) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("at the deadline: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("who stood behind: %v", err)
		}
		if _, err := c.AllocWait(ctx, 5, "huge"); !errors.Is(err, kvcache.ErrTooLarge) {
			t.Errorf("more than the pool: %v", err)
		}
		c.Release(held, "a")
		c.ReleaseAll("small")
	})
}

// TestPriority sets the engine's needs against a waiter's, by age.
func TestPriority(t *testing.T) {
	f := func(name string, running, next int, engineFirst bool, freed int, want bool) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			c := newCache(t, 8, 16)
			all := alloc(t, c, 8, "a")
			begin := time.Now()
			time.Sleep(time.Second)
			since := begin
			if !engineFirst {
				since = begin.Add(time.Hour)
			}
			c.Prioritise(running, next, since)
			got := false
			go func() {
				ids, err := c.AllocWait(t.Context(), 2, "w")
				got = err == nil
				defer c.Release(ids, "w")
				<-t.Context().Done()
			}()
			synctest.Wait()
			c.Release(all[:freed], "a")
			synctest.Wait()
			if got != want {
				t.Errorf("%s: %d freed, waiter served %t", name, freed, got)
			}
			ch := c.NewChain("")
			ids, _, err := c.Reserve(&ch, 0, 1, 0, since, "engine")
			if barred := !engineFirst && !want; barred != errors.Is(err, kvcache.ErrNoSpace) && freed > 2 {
				t.Errorf("%s: engine's reservation: %v", name, err)
			}
			c.Release(ids, "engine")
			c.Prioritise(0, 0, time.Time{}) // and now that nothing is needed:
			synctest.Wait()
			if freed >= 2 && !got {
				t.Errorf("%s: not served in the end", name)
			}
			c.Release(all[freed:], "a")
		})
	}
	f("no demand", 0, 0, true, 2, true)
	f("running ones first", 2, 0, true, 3, false)
	f("running ones first", 2, 0, true, 4, true)
	f("older engine request first", 1, 3, true, 5, false)
	f("older engine request first", 1, 3, true, 6, true)
	f("older waiter first", 1, 3, false, 3, true)
	f("older waiter bars the engine", 2, 3, false, 3, false)
}

func TestReserveWaitMatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, 4, 16)
		toks := tokens(64, 0)
		cached(t, c, toks[:48])
		ch := c.NewChain("")
		ch.Extend(toks)
		held := alloc(t, c, 1, "a")
		go func() {
			time.Sleep(time.Second)
			c.Release(held, "a")
		}()
		before, heard := c.Stats(), 0
		c.OnWait(func() { heard++ })
		ids, n, err := c.ReserveWait(t.Context(), &ch, 63, 4, "b")
		if err != nil || n != 48 || len(ids) != 4 {
			t.Errorf("%v, %d cached, %v", ids, n, err)
		}
		after := c.Stats()
		if hit, asked := after.HitTokens-before.HitTokens, after.AskTokens-before.AskTokens; hit != 48 || asked != 63 {
			t.Errorf("%d of %d tokens count as found, want 48 of 63", hit, asked)
		}
		c.Release(ids, "b")
		if ids, _, err := c.ReserveWait(t.Context(), &ch, 63, 4, "b"); err != nil || heard != 1 {
			t.Errorf("%v: the engine heard %d times of one that waits, want once", err, heard)
		} else {
			c.Release(ids, "b")
		}
	})
}

// TestQuarantineEnds: waiters get the blocks that come out of quarantine, except those
// that somebody still holds, and the engine hears of them.
func TestQuarantineEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, 2, 16)
		calls := 0
		c.Notify(func() { calls++ })
		ids := alloc(t, c, 2, "a")
		c.Retain(ids[1:], "b")
		c.Quarantine(ids, "a")
		var got []int32
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { got, _ = c.AllocWait(ctx, 1, "w") }()
		synctest.Wait()
		if got != nil || calls != 0 {
			t.Errorf("in quarantine: got %v, %d calls", got, calls)
		}
		c.Unquarantine(ids[1:], "a")
		synctest.Wait()
		if got != nil || calls != 0 {
			t.Errorf("another holds it: got %v, %d calls", got, calls)
		}
		c.Unquarantine(ids[:1], "a")
		synctest.Wait()
		if !slices.Equal(got, ids[:1]) || calls != 1 {
			t.Errorf("after the quarantine: got %v, want %v; %d calls", got, ids[:1], calls)
		}
		c.ReleaseAll("w")
		c.ReleaseAll("b")
		check(t, c)
	})
}

func TestTooManyWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := kvcache.New(kvcache.Config{Blocks: 1, BlockTokens: 16, MaxWaiters: 1})
		if err != nil {
			t.Fatal(err)
		}
		alloc(t, c, 1, "a")
		ctx, cancel := context.WithCancel(t.Context())
		go c.AllocWait(ctx, 1, "b")
		synctest.Wait()
		if n := c.Stats().Waiters; n != 1 {
			t.Errorf("%d wait, and one may", n)
		}
		if _, err := c.AllocWait(ctx, 1, "c"); !errors.Is(err, kvcache.ErrTooManyWaiters) {
			t.Errorf("second waiter: %v", err)
		}
		cancel()
		synctest.Wait()
	})
}

func TestNotify(t *testing.T) {
	c := newCache(t, 2, 16)
	calls := 0
	c.Notify(func() { calls++; c.Stats() }) // outside the lock
	ids := alloc(t, c, 2, "a")
	c.Retain(ids, "b")
	c.Release(ids, "a")
	if calls != 0 {
		t.Errorf("%d calls while all is held", calls)
	}
	c.Release(ids, "b")
	if calls != 1 {
		t.Errorf("%d calls after the release", calls)
	}
}
