package cuda

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

const (
	// watchEvery is how often waits are looked at. A kernel tells of one after 100 ms.
	watchEvery = 100 * time.Millisecond
	// hangs is how long ranks wait for one that does not come, after they have told of it.
	hangs = 1500 * time.Millisecond
	// launches is how long they wait while a launch has not returned: what a rank is to come to
	// may not be on its device yet.
	launches = 20 * time.Second
	// lost is how long a rank's kernels have to end after a failure: those that only wait end at
	// once, and one that does not end at all is not waited for.
	lost = 300 * time.Millisecond
	// closes is how long Close waits for the devices to become idle: longer than watch needs to
	// find a rank that hangs.
	closes = 5 * time.Second
)

// inNCCL is the rank that one waits for which computes what NCCL brings: it is not known.
const inNCCL = 255

// A RankError says which rank did not come to where others waited. The backend is of no use
// any more. It wraps kernels.ErrHung.
type RankError struct {
	Rank, Device int // that has not come
	Waiting      int // rank that waits; itself in NCCL's kernels, which do not tell for whom
	Waited       time.Duration
}

func (e *RankError) Error() string {
	if e.Waiting == e.Rank {
		return fmt.Sprintf("rank %d on device %d hangs: NCCL has not brought the other ranks' sums for %.1f s", e.Rank, e.Device, e.Waited.Seconds())
	}
	return fmt.Sprintf("rank %d on device %d hangs: rank %d has waited for it for %.1f s", e.Rank, e.Device, e.Waiting, e.Waited.Seconds())
}

// Unwrap says that a rank hangs.
func (e *RankError) Unwrap() error { return kernels.ErrHung }

// stopped is any other failure of a rank, behind which the others wait in vain.
type stopped struct{ err error }

func (e *stopped) Error() string   { return "the ranks have stopped: " + e.err.Error() }
func (e *stopped) Unwrap() []error { return []error{kernels.ErrHung, e.err} }

// asHung is an error that wraps kernels.ErrHung.
func asHung(err error) error {
	if errors.Is(err, kernels.ErrHung) {
		return err
	}
	return &stopped{err}
}

// watcher finds a wait of ranks for each other that does not end.
type watcher struct {
	waits  []uint64        // by rank, as the library has them: 0, or which wait, << 8, and 1 + the rank that is waited for, or inNCCL
	waited []time.Duration // with that same one
	last   time.Time       // look's
}

func newWatcher(ranks int) *watcher {
	return &watcher{waits: make([]uint64, ranks), waited: make([]time.Duration, ranks)}
}

// look compares with what it saw before. It names the rank that hangs, and one that waits for
// it: of those that somebody waits for, one that waits for nobody. If none is waited for it names one
// that NCCL does not serve, as waiting for itself. A look that comes late counts
// as if it had come in time: a process that was stopped, or has no time, says nothing about a
// rank. launching: a launch has not returned.
func (w *watcher) look(waits []uint64, now time.Time, launching bool) (rank, waiting int, waited time.Duration, hung bool) {
	passed := min(now.Sub(w.last), watchEvery)
	w.last = now
	limit := hangs
	if launching {
		limit = launches
	}
	for i, v := range waits[:len(w.waits)] {
		if v != w.waits[i] || v == 0 {
			w.waits[i], w.waited[i] = v, 0
			continue
		}
		w.waited[i] += passed
		at := int(v&0xff) - 1
		if v&0xff == inNCCL && !hung {
			at = i
		}
		if w.waited[i] < limit || at >= len(w.waits) {
			continue
		}
		if !hung || waits[rank] != 0 && waits[at] == 0 {
			rank, waiting, waited, hung = at, i, w.waited[i], true
		}
	}
	return rank, waiting, waited, hung
}

// within calls f for 0 .. n-1 at once. It returns those for which it has not ended by a limit, and
// the errors of the others. What is late goes on: only the device can end it, or the process.
func within(limit time.Duration, n int, f func(i int) error) (late []int, err error) {
	type end struct {
		i   int
		err error
	}
	ends := make(chan end, n) // nobody need read it
	for i := range n {
		late = append(late, i)
		go func() { ends <- end{i, f(i)} }()
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for len(late) > 0 {
		select {
		case e := <-ends:
			late = slices.DeleteFunc(late, func(i int) bool { return i == e.i })
			err = errors.Join(err, e.err)
		case <-timer.C:
			return late, err
		}
	}
	return nil, err
}

// busy is the error of Close where ranks, of these devices, have not become idle.
func busy(late, devices []int) error {
	var names []string
	for _, i := range late {
		names = append(names, fmt.Sprintf("rank %d on device %d", i, devices[i]))
	}
	return fmt.Errorf("kernels/cuda: not idle after %v: %s; the devices' memory stays with the process", closes, strings.Join(names, ", "))
}
