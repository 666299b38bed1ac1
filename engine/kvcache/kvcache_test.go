package kvcache_test

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

func newCache(t testing.TB, blocks, blockTokens int) *kvcache.Cache {
	t.Helper()
	return newListened(t, blocks, blockTokens, nil)
}

func newListened(t testing.TB, blocks, blockTokens int, l kvcache.Listener) *kvcache.Cache {
	t.Helper()
	c, err := kvcache.New(kvcache.Config{
		Blocks: blocks, BlockTokens: blockTokens, Fingerprint: "model", Numerics: "cpu-f32-1", Listener: l,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { check(t, c) })
	return c
}

func check(t testing.TB, c *kvcache.Cache) {
	t.Helper()
	if err := c.Check(); err != nil {
		t.Fatal(err)
	}
}

func alloc(t testing.TB, c *kvcache.Cache, n int, owner string) []int32 {
	t.Helper()
	ids, err := c.Alloc(n, owner)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

func tokens(n int, first int32) []int32 {
	list := make([]int32, n)
	for i := range list {
		list[i] = first + int32(i)
	}
	return list
}

// cached puts a finished prefix into the index and lets go of it.
func cached(t testing.TB, c *kvcache.Cache, toks []int32) []int32 {
	t.Helper()
	ids := alloc(t, c, c.BlocksFor(len(toks)), "maker")
	c.Insert(toks, "", ids)
	c.Release(ids, "maker")
	return ids
}

func matched(c *kvcache.Cache, toks []int32) int {
	ids, n := c.Match(toks, "", len(toks), "probe")
	c.Release(ids, "probe")
	return n
}

func TestConfigRefused(t *testing.T) {
	f := func(want string, change func(c *kvcache.Config)) {
		t.Helper()
		c := kvcache.Config{Blocks: 4, BlockTokens: 16}
		change(&c)
		_, err := kvcache.New(c)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
	f("", func(c *kvcache.Config) {})
	f("", func(c *kvcache.Config) { c.Blocks, c.BlockTokens = 1, 1 })
	f("", func(c *kvcache.Config) { c.BlockTokens = 256 })
	f("blocks", func(c *kvcache.Config) { c.Blocks = 0 })
	f("blocks", func(c *kvcache.Config) { c.Blocks = 1<<30 + 1 })
	f("block_tokens", func(c *kvcache.Config) { c.BlockTokens = 0 })
	f("block_tokens", func(c *kvcache.Config) { c.BlockTokens = 257 })
	f("hits", func(c *kvcache.Config) { c.HotHits = -1 })
	f("ahead", func(c *kvcache.Config) { c.Ahead = -1 })
	f("max waiters", func(c *kvcache.Config) { c.MaxWaiters = -1 })
}

func TestHashVectors(t *testing.T) {
	root := kvcache.Root("model", "cpu-f32-1", "tenant")
	next := kvcache.Next(root, tokens(16, -1))
	for _, v := range []struct {
		name string
		have kvcache.Hash
		want string
	}{
		{"root", root, "b9aa453e097812ed0401377e5aef6433"},
		{"next", next, "8a40a145c8eea7156c5db3c163c7f64b"},
	} {
		if got := hex.EncodeToString(v.have[:]); got != v.want {
			t.Errorf("%s is %s, want %s", v.name, got, v.want)
		}
	}
	if kvcache.Root("a", "bc", "") == kvcache.Root("ab", "c", "") {
		t.Error("fields run into each other")
	}
}

func TestChainGrowsAndForks(t *testing.T) {
	c := newCache(t, 4, 16)
	toks := tokens(100, 0)
	whole := c.NewChain("")
	whole.Extend(toks)
	step := c.NewChain("")
	for i := range toks {
		step.Extend(toks[:i+1])
	}
	if !slices.Equal(whole.Hashes(), step.Hashes()) || whole.Tokens() != 96 {
		t.Fatal("growing token by token gives another chain")
	}
	fork := whole.Fork(40)
	other := append(slices.Clone(toks[:40]), tokens(60, 500)...)
	fork.Extend(other)
	if !slices.Equal(whole.Hashes()[:2], fork.Hashes()[:2]) || whole.Hashes()[2] == fork.Hashes()[2] {
		t.Error("fork does not part where the tokens do")
	}
	if again := c.NewChain(""); func() bool { again.Extend(toks); return !slices.Equal(again.Hashes(), whole.Hashes()) }() {
		t.Error("growing the fork changed its origin")
	}
}

func TestMatchUnits(t *testing.T) {
	f := func(blockTokens, have, ask, want int) {
		t.Helper()
		c := newCache(t, 64, blockTokens)
		cached(t, c, tokens(have, 0))
		ids, n := c.Match(tokens(1000, 0), "", ask, "a")
		if n != want || len(ids)*blockTokens != want {
			t.Errorf("block of %d, %d cached, %d asked: matched %d in %d blocks, want %d",
				blockTokens, have, ask, n, len(ids), want)
		}
		check(t, c)
		c.Release(ids, "a")
	}
	f(16, 48, 1000, 48)
	f(16, 47, 1000, 32)
	f(16, 48, 47, 32)
	f(16, 48, 0, 0)
	f(16, 48, -1, 0)
	f(16, 15, 1000, 0)
	f(1, 40, 1000, 32)
	f(4, 40, 1000, 32)
	f(24, 100, 1000, 96)
	f(24, 100, 95, 48)
	f(32, 100, 1000, 96)
	f(256, 600, 1000, 512)
}

func TestSaltSeparates(t *testing.T) {
	c := newCache(t, 8, 16)
	cached(t, c, tokens(32, 0))
	if _, n := c.Match(tokens(32, 0), "other", 32, "a"); n != 0 {
		t.Errorf("matched %d tokens under another salt", n)
	}
}

func TestAllocAllOrNothing(t *testing.T) {
	c := newCache(t, 4, 16)
	ids := alloc(t, c, 3, "a")
	if _, err := c.Alloc(2, "b"); !errors.Is(err, kvcache.ErrNoSpace) {
		t.Errorf("two of one: %v", err)
	}
	if _, err := c.Alloc(5, "b"); !errors.Is(err, kvcache.ErrTooLarge) {
		t.Errorf("five of four: %v", err)
	}
	if h := c.Holders(); len(h) != 1 || h[0].Owner != "a" || len(h[0].Blocks) != 3 {
		t.Errorf("holders: %+v", h)
	}
	c.Release(ids, "a")
	if h := c.Holders(); len(h) != 0 {
		t.Errorf("holders at the end: %+v", h)
	}
}

func TestEvictionLeavesFirstThenOldest(t *testing.T) {
	c := newCache(t, 6, 16)
	cached(t, c, tokens(48, 0))    // a chain of 3, older
	cached(t, c, tokens(32, 1000)) // a chain of 2, newer
	steps := []struct{ alloc, long, short int }{
		{1, 48, 32}, // the free block
		{1, 32, 32}, // the older chain's leaf, although its root is as old
		{1, 16, 32},
		{1, 0, 32},
		{1, 0, 16},
		{1, 0, 0},
	}
	for i, s := range steps {
		alloc(t, c, s.alloc, "a")
		// Stats rather than Match, which would count as a use.
		if got, want := c.Stats().Entries, (s.long+s.short)/16; got != want {
			t.Fatalf("after %d: %d entries, want %d", i+1, got, want)
		}
		check(t, c)
	}
	c.ReleaseAll("a")
}

// TestPriorities: what a request of higher priority stored or found stays longest,
// regardless of what was used last; a request of lower priority does not lower it.
func TestPriorities(t *testing.T) {
	heard := &events{}
	c, err := kvcache.New(kvcache.Config{Blocks: 10, BlockTokens: 16, Listener: heard})
	if err != nil {
		t.Fatal(err)
	}
	chain := func(first int32, priority int8) *kvcache.Chain {
		ch := c.NewChain("")
		ch.Priority = priority
		ch.Extend(tokens(32, first))
		return &ch
	}
	store := func(first int32, priority int8) {
		ids := alloc(t, c, 2, "maker")
		c.InsertChain(chain(first, priority), tokens(32, first), ids, 0)
		c.Release(ids, "maker")
	}
	find := func(first int32, priority int8) int {
		ids, n := c.MatchChain(chain(first, priority), 32, "probe")
		c.Release(ids, "probe")
		return n
	}
	store(0, 40)    // high
	store(1000, 0)  // raised below
	store(2000, 0)  // as any
	store(3000, -5) // low
	find(1000, 7)
	find(0, -50)
	store(1000, 8)      // computed once more: these blocks are the caller's
	alloc(t, c, 2, "a") // those that are free
	for _, goes := range []int32{3000, 2000, 1000, 0} {
		before := c.Stats().Entries
		alloc(t, c, 2, "a")
		check(t, c)
		if got := c.Stats().Entries; got != before-2 {
			t.Fatalf("%d entries are left of %d", got, before)
		}
		if gone := heard.removed(); !slices.Equal(gone, chain(goes, 0).Hashes()) {
			t.Errorf("%v went, want those from %d", gone, goes)
		}
	}
	if want := []int8{7, 7, 8, 8}; !slices.Equal(heard.raised, want) {
		t.Errorf("raised %v, want %v", heard.raised, want)
	}
	c.ReleaseAll("a")
}

// events are what a listener has heard.
type events struct {
	gone   []kvcache.Hash
	raised []int8
}

func (l *events) KVEvent(ev kvcache.Event) {
	switch ev.Kind {
	case kvcache.Removed:
		l.gone = append([]kvcache.Hash{ev.Hash}, l.gone...) // from the end of a prompt
	case kvcache.Raised:
		l.raised = append(l.raised, ev.Priority)
	}
}

func (l *events) removed() []kvcache.Hash {
	defer func() { l.gone = nil }()
	return l.gone
}

func TestMatchRefreshesUse(t *testing.T) {
	c := newCache(t, 4, 16)
	cached(t, c, tokens(32, 0))
	cached(t, c, tokens(32, 1000))
	matched(c, tokens(32, 0))
	ids := alloc(t, c, 2, "a")
	if matched(c, tokens(32, 0)) != 32 || matched(c, tokens(32, 1000)) != 0 {
		t.Error("the prefix used last was evicted")
	}
	c.Release(ids, "a")
}

func TestPinnedIsNotEvicted(t *testing.T) {
	c := newCache(t, 4, 16)
	cached(t, c, tokens(64, 0))
	pinned, _ := c.Match(tokens(32, 0), "", 32, "reader")
	more := alloc(t, c, 2, "a")
	for _, id := range more {
		if slices.Contains(pinned, id) {
			t.Fatalf("block %d is pinned and was given away", id)
		}
	}
	if _, err := c.Alloc(1, "b"); !errors.Is(err, kvcache.ErrNoSpace) {
		t.Errorf("third block: %v", err)
	}
	c.Release(pinned, "reader")
	c.Release(more, "a")
}

func TestReserve(t *testing.T) {
	c := newCache(t, 6, 16)
	toks := tokens(96, 0)
	cached(t, c, toks[:32])
	ch := c.NewChain("")
	ch.Extend(toks)
	if _, _, err := c.Reserve(&ch, 95, 6, 1, time.Now(), "a"); !errors.Is(err, kvcache.ErrNoSpace) {
		t.Errorf("with one to spare: %v", err)
	}
	if len(c.Holders()) != 0 {
		t.Errorf("a refused reservation holds %+v", c.Holders())
	}
	ids, n, err := c.Reserve(&ch, 95, 6, 0, time.Now(), "a")
	if err != nil || n != 32 || len(ids) != 6 {
		t.Fatalf("reserve: %v, %d cached, %v", ids, n, err)
	}
	if s := c.Stats(); s.Evicted != 0 || s.Held != 6 {
		t.Errorf("stats: %+v", s)
	}
	if _, _, err := c.Reserve(&ch, 95, 7, 0, time.Now(), "b"); !errors.Is(err, kvcache.ErrTooLarge) {
		t.Errorf("more than the pool: %v", err)
	}
	c.Release(ids, "a")
}

func TestInsertTwiceKeepsFirst(t *testing.T) {
	c := newCache(t, 6, 16)
	a, b := alloc(t, c, 2, "a"), alloc(t, c, 3, "b")
	c.Insert(tokens(32, 0), "", a)
	c.Insert(tokens(48, 0), "", b)
	c.Release(a, "a") // the start of b's prefix, held by nobody
	check(t, c)
	got, n := c.Match(tokens(48, 0), "", 48, "m")
	if n != 48 || !slices.Equal(got, []int32{a[0], a[1], b[2]}) {
		t.Errorf("matched %d in %v", n, got)
	}
	c.Release(got, "m")
	// An inner entry goes when nothing else is left, and comes back.
	rest := alloc(t, c, 3, "c")
	check(t, c)
	if matched(c, tokens(48, 0)) != 0 {
		t.Error("matched over a gap")
	}
	c.Insert(tokens(32, 0), "", rest[:2])
	if n := matched(c, tokens(48, 0)); n != 48 {
		t.Errorf("after the gap closed: matched %d", n)
	}
	c.Release(rest, "c")
	c.Release(b, "b")
}

func TestUnshare(t *testing.T) {
	c := newCache(t, 3, 16)
	ids := alloc(t, c, 1, "a")
	if id, err := c.Unshare(ids[0], "a"); err != nil || id != ids[0] {
		t.Errorf("own block: %d, %v", id, err)
	}
	c.Retain(ids, "b")
	fresh, err := c.Unshare(ids[0], "b")
	if err != nil || fresh == ids[0] {
		t.Errorf("shared block: %d, %v", fresh, err)
	}
	c.Insert(tokens(16, 0), "", ids)
	if id, err := c.Unshare(ids[0], "a"); err != nil || id != ids[0] || c.Stats().Entries != 0 {
		t.Errorf("indexed block: %d, %v, %d entries", id, err, c.Stats().Entries)
	}
	c.Retain(ids, "b")
	last := alloc(t, c, 1, "c")
	if _, err := c.Unshare(ids[0], "b"); !errors.Is(err, kvcache.ErrNoSpace) {
		t.Errorf("no space: %v", err)
	}
	check(t, c)
	c.Release(last, "c")
	c.Release(ids, "a")
	if n := c.ReleaseAll("b"); n != 2 {
		t.Errorf("b held %d", n)
	}
}

func TestGenerations(t *testing.T) {
	c := newCache(t, 2, 16)
	gen := func(id int32) uint32 {
		g, ok := c.Generation(id)
		if !ok {
			t.Fatalf("block %d is unknown", id)
		}
		return g
	}
	id := alloc(t, c, 1, "a")
	g := gen(id[0])
	moved := func(what string) {
		t.Helper()
		if gen(id[0]) == g {
			t.Errorf("%s kept the generation", what)
		}
		g = gen(id[0])
	}
	c.Revoke(id, "a")
	moved("revoke")
	c.Insert(tokens(16, 0), "", id)
	c.Release(id, "a")
	moved("release into the cache")
	c.Clear()
	moved("clear")
	if got := alloc(t, c, 2, "b"); c.Generations(got)[slices.Index(got, id[0])] != g {
		t.Error("allocation moved the generation")
	}
	c.Quarantine(id, "b")
	moved("quarantine")
	check(t, c)
	if _, err := c.Alloc(1, "c"); !errors.Is(err, kvcache.ErrNoSpace) {
		t.Errorf("a quarantined block was given out: %v", err)
	}
	h := c.Holders()
	if len(h) != 2 || h[1].State != kvcache.StateQuarantined || !slices.Equal(h[1].Blocks, id) {
		t.Errorf("holders: %+v", h)
	}
	c.ReleaseAll("b")
	if s := c.Stats(); s.Quarantined != 1 || s.Free != 1 {
		t.Errorf("stats: %+v", s)
	}
	c.Unquarantine(id, "b")
	moved("unquarantine")
	if _, ok := c.Generation(2); ok {
		t.Error("a block outside the pool has a generation")
	}
}

// TestQuarantineShared: another holder of quarantined blocks may release them before or
// after the quarantine ends; they are given out once both have happened.
func TestQuarantineShared(t *testing.T) {
	for _, first := range []string{"the holder", "the quarantine"} {
		c := newCache(t, 2, 16)
		id := alloc(t, c, 1, "a")
		c.Retain(id, "b")
		c.Quarantine(id, "a")
		check(t, c)
		if s := c.Stats(); s.Quarantined != 1 || s.Held != 0 || s.Free != 1 {
			t.Errorf("stats: %+v", s)
		}
		if c.Insert(tokens(16, 0), "", id); c.Stats().Entries > 0 {
			t.Error("a block in quarantine is in the index")
		}
		ends := []func(){func() { c.Release(id, "b") }, func() { c.Unquarantine(id, "a") }}
		if first == "the quarantine" {
			slices.Reverse(ends)
		}
		ends[0]()
		check(t, c)
		if _, err := c.Alloc(2, "c"); !errors.Is(err, kvcache.ErrNoSpace) {
			t.Errorf("%s ends first: the block was given out: %v", first, err)
		}
		ends[1]()
		check(t, c)
		alloc(t, c, 2, "c")
	}
}

func TestMisusePanics(t *testing.T) {
	f := func(what, want string, do func(c *kvcache.Cache, held []int32)) {
		t.Helper()
		c := newCache(t, 4, 16)
		held := alloc(t, c, 1, "a")
		defer func() {
			if p := fmt.Sprint(recover()); !strings.Contains(p, want) {
				t.Errorf("%s: panic is %q, want %q", what, p, want)
			}
			c.Stats() // not locked for ever
		}()
		do(c, held)
	}
	f("foreign release", "does not hold", func(c *kvcache.Cache, held []int32) { c.Release(held, "b") })
	f("double release", "does not hold", func(c *kvcache.Cache, held []int32) { c.Release(held, "a"); c.Release(held, "a") })
	f("outside", "block 9 of 4", func(c *kvcache.Cache, _ []int32) { c.Retain([]int32{9}, "a") })
	f("retain of free", "nobody holds", func(c *kvcache.Cache, _ []int32) { c.Retain([]int32{3}, "a") })
	f("insert of free", "nobody holds", func(c *kvcache.Cache, _ []int32) { c.Insert(tokens(16, 0), "", []int32{3}) })
	f("foreign revoke", "does not hold", func(c *kvcache.Cache, held []int32) { c.Revoke(held, "b") })
	f("quarantine of two", "2 references", func(c *kvcache.Cache, held []int32) { c.Retain(held, "a"); c.Quarantine(held, "a") })
	f("foreign quarantine", "0 references", func(c *kvcache.Cache, held []int32) { c.Quarantine(held, "b") })
	f("shelve of two's", "2 references", func(c *kvcache.Cache, held []int32) { c.Retain(held, "b"); c.Shelve(kvcache.Hash{1}, held, "a") })
	f("shelve of what prefixes lead to", "indexed true", func(c *kvcache.Cache, held []int32) {
		c.Insert(tokens(16, 0), "", held)
		c.Shelve(kvcache.Hash{1}, held, "a")
	})
	f("foreign unquarantine", "not in quarantine", func(c *kvcache.Cache, held []int32) { c.Unquarantine(held, "a") })
}

// recorder keeps the set of hashes that the events say are indexed.
type recorder struct {
	t    testing.TB
	have map[kvcache.Hash]bool
}

func (r *recorder) KVEvent(ev kvcache.Event) {
	switch ev.Kind {
	case kvcache.Stored:
		if r.have[ev.Hash] {
			r.t.Errorf("%x stored twice", ev.Hash)
		}
		if unit := len(ev.Tokens); unit == 0 || unit%16 != 0 || unit%len(ev.Blocks) != 0 || ev.Pos%unit != 0 || (ev.Parent == kvcache.Hash{}) != (ev.Pos == 0) {
			r.t.Errorf("%x: %d tokens in %d blocks from %d", ev.Hash, unit, len(ev.Blocks), ev.Pos)
		}
		r.have[ev.Hash] = true
	case kvcache.Removed:
		if !r.have[ev.Hash] {
			r.t.Errorf("%x removed before it was stored", ev.Hash)
		}
		delete(r.have, ev.Hash)
	case kvcache.Cleared:
		clear(r.have)
	}
}

func TestEventsInOrder(t *testing.T) {
	r := &recorder{t: t, have: make(map[kvcache.Hash]bool)}
	c := newListened(t, 4, 16, r)
	cached(t, c, tokens(48, 0))
	if len(r.have) != 3 {
		t.Errorf("%d units told", len(r.have))
	}
	ids := alloc(t, c, 3, "a")
	if len(r.have) != 1 {
		t.Errorf("%d units left", len(r.have))
	}
	c.Release(ids, "a")
	c.Clear()
	if len(r.have) != 0 {
		t.Errorf("%d units after clear", len(r.have))
	}
}
