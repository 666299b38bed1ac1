package flight

import (
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/kept"
	"github.com/xpyd/xpyd/router/limit"
	"github.com/xpyd/xpyd/router/pick"
)

// metrics are the router's, without probes. Labels come from closed sets: path is a route or
// "other".
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
	exhausted prometheus.Counter     // the retry budget
	takeovers *prometheus.CounterVec // reason, outcome
	pause     prometheus.Histogram   // of a stream that was taken over
	moves     *prometheus.CounterVec // kv
	brought   prometheus.Counter     // tokens

	tenants      *statsByName
	unauthorized prometheus.Counter

	// byPath has what a request counts on its route: looking up a label for each costs more
	// than counting. The map does not change.
	byPath map[string]*routeMetrics

	all []prometheus.Collector
}

// routeMetrics are one route's, each from its first use on: an unused one has no series.
type routeMetrics struct {
	requests, prompt, generated func() prometheus.Counter // of status 200
	duration, ttft, tpot        func() prometheus.Observer
	gaps                        func() *gapCounts
}

func counter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func counters(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func newMetrics(s *Service) *metrics {
	seconds := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}
	var gaps []float64
	for _, d := range gapEdges {
		gaps = append(gaps, d.Seconds())
	}
	byPath := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, []string{"path"})
	}
	m := &metrics{
		requests: counters("xpyd_router_requests_total", "Requests answered, by route and status; 499 is a client that left.", "path", "code"),
		duration: byPath("xpyd_router_request_duration_seconds", "From a request's arrival to the end of its answer.", seconds),
		ttft:     byPath("xpyd_router_ttft_seconds", "From a request's arrival to decode's first byte.", seconds),
		tpot:     byPath("xpyd_router_tpot_seconds", "Mean time between the tokens of each stream.", gaps),
		itl:      newGaps(),
		prompt: counters("xpyd_router_prompt_tokens_total",
			"Prompt tokens of answered requests, cached or not. For a stream that reports no usage: as its worker counted them, or an estimate. Forwarded answers that do not stream count only for tenants, after a wait for admission, or with a request log.", "path"),
		generated: counters("xpyd_router_generation_tokens_total",
			"Tokens of answers. For a stream that reports no usage: one per event. Forwarded answers that do not stream count only for tenants, after a wait for admission, or with a request log.", "path"),
		queued: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "xpyd_router_queue_duration_seconds",
			Help: "Wait for admission and for a pair.", Buckets: seconds}),
		retries:   counters("xpyd_router_retries_total", "Attempts that were repeated on another pair, by what ended them.", "reason"),
		cancelled: counters("xpyd_router_legs_cancelled_total", "Legs that the router ended before their worker did.", "role"),
		fallbacks: counters("xpyd_router_fallbacks_total",
			"Requests that decode served alone because they could not be split, by the feature that prevents it.", "reason"),
		local: counters("xpyd_router_local_prefills_total",
			"Requests that decode served alone although they could have been split: because that was predicted to cost less, or to learn what it costs.", "reason"),
		bytes: counter("xpyd_router_response_bytes_total", "Bytes of answers relayed to clients."),
		exhausted: counter("xpyd_router_retry_budget_exhausted_total",
			"Requests that failed because the retry budget was used up: more attempts fail than retries should cover. xpyd_router_retries_total says why."),
		takeovers: counters("xpyd_router_takeovers_total",
			"Streams whose decode worker was lost or left, by why (transport: its connection broke; timeout: chunk_timeout; dead: the fleet says so; silent: it neither sent nor answered; error: it said what went wrong; drain: it was drained; shortage: it is short of KV blocks; balance: it is slower than its peers) and what followed. continued: another pair went on. failed: none could; the log says why, and the stream ended with an error event or, with the last three reasons, stayed. "+
				"unkept: it could not be tried, because too much is kept for other streams or the worker did not say which tokens it sent. ended: the client left, the deadline passed or the router ended meanwhile.", "reason", "outcome"),
		pause: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "xpyd_router_takeover_pause_seconds",
			Help: "How long a stream stood still, from the break, or where it was left, to the next pair's first event.", Buckets: seconds}),
		moves: counters("xpyd_router_moves_total",
			"Streams that another pair goes on with though their decode worker is well, by where the prompt's KV came from. brought: from that worker, ahead, while it still served the stream. prefill: from a prefill worker, for which the client waited; if that is the rule, look at the log, and at kv.peers.", "kv"),
		brought:      counter("xpyd_router_moved_kv_tokens_total", "Tokens whose KV was brought from one decode worker to another ahead of a move."),
		tenants:      newStatsByName(),
		unauthorized: counter("xpyd_router_unauthorized_total", "Requests without a valid API key."),
	}
	gauge := func(name, help string, f func() int) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return float64(f()) })
	}
	m.all = []prometheus.Collector{m.requests, m.duration, m.ttft, m.tpot, m.itl, m.prompt, m.generated, m.queued, m.retries, m.cancelled, m.fallbacks,
		m.local, m.bytes, m.exhausted, m.takeovers, m.pause, m.moves, m.brought, m.unauthorized, m.tenants.requests, m.tenants.tokens, m.tenants.refused, s.hedges.count,
		gauge("xpyd_router_requests_in_flight", "Requests that are admitted and not over.", func() int { n, _ := s.gate.Counts(); return n }),
		gauge("xpyd_router_queue_requests", "Requests that wait for admission.", func() int { _, n := s.gate.Counts(); return n }),
		gauge("xpyd_router_queue_bytes", "Bodies of the requests that wait for admission.", func() int { _, n := s.gate.Waiting(); return int(n) }),
		gauge("xpyd_router_legs_in_flight", "Legs that are open to workers.", s.legs.count),
	}
	for c := range limit.Class(limit.Classes) {
		m.all = append(m.all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "xpyd_router_queue_class_requests",
			Help: "Requests that wait for admission, by priority.", ConstLabels: prometheus.Labels{"class": c.String()}},
			func() float64 { n, _ := s.gate.Waiting(); return float64(n[c]) }))
		for _, why := range limit.Whys {
			m.all = append(m.all, prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "xpyd_router_shed_total",
				Help:        "Requests that got no place in the router's queue, by priority and reason. A steady rate means that the fleet is too small. Workers count what shed_late sheds.",
				ConstLabels: prometheus.Labels{"class": c.String(), "reason": string(why)}},
				func() float64 { return float64(s.gate.Shed(c, why)) }))
		}
	}
	m.all = append(m.all, keptMetrics(s)...)
	if s.Tracer != nil {
		count := func(name, help string, f func() uint64) {
			m.all = append(m.all, prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(f()) }))
		}
		count("xpyd_router_spans_exported_total", "Spans that the collector took.", func() uint64 { n, _ := s.Tracer.Counts(); return n })
		count("xpyd_router_spans_dropped_total", "Spans dropped because the queue was full or the collector did not take them: look at its health, or sample less.",
			func() uint64 { _, n := s.Tracer.Counts(); return n })
	}
	for _, reason := range []string{pick.LocalCost, pick.LocalExplore, pick.LocalMixed} {
		m.local.WithLabelValues(reason)
	}
	for _, reason := range retryReasons {
		m.retries.WithLabelValues(reason)
	}
	for _, reason := range []string{reasonTransport, reasonTimeout, reasonDead, reasonSilent, reasonError, reasonDrain, reasonBlocks, reasonBalance} {
		for _, outcome := range takeoverOutcomes {
			m.takeovers.WithLabelValues(reason, outcome)
		}
	}
	for _, kv := range []string{kvBrought, kvPrefill} {
		m.moves.WithLabelValues(kv)
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

// keptMetrics are of responses that are kept.
func keptMetrics(s *Service) []prometheus.Collector {
	gauge := func(name, help string, f func(kept.Stats) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return f(s.responses.Stats()) })
	}
	list := []prometheus.Collector{
		gauge("xpyd_router_responses_kept", "Responses that this router's memory keeps for later requests.", func(n kept.Stats) float64 { return float64(n.Entries) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "xpyd_router_responses_background", Help: "Responses that wait or run in the background."},
			func() float64 { return float64(s.background.counted()) }),
		gauge("xpyd_router_responses_kept_bytes", "Memory that they take.", func(n kept.Stats) float64 { return float64(n.Bytes) }),
	}
	for reason, f := range map[string]func(kept.Stats) uint64{"full": func(n kept.Stats) uint64 { return n.Full }, "expired": func(n kept.Stats) uint64 { return n.Expired },
		"large": func(n kept.Stats) uint64 { return n.Large }, "store": func(n kept.Stats) uint64 { return n.Failed }} {
		list = append(list, prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "xpyd_router_responses_dropped_total",
			Help:        "Responses that are not kept (any more), and why. full: others needed the room; if clients miss them, raise responses.entries or responses.bytes. expired: not used for responses.ttl. large: one alone is larger than all that may be kept. store: the Redis failed, at writing or at reading; the log says how.",
			ConstLabels: prometheus.Labels{"reason": reason}}, func() float64 { return float64(f(s.responses.Stats())) }))
	}
	return list
}

