package tier

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// peerMetrics is what came from peers and went to them. Units and tokens are
// counted with those of the other tiers, where there are any.
type peerMetrics struct {
	hits, corrupt, loaded   prometheus.Counter
	fetches, refused        *prometheus.CounterVec
	given, bytes            prometheus.Counter
	seconds                 prometheus.Histogram
	openPeers, fetchingDesc *prometheus.Desc
}

// sharedCollector registers a collector, or returns the one that is registered already
// under its name: the other tiers count in it too.
func sharedCollector[C prometheus.Collector](reg prometheus.Registerer, c C) (C, error) {
	err := reg.Register(c)
	var already prometheus.AlreadyRegisteredError
	if errors.As(err, &already) {
		if old, ok := already.ExistingCollector.(C); ok {
			return old, nil
		}
	}
	return c, err
}

func newPeerMetrics(p *Peers, reg prometheus.Registerer) (*peerMetrics, error) {
	hits, err1 := sharedCollector(reg, unitsLoaded())
	corrupt, err2 := sharedCollector(reg, unitsCorrupt())
	loaded, err3 := sharedCollector(reg, tokensLoaded())
	m := &peerMetrics{
		fetches:      vec("peer_fetches_total", "Prefixes that were asked of a peer, by how it went: done; nothing, it had less than was said; no_room, here or there; shut, it failed lately and was left alone; failed; corrupt; cancelled.", "result"),
		refused:      vec("peer_refused_total", "Prefixes that a peer asked for and did not get: gone; room, it is here, and blocks to hold it are not to spare; quota, enough is being given; salt, the peer may not know its salt.", "reason"),
		given:        counter("peer_given_units_total", "Units held for a peer to collect."),
		bytes:        counter("peer_given_bytes_total", "Bytes of rows that peers lacked of them."),
		seconds:      seconds("peer_seconds", "Time of a fetch from a peer."),
		openPeers:    prometheus.NewDesc("xpyd_kvtier_peers_shut", "Peers that are left alone because they failed lately.", nil, nil),
		fetchingDesc: prometheus.NewDesc("xpyd_kvtier_peer_blocks", "Blocks that fetches under way have taken, and that are held for peers.", []string{"for"}, nil),
	}
	errs := []error{err1, err2, err3}
	for _, c := range []prometheus.Collector{m.fetches, m.refused, m.given, m.bytes, m.seconds, &peerUsage{p, m}} {
		errs = append(errs, reg.Register(c))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	for _, result := range []string{"done", "nothing", "no_room", "shut", "failed", "corrupt", "cancelled"} {
		m.fetches.WithLabelValues(result)
	}
	for _, reason := range []string{"gone", "room", "quota", "salt"} {
		m.refused.WithLabelValues(reason)
	}
	m.hits, m.corrupt, m.loaded = hits.WithLabelValues(peerTier), corrupt.WithLabelValues(peerTier), loaded
	return m, nil
}

// peerUsage collects what is going on.
type peerUsage struct {
	p *Peers
	m *peerMetrics
}

func (u *peerUsage) Describe(c chan<- *prometheus.Desc) {
	c <- u.m.openPeers
	c <- u.m.fetchingDesc
}

func (u *peerUsage) Collect(c chan<- prometheus.Metric) {
	c <- prometheus.MustNewConstMetric(u.m.openPeers, prometheus.GaugeValue, float64(len(u.p.guards.shut(time.Now()))))
	u.p.mu.Lock()
	taken, held := u.p.taken, u.p.held
	u.p.mu.Unlock()
	c <- prometheus.MustNewConstMetric(u.m.fetchingDesc, prometheus.GaugeValue, float64(taken), "fetch")
	c <- prometheus.MustNewConstMetric(u.m.fetchingDesc, prometheus.GaugeValue, float64(held), "give")
}

// PeerStats is how the tier of other workers stands.
type PeerStats struct {
	Fetching int        `json:"fetching_blocks"` // taken by fetches under way
	Giving   int        `json:"giving_blocks"`   // held for peers
	Shut     []ShutPeer `json:"shut,omitempty"`  // left alone for now
}

// ShutPeer is a peer that failed lately.
type ShutPeer struct {
	ID        string    `json:"id"`
	Epoch     uint64    `json:"epoch"`
	Failures  int       `json:"failures"` // in a row
	Until     time.Time `json:"until"`
	LastError string    `json:"last_error"`
}

// Stats describes the tier; nil when there is none.
func (p *Peers) Stats() *PeerStats {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	s := &PeerStats{Fetching: p.taken, Giving: p.held}
	p.mu.Unlock()
	for key, b := range p.guards.shut(time.Now()) {
		s.Shut = append(s.Shut, ShutPeer{key.id, key.epoch, b.failures, b.until, b.last.Error()})
	}
	slices.SortFunc(s.Shut, func(a, b ShutPeer) int { return strings.Compare(a.ID, b.ID) })
	return s
}
