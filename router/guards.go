package router

import (
	"github.com/prometheus/client_golang/prometheus"
)

// guardMetrics are those of what keeps a failure from spreading.
type guardMetrics struct {
	exhausted prometheus.Counter
}

// collectors makes them.
func (g *guardMetrics) collectors(*Router) []prometheus.Collector {
	g.exhausted = prometheus.NewCounter(prometheus.CounterOpts{Name: "xpyd_router_retry_budget_exhausted_total",
		Help: "Requests that failed because the retry budget was used up. The fleet fails more than retries should cover: look at xpyd_router_retries_total for why."})
	return []prometheus.Collector{g.exhausted}
}