func (m *metrics) route(path string) *routeMetrics {
	if route := m.byPath[path]; route != nil {
		return route
	}
	return m.newRoute(path) // not a public one
}

func (m *metrics) newRoute(path string) *routeMetrics {
	count := func(v *prometheus.CounterVec, labels ...string) func() prometheus.Counter {
		return sync.OnceValue(func() prometheus.Counter { return v.WithLabelValues(labels...) })
	}
	observe := func(v *prometheus.HistogramVec) func() prometheus.Observer {
		return sync.OnceValue(func() prometheus.Observer { return v.WithLabelValues(path) })
	}
	return &routeMetrics{requests: count(m.requests, path, "200"), prompt: count(m.prompt, path), generated: count(m.generated, path),
		duration: observe(m.duration), ttft: observe(m.ttft), tpot: observe(m.tpot),
		gaps: sync.OnceValue(func() *gapCounts { return m.itl.of(path) })}
}

func (m *metrics) request(path string, code int) {
	m.requests.WithLabelValues(path, strconv.Itoa(code)).Inc()
}

// maxTenants bounds the values of the label tenant; later ones count as otherTenants.
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

type tenantStats struct {
	by   *statsByName
	name string // the label
}

func newStatsByName() *statsByName {
	return &statsByName{all: map[string]*tenantStats{},
		requests: counters("xpyd_router_tenant_requests_total",
			"Requests that were admitted and are over, by tenant and the first digit of their status. The first 100 tenants are named.", "tenant", "code"),
		tokens: counters("xpyd_router_tenant_tokens_total", "Tokens used, by tenant and kind; one per event for a stream that reports no usage.", "tenant", "kind"),
		refused: counters("xpyd_router_tenant_limited_total",
			"Requests refused, by tenant and the limit that they met. It rises when a client wants more than its key allows.", "tenant", "limit"),
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
