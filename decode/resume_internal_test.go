package decode

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Rows of different numerics are never mixed.
func TestOtherNumerics(t *testing.T) {
	cache, err := kvcache.New(kvcache.Config{Blocks: 4, BlockTokens: 4})
	if err != nil {
		t.Fatal(err)
	}
	s := &Service{cache: cache, remains: newRemains(1)}
	c := &Claim{Tokens: []int32{1, 2, 3, 4, 5}, Owner: "r"}
	left := func() *remainder {
		ids, err := cache.Alloc(1, c.Owner)
		if err != nil {
			t.Fatal(err)
		}
		cache.Shelve(kvcache.Hash{1}, ids, c.Owner)
		return &remainder{shelf: kvcache.Hash{1}, numerics: "cpu", index: []int{0}}
	}
	if tab := s.resume(c, left(), "cuda"); tab != nil || len(cache.Holders()) > 0 || cache.Stats().Free != 4 {
		t.Errorf("%+v; %+v; %+v", tab, cache.Holders(), cache.Stats())
	}
	if tab := s.resume(c, left(), "cpu"); tab == nil || len(tab.blocks) != 2 {
		t.Errorf("%+v", tab)
	}
	if err := cache.Check(); err != nil {
		t.Error(err)
	}
}

// TestGivenUp: an attempt that gave up while a former one had the blocks does not
// stand in the way of the next.
func TestGivenUp(t *testing.T) {
	r, c := newRemains(1), &Claim{RequestID: "r"}
	first, err := r.begin(t.Context(), c, kvcache.Hash{1}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if over, err := r.begin(gone, c, kvcache.Hash{1}, time.Hour); err == nil || over != nil {
		t.Errorf("who is gone has begun: %v", err)
	}
	if len(r.under) != 0 {
		t.Errorf("%d attempts stand in the way", len(r.under))
	}
	first()
	over, err := r.begin(t.Context(), c, kvcache.Hash{1}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	over()
}

// TestFormerIsSlow: an attempt waits for the former one only so long, and a third one for the
// second.
func TestFormerIsSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := newRemains(1), &Claim{RequestID: "r"}
		first, _ := r.begin(t.Context(), c, kvcache.Hash{1}, time.Hour)
		began := time.Now()
		second, err := r.begin(t.Context(), c, kvcache.Hash{1}, time.Second)
		if err != nil || time.Since(began) != time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		first() // the second still stands
		done := make(chan func())
		go func() {
			third, err := r.begin(t.Context(), c, kvcache.Hash{1}, time.Hour)
			if err != nil {
				t.Error(err)
			}
			done <- third
		}()
		synctest.Wait()
		select {
		case <-done:
			t.Error("the third began beside the second")
		default:
		}
		second()
		(<-done)()
		for _, other := range []*Claim{{RequestID: "s"}, {RequestID: "r", Order: handoff.Order{Index: 1}}} {
			over, err := r.begin(t.Context(), other, kvcache.Hash{1}, 0)
			if err != nil {
				t.Error(err)
			}
			defer over()
		}
		if len(r.under) != 2 {
			t.Errorf("%d attempts are under way", len(r.under))
		}
	})
}

// TestRemains: what is put replaces what has its name, else the oldest if there is no room.
func TestRemains(t *testing.T) {
	r := newRemains(2)
	named := func(n byte) *remainder { return &remainder{name: kvcache.Hash{n}} }
	a, b, c := named(1), named(2), named(3)
	again := named(1)
	for i, step := range []struct{ put, gone *remainder }{{a, nil}, {b, nil}, {again, a}, {c, b}, {named(4), again}} {
		if gone := r.put(step.put); gone != step.gone {
			t.Errorf("step %d: %+v is gone", i, gone)
		}
		if r.order.Len() > 2 || len(r.byName) != r.order.Len() {
			t.Errorf("step %d: %d of %d names", i, r.order.Len(), len(r.byName))
		}
	}
	if got := r.remove(kvcache.Hash{3}); got != c {
		t.Errorf("%+v", got)
	}
	if got := r.remove(kvcache.Hash{3}); got != nil || r.order.Len() != 1 {
		t.Errorf("%+v, %d left", got, r.order.Len())
	}
}

// TestFailure: what the router is told of each error, before and after the caller has left.
func TestFailure(t *testing.T) {
	left, leave := context.WithCancelCause(t.Context())
	leave(errors.New("left"))
	late, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	for _, c := range []struct {
		ctx  context.Context
		err  error
		want ticket.Outcome
	}{
		{t.Context(), errors.New("x"), ticket.Corrupt},
		{t.Context(), &kvconn.Error{Outcome: ticket.Refused, Err: errors.New("x")}, ticket.Refused},
		{t.Context(), kvcache.ErrTooLarge, ticket.NoSpace},
		{t.Context(), kvcache.ErrNoSpace, ticket.NoSpace},
		{t.Context(), kvcache.ErrTooManyWaiters, ticket.NoSpace},
		{t.Context(), syscall.EMFILE, ticket.NoSpace},
		{left, kvcache.ErrNoSpace, ticket.Cancelled},
		{late, kvcache.ErrNoSpace, ticket.Late},
	} {
		err := failure(c.ctx, "do", fmt.Errorf("wrapped: %w", c.err), ticket.Corrupt)
		if err.Outcome != c.want || !strings.HasPrefix(err.Error(), "do: ") {
			t.Errorf("%v: %s, %v, want %s", c.err, err.Outcome, err, c.want)
		}
		if kept := errors.Is(err, c.err); kept != (c.ctx != left) {
			t.Errorf("%v says why it failed: %t", err, kept)
		}
	}
}
