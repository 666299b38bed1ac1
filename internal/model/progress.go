package model

import (
	"sync"
	"time"
)

// Progress is how far a long step of Open has come.
type Progress struct {
	Phase string // "download" or "fingerprint"
	What  string // the repository, or the model's path
	Done  int64  // bytes
	Total int64  // bytes
}

// meter counts bytes from several goroutines and reports them now and then.
type meter struct {
	report func(Progress)

	mu   sync.Mutex
	p    Progress
	last time.Time
}

const reportEvery = 100 * time.Millisecond

func newMeter(report func(Progress), phase, what string, total int64) *meter {
	return &meter{report: report, p: Progress{Phase: phase, What: what, Total: total}}
}

// add counts n more bytes; n is negative when bytes have to be read again.
func (m *meter) add(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.p.Done += n
	if now := time.Now(); m.report != nil && now.Sub(m.last) >= reportEvery {
		m.last = now
		m.report(m.p)
	}
}

// finish reports the last state, whatever the clock says.
func (m *meter) finish() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.report != nil {
		m.report(m.p)
	}
}
