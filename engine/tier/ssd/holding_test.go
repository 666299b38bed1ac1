package ssd

import (
	"runtime"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// TestTenantsFilled: writers that fill a tenant's share at once push none of its units
// out.
func TestTenantsFilled(t *testing.T) {
	e := env(t)
	e.TenantShare = 0.125 // 16 of 128
	d := newDisk(t, 128, e, nil)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16)) // preempted in the midst of it, on few processors as well
	rounds := 200
	if testing.Short() {
		rounds = 50
	}
	for round := range rounds {
		root := kvcache.Hash{byte(round), byte(round >> 8), 1}
		var all sync.WaitGroup
		for i := range d.limit {
			all.Go(func() {
				if ok, err := put(t, d, level.Unit{Key: kvcache.Hash{byte(round), byte(round >> 8), 2, byte(i)}, Root: root}); !ok || err != nil {
					t.Errorf("unit %d: written %t, %v", i, ok, err)
				}
			})
		}
		all.Wait()
		if d.over > 0 {
			t.Fatalf("round %d: %d units have made room", round, d.over)
		}
	}
	if err := d.Check(nil); err != nil {
		t.Error(err)
	}
}

// TestTenantsInUse: units that are pinned, being read, or were read lately are
// not those that make room; without another the new one is left out.
func TestTenantsInUse(t *testing.T) {
	e := env(t)
	e.TenantShare = 0.25 // 4 of 16
	d := newDisk(t, 16, e, nil)
	at := func(i int) place { return d.index[kvcache.Hash{1, byte(i)}] }
	put := func(i int) bool {
		t.Helper()
		written, err := put(t, d, level.Unit{Key: kvcache.Hash{1, byte(i)}, Root: kvcache.Hash{7}})
		if err == nil {
			err = d.Check(nil)
		}
		if err != nil {
			t.Fatal(err)
		}
		return written
	}
	for i := range 4 {
		put(i)
	}
	first := at(0)
	e.Pinned = func(k kvcache.Hash) bool { return k == kvcache.Hash{1, 1} }
	at(2).seg.hits[at(2).slot] = true
	put(4)
	if at(4) != first || at(0) != (place{}) {
		t.Error("the oldest is still there")
	}
	put(5) // 1 is pinned, 2 was read: 3 goes
	if at(3) != (place{}) || at(1) == (place{}) || at(2) == (place{}) {
		t.Error("not the right one has gone")
	}
	d.mu.Lock()
	for i := range 6 {
		if p := at(i); p != (place{}) && i != 1 {
			d.reading[p]++
		}
	}
	d.mu.Unlock()
	if put(6) {
		t.Error("written over what is being read")
	}
	clear(d.reading)
	if !put(6) || at(1) == (place{}) {
		t.Error("the pinned one has gone")
	}
}
