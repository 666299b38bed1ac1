package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/handover"
	"github.com/xpyd/xpyd/internal/supervise"
)

const (
	leaveLook = 100 * time.Millisecond
	settled   = time.Second // after a drain, a worker's word that it has nothing to do counts
)

// leave ends the workers once they have nothing to do, and waits for the requests of this router,
// until ctx ends.
func (u *upgrader) leave(ctx context.Context, next *handover.Successor) {
	f := u.front
	f.give()
	ctx, cancel := context.WithTimeout(ctx, f.router.Patience())
	defer cancel()
	var orders sync.WaitGroup
	for _, s := range u.sup.Status() {
		if m := f.watcher.Snapshot().Get(s.Name); m != nil {
			orders.Go(func() {
				if err := f.router.Console.Leave(m); err != nil {
					u.log.Warn("a worker does not know that it leaves", "err", err)
				}
			})
		}
	}
	orders.Wait()
	drained := time.Now()
	look, tell := time.NewTicker(leaveLook), time.NewTicker(time.Second)
	defer look.Stop()
	defer tell.Stop()
	ended := false
	for {
		busy := f.busy(u.sup, drained)
		if busy == 0 && !ended {
			ended = true
			if err := u.sup.Stop(ctx); err != nil {
				u.log.Warn("workers did not stop", "error", err)
			}
		}
		requests, conns := f.router.Left()
		if ended && requests+conns == 0 {
			return
		}
		select {
		case <-look.C:
		case <-tell.C:
			_ = next.Send(&word{Left: leftover(busy, requests, conns)}) // if it has ended, so does this one
		case <-next.Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

// leftover says what an old process still has.
func leftover(busy, requests, conns int) string {
	var parts []string
	if busy > 0 {
		parts = append(parts, count(busy, "busy worker"))
	}
	return strings.Join(append(parts, count(requests, "request"), count(conns, "connection")), ", ")
}

// busy counts the workers that may still have something to do.
func (f *front) busy(sup *supervise.Supervisor, drained time.Time) (n int) {
	all := f.watcher.Snapshot()
	for _, s := range sup.Status() {
		m := all.Get(s.Name)
		if m == nil || m.PID != s.PID || m.State == fleet.Dead || m.State == fleet.Gone {
			continue
		}
		if m.Load.Running+m.Load.Waiting > 0 || m.Heard.Before(drained.Add(settled)) || f.router.Legs(m) > 0 {
			n++
		}
	}
	return n
}

// retire ends this process's part in the chain; the first one stays for its successor.
func (u *upgrader) retire(next *handover.Successor) (err error) {
	_ = next.Talk.Close() // tells it that this one has ended; fails if it has told so itself
	if u.place.First() {
		debug.FreeOSMemory()
		err = u.place.Stay(next)
	} else {
		select {
		case <-next.Done():
			err = next.Ended()
		default:
		}
	}
	if err != nil {
		err = fmt.Errorf("the process that took over ended: %w", err)
	}
	return err
}

// passOn passes on to the successors what signals mean: a first one that they drain, a second one
// that they stop, and SIGHUP; until end is called.
func passOn(ctx context.Context, s *handover.Successor) (end func()) {
	term := func() { s.Forward(syscall.SIGTERM) }
	stops := []func() bool{context.AfterFunc(ctx, term)}
	if d, ok := ctx.Value(drainKey{}).(*drain); ok {
		stops = append(stops, context.AfterFunc(d.now, term))
	}
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	endHUP := background(func(ctx context.Context) {
		defer signal.Stop(hup)
		for {
			select {
			case <-hup:
				s.Forward(syscall.SIGHUP)
			case <-ctx.Done():
				return
			}
		}
	})
	return func() {
		for _, stop := range stops {
			stop()
		}
		endHUP()
	}
}
