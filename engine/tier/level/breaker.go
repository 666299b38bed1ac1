package tier

import (
	"context"
	"sync"
	"time"
)

// Between two probes of a store that failed, doubling.
const (
	probeFirst = time.Second
	probeLast  = 30 * time.Second
)

// breaker keeps operations away from a store, or an SSD, that has failed one. Only
// its own probe tries it again, in the background: no request waits for it.
type breaker struct {
	probe func(context.Context) error
	wg    sync.WaitGroup

	mu     sync.Mutex
	closed bool          // no more probes
	open   bool          // it has failed, and no probe has succeeded since
	opened chan struct{} // closed when it opens; nil: nobody asked
	last   error         // of the last failure, ever
	at     time.Time
}

// allow says whether to try an operation.
func (b *breaker) allow() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.open
}

// opens is closed when the breaker is open.
func (b *breaker) opens() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.opened == nil {
		b.opened = make(chan struct{})
		if b.open {
			close(b.opened)
		}
	}
	return b.opened
}

// failed notes an operation's failure, and begins to probe until ctx ends or
// it answers.
func (b *breaker) failed(ctx context.Context, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last, b.at = err, time.Now()
	if b.open || b.closed {
		return
	}
	b.open = true
	if b.opened != nil {
		close(b.opened)
	}
	b.wg.Go(func() { b.recover(ctx) })
}

// note keeps an error that does not open the breaker.
func (b *breaker) note(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last, b.at = err, time.Now()
}

func (b *breaker) recover(ctx context.Context) {
	for wait := probeFirst; ; wait = min(2*wait, probeLast) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		err := b.probe(ctx)
		b.mu.Lock()
		if err == nil {
			b.open, b.opened = false, nil
			b.mu.Unlock()
			return
		}
		b.last, b.at = err, time.Now()
		b.mu.Unlock()
	}
}

// close waits for the probe; its context must have ended.
func (b *breaker) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.wg.Wait()
}

// state says whether it is open, and the last failure ever.
func (b *breaker) state() (open bool, at time.Time, last error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open, b.at, b.last
}
