package tier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kvlayout"
)

// TestHost: what the pool lost comes back from host memory.
func TestHost(t *testing.T) {
	for _, blockTokens := range []int{1, 16, 64, 256} {
		t.Run(fmt.Sprint(blockTokens), func(t *testing.T) {
			cfg := config("")
			cfg.HostBytes = 1 << 20
			unit := max(blockTokens, 16)
			r := newRigOf(t, cfg, 16*unit/blockTokens, blockTokens)
			tokens := prompt(1, 3*unit)
			r.run(tokens, 0)
			r.saved(tierHost, 3)
			r.load(tokens, 0) // all there
			r.cache.Clear()
			r.load(tokens, 3*unit)
			r.run(tokens, 3*unit)
			r.load(prompt(2, 3*unit)[:unit-1], 0)
		})
	}
}

// TestSSD: the same from the SSD, also after a restart, not after another
// model's.
func TestSSD(t *testing.T) {
	cfg := config(filepath.Join(t.TempDir(), "kv"))
	tokens := prompt(1, 96)
	r := newRig(t, cfg)
	r.run(tokens, 0)
	r.saved(tierSSD, 6)
	r.cache.Clear()
	r.host.Clear()
	r.load(tokens, 96)
	r.run(tokens, 96)
	if r.value("loaded_units_total", tierSSD) != 6 {
		t.Error("not from the SSD")
	}
	if _, err := New(t.Context(), cfg.levels(nil), r.pool, 1, r.tiers.log, r.reg); !errors.Is(err, syscall.EWOULDBLOCK) {
		t.Errorf("two workers in one folder: %v", err)
	}
	r.close()

	for range 20 { // restarts cost nothing
		r = newRig(t, cfg)
		r.load(tokens, 96)
		r.run(tokens, 96)
		r.close()
	}
	r = newRig(t, cfg)
	more := prompt(700, 96)
	r.run(more, 0)
	r.saved(tierSSD, 12)
	r.close()
	r = newRig(t, cfg)
	r.load(tokens, 96)
	r.load(more, 96)
	if err := r.tiers.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	r.cache.Clear()
	r.load(tokens, 0)
	r.close()
	r = newRig(t, cfg)
	r.load(tokens, 0)
	r.run(tokens, 0)
	r.close()

	cfg.Identity = "another model"
	r = newRig(t, cfg)
	r.load(tokens, 0)
	if left, _ := filepath.Glob(filepath.Join(cfg.Dir, "*.xpydkv")); len(left) != 1 {
		t.Errorf("%d segments, want one new one", len(left))
	}
}

// TestSalt: a prefix is found only under the salt it was stored with.
func TestSalt(t *testing.T) {
	r := newRig(t, config(""))
	tokens := prompt(1, 64)
	if _, err := r.compute(tokens, "one", "run"); err != nil {
		t.Fatal(err)
	}
	r.saved(tierHost, 4)
	r.cache.Clear()
	for salt, want := range map[string]int{"": 0, "two": 0, "one": 64} {
		if n := r.tiers.Load(t.Context(), tokens, salt, 64); n != want {
			t.Errorf("salt %q: %d tokens, want %d", salt, n, want)
		}
	}
}

// TestCorrupt changes a byte of what a tier has, or puts a record astray.
func TestCorrupt(t *testing.T) {
	for _, policy := range []WritePolicy{Through, Back} {
		t.Run(string(policy), func(t *testing.T) { testCorrupt(t, policy) })
	}
}

