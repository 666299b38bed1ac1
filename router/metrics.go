package router

import (
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/router/steer"
)

// ownMetrics has the router's own metrics, and registers those of its parts, too.
type ownMetrics struct {
	failedAccepts *prometheus.CounterVec // listener
	reloads       *prometheus.CounterVec // file, result

	reg prometheus.Registerer
	all []prometheus.Collector
}

func newOwnMetrics(reg prometheus.Registerer, r *Router) (*ownMetrics, error) {
	if reg == nil {
		reg = prometheus.NewRegistry()
	}
	m := &ownMetrics{reg: reg,
		failedAccepts: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_accept_errors_total",
			Help: "Connections that could not be accepted, mostly for want of file descriptors: raise the limit (ulimit -n)."}, []string{"listener"}),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_file_reloads_total",
			Help: "Files of keys and certificates that were read again because they had changed. failed: the old ones stay in force."},
			[]string{"file", "result"})}
	for _, l := range []string{"public", "admin"} {
		m.failedAccepts.WithLabelValues(l)
	}
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	m.all = slices.Concat([]prometheus.Collector{m.failedAccepts, m.reloads,
		gauge("xpyd_router_connections", "Client connections on the public listener.", func() float64 { return float64(r.public.Count()) }),
		gauge("xpyd_router_ready", "1 while a probed, compatible pair is live.", func() float64 {
			if r.Ready() {
				return 1
			}
			return 0
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "xpyd_router_request_log_dropped_total",
			Help: "Requests that are not in the request log because the disk was full or too slow for it. The log itself says how many, too."},
			func() float64 { return float64(r.requests.Dropped()) })}, r.flights.Collectors(), r.Members.Collectors(), r.feeds.Collectors())
	if r.cfg.Planner.Mode != steer.Off {
		m.all = append(m.all, r.steer)
	}
	if r.share != nil {
		m.all = append(m.all, r.share.Collectors()...)
	}
	for i, c := range m.all {
		if err := reg.Register(c); err != nil {
			m.all = m.all[:i]
			m.unregister()
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}

func (m *ownMetrics) unregister() {
	for _, c := range m.all {
		m.reg.Unregister(c)
	}
}
