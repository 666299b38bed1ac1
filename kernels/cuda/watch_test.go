package cuda

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// A wait that stays the same is found within two seconds of its beginning, of which the
// kernel keeps 100 ms to itself; one that moves on is not.
func TestWatcher(t *testing.T) {
	wait := func(which, rank int) uint64 { return uint64(which)<<8 | uint64(rank+1) }
	f := func(what string, ranks, want, wantWaiting int, waits func(tick int) []uint64) {
		t.Helper()
		w, now := newWatcher(ranks), time.Unix(1, 0)
		for tick := range 30 {
			rank, waiting, waited, hung := w.look(waits(tick), now, false)
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
	within := func(which int) uint64 { return uint64(which)<<8 | inNCCL }
	f("in NCCL for a moment", 2, -1, 0, func(tick int) []uint64 { return []uint64{within(tick / 12), within(tick / 12)} })
	f("both in NCCL", 2, 0, 0, func(int) []uint64 { return []uint64{within(7), within(7)} })
	f("one in NCCL, which the other has left", 2, 1, 1, func(int) []uint64 { return []uint64{0, within(7)} })
	f("one in NCCL, for which another waits", 3, 1, 0, func(int) []uint64 { return []uint64{wait(7, 1), within(7), 0} })
	f("one that has not come, and others in NCCL", 3, 2, 1, func(int) []uint64 { return []uint64{within(7), wait(7, 2), 0} })
}

// A wait counts for no longer than somebody looks; while a rank is being launched others have more
// patience, which ends.
func TestWatcherPatience(t *testing.T) {
	waits := []uint64{7<<8 | 2, 0}
	look := func(every time.Duration, launching bool) (looks int) {
		w, now := newWatcher(2), time.Unix(1, 0)
		for looks = 1; looks < 1000; looks++ {
			if _, _, _, hung := w.look(waits, now, launching); hung {
				break
			}
			now = now.Add(every)
		}
		return looks
	}
	for _, c := range []struct {
		every     time.Duration
		launching bool
		want      time.Duration
	}{{watchEvery, false, hangs}, {time.Hour, false, hangs}, {watchEvery / 2, false, 2 * hangs}, {watchEvery, true, launches}} {
		if got := look(c.every, c.launching); got != 1+int(c.want/watchEvery) {
			t.Errorf("%+v: hangs at look %d, want %d", c, got, 1+int(c.want/watchEvery))
		}
	}
}

// Whatever fails a rank wraps kernels.ErrHung, once, and itself.
func TestRankErrors(t *testing.T) {
	cause := errors.New("an illegal address")
	hang := error(&RankError{Rank: 1, Device: 3})
	for _, err := range []error{hang, &stopped{cause}} {
		if got := asHung(err); got != err || !errors.Is(got, kernels.ErrHung) {
			t.Errorf("%v became %v", err, got)
		}
	}
	if err := asHung(cause); !errors.Is(err, kernels.ErrHung) || !errors.Is(err, cause) || !strings.Contains(err.Error(), cause.Error()) {
		t.Errorf("%v of %v", err, cause)
	}
	if !strings.Contains(hang.Error(), "rank 1 on device 3") {
		t.Error(hang)
	}
}

func TestWithin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		began := time.Now()
		late, err := within(closes, 4, func(i int) error {
			switch i {
			case 1, 3:
				<-release
			case 2:
				return errors.New("device 2")
			}
			return nil
		})
		if !slices.Equal(late, []int{1, 3}) || err == nil || err.Error() != "device 2" || time.Since(began) != closes {
			t.Errorf("%v are late, error %v, after %v", late, err, time.Since(began))
		}
		if text := busy(late, []int{4, 5, 6, 7}).Error(); !strings.Contains(text, "rank 1 on device 5, rank 3 on device 7") {
			t.Error(text)
		}
		close(release) // what was late can still end, with nobody there
		synctest.Wait()
		began = time.Now()
		if late, err := within(closes, 3, func(int) error { return nil }); late != nil || err != nil || time.Since(began) != 0 {
			t.Errorf("%v are late, error %v, after %v", late, err, time.Since(began))
		}
	})
}
