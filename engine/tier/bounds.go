package tier

import (
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// claims are the loads under way, by the first unit of each. The zero value has none.
type claims struct {
	mu sync.Mutex
	m  map[kvcache.Hash]chan struct{}
}

// begin claims the load that starts with key. If another load has, wait is closed when
// that one ends, and end is nil.
func (l *claims) begin(key kvcache.Hash) (wait <-chan struct{}, end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.m[key]; c != nil {
		return c, nil
	}
	if l.m == nil {
		l.m = make(map[kvcache.Hash]chan struct{})
	}
	c := make(chan struct{})
	l.m[key] = c
	return nil, func() {
		l.mu.Lock()
		delete(l.m, key)
		l.mu.Unlock()
		close(c)
	}
}

// bucket limits bytes a second. It holds a second's worth, and at least one thing.
type bucket struct {
	rate int64 // 0: no limit
	have float64
	at   time.Time // when have was right; zero: the bucket is full
}

// refill adds what has accrued, up to most bytes.
func (b *bucket) refill(most float64, now time.Time) {
	if b.have += float64(b.rate) * now.Sub(b.at).Seconds(); b.at.IsZero() || b.have > most {
		b.have = most
	}
	b.at = now
}

// take returns how many of n things of so many bytes each may be taken now.
func (b *bucket) take(n, bytes int, now time.Time) int {
	if b.rate == 0 {
		return n
	}
	b.refill(max(float64(b.rate), float64(bytes)), now)
	n = max(min(n, int(b.have/float64(bytes))), 0)
	b.have -= float64(n * bytes)
	return n
}

// credit gives back n things of so many bytes each that were taken but not moved.
func (b *bucket) credit(n, bytes int) {
	if b.rate > 0 {
		b.have = min(b.have+float64(n*bytes), max(float64(b.rate), float64(bytes)))
	}
}

// spend takes these bytes if any are left; it may overdraw.
func (b *bucket) spend(bytes int64, now time.Time) bool {
	if b.rate == 0 {
		return true
	}
	b.refill(float64(b.rate), now)
	if b.have <= 0 {
		return false
	}
	b.have -= float64(bytes)
	return true
}
