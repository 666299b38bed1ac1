package links

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// loop is the thread of a group, and what it alone looks at.
type loop struct {
	g      *Group
	links  []*Link
	ending time.Time // since when links wait for their abort; zero: none does
	aborts int       // that run
	began  time.Time // the newest of them
	asked  bool      // for a transfer, since it last waited
}

// now has ended: what is waited for under it is only looked at.
var now = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// run works until there are no links. NCCL keeps state by thread, so the thread ends too.
func (lp *loop) run() {
	runtime.LockOSThread()
	for lp.wait() {
		lp.join()
		lp.launch()
		lp.end()
	}
}

// wait does what was ordered, and waits for orders when there is nothing to look at. It
// returns false when there are no links.
func (lp *loop) wait() bool {
	g := lp.g
	if busy := lp.busy(); busy != 0 {
		timer := time.NewTimer(busy)
		select {
		case <-g.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
	for {
		g.mu.Lock()
		orders := g.orders
		g.orders = nil
		if len(orders) == 0 && len(lp.links) == 0 {
			g.running = false
			g.mu.Unlock()
			return false
		}
		g.mu.Unlock()
		for _, f := range orders {
			f(lp)
		}
		if len(orders) > 0 || lp.busy() != 0 {
			return true
		}
		lp.rest()
	}
}

// rest waits for orders: for a moment with open eyes when there was a transfer just
// now, because others follow it.
func (lp *loop) rest() {
	if lp.asked && runtime.GOMAXPROCS(0) >= processors {
		lp.asked = false
		for began := time.Now(); time.Since(began) < eager; {
			for range 64 {
				select {
				case <-lp.g.wake:
					return
				default:
				}
			}
		}
	}
	<-lp.g.wake
}

// busy is after which time something has to be looked at; 0: when there are orders.
func (lp *loop) busy() time.Duration {
	if !lp.ending.IsZero() || lp.aborts > 0 {
		return pollingTime
	}
	for _, l := range lp.links {
		if !l.gone && (l.state < up || l.begun != nil || len(l.queue) > 0) {
			return pollingTime
		}
	}
	return 0
}

func (lp *loop) open(id []byte, end kernels.LinkEnd, bytes int64) (*Link, error) {
	comm, err := lp.g.lib.Open(id, end, bytes)
	if err != nil {
		return nil, err
	}
	name := "the receiver's end of a link"
	if end == kernels.LinkSender {
		name = "the sender's end of a link"
	}
	l := &Link{g: lp.g, name: name, comm: comm, size: bytes, joined: make(chan struct{}), failed: make(chan struct{}), ended: make(chan struct{})}
	lp.g.live.Add(1)
	lp.links = append(lp.links, l)
	return l, nil
}

// enqueue takes a transfer on.
func (l *Link) enqueue(t *Transfer) {
	switch {
	case l.err != nil:
		t.end(nil, l.err)
	case l.gone || l.closing.Load():
		t.end(nil, fmt.Errorf("%s: %w", l.name, errClosed))
	default:
		l.queue = append(l.queue, t)
	}
}

// fail notes why nothing more comes of a link; it waits for its Close.
func (l *Link) fail(err error) {
	if l.err != nil {
		return
	}
	l.err = fmt.Errorf("%s: %w", l.name, err)
	if l.state < up {
		close(l.joined)
	}
	l.state = over
	close(l.failed)
	l.drop(l.err)
}

// drop ends what NCCL was not asked for.
func (l *Link) drop(err error) {
	for _, t := range l.queue {
		t.end(nil, err)
	}
	l.queue = nil
}

// check says whether a link has failed.
func (l *Link) check() error {
	switch {
	case l.err != nil:
		return l.err
	case l.gone || l.closing.Load():
		return fmt.Errorf("%s: %w", l.name, errClosed)
	}
	if err := l.comm.Settle(0); err != nil && !errors.Is(err, kernels.ErrLate) {
		l.fail(err)
	}
	return l.err
}

// join brings new links on, a step each.
func (lp *loop) join() {
	shut := lp.shut()
	for _, l := range lp.links {
		if l.gone || l.closing.Load() {
			continue
		}
		if l.begun != nil {
			mark, err := l.comm.Resume(0)
			l.settled(l.begun, mark, err)
		}
		switch l.state {
		case joining:
			if shut {
				continue
			}
			if err := l.comm.Settle(0); err == nil {
				l.state = warming
				t := &Transfer{l: l, bytes: min(l.size, warmBytes), launched: make(chan struct{})}
				l.queued.Add(1)
				l.ask(t, 0)
			} else if !errors.Is(err, kernels.ErrLate) {
				l.fail(fmt.Errorf("join: %w", err))
			}
		case warming:
			if l.begun != nil || lp.flying(l) {
				continue
			}
			l.state = up
			l.taken.Store(l.comm.Taken())
			close(l.joined)
		}
	}
}

// ask has NCCL begin a transfer.
func (l *Link) ask(t *Transfer, d time.Duration) {
	t.asked.Store(true)
	mark, err := l.comm.Transfer(t.at, t.bytes, t.after, d)
	l.settled(t, mark, err)
}

// settled notes what has become of a transfer that was asked for.
func (l *Link) settled(t *Transfer, mark kernels.Pending, err error) {
	if errors.Is(err, kernels.ErrLate) {
		l.begun = t
		return
	}
	l.begun = nil
	if err != nil {
		err = fmt.Errorf("%s: transfer %d of %d bytes: %w", l.name, t.number, t.bytes, err)
		t.end(nil, err)
		l.fail(err)
		return
	}
	t.end(mark, nil)
	l.flying = append(slices.DeleteFunc(l.flying, func(t *Transfer) bool { return t.over.Load() }), t)
}

// launch begins what is queued, a transfer of each link in turn.
func (lp *loop) launch() {
	for more := true; more; {
		more = false
		for _, l := range lp.links {
			if lp.shut() || l.state != up || l.begun != nil || len(l.queue) == 0 || l.gone || l.closing.Load() {
				continue
			}
			lp.asked = true
			t := l.queue[0]
			l.queue = l.queue[1:]
			l.ask(t, lp.g.lim.launch)
			more = more || len(l.queue) > 0 && l.begun == nil && l.state == up
		}
	}
}

// flying tells whether the device works on transfers of a link, or is about to.
func (lp *loop) flying(l *Link) bool {
	l.flying = slices.DeleteFunc(l.flying, func(t *Transfer) bool {
		return t.over.Load() || !errors.Is(t.mark.Wait(now), kernels.ErrLate) // of the mark: nobody reads how far t is
	})
	return len(l.flying) > 0 || l.begun != nil
}

// close ends a link; the abort follows when it may.
func (lp *loop) close(l *Link) {
	l.closing.Store(true)
	l.fail(errClosed)
	lp.await(l)
}

// await has end see to a closed link: unless it has, or its abort, with another's, has
// begun and is not over. Its memory is in use until then.
func (lp *loop) await(l *Link) {
	if l.closing.Load() && !l.freed && (!l.gone || l.aborted) && lp.ending.IsZero() {
		lp.ending = time.Now()
	}
}

// shut tells whether transfers wait: for the end of others' before an abort, or for an
// abort.
func (lp *loop) shut() bool {
	lim := &lp.g.lim
	shut := lp.aborts > 0 && time.Since(lp.began) < lim.abort ||
		!lp.ending.IsZero() && time.Since(lp.ending)%(lim.shut+lim.open) < lim.shut
	switch at := lp.g.gate.Load(); {
	case shut && at == 0:
		lp.g.gate.Store(time.Now().UnixNano())
	case !shut && at != 0:
		lp.g.gate.Store(0)
	}
	return shut
}

// end aborts and frees what is closed, all of it together, once nothing of other links
// is under way. What does not come to its end is aborted with them after a while.
func (lp *loop) end() {
	if lp.ending.IsZero() || lp.aborts > 0 && time.Since(lp.began) < lp.g.lim.abort {
		return
	}
	var held []*Link
	for _, l := range lp.links {
		if !l.gone && !l.closing.Load() && lp.flying(l) {
			held = append(held, l)
		}
	}
	if len(held) > 0 && time.Since(lp.ending) < lp.g.lim.gate {
		return
	}
	for _, l := range held {
		l.fail(errHeld)
	}
	var ends, frees []*Link
	var abort, free []Comm
	for _, l := range lp.links {
		closing := l.closing.Load() // which changes at any time
		begins := !l.gone && (closing || slices.Contains(held, l))
		if begins {
			l.drop(fmt.Errorf("%s: %w", l.name, errClosed)) // what came since
			l.gone = true
			ends, abort = append(ends, l), append(abort, l.comm)
		}
		if closing && !l.freed && (begins || l.aborted) {
			l.freed = true
			frees, free = append(frees, l), append(free, l.comm)
		}
	}
	lp.ending, lp.began = time.Time{}, time.Now()
	lp.aborts++
	go func() { // the loop goes on until it has ended
		runtime.LockOSThread()
		err := lp.g.lib.End(abort, free)
		lp.g.order(func(lp *loop) { lp.over(ends, frees, err) })
	}()
}

// over forgets communicators, and links, that are no more.
func (lp *loop) over(ends, frees []*Link, err error) {
	lp.aborts--
	lp.shut()
	for _, l := range ends {
		if l.begun != nil {
			l.begun.end(nil, fmt.Errorf("%s: %w", l.name, errClosed))
			l.begun = nil
		}
		lp.flying(l) // the marks of those that nobody waits for go
		l.aborted = true
		lp.await(l) // closed meanwhile
	}
	for _, l := range frees {
		l.endErr = err
		lp.g.live.Add(-1)
		close(l.ended)
	}
	lp.links = slices.DeleteFunc(lp.links, func(l *Link) bool { return slices.Contains(frees, l) })
}
