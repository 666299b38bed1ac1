package prefill

import (
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// leaseEnd says how a lease ended; it is the metric's label.
type leaseEnd string

const (
	leaseTaken   leaseEnd = "taken"    // decode claimed it
	leaseExpired leaseEnd = "expired"  // nobody did in time
	leaseFailed  leaseEnd = "failed"   // its prompt could not be run
	leaseGivenUp leaseEnd = "given_up" // decode claimed it, and its prompt did not come or was not awaited
)

// Metrics are this package's. A nil one counts nothing.
type Metrics struct {
	held *prometheus.GaugeVec
	ends *prometheus.CounterVec
}

// NewMetrics registers the metrics with reg.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		held: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "xpyd_prefill_leases",
			Help: "Prompts of foreign proxies that run, wait to be collected, or are waited for, by what names them. At 1024 the next is 503: look whether decode comes for them."}, []string{"by"}),
		ends: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_prefill_leases_total",
			Help: "How they ended. expired: nobody collected the prompt within lease_time; given_up: decode waited for a prompt that did not come within ticket_wait, or left. Both say that the proxy and the workers do not agree."}, []string{"by", "end"}),
	}
	for _, by := range []string{byParams, byTransfer, byRoom} {
		m.held.WithLabelValues(by)
		for _, end := range []leaseEnd{leaseTaken, leaseExpired, leaseFailed, leaseGivenUp} {
			m.ends.WithLabelValues(by, string(end))
		}
	}
	for _, c := range []prometheus.Collector{m.held, m.ends} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register prefill's metrics: %w", err)
		}
	}
	return m, nil
}

// What names a lease.
const (
	byParams   = "kv_transfer_params"
	byTransfer = "transfer_id"
	byRoom     = "bootstrap_room"
)

func leaseBy(id string) string {
	switch {
	case strings.HasPrefix(id, EarlyRoom):
		return byRoom
	case strings.HasPrefix(id, EarlyClaim):
		return byTransfer
	}
	return byParams
}

func (m *Metrics) began(id string) {
	if m != nil {
		m.held.WithLabelValues(leaseBy(id)).Inc()
	}
}

func (m *Metrics) ended(id string, end leaseEnd) {
	if m != nil {
		m.held.WithLabelValues(leaseBy(id)).Dec()
		m.ends.WithLabelValues(leaseBy(id), string(end)).Inc()
	}
}
