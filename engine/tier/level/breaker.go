package level

import (
	"context"
	"sync"
	"time"
)

// How long a breaker waits before its first probe, doubling, and at most.
const (
	ProbeFirst = time.Second
	ProbeLast  = 30 * time.Second
)

// Breaker keeps operations away from a level that has failed one. Only its own probe
// tries it again, in the background: no request waits for it. A nil Breaker never opens.
type Breaker struct {
	Probe func(context.Context) error
	wg    sync.WaitGroup

	mu     sync.Mutex
	closed bool          // no more probes
	open   bool          // it has failed, and no probe has succeeded since
	opened chan struct{} // closed when it opens; nil: nobody asked
	last   error         // of the last failure, ever
	at     time.Time
}

// Allow reports whether to try an operation.
func (b *Breaker) Allow() bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.open
}

// Opens is closed when the breaker is open.
func (b *Breaker) Opens() <-chan struct{} {
	if b == nil {
		return nil
	}
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

// Failed notes an operation's failure, and begins to probe until ctx ends or it answers.
func (b *Breaker) Failed(ctx context.Context, err error) {
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

// Note keeps an error that does not open the Breaker.
func (b *Breaker) Note(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last, b.at = err, time.Now()
}

func (b *Breaker) recover(ctx context.Context) {
	for wait := ProbeFirst; ; wait = min(2*wait, ProbeLast) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		err := b.Probe(ctx)
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

// Close waits for the probe; its context must have ended.
func (b *Breaker) Close() {
	if b == nil {
		return
	}
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.wg.Wait()
}

// State reports whether it is open, and the last failure ever.
func (b *Breaker) State() (open bool, at time.Time, last error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open, b.at, b.last
}

// Open is 1 while the breaker is open: a gauge's value.
func (b *Breaker) Open() float64 {
	if b.Allow() {
		return 0
	}
	return 1
}
