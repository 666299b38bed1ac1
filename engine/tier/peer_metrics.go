package tier

import (
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/tier/level"
)

// peerMetrics counts what came from peers and went to them. Units and tokens are counted
// with those of the other tiers, if there are any.
type peerMetrics struct {
	hits, corrupt, loaded prometheus.Counter
	fetches, refused      *prometheus.CounterVec
	given, bytes          prometheus.Counter
	seconds               prometheus.Observer
}

func newPeerMetrics(p *Peers, reg prometheus.Registerer) (*peerMetrics, error) {
	var all level.Metrics
	m := &peerMetrics{
		fetches: all.Counters("peer_fetches_total", "Prefixes that were asked of a peer, by how it went: done; nothing, it had less than was said; no_room, here or there; shut, it failed lately and was left alone; failed; corrupt; cancelled.", "result"),
		refused: all.Counters("peer_refused_total", "Prefixes that a peer asked for and did not get: gone; room, it is here, and blocks to hold it are not to spare; quota, enough is being given; salt, the peer may not know its salt.", "reason"),
		given:   all.Counter("peer_given_units_total", "Units held for a peer to collect."),
		bytes:   all.Counter("peer_given_bytes_total", "Bytes of rows that peers lacked of them."),
		seconds: all.Seconds("peer_seconds", "Time of a fetch from a peer.", 0.0005, 12).WithLabelValues(),
	}
	for _, result := range []string{"done", "nothing", "no_room", "shut", "failed", "corrupt", "cancelled"} {
		m.fetches.WithLabelValues(result)
	}
	for _, reason := range []string{"gone", "room", "quota", "salt"} {
		m.refused.WithLabelValues(reason)
	}
	const blocks = "Blocks that fetches under way have taken, and that are held for peers."
	all.Gauge("peer_blocks", blocks, prometheus.Labels{"for": "fetch"}, func() float64 { return float64(p.Stats().Fetching) })
	all.Gauge("peer_blocks", blocks, prometheus.Labels{"for": "give"}, func() float64 { return float64(p.Stats().Giving) })
	all.Gauge("peers_shut", "Peers that are left alone because they failed lately.", nil, func() float64 { return float64(len(p.guards.shut(time.Now()))) })
	var c common
	if p.tiers != nil {
		c = p.tiers.metrics.common
	} else {
		c = newCommon(&all)
	}
	m.hits, m.corrupt, m.loaded = c.hits.WithLabelValues(peerTier), c.corrupt.WithLabelValues(peerTier), c.loaded
	return m, reg.Register(all)
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
