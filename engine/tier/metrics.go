package tier

import (
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/xpyd/xpyd/engine/tier/level"
)

// peerTier is the label of what came from other workers.
const peerTier = "peer"

// common counts what came into the pool: from the tiers, and from other workers.
type common struct {
	hits, corrupt *prometheus.CounterVec // units, by tier
	loaded        prometheus.Counter     // tokens
}

func newCommon(m *level.Metrics) common {
	return common{
		hits:    m.Counters("loaded_units_total", "Units that came back into the pool.", "tier"),
		corrupt: m.Counters("corrupt_units_total", "Units that did not match their digests and were computed instead; for peers, fetches with such units.", "tier"),
		loaded:  m.Counter("loaded_tokens_total", "Tokens whose KV was loaded instead of computed."),
	}
}

type metrics struct {
	common
	saved, dropped, prefetched *prometheus.CounterVec
	left, noRoom, noQuota      prometheus.Counter
	loadTime                   prometheus.Observer
}

func newMetrics(t *Tiers, reg prometheus.Registerer) (*metrics, error) {
	var all level.Metrics
	m := &metrics{
		common:     newCommon(&all),
		saved:      all.Counters("saved_units_total", "Units written into a tier.", "tier"),
		dropped:    all.Counters("dropped_units_total", "Units left out because too many waited.", "tier"),
		prefetched: all.Counters("prefetched_units_total", "Units read into host memory for a request that then moves them from there, or that did not wait for them.", "tier"),
		left:       all.Counter("left_units_total", "Units that tiers had and a load did without: they did not come within kv.load_timeout, could not be read, or found no slot in host memory. They were computed."),
		noRoom:     all.Counter("no_room_total", "Loads left out because the pool had no block to spare."),
		noQuota:    all.Counter("no_quota_total", "Loads that were cut short by kv.load_quota."),
		loadTime:   all.Seconds("load_seconds", "Time of a request's load.", 0.0005, 12).WithLabelValues(),
	}
	all.Gauge("waiting_units", "Units on their way into a tier.", nil, func() float64 { return float64(t.unsaved.Load()) })
	all.Gauge("pinned_units", "Units that pins keep, or will once they are computed.", nil, func() float64 { return float64(t.pins.count()) })
	all = append(all, &usage{t})
	for _, l := range t.below {
		all = append(all, l.Metrics())
	}
	return m, reg.Register(all)
}

// usage collects how full the tiers are.
type usage struct{ t *Tiers }

var (
	unitsDesc   = prometheus.NewDesc("xpyd_kvtier_units", "Units in a tier.", []string{"tier"}, nil)
	roomDesc    = prometheus.NewDesc("xpyd_kvtier_capacity_units", "Units that a tier has room for.", []string{"tier"}, nil)
	tenantsDesc = prometheus.NewDesc("xpyd_kvtier_tenants", "Cache salts with units in a tier; counted with kv.tenant_share only.", []string{"tier"}, nil)
	overDesc    = prometheus.NewDesc("xpyd_kvtier_tenant_evicted_units_total", "Units that went, or were left out, because their cache salt had its share of a tier.", []string{"tier"}, nil)
	evictedDesc = prometheus.NewDesc("xpyd_kvtier_evicted_units_total", "Units that made room for others.", []string{"tier"}, nil)
)

func (u *usage) Describe(c chan<- *prometheus.Desc) { prometheus.DescribeByCollect(u, c) }

func (u *usage) Collect(c chan<- prometheus.Metric) {
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
