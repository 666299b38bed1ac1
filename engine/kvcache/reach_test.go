package kvcache_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// TestReach: what a lower tier asks of the index, which changes nothing.
func TestReach(t *testing.T) {
	c := newCache(t, 8, 16)
	if c.Blocks() != 8 || c.BlockTokens() != 16 || c.UnitTokens() != 16 {
		t.Errorf("%d blocks of %d tokens, units of %d", c.Blocks(), c.BlockTokens(), c.UnitTokens())
	}
	for tokens, blocks := range map[int]int{0: 0, 1: 1, 15: 1, 16: 1, 17: 2, 32: 2} {
		if got := c.BlocksFor(tokens); got != blocks {
			t.Errorf("%d tokens take %d blocks, want %d", tokens, got, blocks)
		}
	}
	toks := tokens(64, 0)
	cached(t, c, toks[:48])
	ch := c.NewChain("")
	ch.Extend(toks)
	before := c.Stats()
	for most, want := range map[int]int{0: 0, 15: 0, 16: 16, 47: 32, 48: 48, 64: 48} {
		if got := c.Reach(&ch, most); got != want {
			t.Errorf("of at most %d tokens the index has %d, want %d", most, got, want)
		}
	}
	for upto, want := range map[int]bool{16: true, 48: true, 64: false} {
		if c.Knows(ch.Name(upto)) != want {
			t.Errorf("knows the unit that ends at %d: %t", upto, !want)
		}
	}
	if got := c.Stats(); got != before {
		t.Errorf("%+v after it was asked, %+v before", got, before)
	}
	if ids := c.Hold(ch.Name(64), "h"); ids != nil || len(c.Holders()) != 0 {
		t.Errorf("holds %v of a unit that is not there", ids)
	}
	ids := c.Hold(ch.Name(32), "h")
	if h := c.Holders(); len(ids) != 1 || len(h) != 1 || !slices.Equal(h[0].Blocks, ids) {
		t.Errorf("holds %v, %+v", ids, h)
	}
	c.PutBack(ids, "h")
	if s := c.NewChain("s"); s.Root() != kvcache.Root("model", "cpu-f32-1", "s") {
		t.Error("a chain does not begin at its root")
	}
	check(t, c)
}

// TestHashText: a hash is 32 hexadecimal digits, and nothing else is one.
func TestHashText(t *testing.T) {
	h := kvcache.Hash{0xab, 1, 15: 0xff}
	b, err := json.Marshal(map[string]kvcache.Hash{"h": h})
	if want := `{"h":"ab0100000000000000000000000000ff"}`; err != nil || string(b) != want {
		t.Errorf("have %s, %v, want %s", b, err, want)
	}
	var back map[string]kvcache.Hash
	if err := json.Unmarshal(b, &back); err != nil || back["h"] != h {
		t.Errorf("%x, %v", back["h"], err)
	}
	for _, bad := range []string{"", strings.Repeat("0", 30), strings.Repeat("0", 34), strings.Repeat("0", 31) + "g"} {
		if err := new(kvcache.Hash).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q is a hash", bad)
		}
	}
}

// TestHolders: the ledger is in the order of owners, with what each block is held for and since when.
func TestHolders(t *testing.T) {
	c := newCache(t, 8, 16)
	began := time.Now()
	b, a := alloc(t, c, 3, "b"), alloc(t, c, 1, "a")
	if c.SetState("nobody", kvcache.StateRunning); len(c.Holders()) != 2 {
		t.Errorf("%+v", c.Holders())
	}
	c.Quarantine(b[:1], "b")
	states := []string{kvcache.StateHeld, kvcache.StateReceiving, kvcache.StateWaiting, kvcache.StateRunning, kvcache.StateFinished}
	whys := map[string]bool{}
	for _, state := range states {
		c.SetState("b", state)
		h := c.Holders()
		if len(h) != 3 || h[0].Owner != "a" || h[1].Owner != "b" || h[2].Owner != "b" || h[0].State != kvcache.StateHeld {
			t.Fatalf("%+v", h)
		}
		held, barred := h[1], h[2]
		if held.State == kvcache.StateQuarantined {
			held, barred = barred, held
		}
		if held.State != state || len(held.Blocks) != 2 || !slices.IsSorted(held.Blocks) || held.Why == "" ||
			barred.State != kvcache.StateQuarantined || !slices.Equal(barred.Blocks, b[:1]) || h[1].State > h[2].State {
			t.Errorf("%+v", h)
		}
		for _, one := range h {
			if whys[one.State+one.Why] = true; one.Since.Before(began) || one.Since.After(time.Now()) {
				t.Errorf("since %v", one.Since)
			}
		}
	}
	if len(whys) != len(states)+1 {
		t.Errorf("%v", whys)
	}
	c.Unquarantine(b[:1], "b")
	c.ReleaseAll("b")
	c.Release(a, "a")
	if h := c.Holders(); len(h) != 0 {
		t.Errorf("%+v", h)
	}
	check(t, c)
}

// TestRaisedInPlace: a unit that is stored again with a higher priority, while nobody holds it, goes
// after those that were used later.
func TestRaisedInPlace(t *testing.T) {
	heard := &events{}
	c, err := kvcache.New(kvcache.Config{Blocks: 7, BlockTokens: 16, Listener: heard})
	if err != nil {
		t.Fatal(err)
	}
	store := func(first int32, priority int8) kvcache.Hash {
		ch := c.NewChain("")
		ch.Priority = priority
		ch.Extend(tokens(16, first))
		ids := alloc(t, c, 1, "maker")
		c.InsertChain(&ch, tokens(16, first), ids, 0)
		c.Release(ids, "maker")
		check(t, c)
		return ch.Name(16)
	}
	var names []kvcache.Hash
	for i := range int32(6) {
		names = append(names, store(1000*i, 0))
	}
	store(0, 1)
	held := alloc(t, c, 1, "a") // the free one
	for range 6 {
		held = append(held, alloc(t, c, 1, "a")...)
		check(t, c)
	}
	gone := heard.removed() // the last one first
	slices.Reverse(gone)
	if want := append(names[1:], names[0]); !slices.Equal(gone, want) {
		t.Errorf("%x went, want %x", gone, want)
	}
	c.Release(held, "a")
}

// TestColdParent: a unit that continues one that is announced goes before it, announced or not.
func TestColdParent(t *testing.T) {
	c, a := newAnnounced(t, 4, 16, 0, 2)
	toks := tokens(32, 0)
	ch := c.NewChain("")
	ch.Extend(toks)
	first := cached(t, c, toks[:16])
	held := alloc(t, c, 2, "a")
	if len(a.cold) != 1 || a.cold[0] != ch.Name(16) {
		t.Fatalf("announced %x", a.cold)
	}
	if n := c.InsertChain(&ch, toks, append(slices.Clone(first), held[0]), 16); n != 32 {
		t.Fatalf("%d tokens are indexed", n)
	}
	c.Release(held[:1], "a")
	check(t, c)
	more := alloc(t, c, 2, "b")
	check(t, c)
	if c.Knows(ch.Name(32)) || !c.Knows(ch.Name(16)) {
		t.Errorf("the end is there: %t, its beginning: %t", c.Knows(ch.Name(32)), c.Knows(ch.Name(16)))
	}
	c.Release(more, "b")
	c.Release(held[1:], "a")
}
