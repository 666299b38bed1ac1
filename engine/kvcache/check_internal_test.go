package kvcache

import (
	"strings"
	"testing"
)

// TestCheckFinds: Check reports each thing that may be wrong, and nothing of a cache
// that is right.
func TestCheckFinds(t *testing.T) {
	for name, c := range map[string]struct {
		change func(c *Cache, e *entry) // e is the last of a chain of three that nobody holds
		want   string
	}{
		"nothing":                 {func(*Cache, *entry) {}, ""},
		"an empty account":        {func(c *Cache, _ *entry) { c.owners["x"] = &holding{} }, "empty account"},
		"free twice":              {func(c *Cache, _ *entry) { c.free = append(c.free, c.free[0]) }, "free twice"},
		"free and cached":         {func(c *Cache, e *entry) { c.free = append(c.free, e.blocks[0]) }, "in 2 states"},
		"in no state":             {func(c *Cache, _ *entry) { c.free = c.free[1:] }, "in 0 states"},
		"a reference nobody has":  {func(c *Cache, _ *entry) { c.blocks[c.free[0]].refs++; c.free = c.free[1:] }, "owners have 0"},
		"a quarantine nobody has": {func(c *Cache, _ *entry) { c.blocks[c.free[0]].quarantined = true; c.free = c.free[1:] }, "owners say false"},
		"indexed though free":     {func(c *Cache, e *entry) { b := c.free[len(c.free)-1]; c.blocks[b].entry, c.blocks[b].refs = e, 0 }, "in 2 states"},
		"indexed in quarantine": {func(c *Cache, e *entry) {
			b := e.blocks[0]
			c.blocks[b].refs, c.blocks[b].quarantined = 1, true
			c.owners["x"] = &holding{refs: map[int32]int{b: 1}, quarantined: map[int32]bool{b: true}}
		}, "not in use"},
		"of an entry that is gone":     {func(c *Cache, e *entry) { delete(c.index, e.hash) }, "not in the index"},
		"count of cached blocks":       {func(c *Cache, _ *entry) { c.cached++ }, "blocks cached, counted"},
		"count of those in quarantine": {func(c *Cache, _ *entry) { c.quarantined++ }, "in quarantine, counted"},
		"in quarantine twice": {func(c *Cache, e *entry) {
			for _, owner := range []string{"x", "y"} {
				c.owners[owner] = &holding{quarantined: map[int32]bool{e.blocks[0]: true}}
			}
		}, "in quarantine twice"},
		"as many waiters as may be":  {func(c *Cache, _ *entry) { c.waiters = make([]*waiter, c.cfg.MaxWaiters) }, ""},
		"too many waiters":           {func(c *Cache, _ *entry) { c.waiters = make([]*waiter, c.cfg.MaxWaiters+1) }, "waiters, at most"},
		"under a name and the index": {func(c *Cache, e *entry) { c.shelf[e.hash] = e }, "is in the index"},
		"of another entry":           {func(c *Cache, e *entry) { c.blocks[e.blocks[0]].entry = c.index[e.parent] }, "does not know"},
		"another hash":               {func(_ *Cache, e *entry) { e.hash[0]++ }, "not in the index"},
		"too few blocks":             {func(_ *Cache, e *entry) { e.blocks = nil }, "0 blocks"},
		"count of idle blocks":       {func(_ *Cache, e *entry) { e.idle++ }, "blocks idle, counted"},
		"beyond the heap":            {func(c *Cache, e *entry) { e.pos = len(c.idle) }, "heap position"},
		"elsewhere in the heap":      {func(c *Cache, e *entry) { e.pos = (e.pos + 1) % len(c.idle) }, "heap position"},
		"a leaf that is none":        {func(_ *Cache, e *entry) { e.leaf = !e.leaf }, "leaf"},
		"count of cold blocks":       {func(c *Cache, _ *entry) { c.coldBlocks++ }, "cold"},
		"a parent too many":          {func(c *Cache, _ *entry) { c.kids[Hash{9}] = 1 }, "parents, counted"},
		"count of children":          {func(c *Cache, e *entry) { c.kids[e.parent]++ }, "children, counted"},
		"count of cold children":     {func(c *Cache, _ *entry) { c.coldKids[Hash{9}] = 1 }, "parents of cold entries"},
		"the order of eviction": {func(c *Cache, _ *entry) {
			h := c.idle
			h[0], h[1], h[0].pos, h[1].pos = h[1], h[0], h[1].pos, h[0].pos
		}, "out of order"},
	} {
		cache, err := New(Config{Blocks: 8, BlockTokens: Grain})
		if err != nil {
			t.Fatal(err)
		}
		ids, err := cache.Alloc(3, "r")
		if err != nil {
			t.Fatal(err)
		}
		cache.Insert(make([]int32, 3*Grain), "", ids)
		cache.Release(ids, "r")
		if err := cache.Check(); err != nil {
			t.Fatal(err)
		}
		c.change(cache, cache.blocks[ids[2]].entry)
		if err := cache.Check(); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}
