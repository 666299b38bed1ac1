package sim

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// lanes run workers side by side, each on a clock of its own, from one event of the router to the next.
// That takes a fleet in which only the router meets more than one worker, and a load that does not
// follow from the answers: whole workers under an open load. What the router hears meanwhile, which is first
// tokens and ends, it hears afterwards, in the order of time: nothing in between has asked it for
// anything. So a run repeats to the bit on any number of processors.
type lanes struct {
	list []*worker
	due  []*worker // that have something to do in this window
	all  []heard

	stopped func() error // not nil: nobody wants to know the rest
	until   time.Duration
	next    atomic.Int64 // of due
	helpers []chan struct{}
	busy    sync.WaitGroup
}

// heard is what the router is to hear from a worker.
type heard struct {
	at time.Duration
	do func()
}

// fewDue workers are not worth waking somebody for.
const fewDue = 8

// open starts goroutines for all but one of n processors. The caller ends them.
func (l *lanes) open(ctx context.Context, workers []*worker, n int) (end func()) {
	l.list, l.stopped = workers, ctx.Err
	for _, w := range l.list {
		w.alone = true
	}
	var all sync.WaitGroup
	for range n - 1 {
		wake := make(chan struct{})
		l.helpers = append(l.helpers, wake)
		all.Go(func() {
			for range wake {
				l.work()
				l.busy.Done()
			}
		})
	}
	return func() {
		for _, c := range l.helpers {
			close(c)
		}
		l.helpers = nil
		all.Wait()
	}
}

// run has all workers do what they do before a time, and reports whether there was anything.
func (l *lanes) run(until time.Duration) bool {
	l.due, l.until = l.due[:0], until
	for _, w := range l.list {
		if q := w.clock.queue; len(q) > 0 && q[0].at < until {
			l.due = append(l.due, w)
		}
	}
	l.next.Store(0)
	if len(l.due) >= fewDue {
		l.busy.Add(len(l.helpers))
		for _, c := range l.helpers {
			c <- struct{}{}
		}
	}
	l.work()
	l.busy.Wait()
	return len(l.due) > 0
}

// work takes workers that are due until none is left.
func (l *lanes) work() {
	for {
		i := int(l.next.Add(1)) - 1
		if i >= len(l.due) {
			return
		}
		w := l.due[i]
		for n := 0; len(w.clock.queue) > 0 && w.clock.queue[0].at < l.until; n++ {
			if n%looks == 0 && l.stopped() != nil {
				return
			}
			w.clock.next()
		}
	}
}

// told returns what the router hears of the last window: by time, then by worker.
func (l *lanes) told() []heard {
	l.all = l.all[:0]
	for _, w := range l.due {
		l.all = append(l.all, w.heard...)
		clear(w.heard)
		w.heard = w.heard[:0]
	}
	slices.SortStableFunc(l.all, func(a, b heard) int { return cmp.Compare(a.at, b.at) })
	return l.all
}

// tell has the router hear something: at once, or when the lanes' window is over.
func (w *worker) tell(do func()) {
	if w.alone {
		w.heard = append(w.heard, heard{w.clock.now, do})
		return
	}
	do()
}
