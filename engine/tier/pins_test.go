package tier

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestPin: what is pinned stays in host memory whatever comes, in each order,
// until its time is over or it is unpinned.
func TestPin(t *testing.T) {
	for _, order := range []Eviction{LRU, LFU, S3FIFO} {
		t.Run(string(order), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := config("")
				cfg.PinShare, cfg.Eviction = 0.25, order // 4 of 16 units
				r := newRig(t, cfg)
				storm := func() {
					t.Helper()
					for i := range 12 {
						r.run(prompt(5000+256*i, 64), 0)
						r.quiet()
					}
					if err := r.host.Check(nil); err != nil {
						t.Fatal(err)
					}
					r.cache.Clear()
				}
				first, second := prompt(1, 32), prompt(300, 32)
				r.run(first, 0)
				r.quiet()
				p, err := r.tiers.Pin(first, "", time.Hour)
				if err != nil || p.Units != 2 || p.Host != 2 || p.Tokens != 32 {
					t.Fatalf("%+v %v", p, err)
				}
				q, err := r.tiers.Pin(second, "", 2*time.Hour) // before it is computed
				if err != nil || q.Host != 0 {
					t.Fatalf("%+v %v", q, err)
				}
				if _, err := r.tiers.Pin(prompt(600, 32), "", time.Hour); !errors.Is(err, ErrPinned) {
					t.Errorf("a fifth unit is pinned: %v", err)
				}
				if _, err := r.tiers.Pin(prompt(1, 15), "", time.Hour); !errors.Is(err, ErrShort) {
					t.Error(err)
				}
				r.run(second, 0)
				storm()
				r.load(first, 32)
				r.load(second, 32)
				r.cache.Clear()
				if list := r.tiers.Pins(); len(list) != 2 || list[0].ID != p.ID || list[1].Host != 2 {
					t.Errorf("%+v", list)
				}
				time.Sleep(90 * time.Minute)
				synctest.Wait()
				if list := r.tiers.Pins(); len(list) != 1 || list[0].ID != q.ID {
					t.Errorf("after one's time: %+v", list)
				}
				storm()
				if order == LRU { // the others keep what was used
					r.load(first, 0)
				}
				if q2, err := r.tiers.Pin(second, "", 2*time.Hour); err != nil || q2.ID != q.ID { // renewed
					t.Errorf("%+v %v", q2, err)
				}
				time.Sleep(90 * time.Minute)
				storm()
				r.load(second, 32)
				r.cache.Clear()
				if id := r.tiers.PinID(second, ""); id != q.ID || (*Tiers)(nil).Unpin(id) || r.tiers.Unpin(id+"z") || !r.tiers.Unpin(id) || r.tiers.Unpin(id) || r.tiers.Unpin("nonsense") {
					t.Errorf("unpin %s", id)
				}
				storm()
				if order == LRU {
					r.load(second, 0)
				}
				if n, _ := r.tiers.PinnedUnits(); n != 0 || len(r.tiers.Pins()) != 0 {
					t.Errorf("%d units pinned", n)
				}
				r.close()
			})
		})
	}
}

// TestPinPolicies: a pin copies what only the pool has, and what is computed
// later, whatever the write policy; the SSD's log rewrites it.
func TestPinPolicies(t *testing.T) {
	for _, p := range []WritePolicy{Through, Selective, Back} {
		t.Run(string(p), func(t *testing.T) {
			cfg := policy(p, t.TempDir())
			cfg.PinShare, cfg.DirBytes = 0.5, 32*page // 8 units may be pinned; segments of 8
			r := newRig(t, cfg)
			first, second := prompt(1, 64), prompt(300, 64)
			r.run(first, 0)
			for _, tokens := range [][]int32{first, second} {
				if _, err := r.tiers.Pin(tokens, "", time.Hour); err != nil {
					t.Fatal(err)
				}
			}
			r.run(second, 0)
			r.quiet()
			if list := r.tiers.Pins(); list[0].Host != 4 || list[1].Host != 4 {
				t.Fatalf("%+v", list)
			}
			for i := range 60 {
				r.cache.Clear()
				for range 3 {
					if _, err := r.compute(prompt(5000+256*i, 64), "", "run"); err != nil {
						t.Fatal(err)
					}
				}
				r.sink()
				r.quiet()
			}
			if s := r.tiers.Stats()[1]; p != Selective && s.Evicted < 100 {
				t.Errorf("%+v: the log has not gone round", s)
			}
			r.cache.Clear()
			r.host.Clear() // a fault, say
			r.load(first, 64)
			r.load(second, 64)
			r.run(second, 64)
		})
	}
}

// TestTTL: a unit that is too old is not used, in any tier, pinned or not, also after a
// restart.
func TestTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t.TempDir())
		cfg.TTL, cfg.PinShare = time.Hour, 0.5
		cfg.DirIO = IOPread // a goroutine that waits in the kernel holds this bubble's time up
		r := newRig(t, cfg)
		tokens := prompt(1, 64)
		r.run(tokens, 0)
		r.saved(tierSSD, 4)
		r.cache.Clear()
		time.Sleep(40 * time.Minute)
		r.host.Clear()
		r.load(tokens, 64) // from the SSD, with the age that it has
		for i, s := range r.tiers.Report() {
			if s.OldestS != 2400 || s.MeanS != 2400 || s.Units != 4 || s.Loaded != uint64(4*i) {
				t.Errorf("%+v", s)
			}
		}
		r.cache.Clear()
		if _, err := r.tiers.Pin(tokens, "", 5*time.Hour); err != nil {
			t.Error(err)
		}
		time.Sleep(30 * time.Minute)
		r.load(tokens, 0)
		r.saved(tierHost, 3) // the first was looked for
		r.saved(tierSSD, 3)
		r.run(tokens, 0) // and is new again
		r.quiet()
		r.cache.Clear()
		r.load(tokens, 64)
		r.close()
		time.Sleep(2 * time.Hour)
		r = newRig(t, cfg)
		r.load(tokens, 0)
		r.close()
	})
}
