package decode

import (
	"context"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
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
