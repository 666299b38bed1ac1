package tier

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/kvcache"
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
	r.tiers.host.clear()
	r.load(tokens, 96)
	r.run(tokens, 96)
	if r.value("loaded_units_total", tierSSD) != 6 {
		t.Error("not from the SSD")
	}
	if _, err := New(cfg, r.pool, 1, r.tiers.log, r.reg); !errors.Is(err, syscall.EWOULDBLOCK) {
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

// TestSalt: a prefix is its tenant's alone.
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
			l := r.tiers.host.get(unit)
			l.record()[headerSize+100] ^= 4
			l.release()
			r.tiers.disk.drop(unit)
		},
		"host digest": func(r *rig, unit kvcache.Hash) {
			l := r.tiers.host.get(unit)
			l.record()[headerSize+r.tiers.shape.rows()] ^= 1
			l.release()
		},
		"ssd": func(r *rig, unit kvcache.Hash) {
			r.tiers.host.clear()
			p := r.tiers.disk.index[unit]
			r.edit(p, headerSize+100, []byte{0xff})
		},
		"ssd header": func(r *rig, unit kvcache.Hash) {
			r.tiers.host.clear()
			r.edit(r.tiers.disk.index[unit], 9, []byte{0xff})
		},
		"ssd astray": func(r *rig, unit kvcache.Hash) { // a whole record of another unit
			r.tiers.host.clear()
			rec := aligned(r.tiers.shape.record())
			for other, p := range r.tiers.disk.index {
				if other != unit {
					if _, err := p.seg.file.ReadAt(rec, r.tiers.disk.at(int(p.slot))); err != nil {
						r.t.Fatal(err)
					}
				}
			}
			r.edit(r.tiers.disk.index[unit], 0, rec)
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

// edit overwrites bytes of a record behind the tier's back.
func (r *rig) edit(p place, off int, b []byte) {
	f, err := os.OpenFile(p.seg.path, os.O_WRONLY, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(b, r.tiers.disk.at(int(p.slot))+int64(off)); err != nil {
		r.t.Fatal(err)
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
	path := r.tiers.disk.log[0].path
	size := int64(page + 6*r.tiers.shape.record())
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

// slowFile is a disk that answers late, or has no room.
type slowFile struct {
	file
	gate <-chan struct{} // reads wait for it
	full *atomic.Bool    // writes fail
}

func (f slowFile) ReadAt(b []byte, at int64) (int, error) {
	if f.gate != nil {
		<-f.gate
	}
	return f.file.ReadAt(b, at)
}

func (f slowFile) WriteAt(b []byte, at int64) (int, error) {
	if f.full != nil && f.full.Load() {
		return 0, syscall.ENOSPC
	}
	return f.file.WriteAt(b, at)
}

// wrap puts a fault between the tier and its files.
func (r *rig) wrap(gate <-chan struct{}, full *atomic.Bool) {
	d := r.tiers.disk
	d.growing.Lock()
	defer d.growing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	open := d.open
	d.open = func(path string, flag int) (file, error) {
		if full != nil && full.Load() {
			return nil, syscall.ENOSPC
		}
		f, err := open(path, flag)
		return slowFile{f, gate, full}, err
	}
	for _, s := range d.log {
		s.file = slowFile{s.file, gate, full}
	}
}

// TestSlow: a disk that does not answer costs LoadTimeout, and nothing later.
func TestSlow(t *testing.T) {
	for _, policy := range []WritePolicy{Through, Back} {
		t.Run(string(policy), func(t *testing.T) { testSlow(t, policy) })
	}
}

func testSlow(t *testing.T, policy WritePolicy) {
	cfg := config(t.TempDir())
	cfg.Write = policy
	cfg.LoadTimeout = 20 * time.Millisecond
	r := newRig(t, cfg)
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.sink()
	r.saved(tierSSD, 6)
	r.cache.Clear()
	r.tiers.host.clear()
	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	r.wrap(gate, nil)
	r.load(tokens, 0)
	r.run(tokens, 0)
	r.cache.Clear()
	release()
	r.saved(tierSSD, 6) // what was abandoned comes now
	r.tiers.cfg.LoadTimeout = patience
	r.load(tokens, 96)
	r.run(tokens, 96)
}

// TestSlowSegment: while the disk takes its time to begin a segment, what it has
// can be looked up and is loaded.
func TestSlowSegment(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	first := prompt(1, 96)
	r.run(first, 0)
	r.saved(tierSSD, 6)
	d := r.tiers.disk
	gate, entered := make(chan struct{}), make(chan struct{}, 1)
	d.growing.Lock()
	d.mu.Lock()
	open := d.open
	d.open = func(path string, flag int) (file, error) {
		select {
		case entered <- struct{}{}:
		default:
		}
		<-gate
		return open(path, flag)
	}
	d.mu.Unlock()
	d.growing.Unlock()
	full := make(chan error, 1)
	release := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	go func() {
		rec := aligned(d.shape.record())
		for i := range d.slots + 1 { // one more than there is room for
			if _, err := d.write(unit{key: kvcache.Hash{1, byte(i), byte(i >> 8)}, born: time.Now()}, rec); err != nil {
				full <- err
				return
			}
		}
		full <- nil
	}()
	come(t, "a segment is begun", entered)
	r.cache.Clear()
	r.tiers.host.clear()
	r.load(first, 96)
	release()
	if err := come(t, "the last write", full); err != nil {
		t.Error(err)
	}
}

// TestFull: without room on the disk the tier works as far as it can.
func TestFull(t *testing.T) {
	for _, policy := range []WritePolicy{Through, Back} {
		t.Run(string(policy), func(t *testing.T) { testFull(t, policy) })
	}
}

func testFull(t *testing.T, policy WritePolicy) {
	cfg := config(t.TempDir())
	cfg.Write = policy
	r := newRig(t, cfg)
	var full atomic.Bool
	r.wrap(nil, &full)
	full.Store(true)
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.sink()
	r.quiet()
	if n := r.value("io_errors_total", "write"); n != 6 {
		t.Errorf("%v writes failed", n)
	}
	r.cache.Clear()
	r.load(tokens, 96) // host memory has it
	full.Store(false)
	r.cache.Clear()
	r.tiers.host.clear()
	r.run(tokens, 0)
	r.sink()
	r.saved(tierSSD, 6)
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
		r.tiers.host.clear()
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
	r.tiers.host.clear()
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

// TestNoRoom: loads take nothing that somebody waits for, and wait for nobody.
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
		r.cache.AllocWait(ctx, 64, "a waiter")
	}()
	soon(t, "it waits", func() bool { return r.cache.Stats().Waiters > 0 })
	r.load(tokens, 0)
	cancel()
	come(t, "it has left", done)
	r.cache.Release(all, "others")
	r.load(tokens, 64)
}

func FuzzHeader(f *testing.F) {
	b := make([]byte, headerSize)
	h := header{key: kvcache.Hash{1, 2}, payload: 4096, segment: 3, slot: 4, pos: 16}
	h.encode(b)
	f.Add(b)
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHeader(b)
		if err != nil {
			return
		}
		c := make([]byte, headerSize)
		h.encode(c)
		if g, err := parseHeader(c); err != nil || g != h {
			t.Fatalf("%+v became %+v: %v", h, g, err)
		}
	})
}

func FuzzPreamble(f *testing.F) {
	d := &disk{shape: shape{newMemPool(1, 16).layout, 1}, identity: identity}
	f.Add([]byte(`{"format":"xpyd KV segment 1","segment":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if d.recognise(1, b) == nil && len(b) < 50 {
			t.Fatal(string(b))
		}
	})
}

// TestMeasureDisk: the benchmark moves what it says, and leaves nothing.
func TestMeasureDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	r, err := MeasureDisk(t.Context(), dir, 64<<10, 4<<20, 4, ssdIO)
	if err != nil || r.Units != 64 || r.Write <= 0 || r.Read <= 0 {
		t.Fatalf("%+v %v", r, err)
	}
	for _, bad := range []int{0, 100, 65 << 9} {
		if _, err := MeasureDisk(t.Context(), dir, bad, 4<<20, 4, ssdIO); err == nil {
			t.Errorf("units of %d bytes", bad)
		}
	}
}
