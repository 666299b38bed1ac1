package cuda

import (
	"testing"
	"time"
)

// A wait that stays the same is found within two seconds of its beginning, of which the
// kernel keeps 100 ms to itself; one that moves on is not.
func TestWatcher(t *testing.T) {
	wait := func(which, rank int) uint64 { return uint64(which)<<8 | uint64(rank+1) }
	f := func(what string, ranks, want, wantWaiting int, waits func(tick int) []uint64) {
		t.Helper()
		w, now := newWatcher(ranks), time.Unix(1, 0)
		for tick := range 30 {
			rank, waiting, waited, hung := w.look(waits(tick), now)
			if took := time.Duration(tick+1)*watchEvery + 100*time.Millisecond; hung {
				if rank != want || waiting != wantWaiting || waited < hangs || took > 2*time.Second {
					t.Errorf("%s: rank %d hangs, %d waited %v; want %d, %d; found after %v", what, rank, waiting, waited, want, wantWaiting, took)
				}
				return
			}
			now = now.Add(watchEvery)
		}
		if want >= 0 {
			t.Errorf("%s: nothing was found", what)
		}
	}
	f("nobody waits", 2, -1, 0, func(int) []uint64 { return []uint64{0, 0} })
	f("slow", 2, -1, 0, func(tick int) []uint64 { return []uint64{wait(tick/12, 1), 0} })
	f("comes at last", 2, -1, 0, func(tick int) []uint64 {
		if tick == 14 {
			return []uint64{0, 0}
		}
		return []uint64{wait(7, 1), 0}
	})
	f("one of two", 2, 1, 0, func(int) []uint64 { return []uint64{wait(7, 1), 0} })
	f("the first", 2, 0, 1, func(int) []uint64 { return []uint64{0, wait(7, 0)} })
	f("one of four, for which one waits that is waited for", 4, 2, 1, func(int) []uint64 {
		return []uint64{wait(7, 1), wait(7, 2), 0, wait(7, 1)}
	})
}
