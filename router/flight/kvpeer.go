package flight

import (
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// warm tells a pick request who has how much of the prompt, and keeps what the index
// knows for findPeer.
func (q *request) warm(req *pick.Request) {
	q.reaches = q.reaches[:0]
	if !q.probe {
		q.reaches = q.s.Feeds.Warm(&q.ctx, &sense.Prompt{Top: &q.top, Body: q.body}, req, q.reaches)
	}
}

// findPeer returns the worker besides the attempt's pair that has more of the prompt
// than either, by kv_events.peer_tokens at least: of several the one whose hit
// is worth most, since what lies in a slow tier comes late. Nil if there is none
// that they can fetch from.
func (a *attempt) findPeer() *dialect.Peer {
	q := a.q
	if len(q.reaches) == 0 || a.d.inst.Dialect != sense.NativeDialect {
		return nil
	}
	own := 0
	for _, h := range q.reaches {
		if h.ID == a.p.inst.ID || h.ID == a.d.inst.ID {
			own = max(own, h.Tokens)
		}
	}
	var best *dialect.Peer
	worth := 0.0
	now := q.s.fleet.Snapshot()
	for _, h := range q.reaches {
		if h.Tokens < own+q.s.PeerTokens || best != nil && h.Worth <= worth {
			continue
		}
		if m := now.Get(h.ID); m != nil && m.Epoch == h.Epoch && gives(m, a.d.inst) {
			worth = h.Worth
			best = &dialect.Peer{Instance: &m.Instance, Tokens: h.Tokens}
		}
	}
	return best
}

// gives reports whether a worker's blocks are of the same kind as another's.
func gives(m *fleet.Member, to *fleet.Instance) bool {
	return m.Serves() && m.Dialect == sense.NativeDialect && m.KVAddr != "" && m.URL != "" && m.ModelFingerprint == to.ModelFingerprint &&
		m.TokenizerFingerprint == to.TokenizerFingerprint && m.Numerics == to.Numerics
}
