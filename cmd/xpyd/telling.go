package main

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/sim"
)

// lines is a writer for several goroutines, each of which writes whole lines.
type lines struct {
	mu sync.Mutex
	to io.Writer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.to.Write(b)
}

// Who waits for a computation hears of it after firstTold, and then each time after twice as long, up to lastTold.
const firstTold, lastTold = 2 * time.Second, 32 * time.Second

// telling says now and then how far a computation is, until end is called, which waits for that.
func telling(stderr io.Writer, p *sim.Progress) (end func()) {
	began := time.Now()
	return background(func(ctx context.Context) {
		wait := firstTold
		timer := time.NewTimer(wait)
		defer timer.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-timer.C:
				wait = min(2*wait, lastTold)
				timer.Reset(wait)
				fmt.Fprintf(stderr, "%v: %d tries begun, %d requests computed\n", now.Sub(began).Round(time.Second), p.Tries.Load(), p.Requests.Load())
			}
		}
	})
}

// untilOver reads until a context is over.
type untilOver struct {
	ctx context.Context
	io.Reader
}

func (r untilOver) Read(b []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(b)
}