func testCorrupt(t *testing.T, policy WritePolicy) {
	tokens := prompt(1, 96)
	for name, harm := range map[string]func(r *rig, unit kvcache.Hash){
		"host": func(r *rig, unit kvcache.Hash) {
			l := r.host.Get(unit)
			l.Record()[headerSize+100] ^= 4
			l.Release()
			r.disk.Forget(unit)
		},
		"host digest": func(r *rig, unit kvcache.Hash) {
			l := r.host.Get(unit)
			l.Record()[r.tiers.shape.ByLayer[0].DigestsAt] ^= 1
			l.Release()
		},
		"ssd": func(r *rig, unit kvcache.Hash) {
			r.host.Clear()
			r.edit(r.places()[unit], headerSize+100, []byte{0xff})
		},
		"ssd header": func(r *rig, unit kvcache.Hash) {
			r.host.Clear()
			r.edit(r.places()[unit], 9, []byte{0xff})
		},
		"ssd astray": func(r *rig, unit kvcache.Hash) { // a whole record of another unit
			r.host.Clear()
			for other, p := range r.places() {
				if other != unit {
					r.edit(r.places()[unit], 0, r.peek(p))
					return
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config(t.TempDir())
			cfg.Write = policy
			r := newRig(t, cfg)
			r.run(tokens, 0)
			r.sink()
			r.saved(tierSSD, 6)
			r.cache.Clear()
			chain := r.cache.NewChain("")
			chain.Extend(tokens)
			harm(r, chain.Name(64))
			r.load(tokens, 48)
			r.run(tokens, 48) // checks the rows of the first 48, and makes the others
			r.sink()
			r.saved(tierSSD, 6)
			r.cache.Clear()
			r.load(tokens, 96)
			r.run(tokens, 96)
			if n := r.value("corrupt_units_total", "") + r.value("io_errors_total", "read"); n != 1 {
				t.Errorf("%v units reported", n)
			}
		})
	}
}

// TestTorn: a restart over segments that a crash has left, cut at every length.
func TestTorn(t *testing.T) {
	dir := t.TempDir()
	cfg := config(dir)
	tokens := prompt(1, 96)
	r := newRig(t, cfg)
	r.run(tokens, 0)
	r.saved(tierSSD, 6)
	path := r.segments()[0]
	size := int64(page + 6*r.tiers.shape.Record())
	r.close()
	whole, err := os.ReadFile(path)
	if err != nil || int64(len(whole)) != size {
		t.Fatalf("%d bytes, want %d: %v", len(whole), size, err)
	}
	for _, n := range []int{0, 1, 100, page - 1, page, page + 1, page + headerSize, 2*page - 1, 3*page + 17, 5 * page, len(whole) - 1} {
		cfg.Dir = t.TempDir()
		if err := os.WriteFile(filepath.Join(cfg.Dir, filepath.Base(path)), whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		r := newRig(t, cfg)
		got := r.tiers.Load(t.Context(), tokens, "", len(tokens))
		if most := max(0, (n-page)/page*16); got > most {
			t.Errorf("%d bytes: %d tokens loaded, there were %d", n, got, most)
		}
		r.run(tokens, got)
		r.close()
	}
}

// TestLog: a full log loses its oldest units, but not those that were read.
func TestLog(t *testing.T) {
	cfg := config(t.TempDir())
	cfg.DirBytes = 16 * page // four segments of four units
	r := newRig(t, cfg)
	first := prompt(1000, 32)
	r.run(first, 0)
	r.saved(tierSSD, 2)
	for n := range 40 {
		r.cache.Clear()
		r.run(prompt(n, 128), 0)
		r.quiet()
		r.cache.Clear()
		r.host.Clear()
		r.load(first, 32) // each round, so it stays
	}
	if s := r.tiers.Stats()[1]; s.Units > s.Capacity || s.Capacity != 16 || s.Evicted == 0 {
		t.Errorf("%+v", s)
	}
	if files, _ := filepath.Glob(filepath.Join(cfg.Dir, "*.xpydkv")); len(files) > 5 {
		t.Errorf("%d segments", len(files))
	}
}

// TestShared: fifty requests for one prompt load it once.
func TestShared(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.saved(tierSSD, 6)
	r.cache.Clear()
	r.host.Clear()
	var wg sync.WaitGroup
	var loaded atomic.Int64
	for i := range 50 {
		wg.Go(func() {
			loaded.Add(int64(r.tiers.Load(t.Context(), tokens, "", 96)))
			if hit, err := r.compute(tokens, "", fmt.Sprint("run-", i)); err != nil || hit != 96 {
				t.Errorf("%d tokens were there: %v", hit, err)
			}
		})
	}
	wg.Wait()
	if loaded.Load() != 96 {
		t.Errorf("%d tokens loaded in all", loaded.Load())
	}
}

// TestNoRoom: loads take no blocks that somebody waits for, and do not wait themselves.
func TestNoRoom(t *testing.T) {
	cfg := config("")
	cfg.LoadBlocks = 3
	r := newRig(t, cfg)
	tokens := prompt(1, 64)
	r.run(tokens, 0)
	r.saved(tierHost, 4)
	r.cache.Clear()
	r.load(tokens, 48) // no more than loads may take
	r.cache.Clear()
	r.tiers.cfg.LoadBlocks = 4
	all, err := r.cache.Alloc(61, "others")
	if err != nil {
		t.Fatal(err)
	}
	r.load(tokens, 0)
	r.cache.Release(all, "others")
	ctx, cancel := context.WithCancel(t.Context())
	all, _ = r.cache.Alloc(10, "others")
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.cache.ReserveWait(ctx, &kvcache.Chain{}, 0, 64, "a waiter")
	}()
	soon(t, "it waits", func() bool { return r.cache.Stats().Waiters > 0 })
	r.load(tokens, 0)
	cancel()
	come(t, "it has left", done)
	r.cache.Release(all, "others")
	r.load(tokens, 64)
}

// TestMeasureHost: units go out of a pool and come back, verified, whatever the size of
// a block.
func TestMeasureHost(t *testing.T) {
	for _, bt := range []int{1, 16, 64} {
		l := kvlayout.Plain(2, 2, 8, bt, "f32")
		pool, err := cpu.NewPool(l, host.MeasureBlocks(l, 64<<10))
		if err != nil {
			t.Fatal(err)
		}
		if bulk {
			mem := newMemPool(host.MeasureBlocks(newMemPool(1, bt).layout, 64<<10), bt)
			pool, l = &fakeDevice{fakePool: mem}, mem.layout
		}
		r, err := host.Measure(t.Context(), l, pool, 64<<10, 3, nil)
		if err != nil || r.Units < 2 || r.Units*r.UnitBytes > 64<<10 || r.BlockTokens != bt {
			t.Fatalf("%+v, %v", r, err)
		}
		for _, rates := range [][]float64{r.Out, r.In, r.Both} {
			if len(rates) != 3 || slices.Min(rates) <= 0 {
				t.Errorf("block of %d: %v bytes a second", bt, rates)
			}
		}
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	l := kvlayout.Plain(1, 1, 8, 16, "f32")
	pool, err := cpu.NewPool(l, host.MeasureBlocks(l, 1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := host.Measure(over, l, pool, 1, 1, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestMeasureProgress: measuring reports its progress, and ends with its context at any
// point.
func TestMeasureProgress(t *testing.T) {
	const total = 2 * level.MeterStep
	l := kvlayout.Plain(2, 2, 64, 16, "f32")
	measure := map[string]func(context.Context, level.Progress) error{
		"disk": func(ctx context.Context, p level.Progress) error {
			_, err := ssd.Measure(ctx, filepath.Join(t.TempDir(), "kv"), 1<<20, total, 2, ssdIO, p)
			return err
		},
		"host": func(ctx context.Context, p level.Progress) error {
			pool, err := cpu.NewPool(l, host.MeasureBlocks(l, total))
			if err == nil {
				_, err = host.Measure(ctx, l, pool, total, 1, p)
			}
			return err
		},
	}
	for where, phases := range map[string][]string{"host": {"fill", "move"}, "disk": {"write", "read"}} {
		var all []string
		if err := measure[where](t.Context(), func(what string, done, of int64) {
			if done < level.MeterStep || done > of || of < total*8/10 {
				t.Errorf("%s: %d of %d", what, done, of)
			}
			all = append(all, what)
		}); err != nil || !slices.Equal(slices.Compact(all), phases) {
			t.Errorf("%s: said %v: %v", where, all, err)
		}
		for _, phase := range phases {
			ctx, cancel := context.WithCancel(t.Context())
			var last string
			said := 0
			err := measure[where](ctx, func(what string, _, _ int64) {
				if last = what; what == phase {
					said++
					cancel()
				}
			})
			if !errors.Is(err, context.Canceled) || last != phase || said != 1 {
				t.Errorf("%s: ended while it said %s, which it did %d times: %s, %v", where, phase, said, last, err)
			}
		}
	}
}

// TestMeasureDisk: the benchmark moves as many bytes as it reports, and leaves nothing
// behind.
func TestMeasureDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	r, err := ssd.Measure(t.Context(), dir, 64<<10, 4<<20, 4, ssdIO, nil)
	if err != nil || r.Units != 64 || r.Write <= 0 || r.Read <= 0 {
		t.Fatalf("%+v %v", r, err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is left: %v", err)
	}
	if _, err := ssd.Measure(t.Context(), filepath.Dir(dir), 64<<10, 4<<20, 4, ssdIO, nil); err != nil {
		t.Errorf("an empty folder: %v", err)
	}
	taken := t.TempDir()
	if err := os.WriteFile(filepath.Join(taken, "thesis.txt"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ssd.Measure(t.Context(), taken, 64<<10, 4<<20, 4, ssdIO, nil); err == nil {
		t.Error("measured in a folder with files of others")
	}
	if _, err := os.Stat(filepath.Join(taken, "thesis.txt")); err != nil {
		t.Error(err)
	}
	for _, bad := range []int{0, 100, 65 << 9} {
		if _, err := ssd.Measure(t.Context(), dir, bad, 4<<20, 4, ssdIO, nil); err == nil {
			t.Errorf("units of %d bytes", bad)
		}
	}
}

// TestLoadBlocks: loads that begin together take no more blocks than the bound for all
// loads.
func TestLoadBlocks(t *testing.T) {
	cfg := config("")
	cfg.LoadBlocks = 8
	r := newRig(t, cfg)
	_, first, _ := r.tiers.admit(6)
	_, second, _ := r.tiers.admit(6)
	if _, _, ok := r.tiers.admit(1); first != 6 || second != 2 || ok {
		t.Errorf("%d and %d of 8 blocks, and more: %t", first, second, ok)
	}
	r.tiers.settle(-8)
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.quiet()
	for range 3 { // each gives back what it took
		r.cache.Clear()
		r.load(tokens, 96)
		if r.tiers.taken != 0 {
			t.Errorf("%d blocks are still taken", r.tiers.taken)
		}
	}
}

// TestQuotaUnused: loads that move nothing, for lack of blocks or because nothing comes,
// leave load_quota as it was.
func TestQuotaUnused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config("")
		cfg.LoadQuota = 10 * page // one load
		r := newRig(t, cfg)
		defer r.close()
		tokens := prompt(1, 160)
		r.run(tokens, 0)
		r.quiet()
		r.cache.Clear()
		time.Sleep(time.Second)
		if _, err := r.cache.Alloc(60, "busy"); err != nil {
			t.Fatal(err)
		}
		for range 6 {
			r.load(tokens, 0)
		}
		r.cache.ReleaseAll("busy")
		r.load(tokens, 160)
		if n := r.value("no_quota_total", ""); n != 0 {
			t.Errorf("%v loads were cut short", n)
		}
		r.cache.Clear()
		r.load(tokens, 0)
		r.tiers.credit(1<<20, page)
		r.load(tokens, 160) // credit is no more than a second's worth
		r.cache.Clear()
		r.load(tokens, 0)
	})
}

// TestTTLAhead: the age of a unit that was saved while the clock was ahead counts from
// the restart that found it.
func TestTTLAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t.TempDir())
		cfg.DirIO = IOPread // see TestTTL
		r := newRig(t, cfg)
		tokens := prompt(1, 16)
		r.run(tokens, 0)
		r.quiet()
		key := r.unit(tokens, 16)
		l := r.host.Peek(key)
		u, rec := l.Unit(), record()
		copy(rec, l.Record())
		l.Release()
		r.disk.Forget(key)
		u.Born = time.Now().Add(10 * 365 * 24 * time.Hour)
		if ok, err := r.disk.Save(t.Context(), u, rec); !ok || err != nil {
			t.Fatal(ok, err)
		}
		r.close()
		cfg.TTL = time.Hour
		r = newRig(t, cfg)
		defer r.close()
		r.load(tokens, 16)
		r.run(tokens, 16)
		r.cold()
		time.Sleep(cfg.TTL)
		if r.disk.Has(key) {
			t.Errorf("found after its time, born %v", r.disk.Born(key))
		}
	})
}

// hugePool says that a unit has 4 GiB.
type hugePool struct{ *memPool }

func (p hugePool) Layout() kvlayout.Layout {
	return kvlayout.Plain(2, 2, 1<<28, 16, kvlayout.F32)
}

// TestHugeUnit: units that are too large are refused before anything is taken.
func TestHugeUnit(t *testing.T) {
	_, err := New(t.Context(), config("").levels(nil), hugePool{newMemPool(8, 16)}, 1, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err == nil || !strings.Contains(err.Error(), "4 GiB") {
		t.Error(err)
	}
}
