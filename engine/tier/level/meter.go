package tier

import (
	"sync"
	"sync/atomic"
)

// Progress hears how many bytes of what is being done are done.
type Progress func(what string, done, total int64)

// meterStep is how many bytes a meter is silent for, so that it costs nothing.
const meterStep = 16 << 20

// meter adds up bytes from several goroutines, and tells of them one at a time.
type meter struct {
	tell  Progress // nil: nobody
	what  string
	total int64
	done  atomic.Int64
	mu    sync.Mutex
}

func (m *meter) add(n int64) {
	if m.tell == nil {
		return
	}
	if done := m.done.Add(n); done/meterStep != (done-n)/meterStep {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.tell(m.what, done, m.total)
	}
}
