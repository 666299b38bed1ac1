package tier

import (
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// TestTenantsSSD: who has its share of the SSD makes room from its own, also
// after a restart; the log does not move for it.
func TestTenantsSSD(t *testing.T) {
	cfg := config(filepath.Join(t.TempDir(), "kv"))
	cfg.TenantShare, cfg.DirBytes = 0.25, 32*page // 8 of 32 units
	var r *rig
	compute := func(n int, salt string) {
		t.Helper()
		if _, err := r.compute(prompt(n, 32), salt, "run"); err != nil {
			t.Fatal(err)
		}
		r.quiet()
		if err := r.tiers.disk.check(); err != nil {
			t.Fatal(err)
		}
	}
	loaded := func(n int, salt string) int {
		t.Helper()
		r.cache.Clear()
		r.tiers.host.clear()
		return r.tiers.Load(t.Context(), prompt(n, 32), salt, 32)
	}
	for round := range 2 {
		r = newRig(t, cfg)
		for i := range 3 {
			compute(256*i, "modest")
		}
		for i := range 40 {
			compute(256*(100+50*round+i), "greedy")
		}
		if s := r.tiers.Stats()[1]; s.Units != 14 {
			t.Errorf("%+v, want 6 units and 8", s)
		}
		for i := range 3 {
			if n := loaded(256*i, "modest"); n != 32 {
				t.Errorf("round %d: the modest one lost its prompt %d", round, i)
			}
		}
		for i := 36; i < 40; i++ {
			if n := loaded(256*(100+50*round+i), "greedy"); n != 32 {
				t.Errorf("round %d: the greedy one's prompt %d is not there", round, i)
			}
		}
		if n := r.value("tenants", tierSSD); n != 2 {
			t.Errorf("%v tenants", n)
		}
		if files, _ := filepath.Glob(filepath.Join(cfg.Dir, "*.xpydkv")); len(files) > 2 {
			t.Errorf("%d segments for 14 units", len(files))
		}
		r.close()
	}
}

// TestTenantsFilled: writers that fill a tenant's share at once push none of its units
// out.
func TestTenantsFilled(t *testing.T) {
	cfg := config(t.TempDir())
	cfg.TenantShare, cfg.DirBytes = 0.125, 128*page // 16 of 128
	r := newRig(t, cfg)
	d := r.tiers.disk
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16)) // preempted in the midst of it, on few processors as well
	rounds := 200
	if underRace {
		rounds = 50
	}
	for round := range rounds {
		root := kvcache.Hash{byte(round), byte(round >> 8), 1}
		var all sync.WaitGroup
		for i := range d.limit {
			all.Go(func() {
				rec := aligned(d.shape.record())
				if ok, err := d.write(unit{key: kvcache.Hash{byte(round), byte(round >> 8), 2, byte(i)}, root: root, born: time.Now()}, rec); !ok || err != nil {
					t.Errorf("unit %d: written %t, %v", i, ok, err)
				}
			})
		}
		all.Wait()
		if d.over > 0 {
			t.Fatalf("round %d: %d units have made room", round, d.over)
		}
	}
	if err := d.check(); err != nil {
		t.Error(err)
	}
}

// TestTenantsInUse: units that are pinned, being read, or were read lately are
// not those that make room; without another the new one is left out.
func TestTenantsInUse(t *testing.T) {
	cfg := config(t.TempDir())
	cfg.TenantShare, cfg.PinShare, cfg.DirBytes = 0.25, 0.25, 16*page // 4 of 16
	r := newRig(t, cfg)
	d := r.tiers.disk
	at := func(i int) place { return d.index[kvcache.Hash{1, byte(i)}] }
	put := func(i int) bool {
		t.Helper()
		rec := aligned(d.shape.record())
		written, err := d.write(unit{key: kvcache.Hash{1, byte(i)}, root: kvcache.Hash{7}, born: time.Now()}, rec)
		if err == nil {
			err = d.check()
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
	d.pinned = func(k kvcache.Hash) bool { return k == kvcache.Hash{1, 1} }
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

// TestTornOver: a crash in the middle of overwriting a record leaves neither
// the old unit nor the new one, whichever half was written.
func TestTornOver(t *testing.T) {
	for name, keep := range map[string]func(old, now []byte) []byte{
		"only the header":     func(old, now []byte) []byte { return append(now[:headerSize:headerSize], old[headerSize:]...) },
		"all but the header":  func(old, now []byte) []byte { return append(old[:headerSize:headerSize], now[headerSize:]...) },
		"the beginning":       func(old, now []byte) []byte { return append(now[:500:500], old[500:]...) },
		"nothing but its end": func(old, now []byte) []byte { return append(old[:500:500], now[500:]...) },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config(filepath.Join(t.TempDir(), "kv"))
			cfg.TenantShare, cfg.DirBytes = 0.2, 16*page // 3 of 16
			r := newRig(t, cfg)
			old, now := prompt(0, 48), prompt(256, 48)
			read := func(p place) []byte {
				rec := aligned(r.tiers.shape.record())
				if _, err := p.seg.file.ReadAt(rec, r.tiers.disk.at(int(p.slot))); err != nil {
					t.Fatal(err)
				}
				return rec
			}
			chain := r.cache.NewChain("")
			chain.Extend(now)
			r.run(old, 0)
			r.saved(tierSSD, 3)
			before := map[place][]byte{}
			for _, p := range r.tiers.disk.index {
				before[p] = read(p)
			}
			r.run(now, 0)
			r.saved(tierSSD, 3)
			p := r.tiers.disk.index[chain.Name(16)]
			r.edit(p, 0, keep(before[p], read(p)))
			r.close()
			r = newRig(t, cfg)
			got := 0
			for _, tokens := range [][]int32{old, now} {
				n := r.tiers.Load(t.Context(), tokens, "", 48)
				r.run(tokens, n) // right rows
				got += n
			}
			if got > 32 { // a torn unit of the old prompt's middle may leave its beginning
				t.Errorf("%d tokens loaded", got)
			}
			r.quiet()
			if err := r.tiers.disk.check(); err != nil {
				t.Error(err)
			}
		})
	}
}
