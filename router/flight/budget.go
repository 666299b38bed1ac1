package flight

import (
	"sync"
	"sync/atomic"
	"time"
)

// budget is a token bucket that traffic itself fills: each request earns a part
// of a token, and a trickle comes with time, so that a fleet with little
// traffic is not left without. It bounds what the router adds to the load: a
// failing fleet must not be hit several times as hard.
type budget struct {
	thousandths atomic.Int64 // of a token
	earned      int64        // thousandths a request
	burst       int64        // thousandths that can be saved up by requests

	mu      sync.Mutex
	trickle float64 // tokens a second
	at      time.Time
}

// newBudget starts full. ratio is tokens a request, trickle tokens a second.
func newBudget(ratio float64, burst int, trickle float64) *budget {
	b := &budget{earned: int64(ratio * 1000), burst: int64(burst) * 1000, trickle: trickle}
	b.thousandths.Store(b.burst)
	return b
}

// earn is a request's part; in the usual case, of a full bucket, it is one load.
func (b *budget) earn() {
	if b.thousandths.Load() < b.burst {
		b.add(b.earned, b.burst)
	}
}

func (b *budget) add(n, most int64) {
	for {
		old := b.thousandths.Load()
		if old >= most || b.thousandths.CompareAndSwap(old, min(old+n, most)) {
			return
		}
	}
}

// spend takes a token, if there is one.
func (b *budget) spend(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.trickle > 0 {
		if b.at.IsZero() {
			b.at = now
		}
		// What is less than a thousandth counts the next time.
		if n := int64(now.Sub(b.at).Seconds() * b.trickle * 1000); n > 0 {
			b.add(n, max(b.burst, 1000))
			b.at = b.at.Add(time.Duration(float64(n) / (b.trickle * 1000) * float64(time.Second)))
		}
	}
	for {
		old := b.thousandths.Load()
		if old < 1000 {
			return false
		}
		if b.thousandths.CompareAndSwap(old, old-1000) {
			return true
		}
	}
}

// affords reports whether the retry budget has another attempt after f, and takes it.
func (s *Service) affords(f *failure) bool {
	if !f.budgeted() || s.budget.spend(time.Now()) {
		return true
	}
	s.metrics.exhausted.Inc()
	return false
}
