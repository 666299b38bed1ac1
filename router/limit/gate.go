package limit

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of a Gate.
type Limits struct {
	InFlight int           // run at once
	Wait     time.Duration // the longest wait
	Bounds                 // of what waits
}

// Refusal is why Gate.Wait gave no place, unless the context ended.
type Refusal struct {
	Why Why
	// After is when the request might have got a place; 0: unknown.
	After time.Duration
	// Limits were in force.
	Limits Limits
}

// Why a request was refused.
type Why string

// The reasons.
const (
	Full      Why = "full"      // the queue is full, and others have less in it
	Displaced Why = "displaced" // the queue became full, and others had less in it
	Late      Why = "late"      // it waited for Limits.Wait
	Hopeless  Why = "hopeless"  // far too much is ahead of it for the time that it has
	Deadline  Why = "deadline"  // too little time is left until its deadline
)

// Whys are all of them.
var Whys = []Why{Full, Displaced, Late, Hopeless, Deadline}

func (r *Refusal) Error() string { return fmt.Sprintf("not admitted: %s", r.Why) }

// Gate lets a number of requests run; the others wait in a Queue. While nobody waits,
// entering and leaving are one atomic operation each.
type Gate struct {
	// word is waiting<<32 | running. While anybody waits, only the holder of mu changes it.
	word   atomic.Uint64
	limits atomic.Pointer[Limits]

	mu    sync.Mutex
	queue *Queue
	drain drain
	least least // of requests that ran while others waited
	shed  [Classes]map[Why]uint64
}

const oneWaits = 1 << 32

func running(w uint64) int { return int(uint32(w)) }
func waiting(w uint64) int { return int(w >> 32) }

// NewGate returns a gate with all its places free.
func NewGate(l Limits) *Gate {
	g := &Gate{queue: NewQueue(l.Bounds)}
	for c := range g.shed {
		g.shed[c] = map[Why]uint64{}
	}
	g.limits.Store(&l)
	return g
}

// Set changes the limits; new places are given out at once.
func (g *Gate) Set(l Limits) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limits.Store(&l)
	g.queue.Set(l.Bounds)
	g.hand(time.Now())
}

// TryEnter takes a place if one is free and nobody waits. If it succeeds, the caller calls
// Leave once.
func (g *Gate) TryEnter() bool {
	most := g.limits.Load().InFlight
	for {
		w := g.word.Load()
		if waiting(w) > 0 || running(w) >= most {
			return false
		}
		if g.word.CompareAndSwap(w, w+1) {
			return true
		}
	}
}

// Leave gives a place back. since is when the request got it, or arrived; good means that
// it was served.
func (g *Gate) Leave(since time.Time, good bool) {
	for {
		w := g.word.Load()
		if waiting(w) > 0 {
			break
		}
		if g.word.CompareAndSwap(w, w-1) {
			return
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if good {
		g.least.add(now, now.Sub(since))
	}
	g.word.Add(^uint64(0))
	g.hand(now)
}

// hand gives free places to the next requests; g.mu is held.
func (g *Gate) hand(now time.Time) {
	most := g.limits.Load().InFlight
	for {
		w := g.word.Load()
		if waiting(w) == 0 || running(w) >= most {
			break
		}
		it := g.queue.Pop()
		g.drain.served(now, it.Cost)
		g.word.Add(^uint64(oneWaits - 2)) // one more runs, one fewer waits
		close(it.turn)
	}
	g.drain.waits(now, g.queue.Len() > 0)
}

// place takes a free place, or counts one more as waiting; g.mu is held.
func (g *Gate) place() (entered bool) {
	most := g.limits.Load().InFlight
	for {
		w := g.word.Load()
		next := w + oneWaits
		free := waiting(w) == 0 && running(w) < most
		if free {
			next = w + 1
		}
		if g.word.CompareAndSwap(w, next) {
			return free
		}
	}
}

// Wait takes a place. It waits until ctx ends, for Limits.Wait, or for as long as the
// request can still be served before its deadline (zero: none), judging by the fastest of
// late. The error is a *Refusal or ctx's cause. If it is nil, the caller calls Leave once.
func (g *Gate) Wait(ctx context.Context, it *Item, deadline time.Time) error {
	it.turn = make(chan struct{})
	left, why, err := g.join(it, deadline)
	if err != nil || left == 0 {
		return err
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-it.turn:
		return it.err
	case <-timer.C:
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	select {
	case <-it.turn: // it came at the last moment
		if it.err == nil && ctx.Err() != nil {
			g.word.Add(^uint64(0))
			g.hand(now)
			return context.Cause(ctx)
		}
		return it.err
	default:
	}
	g.queue.Remove(it)
	g.word.Add(^uint64(oneWaits - 1))
	g.drain.waits(now, g.queue.Len() > 0)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return g.refuse(now, it, why)
}

// join puts a request into the queue; left is how long it may wait there, 0 if it got a
// place at once.
func (g *Gate) join(it *Item, deadline time.Time) (left time.Duration, why Why, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.place() {
		return 0, "", nil
	}
	now := time.Now()
	left, why = g.limits.Load().Wait, Late
	if !deadline.IsZero() {
		if d := deadline.Sub(now) - g.least.get(now); d < left {
			left, why = d, Deadline
		}
	}
	ahead, known := g.ahead(now, it)
	var out []*Item
	switch ok := false; {
	case left <= 0:
		err = g.refuse(now, it, Deadline)
	case known && ahead > hopeless*left:
		err = g.refuse(now, it, Hopeless)
	default:
		if out, ok = g.queue.Push(it); !ok {
			err = g.refuse(now, it, Full)
		}
	}
	for _, o := range out {
		o.err = g.refuse(now, o, Displaced)
		close(o.turn)
	}
	gone := uint64(len(out))
	if err != nil {
		gone++
	}
	g.word.Add(-(gone * oneWaits))
	g.drain.waits(now, g.queue.Len() > 0)
	return left, why, err
}

// hopeless is by how many times the measured wait must exceed the time that a request has
// for it to be refused at once: the rate may rise.
const hopeless = 2

// ahead is how long a request that comes now would wait.
func (g *Gate) ahead(now time.Time, it *Item) (time.Duration, bool) {
	rate, ok := g.drain.rate(now)
	if !ok {
		return 0, false
	}
	s := min(g.queue.Ahead(it)/rate, maxAfter.Seconds())
	return time.Duration(s * float64(time.Second)), true
}

// maxAfter bounds Refusal.After.
const maxAfter = time.Hour

func (g *Gate) refuse(now time.Time, it *Item, why Why) error {
	g.shed[it.Class][why]++
	after, _ := g.ahead(now, it)
	return &Refusal{Why: why, After: after, Limits: *g.limits.Load()}
}

// Settle tells the queue that a request that had waited cost so much more than estimated.
func (g *Gate) Settle(it *Item, more float64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.queue.Settle(it.Tenant, it.Class, more)
}

// Counts returns how many run and how many wait.
func (g *Gate) Counts() (run, wait int) {
	w := g.word.Load()
	return running(w), waiting(w)
}

// Waiting is what waits, by class and in bytes.
func (g *Gate) Waiting() (n [Classes]int, bytes int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range n {
		n[c] = g.queue.LenOf(Class(c))
	}
	return n, g.queue.Bytes()
}

// Shed is how many requests of a class were refused for a reason.
func (g *Gate) Shed(c Class, why Why) uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.shed[c][why]
}
