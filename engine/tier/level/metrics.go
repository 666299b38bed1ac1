package level

import "github.com/prometheus/client_golang/prometheus"

// Metrics are series named xpyd_kvtier_*, and the Collector of all of them.
type Metrics []prometheus.Collector

func added[C prometheus.Collector](m *Metrics, c C) C {
	*m = append(*m, c)
	return c
}

func opts(name, help string) prometheus.Opts {
	return prometheus.Opts{Namespace: "xpyd", Subsystem: "kvtier", Name: name, Help: help}
}

// Counter adds a counter.
func (m *Metrics) Counter(name, help string) prometheus.Counter {
	return added(m, prometheus.NewCounter(prometheus.CounterOpts(opts(name, help))))
}

// Counters adds counters with labels.
func (m *Metrics) Counters(name, help string, labels ...string) *prometheus.CounterVec {
	return added(m, prometheus.NewCounterVec(prometheus.CounterOpts(opts(name, help)), labels))
}

// Seconds adds histograms of times, with n buckets that double from first seconds on.
func (m *Metrics) Seconds(name, help string, first float64, n int, labels ...string) *prometheus.HistogramVec {
	return added(m, prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: name, Help: help,
		Buckets: prometheus.ExponentialBuckets(first, 2, n)}, labels))
}

// Gauge adds a gauge of what f returns.
func (m *Metrics) Gauge(name, help string, labels prometheus.Labels, f func() float64) {
	o := prometheus.GaugeOpts(opts(name, help))
	o.ConstLabels = labels
	added(m, prometheus.NewGaugeFunc(o, f))
}

// CounterOf adds a counter of what f returns.
func (m *Metrics) CounterOf(name, help string, f func() float64) {
	added(m, prometheus.NewCounterFunc(prometheus.CounterOpts(opts(name, help)), f))
}

// Describe implements prometheus.Collector.
func (m Metrics) Describe(to chan<- *prometheus.Desc) {
	for _, c := range m {
		c.Describe(to)
	}
}

// Collect implements prometheus.Collector.
func (m Metrics) Collect(to chan<- prometheus.Metric) {
	for _, c := range m {
		c.Collect(to)
	}
}
