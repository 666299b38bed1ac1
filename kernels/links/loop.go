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

// loop is a group's thread and the state that only it touches.
type loop struct {
	g      *Group
	links  []*Link
	ending time.Time // since when links wait for their abort; zero: none waits
	aborts int       // running
	began  time.Time // start of the newest abort
	asked  bool      // a transfer was asked for since the last rest
}

// now is a cancelled context: a Wait under it only looks.
var now = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// run works until no links are left. NCCL keeps state by thread, so the thread ends too.
func (lp *loop) run() {
	runtime.LockOSThread()
	for lp.wait() {
		lp.join()
		lp.launch()
		lp.end()
	}
}

// wait carries out orders, and waits for some when nothing needs polling. It returns false
// when no links are left.
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

// rest waits for orders. Just after a transfer it spins for a moment first, because more
// tend to follow.
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

// busy returns the polling interval, or 0 if only orders need attention.
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

// enqueue queues a transfer, or fails it if the link takes no more.
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

// fail marks a link as failed; it then waits for its Close.
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

// drop fails the transfers that NCCL has not been asked for.
func (l *Link) drop(err error) {
	for _, t := range l.queue {
		t.end(nil, err)
	}
	l.queue = nil
}

// check returns the link's failure, if any.
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

// join advances each new link by one step.
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

// settled records the outcome of asking NCCL for a transfer.
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

// launch begins queued transfers, one of each link in turn.
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

// flying reports whether the device works on transfers of a link, or is about to.
func (lp *loop) flying(l *Link) bool {
	l.flying = slices.DeleteFunc(l.flying, func(t *Transfer) bool {
		return t.over.Load() || !errors.Is(t.mark.Wait(now), kernels.ErrLate) // ask the mark, not t: nobody needs its progress text
	})
	return len(l.flying) > 0 || l.begun != nil
}

// close fails a link and schedules its abort.
func (lp *loop) close(l *Link) {
	l.closing.Store(true)
	l.fail(errClosed)
	lp.await(l)
}

// await schedules a closed link for end, unless it is already freed or its abort, begun
// together with another's, still runs. Its memory is in use until then.
func (lp *loop) await(l *Link) {
	if l.closing.Load() && !l.freed && (!l.gone || l.aborted) && lp.ending.IsZero() {
		lp.ending = time.Now()
	}
}

// shut reports whether transfers are held back: for others to finish before an abort, or
// for an abort.
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

// end aborts and frees all closed links together, once no other link has a transfer under
// way. Transfers that do not finish within limits.gate are aborted with them.
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
		closing := l.closing.Load() // read once: it may change at any time
		begins := !l.gone && (closing || slices.Contains(held, l))
		if begins {
			l.drop(fmt.Errorf("%s: %w", l.name, errClosed)) // queued since it failed
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
	go func() { // the loop keeps running meanwhile
		runtime.LockOSThread()
		err := lp.g.lib.End(abort, free)
		lp.g.order(func(lp *loop) { lp.over(ends, frees, err) })
	}()
}

// over forgets aborted communicators and freed links.
func (lp *loop) over(ends, frees []*Link, err error) {
	lp.aborts--
	lp.shut()
	for _, l := range ends {
		if l.begun != nil {
			l.begun.end(nil, fmt.Errorf("%s: %w", l.name, errClosed))
			l.begun = nil
		}
		lp.flying(l) // drops marks that nobody waits for
		l.aborted = true
		lp.await(l) // in case it was closed meanwhile
	}
	for _, l := range frees {
		l.endErr = err
		lp.g.live.Add(-1)
		close(l.ended)
	}
	lp.links = slices.DeleteFunc(lp.links, func(l *Link) bool { return slices.Contains(frees, l) })
}
