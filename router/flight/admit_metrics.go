package flight

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/router/limit"
)

// maxTenants bounds the label tenant: who comes later counts as otherTenants.
const (
	maxTenants   = 100
	otherTenants = "other"
)

// statsByName is what is counted by tenant.
type statsByName struct {
	requests *prometheus.CounterVec // tenant, code
	tokens   *prometheus.CounterVec // tenant, kind
	refused  *prometheus.CounterVec // tenant, limit

	mu  sync.RWMutex
	all map[string]*tenantStats
}

// tenantStats are one tenant's.
type tenantStats struct {
	by   *statsByName
	name string // the label
}

func newStatsByName() *statsByName {
	return &statsByName{all: map[string]*tenantStats{},
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_tenant_requests_total",
			Help: "Requests that were admitted and are over, by tenant and the first digit of their status. The first 100 tenants are named."},
			[]string{"tenant", "code"}),
		tokens: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_tenant_tokens_total",
			Help: "Tokens used, by tenant and kind; of streams that do not tell, one an event."}, []string{"tenant", "kind"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_tenant_limited_total",
			Help: "Requests refused, by tenant and the limit that they met. A rise is a client that wants more than its key gives."},
			[]string{"tenant", "limit"}),
	}
}

func (s *statsByName) of(name string) *tenantStats {
	s.mu.RLock()
	t := s.all[name]
	s.mu.RUnlock()
	if t != nil {
		return t
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= maxTenants && s.all[name] == nil {
		name = otherTenants
	}
	if s.all[name] == nil {
		s.all[name] = &tenantStats{by: s, name: name}
	}
	return s.all[name]
}

var codeClasses = [...]string{"0xx", "1xx", "2xx", "3xx", "4xx", "5xx"}

func (t *tenantStats) count(status, prompt, generated int) {
	t.by.requests.WithLabelValues(t.name, codeClasses[min(max(status/100, 0), 5)]).Inc()
	t.by.tokens.WithLabelValues(t.name, "prompt").Add(float64(max(prompt, 0)))
	t.by.tokens.WithLabelValues(t.name, "generated").Add(float64(max(generated, 0)))
}

func (t *tenantStats) limited(what string) { t.by.refused.WithLabelValues(t.name, what).Inc() }

// admission is the metrics of what is let in and what is not.
type admissionMetrics struct {
	tenants      *statsByName
	unauthorized prometheus.Counter
	gate         *gate
	waiting      *prometheus.Desc // class
	bytes        *prometheus.Desc
	shed         *prometheus.Desc // class, reason
}

func newAdmissionMetrics(g *gate) *admissionMetrics {
	return &admissionMetrics{gate: g, tenants: newStatsByName(),
		unauthorized: prometheus.NewCounter(prometheus.CounterOpts{Name: "xpyd_router_unauthorized_total",
			Help: "Requests without a good API key."}),
		waiting: prometheus.NewDesc("xpyd_router_queue_class_requests", "Requests that wait for admission, by priority.", []string{"class"}, nil),
		bytes:   prometheus.NewDesc("xpyd_router_queue_bytes", "Bodies of the requests that wait for admission.", nil, nil),
		shed: prometheus.NewDesc("xpyd_router_shed_total",
			"Requests that got no place, by priority and why. A steady rate means that the fleet is too small.", []string{"class", "reason"}, nil),
	}
}

func (m *admissionMetrics) parts() []prometheus.Collector {
	return []prometheus.Collector{m.tenants.requests, m.tenants.tokens, m.tenants.refused, m.unauthorized}
}

// Describe is prometheus.Collector's.
func (m *admissionMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.parts() {
		c.Describe(ch)
	}
	ch <- m.waiting
	ch <- m.bytes
	ch <- m.shed
}

// Collect is prometheus.Collector's.
func (m *admissionMetrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.parts() {
		c.Collect(ch)
	}
	n, bytes := m.gate.Waiting()
	ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.GaugeValue, float64(bytes))
	for i := range n {
		c := limit.Class(i)
		ch <- prometheus.MustNewConstMetric(m.waiting, prometheus.GaugeValue, float64(n[i]), c.String())
		for _, why := range limit.Whys {
			ch <- prometheus.MustNewConstMetric(m.shed, prometheus.CounterValue, float64(m.gate.Shed(c, why)), c.String(), string(why))
		}
	}
}
