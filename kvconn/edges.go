package kvconn

import (
	"sync"
	"sync/atomic"
)

// edges count the bytes that came from each sender with which there is a session. There are no more than sessions.
type edges struct {
	mu sync.Mutex
	by map[string]*edge // by the sender's ID
}

// edge is one sender's bytes, from its first session on until none is left.
type edge struct {
	bytes    atomic.Int64
	sessions int // under edges.mu
}

// open returns a sender's edge, for a session that begins; close takes it back.
func (e *edges) open(sender string) *edge {
	e.mu.Lock()
	defer e.mu.Unlock()
	of := e.by[sender]
	if of == nil {
		of = &edge{}
		if e.by == nil {
			e.by = map[string]*edge{}
		}
		e.by[sender] = of
	}
	of.sessions++
	return of
}

func (e *edges) close(sender string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if of := e.by[sender]; of != nil {
		if of.sessions--; of.sessions == 0 {
			delete(e.by, sender)
		}
	}
}

// MovedFrom is how many bytes of KV rows this process has stored of each sender that it has a session with, since the
// first of these began.
func (m *Metrics) MovedFrom() map[string]int64 {
	m.edges.mu.Lock()
	defer m.edges.mu.Unlock()
	out := make(map[string]int64, len(m.edges.by))
	for id, of := range m.edges.by {
		out[id] = of.bytes.Load()
	}
	return out
}
