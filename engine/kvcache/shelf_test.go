package kvcache_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/engine/kvcache"
)

func TestShelf(t *testing.T) {
	c, err := kvcache.New(kvcache.Config{Blocks: 8, BlockTokens: 4})
	if err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
	}
	alloc := func(n int, owner string) []int32 {
		t.Helper()
		ids, err := c.Alloc(n, owner)
		if err != nil {
			t.Fatal(err)
		}
		check()
		return ids
	}
	name := kvcache.Hash{1}
	ids := alloc(3, "a")
	old := c.Generations(ids)
	c.Shelve(name, ids, "a")
	check()
	if s := c.Stats(); s.Held != 0 || s.Cached != 3 || s.Available() != 8 || len(c.Holders()) != 0 {
		t.Errorf("shelved: %+v, %+v", s, c.Holders())
	}
	got := c.Unshelve(name, "b")
	if !slices.Equal(got, ids) || slices.Equal(c.Generations(ids), old) {
		t.Errorf("unshelved %v under %v, shelved %v under %v", got, c.Generations(ids), ids, old)
	}
	check()
	if again := c.Unshelve(name, "b"); again != nil {
		t.Errorf("unshelved twice: %v", again)
	}

	// Another part under the same name takes the place of the first.
	c.Shelve(name, got[:1], "b")
	c.Shelve(name, got[1:], "b")
	check()
	if s := c.Stats(); s.Free != 6 || s.Cached != 2 {
		t.Errorf("replaced: %+v", s)
	}
	// Space that is needed is taken, all of the part at once.
	rest := alloc(7, "c")
	if c.Unshelve(name, "b") != nil {
		t.Error("evicted blocks were unshelved")
	}
	if _, err := c.Alloc(2, "c"); !errors.Is(err, kvcache.ErrNoSpace) {
		t.Error(err)
	}
	c.Release(rest, "c")
	c.Shelve(name, alloc(2, "d"), "d")
	c.Shelve(name, nil, "d")
	check()
	if s := c.Stats(); s.Free != 8 {
		t.Errorf("emptied: %+v", s)
	}
	c.Shelve(name, alloc(2, "d"), "d")
	c.Clear()
	check()
	if s := c.Stats(); s.Free != 8 || c.Unshelve(name, "d") != nil {
		t.Errorf("cleared: %+v", s)
	}
}
