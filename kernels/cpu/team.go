package cpu

import (
	"iter"
	"runtime"
	"sync"
	"sync/atomic"
)

// team is a fixed set of goroutines that run one function together, meeting
// at barriers inside it. Member 0 is the caller of run; the others sleep on a
// channel between runs and never spin then. A team of several ranks is watched (watch.go):
// all its members are goroutines, so that the caller can give up one that hangs.
type team struct {
	size  int
	seats []seat
	start []chan func(member int) // one for each sleeping member; nil asks whether it has left the run
	wg    sync.WaitGroup
	watch *watch // nil with one rank
	spins int    // at a barrier

	closed  bool
	active  int          // members of the current run
	_       [64]byte     // the words below are shared and change often
	arrived atomic.Int32 // members at the barrier
	_       [60]byte
	phase   atomic.Uint32 // barriers passed
	_       [60]byte
	ranks   []counter
	broken  atomic.Pointer[any] // panic of a member of the current run; nil: none
	left    sync.WaitGroup      // members still inside a broken run

	parked atomic.Int32
	mu     sync.Mutex // only for waiting on phase
	cond   sync.Cond
}

// At a barrier a member first spins, which covers the usual microsecond of
// imbalance, then yields to other goroutines, then sleeps.
const (
	spinRounds  = 200 // of spinPauses PAUSE instructions each
	spinPauses  = 4
	yieldRounds = 20
)

// seat is what a member is known by. Only the member changes it while it works.
type seat struct {
	rank    int
	watched bool
	resting atomic.Bool   // waits for others, or is outside a run
	beats   atomic.Uint64 // grow as it works
	_       [96]byte
}

// progress tells the watch that the member works.
func (s *seat) progress() {
	if s.watched {
		s.beats.Store(s.beats.Load() + 1) // nobody else writes it
	}
}

// rest tells the watch that the member waits for others; resume ends it.
func (s *seat) rest() {
	if s.watched {
		s.resting.Store(true)
	}
}

func (s *seat) resume() {
	if s.watched {
		s.progress()
		s.resting.Store(false)
	}
}

// counter is a rank's first unclaimed item since the last barrier, counted from its own first.
type counter struct {
	next atomic.Int64
	_    [120]byte
}

// newTeam divides size members evenly among ranks.
func newTeam(size, ranks int) *team {
	t := &team{size: size, seats: make([]seat, size), ranks: make([]counter, ranks), active: 1, spins: spinRounds}
	t.cond.L = &t.mu
	for i := range t.seats {
		t.seats[i].rank = i * ranks / size
	}
	if ranks > 1 {
		t.startWatched()
		return t
	}
	for member := 1; member < size; member++ {
		start := make(chan func(int), 1)
		t.start = append(t.start, start)
		t.wg.Go(func() {
			for work := range start {
				if work == nil {
					t.left.Done()
					continue
				}
				t.do(member, work)
			}
		})
	}
	return t
}

// run calls work(member) on n members, which must all pass the same barriers. If one
// panics, the others leave work at their next barrier, and once all have left run panics
// with the same value; the team can run again.
func (t *team) run(n int, work func(member int)) {
	t.active = n
	t.unclaim()
	for _, c := range t.start[:n-1] {
		c <- work
	}
	t.do(0, work)
	p := t.broken.Load()
	if p == nil {
		return
	}
	t.left.Add(n - 1)
	for _, c := range t.start[:n-1] {
		c <- nil
	}
	t.left.Wait()
	t.arrived.Store(0)
	t.broken.Store(nil)
	panic(*p)
}

// do is a member's part of a run. It ends at a barrier, so that member 0 waits for all.
func (t *team) do(member int, work func(member int)) {
	defer func() {
		if p := recover(); p != nil {
			t.fail(t.ofRank(member, p))
		}
	}()
	work(member)
	t.meet(&t.seats[member])
}

// unclaim makes all items unclaimed.
func (t *team) unclaim() {
	for i := range t.ranks {
		t.ranks[i].next.Store(0)
	}
}

