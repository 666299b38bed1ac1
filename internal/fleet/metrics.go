package fleet

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of a watcher. The gauges are read from the snapshot when scraped.
type metrics struct {
	registerer prometheus.Registerer
	collectors []prometheus.Collector

	events  *prometheus.CounterVec // role, cause
	refused prometheus.Counter
}

func newMetrics(r prometheus.Registerer, w *Watcher) (*metrics, error) {
	m := &metrics{
		registerer: r,
		events: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "xpyd_fleet_events_total",
			Help: "Changes of members' states, by role and cause. The log has the reasons of silence, report and full.",
		}, []string{"role", "cause"}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "xpyd_fleet_messages_refused_total",
			Help: "Malformed messages on NATS. If it rises, find the sender: another version or a stranger.",
		}),
	}
	m.collectors = []prometheus.Collector{m.events, m.refused, snapshotCollector{w}}
	if r == nil {
		return m, nil
	}
	for i, c := range m.collectors {
		if err := r.Register(c); err != nil {
			m.collectors = m.collectors[:i]
			m.unregister()
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) unregister() {
	if m.registerer == nil {
		return
	}
	for _, c := range m.collectors {
		m.registerer.Unregister(c)
	}
}

// snapshotCollector renders a watcher's snapshot.
type snapshotCollector struct{ w *Watcher }

var (
	descMembers = prometheus.NewDesc("xpyd_fleet_members",
		"Members by role and state. Suspect ones get no new work; unheard ones do: find out why they do not reach NATS.", []string{"role", "state"}, nil)
	descAge = prometheus.NewDesc("xpyd_fleet_heartbeat_age_seconds",
		"Longest time since a member was heard, on NATS or by a probe, among those that announce themselves and are not dead.", nil, nil)
	descRefusals = prometheus.NewDesc("xpyd_fleet_incompatible_members",
		"Live members that have no compatible counterpart, or few. xpyd status says which field differs.", nil, nil)
	descConnected = prometheus.NewDesc("xpyd_fleet_nats_connected",
		"1 while NATS is reachable. While it is 0, silence kills nobody and nobody joins.", nil, nil)
	descReconnects = prometheus.NewDesc("xpyd_fleet_nats_reconnects_total",
		"Times that the link to NATS was restored.", nil, nil)
)

func (c snapshotCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descMembers, descAge, descRefusals, descConnected, descReconnects} {
		out <- d
	}
}

func (c snapshotCollector) Collect(out chan<- prometheus.Metric) {
	s := c.w.Snapshot()
	type key struct {
		role  Role
		state State
	}
	count := map[key]int{}
	var age time.Duration
	now := time.Now()
	for i := range s.Members {
		m := &s.Members[i]
		count[key{m.Role, m.State}]++
		if m.Source == NATS && !over(m.State) {
			age = max(age, now.Sub(m.Heard))
		}
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, role := range []Role{Prefill, Decode} {
		for _, state := range []State{Live, Unheard, Suspect, Dead, Gone} {
			gauge(descMembers, float64(count[key{role, state}]), string(role), string(state))
		}
	}
	connected := 0.0
	if s.Link.Up {
		connected = 1
	}
	gauge(descAge, age.Seconds())
	gauge(descRefusals, float64(len(s.Refusals())))
	gauge(descConnected, connected)
	out <- prometheus.MustNewConstMetric(descReconnects, prometheus.CounterValue, float64(s.Link.Reconnects))
}
