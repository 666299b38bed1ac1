package kvevents

import (
	"sync"
	"time"
)

// saidEvery is the least time between log lines that a peer can cause.
const saidEvery = time.Minute

// seldom lets a log line through once in a while, and counts the others.
type seldom struct {
	mu   sync.Mutex
	last time.Time
	left int
}

// due reports whether to log now, and how many lines were left out before.
func (s *seldom) due() (leftOut int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if !s.last.IsZero() && now.Sub(s.last) < saidEvery {
		s.left++
		return 0, false
	}
	leftOut, s.left, s.last = s.left, 0, now
	return leftOut, true
}
