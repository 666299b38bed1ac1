package tier

import (
	"os"
	"testing"
	"testing/synctest"
	"time"
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
		r.tiers.host.clear()
		if err := os.Truncate(r.tiers.disk.log[0].path, keep); err != nil {
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
		r.tiers.host.clear()
		r.load(more, 64)
		r.run(more, 64)
	}
}

// lateFile is a disk each read of which takes a while.
type lateFile struct {
	file
	by time.Duration
}

func (f lateFile) ReadAt(b []byte, at int64) (int, error) {
	time.Sleep(f.by) // the disk's, not the test's
	return f.file.ReadAt(b, at)
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
		r.tiers.host.clear()
		for _, s := range r.tiers.disk.log {
			s.file = lateFile{s.file, 500 * time.Millisecond}
		}
		r.took(tokens, 0, 300*time.Millisecond)
		if held := r.cache.Holders(); len(held) > 0 {
			t.Errorf("still held: %+v", held)
		}
		time.Sleep(200 * time.Millisecond) // until what was begun has come, and is given back
		synctest.Wait()
		if n := len(r.tiers.reads); n != 0 {
			t.Errorf("%d reads under way", n)
		}
		r.tiers.cfg.LoadTimeout = 2 * time.Second
		r.took(other, 96, 500*time.Millisecond)
		r.run(other, 96)
		r.close()
	})
}
