package tier

import (
	"github.com/prometheus/client_golang/prometheus"
)

// Tiers as labels name them.
const (
	Host      = "host"
	tierHost  = Host
	tierSSD   = "ssd"
	tierStore = "store"
	tierPeer  = "peer"
)

type metrics struct {
	saved, dropped, hits, prefetched, corrupt, errors, late *prometheus.CounterVec
	loaded, left, noRoom, noQuota                           prometheus.Counter
	loadTime                                                prometheus.Histogram
}

func newMetrics(t *Tiers, reg prometheus.Registerer) (*metrics, error) {
	vec := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: name, Help: help}, []string{label})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: name, Help: help})
	}
	m := &metrics{
		saved:      vec("saved_units_total", "Units written into a tier.", "tier"),
		dropped:    vec("dropped_units_total", "Units left out because too many waited.", "tier"),
		hits:       unitsLoaded(),
		prefetched: vec("prefetched_units_total", "Units read into host memory for a request that then moves them from there, or that did not wait for them.", "tier"),
		corrupt:    unitsCorrupt(),
		errors:     vec("io_errors_total", "Failed reads and writes of the SSD tier.", "op"),
		late:       vec("ssd_late_total", "Transfers of the SSD tier that took longer than half of kv.load_timeout.", "op"),
		loaded:     tokensLoaded(),
		left:       counter("left_units_total", "Units that tiers had and a load did without: they did not come within kv.load_timeout, could not be read, or found no slot in host memory. They were computed."),
		noRoom:     counter("no_room_total", "Loads left out because the pool had no block to spare."),
		noQuota:    counter("no_quota_total", "Loads that were cut short by kv.load_quota."),
		loadTime:   prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: "load_seconds", Help: "Time of a request's load.", Buckets: prometheus.ExponentialBuckets(0.0005, 2, 12)}),
	}
	all := []prometheus.Collector{m.saved, m.dropped, m.hits, m.prefetched, m.corrupt, m.errors, m.late, m.loaded, m.left, m.noRoom, m.noQuota, m.loadTime, &usage{t}}
	if t.shared != nil {
		t.shared.metrics = newSharedMetrics()
		all = append(all, t.shared)
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
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: "loaded_units_total", Help: "Units that came back into the pool."}, []string{"tier"})
}

func unitsCorrupt() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: "corrupt_units_total", Help: "Units that did not agree with their digests, of a peer the fetches of which some did not; they were computed instead."}, []string{"tier"})
}

func tokensLoaded() prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "xpyd", Subsystem: "kvtier", Name: "loaded_tokens_total", Help: "Tokens whose KV was loaded instead of computed."})
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
	slowDesc    = prometheus.NewDesc("xpyd_kvtier_ssd_open", "1 while the SSD tier is left alone because a transfer took too long.", nil, nil)
	ioDesc      = prometheus.NewDesc("xpyd_kvtier_ssd_io_info", "How the SSD tier is read and written.", []string{"io"}, nil)
	directDesc  = prometheus.NewDesc("xpyd_kvtier_ssd_direct_total", "Transfers that went by pread or pwrite because io_uring did not take them.", nil, nil)
	evictedDesc = prometheus.NewDesc("xpyd_kvtier_evicted_units_total", "Units that made room for others.", []string{"tier"}, nil)
)

func (u *usage) Describe(c chan<- *prometheus.Desc) { prometheus.DescribeByCollect(u, c) }

func (u *usage) Collect(c chan<- prometheus.Metric) {
	c <- prometheus.MustNewConstMetric(unsavedDesc, prometheus.GaugeValue, float64(u.t.unsaved.Load()))
	u.t.host.mu.Lock()
	tenants, over := len(u.t.host.tenants), u.t.host.over
	u.t.host.mu.Unlock()
	c <- prometheus.MustNewConstMetric(pinnedDesc, prometheus.GaugeValue, float64(u.t.pins.count()))
	c <- prometheus.MustNewConstMetric(tenantsDesc, prometheus.GaugeValue, float64(tenants), tierHost)
	c <- prometheus.MustNewConstMetric(overDesc, prometheus.CounterValue, float64(over), tierHost)
	if d := u.t.disk; d != nil {
		d.mu.Lock()
		tenants, over := len(d.tenants), d.over
		d.mu.Unlock()
		c <- prometheus.MustNewConstMetric(tenantsDesc, prometheus.GaugeValue, float64(tenants), tierSSD)
		c <- prometheus.MustNewConstMetric(overDesc, prometheus.CounterValue, float64(over), tierSSD)
		c <- prometheus.MustNewConstMetric(ioDesc, prometheus.GaugeValue, 1, string(u.t.io.way()))
		open := 0.0
		if !u.t.slow.allow() {
			open = 1
		}
		c <- prometheus.MustNewConstMetric(slowDesc, prometheus.GaugeValue, open)
	}
	if u.t.io.ring != nil {
		c <- prometheus.MustNewConstMetric(directDesc, prometheus.CounterValue, float64(u.t.io.ring.Stats().Direct))
	}
	for _, s := range u.t.Stats() {
		c <- prometheus.MustNewConstMetric(unitsDesc, prometheus.GaugeValue, float64(s.Units), s.Tier)
		c <- prometheus.MustNewConstMetric(roomDesc, prometheus.GaugeValue, float64(s.Capacity), s.Tier)
		c <- prometheus.MustNewConstMetric(evictedDesc, prometheus.CounterValue, float64(s.Evicted), s.Tier)
	}
}

// Stats is how one tier stands.
type Stats struct {
	Tier      string `json:"tier"` // "host" or "ssd"
	Units     int    `json:"units"`
	Capacity  int    `json:"capacity_units"`
	UnitBytes int    `json:"unit_bytes"`
	Evicted   uint64 `json:"evicted_units"`
	// Of Report only: units that came back into the pool from here since the
	// worker began, and how long ago those that are here came into the tiers.
	Loaded  uint64  `json:"loaded_units"`
	OldestS float64 `json:"oldest_s"`
	MeanS   float64 `json:"mean_age_s"`
	// Of the SSD: how it is read and written, and why not by io_uring if that
	// was wanted.
	IO    IO     `json:"io,omitempty"`
	NoIOU string `json:"no_io_uring,omitempty"`
	// Of the SSD: why it is left alone; "" while it is fast enough.
	Slow string `json:"left_alone,omitempty"`
}

// Stats lists the tiers, nearest first.
func (t *Tiers) Stats() []Stats {
	if t == nil {
		return nil
	}
	t.host.mu.Lock()
	list := []Stats{{Tier: tierHost, Units: len(t.host.keys), Capacity: len(t.host.slots), UnitBytes: t.shape.record(), Evicted: t.host.lost}}
	t.host.mu.Unlock()
	if t.disk != nil {
		s := t.disk.stats()
		if s.IO = t.io.way(); t.io.why != nil {
			s.NoIOU = t.io.why.Error()
		}
		if open, _, why := t.slow.state(); open {
			s.Slow = why.Error()
		}
		list = append(list, s)
	}
	return list
}
