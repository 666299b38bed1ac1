package tier

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/redis"
	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
)

// TestStage: the part of a prefix that lies on the SSD or in the shared store is first
// read into host memory, and takes no block; then all of the prefix arrives behind the
// step. A wrong unit ends it, is counted for the level it came from, and is gone.
func TestStage(t *testing.T) {
	for _, slow := range []string{tierSSD, tierStore} {
		for name, lacks := range map[string][]int{"end": {12, 13, 14, 15, 16, 17, 18, 19}, "middle": {3, 4, 9}, "all": all(20), "nothing": nil} {
			for _, bad := range []bool{false, true} {
				t.Run(fmt.Sprint(slow, " ", name, " bad ", bad), func(t *testing.T) { testStage(t, slow, lacks, bad && lacks != nil) })
			}
		}
	}
}

func all(n int) (list []int) {
	for i := range n {
		list = append(list, i)
	}
	return list
}

func testStage(t *testing.T, slow string, lacks []int, bad bool) {
	var store *redistest.Server
	tc := config("")
	if slow == tierSSD {
		tc = config(t.TempDir())
		tc.DirBytes = 8 << 20
	} else {
		store = redistest.Start(t)
		a, err := redis.ParseURL(store.URL())
		if err != nil {
			t.Fatal(err)
		}
		if tc.Store, err = redis.New(redis.Config{Address: a, Timeout: time.Minute, TTL: time.Hour, MaxValue: 1 << 16}); err != nil {
			t.Fatal(err)
		}
		tc.StoreWrites = true
	}
	tc.HostBytes = 1 << 20
	r := newStepRigOn(t, stepConfig(), 64, tc)
	tokens := talk(3, 321)
	want := r.cold(tokens, 8)
	chain := r.chain(tokens)
	for _, i := range lacks {
		r.host.Forget(chain.Name(16 * (i + 1)))
	}
	cached := 320
	if bad {
		first := slices.Min(lacks)
		cached = 16 * first
		r.spoilBelow(store, chain.Name(16*(first+1)))
	}
	if n := r.tiers.Stage(t.Context(), tokens, "", 320); n != 0 {
		t.Errorf("%d tokens loaded before the queue", n)
	}
	if s := r.cache.Stats(); s.Free != s.Blocks {
		t.Errorf("blocks were taken: %+v", s)
	}
	r.quiet() // a bad one is gone from the store
	h, s := r.begin(tokens, 8, nil)
	got, n, err := read(h)
	if err != nil || n != cached || !slices.Equal(got, want) {
		t.Errorf("%v with %d cached, want %v with %d: %v", got, n, want, cached, err)
	}
	if cached > 0 {
		come(t, "the prefix's end", come(t, "its begin", s.got).Done())
	}
	come(t, "the request's end", h.Done())
	r.quiet()
	one := &rig{t: t, reg: r.reg, tiers: r.tiers}
	if n := one.value("prefetched_units_total", slow); !bad && n != float64(len(lacks)) {
		t.Errorf("%v units prefetched, want %d", n, len(lacks))
	}
	if n := one.value("loaded_units_total", tierHost); n != float64(cached/16) {
		t.Errorf("%v units moved from host memory, want %d", n, cached/16)
	}
	wrong := 0.0
	if bad {
		wrong = 1
	}
	if n := one.value("corrupt_units_total", slow); n != wrong || one.value("corrupt_units_total", tierHost) != 0 {
		t.Errorf("%v wrong units counted in %s", n, slow)
	}
	if r.voided() != 0 {
		t.Error("a step computed with what had not been verified")
	}
}

// spoilBelow changes a byte of a unit's rows on the SSD or in the store.
func (r *stepRig) spoilBelow(store *redistest.Server, unit kvcache.Hash) {
	r.t.Helper()
	if store != nil {
		key := r.store.Key(unit)
		b := store.Value(key)
		b[headerSize+100] ^= 4
		store.Set(key, b)
		return
	}
	one := &rig{t: r.t, tiers: r.tiers, dir: r.dir}
	p := one.places()[unit]
	one.edit(p, headerSize+100, []byte{one.peek(p)[headerSize+100] ^ 4})
}

// TestPrefetch: a request waits for the SSD no longer than load_timeout, and what it did
// not wait for is still read: a request that is placed later finds all of it. So a
// timeout of a millisecond is best effort, and a long one waits for everything.
func TestPrefetch(t *testing.T) {
	if !bulk {
		t.Skip("the pool is host memory: nothing is read ahead")
	}
	const read, units = 10 * time.Millisecond, 40
	for wait, took := range map[time.Duration]time.Duration{time.Millisecond: time.Millisecond, time.Minute: 0} {
		synctest.Test(t, func(t *testing.T) {
			cfg := config(t.TempDir())
			cfg.DirIO, cfg.LoadTimeout, cfg.HostBytes, cfg.DirBytes = IOPread, wait, 1<<20, 2<<20
			r := newRig(t, cfg)
			defer r.close()
			tokens := prompt(1, 16*units)
			r.run(tokens, 0)
			r.saved(tierSSD, units)
			r.cold()
			var by atomic.Int64
			by.Store(int64(read))
			r.stall(&by)
			began := time.Now()
			r.tiers.Stage(t.Context(), tokens, "", len(tokens))
			if d := time.Since(began); took > 0 && d != took || took == 0 && (d < read || d > units*read) {
				t.Errorf("with load_timeout %v it waited for %v", wait, d)
			}
			if took == 0 {
				r.saved(tierHost, units)
			}
			time.Sleep(units * read)
			synctest.Wait()
			if n := r.tiers.Stats()[0].Units; n != units || len(r.tiers.stages) != 0 || r.value("prefetched_units_total", tierSSD) != units {
				t.Errorf("with load_timeout %v there are %d units, %v prefetched", wait, n, r.value("prefetched_units_total", tierSSD))
			}
			if held := r.cache.Holders(); len(held) > 0 {
				t.Errorf("blocks are held: %+v", held)
			}
		})
	}
}
