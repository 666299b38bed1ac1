package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// answerMemory bounds the memory of all answers under way. Each reserves its share before it
// begins, in order of arrival, and holds nothing else while it waits.
type answerMemory struct {
	most  int64
	queue int           // how many may wait
	wait  time.Duration // how long each may
	full  prometheus.Counter

	mu      sync.Mutex
	used    int64
	waiting []*answerShare
}

// answerShare is one answer's part; nil if it needs none.
type answerShare struct {
	m     *answerMemory
	bytes int64
	got   chan struct{} // closed when granted
}

func newAnswerMemory(most int64, queue int, wait time.Duration) *answerMemory {
	return &answerMemory{most: most, queue: queue, wait: wait, full: prometheus.NewCounter(prometheus.CounterOpts{Name: "xpyd_worker_answers_refused_total",
		Help: "Requests refused for want of memory for their answers: raise answer_memory, or add workers."})}
}

var (
	errMemory  = errors.New("the memory for answers is taken")
	errWaiters = errors.New("the memory for answers is taken, and too many wait for it")
)

// reserve waits for n bytes, at most m.most. The caller releases them.
func (m *answerMemory) reserve(ctx context.Context, n int64) (*answerShare, error) {
	s := &answerShare{m: m, bytes: n, got: make(chan struct{})}
	m.mu.Lock()
	if len(m.waiting) >= m.queue {
		m.mu.Unlock()
		m.full.Inc()
		return nil, errWaiters
	}
	m.waiting = append(m.waiting, s)
	m.grantWaiting()
	m.mu.Unlock()
	timer := time.NewTimer(m.wait)
	defer timer.Stop()
	var err error
	select {
	case <-s.got:
		return s, nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-timer.C:
		m.full.Inc()
		err = fmt.Errorf("%w: %d bytes did not come free within %v", errMemory, s.bytes, m.wait)
	}
	s.release()
	return nil, err
}

// grantWaiting serves the queue from its head while memory lasts. m.mu is held.
func (m *answerMemory) grantWaiting() {
	n := 0
	for _, s := range m.waiting {
		if m.used+s.bytes > m.most {
			break
		}
		m.used += s.bytes
		close(s.got)
		n++
	}
	m.waiting = slices.Delete(m.waiting, 0, n)
}

// grow adds n bytes to a share if they are free. It does not wait, because its holder keeps others
// waiting.
func (s *answerShare) grow(n int64) bool {
	if s == nil {
		return true
	}
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.used+n > s.m.most {
		s.m.full.Inc()
		return false
	}
	s.m.used += n
	s.bytes += n
	return true
}

// release gives a share back, or leaves the queue.
func (s *answerShare) release() {
	if s == nil {
		return
	}
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if i := slices.Index(s.m.waiting, s); i >= 0 {
		s.m.waiting = slices.Delete(s.m.waiting, i, i+1)
	} else {
		s.m.used -= s.bytes
	}
	s.bytes = 0
	s.m.grantWaiting()
}

func (m *answerMemory) state() (used int64, waiting int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used, len(m.waiting)
}

func (m *answerMemory) collectors() []prometheus.Collector {
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	return []prometheus.Collector{m.full,
		gauge("xpyd_worker_answer_bytes", "Memory set aside for answers under way.", func() float64 { n, _ := m.state(); return float64(n) }),
		gauge("xpyd_worker_answers_waiting", "Requests that wait for memory for their answers.", func() float64 { _, n := m.state(); return float64(n) }),
	}
}
