package shared

import "github.com/prometheus/client_golang/prometheus"

// metrics is what operations on the shared store have come to. Units are
// counted with those of the other tiers.
type metrics struct {
	errors, bytes *prometheus.CounterVec
	seconds       *prometheus.HistogramVec
}

func newMetrics() *metrics {
	const ns, sub = "xpyd", "kvtier"
	return &metrics{
		errors:  prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: ns, Subsystem: sub, Name: "store_errors_total", Help: "Operations that the shared store refused, or that failed because it was not reached or did not answer in time."}, []string{"op", "kind"}),
		bytes:   prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: ns, Subsystem: sub, Name: "store_bytes_total", Help: "Bytes of values that went to the shared store and came from it."}, []string{"op"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: ns, Subsystem: sub, Name: "store_seconds", Help: "Time of an operation of the shared store: a question about up to 512 units, a read of up to 4, a write of one.", Buckets: prometheus.ExponentialBuckets(0.0001, 2, 14)}, []string{"op"}),
	}
}

var storeOpenDesc = prometheus.NewDesc("xpyd_kvtier_store_open", "1 while the shared store is left alone because an operation failed.", nil, nil)

// Describe implements prometheus.Collector.
func (s *Shared) Describe(c chan<- *prometheus.Desc) {
	c <- storeOpenDesc
	s.metrics.errors.Describe(c)
	s.metrics.bytes.Describe(c)
	s.metrics.seconds.Describe(c)
}

// Collect implements prometheus.Collector.
func (s *Shared) Collect(c chan<- prometheus.Metric) {
	c <- prometheus.MustNewConstMetric(storeOpenDesc, prometheus.GaugeValue, s.breaker.Open())
	s.metrics.errors.Collect(c)
	s.metrics.bytes.Collect(c)
	s.metrics.seconds.Collect(c)
}
