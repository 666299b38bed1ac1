package router

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// guardMetrics are those of what keeps a failure from spreading.
type guardMetrics struct {
	exhausted prometheus.Counter
	opened    *prometheus.CounterVec // role
	ejections *prometheus.CounterVec // role
}

// collectors makes them.
func (g *guardMetrics) collectors(r *Router) []prometheus.Collector {
	g.exhausted = prometheus.NewCounter(prometheus.CounterOpts{Name: "xpyd_router_retry_budget_exhausted_total",
		Help: "Requests that failed because the retry budget was used up. The fleet fails more than retries should cover: look at xpyd_router_retries_total for why."})
	g.opened = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_breaker_opened_total",
		Help: "Times that a worker's breaker opened, also after a try that failed. `xpyd status` says whose and why."}, []string{"role"})
	g.ejections = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_ejections_total",
		Help: "Times that a worker was ejected because it did worse than its peers. `xpyd status` says whose and why."}, []string{"role"})
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		g.opened.WithLabelValues(string(role))
		g.ejections.WithLabelValues(string(role))
	}
	gauge := func(name, help string, f func() int) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return float64(f()) })
	}
	return []prometheus.Collector{g.exhausted, g.opened, g.ejections, r.hedges.count,
		gauge("xpyd_router_breakers_open", "Workers whose breaker is open or half open: they are live, and fail what they are given.",
			func() int { n, _ := r.picker.Guarded(); return n }),
		gauge("xpyd_router_workers_ejected", "Workers that get no requests because they do worse than their peers.",
			func() int { _, n := r.picker.Guarded(); return n }),
	}
}

// followGuards logs and counts what happens to the guards of workers, and
// compares the workers now and then.
func (r *Router) followGuards() {
	tick := time.NewTicker(r.cfg.Pick.Ejection.Interval)
	defer tick.Stop()
	for {
		events, changed := r.picker.Events()
		for i := range events {
			r.guarded(&events[i])
		}
		select {
		case <-changed:
		case now := <-tick.C:
			r.picker.Judge(now)
		case <-r.ctx.Done():
			return
		}
	}
}

func (r *Router) guarded(ev *pick.Event) {
	log := r.log.With("worker", ev.ID, "role", ev.Role, "was", ev.Was)
	switch ev.State {
	case pick.Open:
		if ev.Until == nil || !ev.Until.After(time.Now()) {
			return // a try that was not made
		}
		r.metrics.guards.opened.WithLabelValues(string(ev.Role)).Inc()
		log.Warn("breaker opened", "until", *ev.Until, "why", ev.Why)
	case pick.HalfOpen:
		log.Debug("breaker is half open: one request tries the worker")
	case pick.Ejected:
		r.metrics.guards.ejections.WithLabelValues(string(ev.Role)).Inc()
		log.Warn("worker ejected", "until", *ev.Until, "why", ev.Why)
	default:
		log.Info("worker gets requests again")
	}
}

// affords says whether the retry budget has another attempt after f, and takes it.
func (r *Router) affords(f *failure) bool {
	if !f.budgeted() || r.budget.spend(time.Now()) {
		return true
	}
	r.metrics.guards.exhausted.Inc()
	return false
}
