package flight

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/limit"
	"github.com/xpyd/xpyd/router/pick"
)

// metrics are the router's, without probes. Labels come from closed sets:
// path is a route or "other".
type metrics struct {
	requests  *prometheus.CounterVec   // path, code
	duration  *prometheus.HistogramVec // path
	ttft      *prometheus.HistogramVec // path
	tpot      *prometheus.HistogramVec // path
	itl       *gaps
	prompt    *prometheus.CounterVec // path
	generated *prometheus.CounterVec // path
	queued    prometheus.Histogram
	retries   *prometheus.CounterVec // reason
	cancelled *prometheus.CounterVec // role
	fallbacks *prometheus.CounterVec // reason
	local     *prometheus.CounterVec // reason
	bytes     prometheus.Counter
	*admissionMetrics
	exhausted prometheus.Counter // the retry budget

	// byPath is what a request counts on its route: looking a label up for each
	// costs more than counting. The map does not change.
	byPath map[string]*routeMetrics

	all []prometheus.Collector
}

// routeMetrics are one route's, each from its first use on: what nothing was asked
// of has no series.
type routeMetrics struct {
	requests, prompt, generated func() prometheus.Counter // of status 200
	duration, ttft, tpot        func() prometheus.Observer
	gaps                        func() *gapCounts
}

func newMetrics(s *Service) *metrics {
	seconds := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_requests_total",
			Help: "Requests answered, by route and status; 499 is a client that left."}, []string{"path", "code"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "xpyd_router_request_duration_seconds",
			Help: "From a request's arrival to the end of its answer.", Buckets: seconds}, []string{"path"}),
		ttft: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "xpyd_router_ttft_seconds",
			Help: "From a request's arrival to decode's first byte.", Buckets: seconds}, []string{"path"}),
		tpot: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "xpyd_router_tpot_seconds",
			Help: "Mean time between the tokens of a stream, of each.", Buckets: edges(gapEdges[:])}, []string{"path"}),
		itl: newGaps(),
		prompt: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_prompt_tokens_total",
			Help: "Prompt tokens of requests that were answered, cached or not. Of streams that do not tell, as prefill counted or as a guess; of what is passed on, where keys are counted."}, []string{"path"}),
		generated: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_generation_tokens_total",
			Help: "Tokens of answers. Of streams that do not tell, one an event; of what is passed on, where keys are counted."}, []string{"path"}),
		queued: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "xpyd_router_queue_duration_seconds",
			Help: "Wait for admission and for a pair.", Buckets: seconds}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_retries_total",
			Help: "Attempts that were repeated on another pair, by what ended them."}, []string{"reason"}),
		cancelled: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_legs_cancelled_total",
			Help: "Legs that the router ended before their worker did."}, []string{"role"}),
		fallbacks: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_fallbacks_total",
			Help: "Requests that decode served alone because they could not be split, by what of them could not."}, []string{"reason"}),
		bytes: prometheus.NewCounter(prometheus.CounterOpts{Name: "xpyd_router_response_bytes_total",
			Help: "Bytes of answers relayed to clients."}),
	}
	m.local = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_local_prefills_total",
		Help: "Requests that decode served alone though they could be split: by predicted cost, or to learn it."}, []string{"reason"})
	for _, reason := range []string{pick.LocalCost, pick.LocalExplore} {
		m.local.WithLabelValues(reason)
	}
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	m.all = []prometheus.Collector{m.requests, m.duration, m.ttft, m.tpot, m.itl, m.prompt, m.generated, m.queued, m.retries, m.cancelled, m.fallbacks, m.bytes,
		gauge("xpyd_router_requests_in_flight", "Requests that are admitted and not over.", func() float64 {
			n, _ := s.gate.counts()
			return float64(n)
		}),
		gauge("xpyd_router_queue_requests", "Requests that wait for admission.", func() float64 {
			_, n := s.gate.counts()
			return float64(n)
		}),
		gauge("xpyd_router_legs_in_flight", "Legs that are open to workers.", func() float64 { return float64(s.legs.count()) }),
	}
	m.admissionMetrics = newAdmissionMetrics(s.gate)
	m.exhausted = prometheus.NewCounter(prometheus.CounterOpts{Name: "xpyd_router_retry_budget_exhausted_total",
		Help: "Requests that failed because the retry budget was used up. The fleet fails more than retries should cover: look at xpyd_router_retries_total for why."})
	m.all = append(m.all, m.local, m.admissionMetrics, m.exhausted, s.hedges.count)
	if s.Tracer != nil {
		count := func(name, help string, f func() float64) {
			m.all = append(m.all, prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, f))
		}
		count("xpyd_router_spans_exported_total", "Spans that the collector took.",
			func() float64 { n, _ := s.Tracer.Counts(); return float64(n) })
		count("xpyd_router_spans_dropped_total", "Spans dropped because the queue was full or the collector did not take them: look at its health, or sample less.",
			func() float64 { _, n := s.Tracer.Counts(); return float64(n) })
	}
	for _, reason := range retryReasons {
		m.retries.WithLabelValues(reason)
	}
	for _, s := range dialect.Shapes {
		m.fallbacks.WithLabelValues(string(s))
	}
	m.byPath = make(map[string]*routeMetrics, len(s.Paths))
	for _, path := range s.Paths {
		m.byPath[path] = m.newRoute(path)
	}
	return m
}

func edges(of []time.Duration) (out []float64) {
	for _, d := range of {
		out = append(out, d.Seconds())
	}
	return out
}

func (m *metrics) route(path string) *routeMetrics {
	if route := m.byPath[path]; route != nil {
		return route
	}
	return m.newRoute(path) // not a public one
}

func (m *metrics) newRoute(path string) *routeMetrics {
	counter := func(v *prometheus.CounterVec, labels ...string) func() prometheus.Counter {
		return sync.OnceValue(func() prometheus.Counter { return v.WithLabelValues(labels...) })
	}
	observer := func(v *prometheus.HistogramVec) func() prometheus.Observer {
		return sync.OnceValue(func() prometheus.Observer { return v.WithLabelValues(path) })
	}
	return &routeMetrics{requests: counter(m.requests, path, "200"), prompt: counter(m.prompt, path), generated: counter(m.generated, path),
		duration: observer(m.duration), ttft: observer(m.ttft), tpot: observer(m.tpot),
		gaps: sync.OnceValue(func() *gapCounts { return m.itl.of(path) })}
}

func (m *metrics) request(path string, code int) {
	m.requests.WithLabelValues(path, strconv.Itoa(code)).Inc()
}

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
