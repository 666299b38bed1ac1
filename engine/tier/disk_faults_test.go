package tier

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// TestTruncated: a segment that is cut while it is in use loses what was cut,
// and nothing else; new units are written.
func TestTruncated(t *testing.T) {
	for _, keep := range []int64{0, 10, page, page + 100, 3*page + 1, 4 * page} {
		r := newRig(t, config(t.TempDir()))
		tokens := prompt(1, 96)
		r.run(tokens, 0)
		r.saved(tierSSD, 6)
		r.cache.Clear()
		r.host.Clear()
		if err := os.Truncate(r.segments()[0], keep); err != nil {
			t.Fatal(err)
		}
		// Writers run side by side, so the prompt's units lie in any order.
		n := r.tiers.Load(t.Context(), tokens, "", 96)
		if most := int(max(0, keep/page-1)) * 16; n > most {
			t.Errorf("cut to %d bytes: %d tokens loaded, %d were there", keep, n, most)
		}
		r.quiet() // reads that nobody waits for any more keep their units from being saved
		r.run(tokens, n)
		r.quiet()
		r.cache.Clear()
		r.load(tokens, 96) // host memory has them again
		r.run(tokens, 96)
		more := prompt(700, 64)
		r.run(more, 0)
		r.quiet()
		r.cache.Clear()
		r.host.Clear()
		r.load(more, 64)
		r.run(more, 64)
	}
}

// TestLateReads: reads of 500 ms cost a request load_timeout at most, exactly;
// those under way are of use to the next one, and with time enough all arrive
// together.
func TestLateReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t.TempDir())
		cfg.DirIO, cfg.LoadTimeout = IOPread, 300*time.Millisecond // see TestTTL
		r := newRig(t, cfg)
		tokens, other := prompt(1, 96), prompt(700, 96)
		for _, p := range [][]int32{tokens, other} {
			r.run(p, 0)
			r.quiet()
		}
		r.cache.Clear()
		r.host.Clear()
		var by atomic.Int64
		by.Store(int64(500 * time.Millisecond))
		r.stall(&by)
		r.took(tokens, 0, 300*time.Millisecond)
		if n := r.value("left_units_total", ""); n != 6 {
			t.Errorf("%v units counted as left out", n)
		}
		if held := r.cache.Holders(); len(held) > 0 {
			t.Errorf("still held: %+v", held)
		}
		time.Sleep(200 * time.Millisecond) // until what was begun has come, and is given back
		synctest.Wait()
		if n := len(r.tiers.lane(tierSSD).reads); n != 0 {
			t.Errorf("%d reads under way", n)
		}
		r.tiers.cfg.LoadTimeout = 2 * time.Second
		r.took(other, 96, 500*time.Millisecond)
		r.run(other, 96)
		r.close()
	})
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
	r.host.Clear()
	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	r.block(gate, nil)
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
	gate, entered := make(chan struct{}), make(chan struct{}, 1)
	r.set(func(h *hooks) {
		h.open = func(string) error {
			select {
			case entered <- struct{}{}:
			default:
			}
			<-gate
			return nil
		}
	})
	full := make(chan error, 1)
	release := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	go func() {
		rec := record()
		for i := range ssdSlots + 1 { // one more than there is room for
			if _, err := r.disk.Save(t.Context(), level.Unit{Key: kvcache.Hash{1, byte(i), byte(i >> 8)}, Born: time.Now()}, rec); err != nil {
				full <- err
				return
			}
		}
		full <- nil
	}()
	come(t, "a segment is begun", entered)
	r.cache.Clear()
	r.host.Clear()
	r.load(first, 96)
	release()
	if err := come(t, "the last write", full); err != nil {
		t.Error(err)
	}
}

// TestFull: on a full disk the tier does what it can.
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
	r.block(nil, &full)
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
	r.host.Clear()
	r.run(tokens, 0)
	r.sink()
	r.saved(tierSSD, 6)
}

// TestFullMoves: the log moves on in the room that other files leave it, even if a unit
// that was read would deserve to be kept.
func TestFullMoves(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	r.confine(5 * ssdSlots / 2 * page) // of four segments
	for i := range 100 {
		tokens := prompt(256*(i+1), 96)
		r.cache.Clear()
		r.run(tokens, 0)
		r.quiet()
		r.host.Clear()
		if chain := r.unit(tokens, 96); !r.disk.Has(chain) {
			t.Fatalf("prompt %d is not written", i)
		}
		r.cache.Clear()
		r.load(tokens, 96) // and is read
	}
	if n := r.value("io_errors_total", "write"); n != 0 {
		t.Errorf("%v writes failed", n)
	}
}

// TestSmaller: after a restart with a smaller size the files take no more than that, and
// pinned units are among what is left.
func TestSmaller(t *testing.T) {
	for _, c := range []struct{ pages, then int }{{512, 128}, {11, 8}} { // larger segments, more segments
		cfg := config(t.TempDir())
		cfg.DirBytes, cfg.PinShare = int64(c.pages)*page, 0.5
		r := newRig(t, cfg)
		first := prompt(256, 16)
		if _, err := r.tiers.Pin(first, "", time.Hour); err != nil {
			t.Fatal(err)
		}
		r.run(first, 0)
		r.quiet()
		for i := range c.pages - 1 {
			r.cache.Clear()
			r.run(prompt(256*(i+2), 16), 0)
			r.quiet()
		}
		r.close()
		cfg.DirBytes = int64(c.then) * page
		r = newRig(t, cfg)
		files, _ := filepath.Glob(filepath.Join(cfg.Dir, "*.xpydkv"))
		size := int64(0)
		for _, f := range files {
			info, err := os.Stat(f)
			if err != nil {
				t.Fatal(err)
			}
			size += info.Size() - page
		}
		if size > cfg.DirBytes || size < cfg.DirBytes/2 {
			t.Errorf("%d files, %d bytes in them, %d allowed", len(files), size, cfg.DirBytes)
		}
		if err := r.disk.Check(nil); err != nil {
			t.Error(err)
		}
		if n := r.disk.Stats(false).Units; n < c.then/2 {
			t.Errorf("%d units of %d are found", n, c.then)
		}
		r.load(first, 16)
		r.run(first, 16)
	}
}
