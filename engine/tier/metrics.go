package tier

import (
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/xpyd/xpyd/engine/tier/level"
)

// peerTier is the label of what came from other workers.
const peerTier = "peer"

type metrics struct {
	saved, dropped, hits, prefetched, corrupt *prometheus.CounterVec
	loaded, left, noRoom, noQuota             prometheus.Counter
	loadTime                                  prometheus.Histogram
}

func counter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: name, Help: help})
}

func vec(name, help, label string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: name, Help: help}, []string{label})
}

func seconds(name, help string) prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(0.0005, 2, 12)})
}

func newMetrics(t *Tiers, reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		saved:      vec("saved_units_total", "Units written into a tier.", "tier"),
		dropped:    vec("dropped_units_total", "Units left out because too many waited.", "tier"),
		hits:       unitsLoaded(),
		prefetched: vec("prefetched_units_total", "Units read into host memory for a request that then moves them from there, or that did not wait for them.", "tier"),
		corrupt:    unitsCorrupt(),
		loaded:     tokensLoaded(),
		left:       counter("left_units_total", "Units that tiers had and a load did without: they did not come within kv.load_timeout, could not be read, or found no slot in host memory. They were computed."),
		noRoom:     counter("no_room_total", "Loads left out because the pool had no block to spare."),
		noQuota:    counter("no_quota_total", "Loads that were cut short by kv.load_quota."),
		loadTime:   seconds("load_seconds", "Time of a request's load."),
	}
	all := []prometheus.Collector{m.saved, m.dropped, m.hits, m.prefetched, m.corrupt, m.loaded, m.left, m.noRoom, m.noQuota, m.loadTime, &usage{t}}
	for _, l := range t.below {
		all = append(all, l)
	}
	for _, c := range all {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// What all tiers count in, those of other workers too.

func unitsLoaded() *prometheus.CounterVec {
	return vec("loaded_units_total", "Units that came back into the pool.", "tier")
}

func unitsCorrupt() *prometheus.CounterVec {
	return vec("corrupt_units_total", "Units that did not agree with their digests, of a peer the fetches of which some did not; they were computed instead.", "tier")
}

func tokensLoaded() prometheus.Counter {
	return counter("loaded_tokens_total", "Tokens whose KV was loaded instead of computed.")
}

// usage collects how full the tiers are.
type usage struct{ t *Tiers }

var (
	unsavedDesc = prometheus.NewDesc("xpyd_kvtier_waiting_units", "Units on their way into a tier.", nil, nil)
	unitsDesc   = prometheus.NewDesc("xpyd_kvtier_units", "Units in a tier.", []string{"tier"}, nil)
	roomDesc    = prometheus.NewDesc("xpyd_kvtier_capacity_units", "Units that a tier has room for.", []string{"tier"}, nil)
	pinnedDesc  = prometheus.NewDesc("xpyd_kvtier_pinned_units", "Units that pins keep, or will once they are computed.", nil, nil)
	tenantsDesc = prometheus.NewDesc("xpyd_kvtier_tenants", "Cache salts with units in a tier; counted with kv.tenant_share only.", []string{"tier"}, nil)
	overDesc    = prometheus.NewDesc("xpyd_kvtier_tenant_evicted_units_total", "Units that went, or were left out, because their cache salt had its share of a tier.", []string{"tier"}, nil)
	evictedDesc = prometheus.NewDesc("xpyd_kvtier_evicted_units_total", "Units that made room for others.", []string{"tier"}, nil)
)

func (u *usage) Describe(c chan<- *prometheus.Desc) { prometheus.DescribeByCollect(u, c) }

func (u *usage) Collect(c chan<- prometheus.Metric) {
	c <- prometheus.MustNewConstMetric(unsavedDesc, prometheus.GaugeValue, float64(u.t.unsaved.Load()))
	c <- prometheus.MustNewConstMetric(pinnedDesc, prometheus.GaugeValue, float64(u.t.pins.count()))
	for _, s := range u.t.Stats() {
		c <- prometheus.MustNewConstMetric(unitsDesc, prometheus.GaugeValue, float64(s.Units), s.Tier)
		c <- prometheus.MustNewConstMetric(roomDesc, prometheus.GaugeValue, float64(s.Capacity), s.Tier)
		c <- prometheus.MustNewConstMetric(evictedDesc, prometheus.CounterValue, float64(s.Evicted), s.Tier)
		c <- prometheus.MustNewConstMetric(tenantsDesc, prometheus.GaugeValue, float64(s.Tenants), s.Tier)
		c <- prometheus.MustNewConstMetric(overDesc, prometheus.CounterValue, float64(s.Over), s.Tier)
	}
}

// Stats is how one level stands, StoreStats a shared one.
type (
	Stats      = level.Stats
	StoreStats = level.RemoteStats
)

// Stats lists the levels of this worker's own, nearest first.
func (t *Tiers) Stats() []Stats { return t.stats(false) }

func (t *Tiers) stats(ages bool) (list []Stats) {
	if t == nil {
		return nil
	}
	for _, l := range t.levels() {
		if s := l.Stats(ages); s.Remote == nil {
			list = append(list, s)
		}
	}
	return list
}

// Report is Stats with hits and ages. It looks at every unit under the levels'
// locks, about 10 ms for a million: for people, not for every scrape.
func (t *Tiers) Report() []Stats {
	list := t.stats(true)
	for i := range list {
		var m dto.Metric
		if t.metrics.hits.WithLabelValues(list[i].Tier).Write(&m) == nil {
			list[i].Loaded = uint64(m.GetCounter().GetValue())
		}
	}
	return list
}

// StoreStats describes the shared store; nil when there is none.
func (t *Tiers) StoreStats() *StoreStats {
	if t == nil || t.shared == nil {
		return nil
	}
	return t.shared.Stats(false).Remote
}
