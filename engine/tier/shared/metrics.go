package tier

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// sharedMetrics is what operations on the shared store have come to. Units are
// counted with those of the other tiers.
type sharedMetrics struct {
	errors, bytes *prometheus.CounterVec
	seconds       *prometheus.HistogramVec
}

func newSharedMetrics() *sharedMetrics {
	const ns, sub = "xpyd", "kvtier"
	return &sharedMetrics{
		errors:  prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: ns, Subsystem: sub, Name: "store_errors_total", Help: "Operations that the shared store refused, or that failed because it was not reached or did not answer in time."}, []string{"op", "kind"}),
		bytes:   prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: ns, Subsystem: sub, Name: "store_bytes_total", Help: "Bytes of values that went to the shared store and came from it."}, []string{"op"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: ns, Subsystem: sub, Name: "store_seconds", Help: "Time of an operation of the shared store: a question about up to 512 units, a read of up to 4, a write of one.", Buckets: prometheus.ExponentialBuckets(0.0001, 2, 14)}, []string{"op"}),
	}
}

var storeOpenDesc = prometheus.NewDesc("xpyd_kvtier_store_open", "1 while the shared store is left alone because an operation failed.", nil, nil)

// Describe implements prometheus.Collector.
func (s *shared) Describe(c chan<- *prometheus.Desc) {
	c <- storeOpenDesc
	s.metrics.errors.Describe(c)
	s.metrics.bytes.Describe(c)
	s.metrics.seconds.Describe(c)
}

// Collect implements prometheus.Collector.
func (s *shared) Collect(c chan<- prometheus.Metric) {
	open := 0.0
	if !s.breaker.allow() {
		open = 1
	}
	c <- prometheus.MustNewConstMetric(storeOpenDesc, prometheus.GaugeValue, open)
	s.metrics.errors.Collect(c)
	s.metrics.bytes.Collect(c)
	s.metrics.seconds.Collect(c)
}

// StoreStats is how the shared store stands, as this worker sees it.
type StoreStats struct {
	URL       string     `json:"url"` // without credentials
	Prefix    string     `json:"prefix"`
	UnitBytes int        `json:"unit_bytes"`
	Reachable bool       `json:"reachable"` // false: it is left alone until a probe succeeds
	Writes    bool       `json:"writes"`
	Written   uint64     `json:"written_units"` // by this process
	LastError string     `json:"last_error,omitempty"`
	LastAt    *time.Time `json:"last_error_at,omitempty"`
}

// StoreStats describes the shared store; nil when there is none.
func (t *Tiers) StoreStats() *StoreStats {
	if t == nil || t.shared == nil {
		return nil
	}
	s := t.shared
	open, at, last := s.breaker.state()
	s.mu.Lock()
	defer s.mu.Unlock()
	st := &StoreStats{URL: s.store.String(), Prefix: s.prefix, UnitBytes: s.bytes(), Reachable: !open, Writes: s.writes, Written: s.written}
	if last != nil {
		st.LastError, st.LastAt = last.Error(), &at
	}
	return st
}

// ErrNoStore says that there is no shared store, or this worker may not write to it.
var ErrNoStore = errors.New("no shared store to write to")

// Purge deletes the units of this model, numerics and layout from the shared
// store, for all workers: those that it finds until ctx ends. With an error
// there may be more.
func (t *Tiers) Purge(ctx context.Context) (deleted int, err error) {
	if t == nil || t.shared == nil || !t.shared.writes {
		return 0, ErrNoStore
	}
	return t.shared.store.Purge(ctx, t.shared.prefix)
}
