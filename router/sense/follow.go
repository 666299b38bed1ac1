package sense

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// memberMetrics are about which workers may get requests.
type memberMetrics struct {
	sent      *prometheus.CounterVec // probes, by result
	opened    *prometheus.CounterVec // role
	ejections *prometheus.CounterVec // role
}

func newMemberMetrics() memberMetrics {
	counters := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	g := memberMetrics{
		sent: counters("xpyd_router_probes_total", "One-token probes sent, by result.", "result"),
		opened: counters("xpyd_router_breaker_opened_total",
			"Times that a worker's breaker opened, including after a failed trial. `xpyd status` says whose and why.", "role"),
		ejections: counters("xpyd_router_ejections_total",
			"Times that a worker was ejected because it did worse than its peers. `xpyd status` says whose and why.", "role"),
	}
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		g.opened.WithLabelValues(string(role))
		g.ejections.WithLabelValues(string(role))
	}
	return g
}

// Collectors returns the metrics.
func (ms *Members) Collectors() []prometheus.Collector {
	gauge := func(name, help string, f func() int) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return float64(f()) })
	}
	return []prometheus.Collector{ms.sent, ms.opened, ms.ejections,
		gauge("xpyd_router_breakers_open", "Workers whose breaker is open or half open: they are live, but fail their requests.",
			func() int { n, _ := ms.Picker.Guarded(); return n }),
		gauge("xpyd_router_workers_ejected", "Workers that get no requests because they do worse than their peers.",
			func() int { _, n := ms.Picker.Guarded(); return n }),
		gauge("xpyd_router_prefix_bytes", "Memory for which worker got which prefix, by text. At pick.affinity_bytes the oldest are forgotten. 0 long after a start: no prompt is long enough, and other routers told of none.", ms.Picker.AffinityBytes),
	}
}

// followGuards logs and counts what happens to the workers' guards, and compares the
// workers now and then.
func (ms *Members) followGuards() {
	tick := time.NewTicker(ms.Judge)
	defer tick.Stop()
	for {
		events, changed := ms.Picker.Events()
		for i := range events {
			ms.guarded(&events[i])
		}
		select {
		case <-changed:
		case now := <-tick.C:
			ms.Picker.Judge(now)
		case <-ms.Ctx.Done():
			return
		}
	}
}

func (ms *Members) guarded(ev *pick.Event) {
	log := ms.Log.With("worker", ev.ID, "role", ev.Role, "was", ev.Was)
	switch ev.State {
	case pick.Open:
		if ev.Until == nil || !ev.Until.After(time.Now()) {
			return // no request tried it
		}
		ms.opened.WithLabelValues(string(ev.Role)).Inc()
		log.Warn("breaker opened", "until", *ev.Until, "why", ev.Why)
	case pick.HalfOpen:
		log.Debug("breaker is half open: one request tries the worker")
	case pick.Ejected:
		ms.ejections.WithLabelValues(string(ev.Role)).Inc()
		log.Warn("worker ejected", "until", *ev.Until, "why", ev.Why)
	default:
		log.Info("worker gets requests again")
	}
}

// followPicks updates the picker's table at each change of the fleet and of the probes, so
// that requests need not. It asks other routers a little after the first pair is there,
// when most of the fleet is.
func (ms *Members) followPicks() {
	asks := ms.Share != nil
	var settled <-chan time.Time
	for {
		changed, probed := ms.Fleet.Changed(), ms.Probed()
		ms.Picker.Refresh(ms.View())
		if asks && ms.HasPair() {
			asks, settled = false, time.After(settling)
		}
		select {
		case <-settled:
			ms.Share.Ask()
		case <-changed:
		case <-probed:
		case <-ms.Ctx.Done():
			return
		}
	}
}

const settling = time.Second
