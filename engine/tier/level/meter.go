package level

import (
	"sync"
	"sync/atomic"
)

// Progress is told how many bytes of the total are done.
type Progress func(what string, done, total int64)

// MeterStep is how many bytes lie between two calls of Progress, so that a Meter costs nothing.
const MeterStep = 16 << 20

// Meter adds up bytes from several goroutines. It calls Tell one at a time.
type Meter struct {
	Tell  Progress // nil: nobody
	What  string
	Total int64
	done  atomic.Int64
	mu    sync.Mutex
}

// Add counts n bytes more.
func (m *Meter) Add(n int64) {
	if m.Tell == nil {
		return
	}
	if done := m.done.Add(n); done/MeterStep != (done-n)/MeterStep {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.Tell(m.What, done, m.Total)
	}
}
