package flight

import (
	"sync"
	"sync/atomic"
	"time"
)

// budget is a token bucket that traffic fills: each request earns a part of a token, and a
// trickle comes with time, so that a quiet fleet is not left without. It bounds the load
// that the router adds: a failing fleet must not be hit several times as hard.
type budget struct {
	thousandths atomic.Int64 // of a token
	earned      int64        // thousandths per request
	burst       int64        // most thousandths that requests can save up

	mu      sync.Mutex
	trickle float64 // tokens a second
	at      time.Time
}

// newBudget returns a full budget. ratio is tokens per request, trickle tokens per second.
func newBudget(ratio float64, burst int, trickle float64) *budget {
	b := &budget{earned: int64(ratio * 1000), burst: int64(burst) * 1000, trickle: trickle}
	b.thousandths.Store(b.burst)
	return b
}

// earn adds a request's part. Mostly the bucket is full, and then it is one load.
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

func (b *budget) spend(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.trickle > 0 {
		if b.at.IsZero() {
			b.at = now
		}
		// Less than a thousandth is carried over.
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

// affords takes another attempt after f from the retry budget; false if it is used up.
func (s *Service) affords(f *failure) bool {
	if !f.budgeted() || s.budget.spend(time.Now()) {
		return true
	}
	s.metrics.exhausted.Inc()
	return false
}
