package kvconn

import (
	"errors"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Metrics are this package's counters; one value serves a process's receiver
// and its server.
type Metrics struct {
	tickets  *prometheus.CounterVec   // side, outcome
	seconds  *prometheus.HistogramVec // side
	active   *prometheus.GaugeVec     // side
	sessions *prometheus.GaugeVec     // side
	ends     *prometheus.CounterVec   // side, outcome
	bytes    *prometheus.CounterVec   // side
	units    *prometheus.CounterVec   // side
	resends  *prometheus.CounterVec   // side
	corrupt  prometheus.Counter
	lost     prometheus.Counter
	stale    *prometheus.CounterVec // reason
	repaired prometheus.Counter
	refusals *prometheus.CounterVec // field
	mapped   *prometheus.GaugeVec   // side
	stuck    *prometheus.CounterVec // side

	failedAccepts prometheus.Counter
	edges         edges
}

// NewMetrics registers the metrics with reg. With a nil reg they are counted but not
// shown.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	var all []prometheus.Collector
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		all = append(all, c)
		return c
	}
	gauge := func(name, help string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, []string{"side"})
		all = append(all, g)
		return g
	}
	m := &Metrics{
		tickets: counter("xpyd_kvconn_tickets_total", "Tickets that ended, by outcome.", "side", "outcome"),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "xpyd_kvconn_ticket_seconds",
			Help:    "Time from a ticket to its end, prompt computation included.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 18)}, []string{"side"}),
		active:   gauge("xpyd_kvconn_active_tickets", "Tickets that are not over."),
		sessions: gauge("xpyd_kvconn_sessions", "Live sessions."),
		ends:     counter("xpyd_kvconn_session_ends_total", "Sessions that ended, by outcome; done is an orderly close.", "side", "outcome"),
		bytes:    counter("xpyd_kvconn_payload_bytes_total", "KV row bytes sent, or stored after their digest check.", "side"),
		units:    counter("xpyd_kvconn_units_total", "Blocks of one layer sent, or stored after their digest check.", "side"),
		resends:  counter("xpyd_kvconn_resent_units_total", "Blocks of one layer asked for again, or sent again.", "side"),
		corrupt: counter("xpyd_kvconn_corrupt_units_total",
			"Blocks of one layer that arrived with a wrong digest and were not stored.").WithLabelValues(),
		lost: counter("xpyd_kvconn_lost_units_total",
			"Blocks of one layer that were torn when their peer ended: what came between two GPUs had a wrong digest and did not come again.").WithLabelValues(),
		repaired: counter("xpyd_kv_repaired_units_total",
			"Blocks of one layer that arrived damaged or not at all and were stored after they had been asked for again.").WithLabelValues(),
		stale:  counter("xpyd_kvconn_stale_units_total", "Blocks of one layer dropped on arrival, by reason.", "reason"),
		mapped: gauge("xpyd_kvconn_mapped_pools", "Receivers' pools that a sender has mapped: on the receiver's side those it has not proof of being unmapped."),
		stuck:  counter("xpyd_kvconn_stuck_ends_total", "Pools and rings between GPUs whose end a device held up for longer than was waited for. Their memory is taken until it lets go: look at that GPU, or at NCCL's log, and restart the worker.", "side"),
		failedAccepts: counter("xpyd_kvconn_accept_errors_total",
			"Connections of other workers that could not be accepted, mostly for want of file descriptors: raise the limit (ulimit -n).").WithLabelValues(),
		refusals: counter("xpyd_kvconn_handshake_refusals_total", "Handshakes refused by either side, by field.", "field"),
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range append(all, m.seconds) {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// unended counts a close that a device holds up.
func (m *Metrics) unended(side Side, err error) {
	if errors.Is(err, ErrStuck) {
		m.stuck.WithLabelValues(string(side)).Inc()
	}
}

// perSide are the counters that a session touches often, looked up once.
type perSide struct {
	m                     *Metrics
	side                  string
	bytes, units, resends prometheus.Counter
	active, sessions      prometheus.Gauge
}

func (m *Metrics) of(side Side) perSide {
	s := string(side)
	return perSide{m: m, side: s,
		bytes: m.bytes.WithLabelValues(s), units: m.units.WithLabelValues(s), resends: m.resends.WithLabelValues(s),
		active: m.active.WithLabelValues(s), sessions: m.sessions.WithLabelValues(s)}
}

func (p perSide) ticketEnd(o ticket.Outcome, seconds float64) {
	p.active.Dec()
	p.m.tickets.WithLabelValues(p.side, string(o)).Inc()
	p.m.seconds.WithLabelValues(p.side).Observe(seconds)
}

func (p perSide) sessionEnd(o ticket.Outcome) {
	p.sessions.Dec()
	p.m.ends.WithLabelValues(p.side, string(o)).Inc()
}

// refused counts a failed handshake under the field it was refused for, if it was,
// without the field's index, so that labels stay few.
func (m *Metrics) refused(err error) {
	d, ok := errors.AsType[*Incompatible](err)
	if !ok {
		return
	}
	field, _, _ := strings.Cut(d.Field, "[")
	switch field {
	case "banner", "protocol", "role", "id", "epoch", "model_fingerprint", "tokenizer_fingerprint", "numerics", "layout.groups", "bulk_conns", "session", "capacity", fieldSecret, "identity", "revoked":
	default: // a peer's refusal may name anything
		field = "other"
	}
	m.refusals.WithLabelValues(field).Inc()
}

// Moved is how many bytes of KV rows this process has sent to decode workers, and how many it has stored, since it
// began.
func (m *Metrics) Moved() (sent, stored int64) {
	count := func(side Side) int64 {
		var out dto.Metric
		if err := m.bytes.WithLabelValues(string(side)).Write(&out); err != nil {
			return 0
		}
		return int64(out.GetCounter().GetValue())
	}
	return count(SideSender), count(SideReceiver)
}
