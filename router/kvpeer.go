package router

import (
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/dialect"
)

// nativeDialect is spoken by our own workers, the only ones that fetch from
// others what they lack.
const nativeDialect = "native"

// reach is how many tokens of a request's prompt a worker has, in whatever
// tier, by its own events.
type reach struct {
	id     string
	epoch  uint64
	tokens int
	worth  float64 // those in slow tiers counted in part
}

// noteReach keeps what the index knows, for findPeer.
func (q *request) noteReach(h reach) {
	if q.r.cfg.Events.PeerTokens > 0 {
		q.reaches = append(q.reaches, h)
	}
}

// findPeer returns the worker besides the attempt's pair that has more of the prompt
// than either, by kv_events.peer_tokens at least: of several the one whose hit
// is worth most, since what lies in a slow tier comes late. Nil if there is none
// that they can fetch from.
func (a *attempt) findPeer() *dialect.Peer {
	q := a.q
	if len(q.reaches) == 0 || a.d.inst.Dialect != nativeDialect {
		return nil
	}
	own := 0
	for _, h := range q.reaches {
		if h.id == a.p.inst.ID || h.id == a.d.inst.ID {
			own = max(own, h.tokens)
		}
	}
	var best *dialect.Peer
	worth := 0.0
	now := q.r.fleet.Snapshot()
	for _, h := range q.reaches {
		if h.tokens < own+q.r.cfg.Events.PeerTokens || best != nil && h.worth <= worth {
			continue
		}
		if m := now.Get(h.id); m != nil && m.Epoch == h.epoch && gives(m, a.d.inst) {
			worth = h.worth
			best = &dialect.Peer{Instance: &m.Instance, Tokens: h.tokens}
		}
	}
	return best
}

// gives says whether a worker's blocks are of the same kind as another's.
func gives(m *fleet.Member, to *fleet.Instance) bool {
	return m.Serves() && m.Dialect == nativeDialect && m.KVAddr != "" && m.URL != "" && m.ModelFingerprint == to.ModelFingerprint &&
		m.TokenizerFingerprint == to.TokenizerFingerprint && m.Numerics == to.Numerics
}
