package tier

import (
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// claims are the loads under way, by the unit that each begins with. The zero
// value has none.
type claims struct {
	mu sync.Mutex
	m  map[kvcache.Hash]chan struct{}
}

// begin claims the load that starts with key; or returns the end of the one
// that has claimed it.
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

// bucket is what loads may take: rate bytes a second, a second's worth at once
// and at least one thing.
type bucket struct {
	rate int64 // 0: anything
	have float64
	at   time.Time // when have was right; zero: never, it is full
}

// take returns how many of n things of so many bytes may be taken now.
func (b *bucket) take(n, bytes int, now time.Time) int {
	if b.rate == 0 {
		return n
	}
	most := max(float64(b.rate), float64(bytes))
	if b.have += float64(b.rate) * now.Sub(b.at).Seconds(); b.at.IsZero() || b.have > most {
		b.have = most
	}
	b.at = now
	n = max(min(n, int(b.have/float64(bytes))), 0)
	b.have -= float64(n * bytes)
	return n
}

// credit gives back n things of so many bytes that take handed out and nobody moved.
func (b *bucket) credit(n, bytes int) {
	if b.rate > 0 {
		b.have = min(b.have+float64(n*bytes), max(float64(b.rate), float64(bytes)))
	}
}

// spend takes so many bytes if anything is left; what was too much is missing
// later.
func (b *bucket) spend(bytes int64, now time.Time) bool {
	if b.rate == 0 {
		return true
	}
	if b.have += float64(b.rate) * now.Sub(b.at).Seconds(); b.at.IsZero() || b.have > float64(b.rate) {
		b.have = float64(b.rate)
	}
	b.at = now
	if b.have <= 0 {
		return false
	}
	b.have -= float64(bytes)
	return true
}
