package cpu

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// watch finds a member of a team of several ranks that hangs: one that neither works nor waits
// for others. Members tell of their work in steps of milliseconds, whatever the size of the model
// and of the step, and however slow the machine is; so the others' patience at a barrier needs no
// bound, only a member's silence does.
//
// Silence is counted in the watch's own ticks, and a tick that comes late does not count: a
// process that is stopped, or a machine that has no time for it, says nothing about a rank.
type watch struct {
	hung chan struct{} // closed once err is set
	told chan error    // err, for the backend's owner
	err  error
	done chan struct{} // a member has left the run
	quit chan struct{}
	end  sync.Once
	wg   sync.WaitGroup
}

const (
	watchTick  = 100 * time.Millisecond
	watchTicks = 15 // of silence: with the tick that begins it, known within 2 s
)

// silentMACs is about how many multiply-adds a member does without telling of progress: a few
// milliseconds, and a third of a second where there is no assembly.
const silentMACs = 32 << 20

// mostPanels is how many panels of k inputs a member of a watched team takes at a time for n tokens.
func (t *team) mostPanels(k, n int) int {
	if t.watch == nil {
		return math.MaxInt
	}
	return max(1, silentMACs/(panelRows*k*min(n, 12))) // of more tokens mul tells by itself
}

// startWatched starts the members of a team of several ranks, and its watch.
func (t *team) startWatched() {
	w := &watch{hung: make(chan struct{}), told: make(chan error, 1), done: make(chan struct{}, t.size), quit: make(chan struct{})}
	t.watch = w
	if t.size > runtime.GOMAXPROCS(0) { // ranks need a thread each, however few CPUs there are
		t.spins = 0 // it would hold up those that are waited for
	}
	for member := range t.seats {
		s := &t.seats[member]
		s.watched = true
		s.rest()
		start := make(chan func(int), 1)
		t.start = append(t.start, start)
		t.wg.Go(func() {
			for work := range start {
				t.do(member, work)
				s.rest()
				w.done <- struct{}{}
			}
		})
	}
	w.wg.Go(func() { t.watchOver(w) })
}

// runWatched is run for a team of several ranks. Its error wraps kernels.ErrHung and names the
// rank; the team cannot run again then.
func (t *team) runWatched(work func(member int)) error {
	t.active = t.size
	t.unclaim()
	for i, c := range t.start {
		t.seats[i].resume() // it sleeps, and does not
		c <- work
	}
	for range t.size {
		select {
		case <-t.watch.done:
		case <-t.watch.hung:
			return t.watch.err
		}
	}
	if p := t.broken.Load(); p != nil {
		t.arrived.Store(0)
		t.broken.Store(nil)
		panic(*p)
	}
	return nil
}

// failed is why the team cannot run any more; nil: it can.
func (t *team) failed() error {
	if t.watch == nil {
		return nil
	}
	select {
	case <-t.watch.hung:
		return t.watch.err
	default:
		return nil
	}
}

// ofRank names the rank in the value of a member's panic, if there are several.
func (t *team) ofRank(member int, p any) any {
	if t.watch == nil {
		return p
	}
	if err, ok := p.(error); ok {
		return fmt.Errorf("rank %d: %w", t.seats[member].rank, err)
	}
	return fmt.Errorf("rank %d: %v", t.seats[member].rank, p)
}

// watchOver looks at the members until one hangs or the team is closed.
func (t *team) watchOver(w *watch) {
	tick := time.NewTicker(watchTick)
	defer tick.Stop()
	g := newGaze(t, time.Now())
	for {
		select {
		case <-w.quit:
			return
		case <-tick.C:
		}
		stuck := g.look(t, time.Now())
		if stuck == nil {
			continue
		}
		w.err = fmt.Errorf("rank %s of %d: %w: no progress in %v", strings.Join(stuck, ", "), len(t.ranks), kernels.ErrHung, watchTicks*watchTick)
		w.told <- w.err
		close(w.hung)
		t.fail(w.err) // the others leave
		return
	}
}

// gaze is what a watch has seen of the members.
type gaze struct {
	last   time.Time
	beats  []uint64
	silent []int // ticks
}

func newGaze(t *team, now time.Time) *gaze {
	return &gaze{last: now, beats: make([]uint64, t.size), silent: make([]int, t.size)}
}

// look counts one tick, and returns the ranks that hang.
func (g *gaze) look(t *team, now time.Time) (stuck []string) {
	late := now.Sub(g.last) > watchTick*3/2
	g.last = now
	for i := range t.seats {
		s := &t.seats[i]
		switch beats := s.beats.Load(); {
		case s.resting.Load() || beats != g.beats[i]:
			g.beats[i], g.silent[i] = beats, 0
		case !late:
			g.silent[i]++
		}
		if g.silent[i] < watchTicks {
			continue
		}
		if rank := strconv.Itoa(s.rank); !slices.Contains(stuck, rank) {
			stuck = append(stuck, rank)
		}
	}
	return stuck
}

// close ends the watch and waits for it. w may be nil.
func (w *watch) close() {
	if w == nil {
		return
	}
	w.end.Do(func() { close(w.quit) })
	w.wg.Wait()
}
