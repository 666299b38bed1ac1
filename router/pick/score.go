package pick

import (
	"slices"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Up to scanAll members of a class are all compared; of more, sample random
// ones and those with a warm prefix, so that a choice costs the same in a
// fleet of any size.
const (
	scanAll = 16
	sample  = 8
)

// Weights of the decode cost, in sequences.
const (
	coldPrefix = 0.5 // the whole prompt's KV must be moved
	fullPool   = 4   // the block pool is nearly used up
	pastBatch  = 2   // a sequence would wait for a place in the batch
	preferred  = -4  // a broken transfer has brought a part of the prompt
)

// tokensPerSeq is how many queued prompt tokens weigh like one running
// sequence.
const tokensPerSeq = 1000

// avoided outweighs every load, in sequences.
const avoided = 1e6

// scorer is one pick.
type scorer struct {
	p       *Picker
	snap    *fleet.Snapshot
	req     *Request
	matches []match
	length  int // bytes of the prompt that the chain covers

	prefills, decodes []Candidate // when explaining
}

// pair returns the cheapest compatible pair, nil when there is none. Members
// of a class are interchangeable partners, so the best of each class decides.
func (s *scorer) pair(m *model) (p, d *node) {
	best := 0.0
	bestD := make([]*node, len(m.decode))
	costD := make([]float64, len(m.decode))
	s.prefills, s.decodes = nil, nil
	for j := range m.decode {
		bestD[j], costD[j] = s.best(&m.decode[j], fleet.Decode)
	}
	for j, dn := range bestD { // engines that do both phases
		if dn != nil && m.decode[j].rep.Alone() {
			total := s.cost(dn, fleet.Prefill)/tokensPerSeq + costD[j]
			if p == nil || total < best || total == best && dn.last < d.last {
				p, d, best = dn, dn, total
			}
		}
	}
	for i := range m.prefill {
		if !slices.Contains(m.compatible[i], true) {
			continue
		}
		pn, cost := s.best(&m.prefill[i], fleet.Prefill)
		if pn == nil {
			continue
		}
		for j, dn := range bestD {
			if total := cost/tokensPerSeq + costD[j]; dn != nil && m.compatible[i][j] &&
				(p == nil || total < best || total == best && dn.last < d.last) {
				p, d, best = pn, dn, total
			}
		}
	}
	return p, d
}

// best returns the cheapest member of a class that the request may use.
func (s *scorer) best(c *class, role fleet.Role) (*node, float64) {
	var best *node
	var bestCost float64
	consider := func(n *node) {
		if slices.Contains(s.req.Exclude, n.key.id) || n == best {
			return
		}
		cost := s.cost(n, role)
		if best == nil || cost < bestCost || cost == bestCost && n.last < best.last {
			best, bestCost = n, cost
		}
	}
	switch {
	case s.p.policy == Random || s.p.policy == PowerOfTwo:
		tries := 1
		if s.p.policy == PowerOfTwo {
			tries = 2
		}
		start := s.p.rnd.IntN(len(c.nodes))
		for range tries {
			consider(c.nodes[start])
			start = s.p.rnd.IntN(len(c.nodes))
		}
		for i := 0; best == nil && i < len(c.nodes); i++ { // both were excluded
			consider(c.nodes[(start+i)%len(c.nodes)])
		}
	case len(c.nodes) <= scanAll || s.p.policy == RoundRobin:
		for _, n := range c.nodes {
			consider(n)
		}
	default:
		for _, m := range s.matches {
			if n := m.node(role); n != nil && slices.Contains(c.nodes, n) {
				consider(n)
			}
		}
		for range sample {
			consider(c.nodes[s.p.rnd.IntN(len(c.nodes))])
		}
		for i := 0; best == nil && i < len(c.nodes); i++ {
			consider(c.nodes[i])
		}
	}
	return best, bestCost
}

// cost is how unwelcome the request is at n: for prefill in prompt tokens to
// compute before its answer, for decode in sequences beside it.
func (s *scorer) cost(n *node, role fleet.Role) float64 {
	m := &s.snap.Members[n.at]
	cand := Candidate{ID: n.key.id}
	share := 0.0
	if s.p.policy == Prefix {
		share = s.share(n, role)
	}
	switch {
	case s.p.policy == Random:
	case s.p.policy == RoundRobin:
		cand.Cost = float64(n.last)
	case role == fleet.Prefill:
		// Its own report knows of other routers, our count of the last
		// moments: the larger is nearer the truth, their sum counts twice.
		load := float64(max(n.queued, m.Load.QueuedTokens))
		cand.Load = load
		cand.Cost = load + float64(s.req.Tokens)*(1-share)
		if s.p.policy == Prefix {
			cand.Cost += n.recent(s.p.tick) / (2 * halfLife)
		}
	default:
		cand.Load = float64(max(n.seqs, m.Load.Running+m.Load.Waiting))
		cand.Cost = cand.Load
		if m.MaxBatch > 0 && cand.Load >= float64(m.MaxBatch) {
			cand.Cost += pastBatch
		}
		if used(n, m) > 0.9 {
			cand.Cost += fullPool
		}
		if s.p.policy == Prefix {
			cand.Cost += coldPrefix*(1-share) + coldPrefix*n.recent(s.p.tick)/(2*halfLife)
		}
	}
	if role == fleet.Decode && s.req.Prefer == n.key.id {
		cand.Cost += preferred
	}
	cand.Match = share
	for _, id := range s.req.Avoid {
		if id != n.key.id {
			continue
		}
		if role == fleet.Prefill {
			cand.Cost += avoided * tokensPerSeq
		} else {
			cand.Cost += avoided
		}
	}
	if s.req.Explain {
		s.note(role, cand)
	}
	return cand.Cost
}

// used is the fraction of n's block pool that is taken, by its own report or
// by what we sent there.
func used(n *node, m *fleet.Member) float64 {
	pool := m.Blocks * m.Layout.BlockTokens
	if pool <= 0 {
		return m.Load.KVUsed
	}
	return max(m.Load.KVUsed, float64(n.kv)/float64(pool))
}

// share is the part of the prompt that n has probably cached.
func (s *scorer) share(n *node, role fleet.Role) float64 {
	if s.length == 0 {
		return 0
	}
	for _, m := range s.matches {
		if m.node(role) == n {
			return float64(m.bytes) / float64(s.length)
		}
	}
	return 0
}
