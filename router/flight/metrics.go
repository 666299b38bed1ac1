package flight

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/router/dialect"
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
