package cuda

import (
	"fmt"
	"time"
)

const (
	// watchEvery is how often waits are looked at. A kernel tells of one after 100 ms.
	watchEvery = 100 * time.Millisecond
	// hangs is how long ranks wait for one that does not come, after they have told of it.
	hangs = 1500 * time.Millisecond
)

// A RankError says which rank did not come to where others waited. The backend is of no use
// any more.
type RankError struct {
	Rank, Device int // that has not come
	Waiting      int // rank that waits
	Waited       time.Duration
}

func (e *RankError) Error() string {
	return fmt.Sprintf("rank %d on device %d hangs: rank %d has waited for it for %.1f s", e.Rank, e.Device, e.Waiting, e.Waited.Seconds())
}

// watcher finds a wait of ranks for each other that does not end.
type watcher struct {
	waits []uint64 // by rank, as the library has them: 0, or which wait, << 8, and 1 + the rank that is waited for
	since []time.Time
}

func newWatcher(ranks int) *watcher {
	return &watcher{make([]uint64, ranks), make([]time.Time, ranks)}
}

// look compares with what it saw before. It names the rank that hangs, and one that waits for
// it: of those that somebody waits for, one that waits for nobody.
func (w *watcher) look(waits []uint64, now time.Time) (rank, waiting int, waited time.Duration, hung bool) {
	for i, v := range waits[:len(w.waits)] {
		if v != w.waits[i] || v == 0 {
			w.waits[i], w.since[i] = v, now
			continue
		}
		d := now.Sub(w.since[i])
		at := int(v&0xff) - 1
		if d < hangs || at >= len(w.waits) {
			continue
		}
		if !hung || waits[rank] != 0 && waits[at] == 0 {
			rank, waiting, waited, hung = at, i, d, true
		}
	}
	return rank, waiting, waited, hung
}