// fail records the first panic of a run and releases those at the barrier.
func (t *team) fail(p any) {
	if t.broken.CompareAndSwap(nil, &p) {
		t.release()
	}
}

// release lets those at the barrier go on.
func (t *team) release() {
	t.phase.Add(1)
	if t.parked.Load() > 0 {
		t.mu.Lock()
		t.cond.Broadcast()
		t.mu.Unlock()
	}
}

// checkBroken panics if another member has, so that this one leaves its work too.
func (t *team) checkBroken() {
	if p := t.broken.Load(); p != nil {
		panic(*p)
	}
}

// barrier waits until every active member is here, and resets claim.
func (t *team) barrier(s *seat) {
	t.meet(s)
	t.checkBroken()
}

// meet is a barrier that does not look at broken afterwards: after a run's last one, broken
// may already belong to the next run.
func (t *team) meet(s *seat) {
	// Read before arriving: after it, member 0 may already be in the next run.
	active := int32(t.active)
	if active == 1 {
		t.unclaim()
		return
	}
	phase := t.phase.Load()
	t.checkBroken() // after reading phase: a later panic changes it
	if t.arrived.Add(1) == active {
		t.arrived.Store(0)
		t.unclaim()
		t.release()
		return
	}
	s.rest()
	t.await(phase)
	s.resume()
}

// await waits until the barrier that was reached in phase releases its members.
func (t *team) await(phase uint32) {
	for range t.spins {
		if t.phase.Load() != phase {
			return
		}
		pause(spinPauses)
	}
	for range yieldRounds {
		if t.phase.Load() != phase {
			return
		}
		runtime.Gosched()
	}
	t.mu.Lock()
	t.parked.Add(1)
	for t.phase.Load() == phase {
		t.cond.Wait()
	}
	t.parked.Add(-1)
	t.mu.Unlock()
}

// part is the seat's rank's share of the items 0..n-1.
func (t *team) part(s *seat, n int) (first, end int) {
	ranks := len(t.ranks)
	if ranks == 1 {
		return 0, n
	}
	return n * s.rank / ranks, n * (s.rank + 1) / ranks
}

// claim takes up to chunk of the rank's part of the items 0..n-1 that nobody has taken since the
// last barrier. lo == hi means that none are left.
func (t *team) claim(s *seat, n, chunk int) (lo, hi int) {
	s.progress()
	first, end := t.part(s, n)
	next := &t.ranks[s.rank].next
	if t.active == 1 {
		lo = min(int(next.Load()), end)
		hi = min(lo+chunk, end)
		next.Store(int64(hi))
		return lo, hi
	}
	lo = min(first+int(next.Add(int64(chunk)))-chunk, end)
	return lo, min(lo+chunk, end)
}

// items yields the items of 0..n-1 that this member claims, chunk by chunk.
func (t *team) items(s *seat, n, chunk int) iter.Seq[int] {
	return func(yield func(int) bool) {
		for lo, hi := t.claim(s, n, chunk); lo < hi; lo, hi = t.claim(s, n, chunk) {
			for i := lo; i < hi; i++ {
				if !yield(i) {
					return
				}
				s.progress()
			}
		}
	}
}

// share is a chunk for claim: a quarter of an even share, because a long run of
// panels streams from memory faster than many short ones (measured: 16 chunks
// a member cost a quarter of the speed), and quarters still even out a member
// that was interrupted. Everything at once when alone.
func (t *team) share(n int) int {
	if t.active == 1 {
		return max(n, 1)
	}
	return max(1, (n+4*t.active-1)/(4*t.active))
}

// close ends the goroutines and waits for them, unless one hangs: then ended is false. No run
// may be in progress.
func (t *team) close() (ended bool) {
	for _, c := range t.start {
		close(c)
	}
	t.start, t.closed = nil, true
	t.watch.close()
	if t.failed() != nil {
		return false
	}
	t.wg.Wait()
	return true
}
