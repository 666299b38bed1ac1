package pick

import (
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Up to scanAll members of a class are all compared; of more, those with a warm prefix, the least
// recently used and some random ones, so that a choice costs the same in a fleet of any size. The
// best few of each class are looked at in pairs.
const (
	scanAll  = 16
	sample   = 8
	idlest   = 2
	finalist = 4
)

// Weights of the decode cost, in sequences.
const (
	coldPrefix = 0.5 // the whole prompt's KV must be moved
	fullPool   = 4   // the block pool is nearly used up
	pastBatch  = 2   // a sequence would wait for a place in the batch
	preferred  = -4  // a broken transfer has brought a part of the prompt
)

// tokensPerSeq is how many queued prompt tokens weigh like one running sequence.
const tokensPerSeq = 1000

// Weights of the predicted time, in seconds: for each running sequence, and for waiting for a place
// in the batch.
const (
	seqTime   = 5e-4
	batchTime = 5e-2
)

// scorer is one pick. A picker has one for all of them, for its memory.
type scorer struct {
	p      *Picker
	view   *View
	snap   *fleet.Snapshot
	req    *Request
	behind bool // the table is older than the view

	matches []match // of the text
	length  int     // bytes of the prompt that the chain covers
	warms   []warmNode
	wrong   []*node // that the view does not have

	pre, dec         []shortlist // by class of the model
	all              []spot      // when mixing
	localMS, splitMS float64     // predicted, when both were weighed

	prefills, decodes []Candidate // when explaining
}

type warmNode struct {
	n     *node
	share float64
}

// scored is a candidate: its cost in the policy's unit, its load, and the part of the prompt that
// it has and, unless 0, would have with what others give.
type scored struct {
	n                          *node
	avoid                      int
	cost, load, share, fetched float64
}

// shortlist is the best of a class, best first.
type shortlist struct {
	list [finalist]scored
	n    int
}

// pair is two candidates, or twice the same one that serves alone.
type pair struct {
	p, d  *scored
	local string
}

// before orders candidates: those to avoid last, then by cost, then the least recently used first.
func (a *scored) before(b *scored) bool {
	switch {
	case a.avoid != b.avoid:
		return a.avoid < b.avoid
	case a.cost != b.cost:
		return a.cost < b.cost
	}
	return a.n.last < b.n.last
}

func (l *shortlist) add(c scored) {
	i := l.n
	for i > 0 && c.before(&l.list[i-1]) {
		i--
	}
	if i == finalist {
		return
	}
	l.n = min(l.n+1, finalist)
	copy(l.list[i+1:l.n], l.list[i:])
	l.list[i] = c
}

func (s *scorer) begin(p *Picker, v *View, req *Request, behind bool) {
	*s = scorer{p: p, view: v, snap: v.Snapshot, req: req, behind: behind,
		matches: s.matches[:0], warms: s.warms[:0], wrong: s.wrong[:0], pre: s.pre, dec: s.dec, all: s.all[:0]}
}

// end lets go of what the pick was about.
func (s *scorer) end() {
	clear(s.matches)
	clear(s.warms)
	clear(s.wrong)
	clear(s.all)
	s.view, s.snap, s.req, s.prefills, s.decodes = nil, nil, nil, nil, nil
}

func (s *scorer) policy() string { return s.p.policy }

// byText and byEvents say what the policy knows prefixes from.
func (s *scorer) byText() bool {
	switch s.policy() {
	case Prefix, KVEvents, PredictedTTFT:
		return true
	}
	return s.p.cfg.Disaggregate != Always
}

func (s *scorer) byEvents() bool {
	return s.req.Tokenized && (s.policy() == KVEvents || s.policy() == PredictedTTFT || s.policy() != Prefix && s.p.cfg.Disaggregate == ByCost || s.p.cfg.Disaggregate == Mixed)
}

// warm looks up which workers have a part of the prompt.
func (s *scorer) warm() {
	if s.byText() {
		s.matches, s.length = s.p.index.match(s.matches, s.req.Chain)
	}
	if !s.byEvents() {
		return
	}
	for _, w := range s.req.Warm {
		if n := s.p.nodes[nodeKey{w.ID, w.Epoch}]; n != nil && n.class != nil {
			s.warms = append(s.warms, warmNode{n, min(w.Tokens/float64(max(s.req.Tokens, 1)), 1)})
		}
	}
}

// member returns a node's member in the view, or nil.
func (s *scorer) member(n *node) *fleet.Member {
	if at := int(n.at.Load()); at < len(s.snap.Members) {
		if m := &s.snap.Members[at]; m.ID == n.key.id && m.Epoch == n.key.epoch {
			return m
		}
	}
	if m := s.snap.Get(n.key.id); m != nil && m.Epoch == n.key.epoch {
		return m
	}
	return nil
}

// trusted reports whether a chosen node is still eligible; if not, it is left out from then on.
func (s *scorer) trusted(n *node) bool {
	if !s.behind || s.view.Eligible == nil || s.view.Eligible(s.member(n)) {
		return true
	}
	s.wrong = append(s.wrong, n)
	return false
}

// usable returns the member of a node that the request may use, or nil.
func (s *scorer) usable(n *node) *fleet.Member {
	if slices.Contains(s.req.Exclude, n.key.id) || slices.Contains(s.wrong, n) || !n.guard.admits(s.view.Now) {
		return nil
	}
	m := s.member(n)
	if m == nil || s.behind && (!m.Usable() || m.Role != n.class.id.Role) {
		return nil
	}
	if s.req.Room > 0 && (n.class.id.Role == fleet.Decode || s.mixes()) && !s.roomy(n, m) {
		return nil
	}
	return m
}

// spare is the part of a decode's pool that stays free where Request.Room counts: what else runs
// there may need more than is known, and must not be short next.
const spare = 0.125

// roomy reports whether n has Request.Room and places in its batch, by its report and by what we
// sent there.
func (s *scorer) roomy(n *node, m *fleet.Member) bool {
	pool := float64(m.Blocks * m.Layout.BlockTokens)
	seqs := max(n.seqsAll(), m.Load.Running) + max(s.req.Seqs, 1)
	return (1-spare-used(n, m))*pool >= float64(s.req.Room) && m.Load.Waiting == 0 && (m.MaxBatch == 0 || seqs <= m.MaxBatch)
}

// pair returns the cheapest compatible pair; p is nil if there is none. Members of a class differ
// as partners only by where they are, so the best few of each class decide.
func (s *scorer) pair(m *model) pair {
	if s.mixes() {
		if out := s.mixed(m); out.p != nil {
			return out
		}
	}
	s.prefills, s.decodes = nil, nil
	s.pre, s.dec = sized(s.pre, len(m.prefill)), sized(s.dec, len(m.decode))
	for j, c := range m.decode {
		s.dec[j] = s.best(c, fleet.Decode)
	}
	var out pair
	var best rating
	offer := func(p, d *scored, r rating) {
		if out.p == nil || r.before(&best) {
			out, best = pair{p: p, d: d}, r
		}
	}
	for j, c := range m.decode { // engines that do both phases
		if d := &s.dec[j].list[0]; s.dec[j].n > 0 && c.rep.Alone() {
			as := s.score(d.n, s.member(d.n), fleet.Prefill)
			offer(d, d, s.rate(&as, d))
		}
	}
	for i, c := range m.prefill {
		if !slices.Contains(m.compatible[i], true) {
			continue
		}
		s.pre[i] = s.best(c, fleet.Prefill)
		for j := range m.decode {
			if !m.compatible[i][j] {
				continue
			}
			as, ds := &s.pre[i], &s.dec[j]
			wide := as.n > 0 && s.member(as.list[0].n).Topology != ""
			for a := range as.n {
				for b := range ds.n {
					if a+b == 0 || wide {
						offer(&as.list[a], &ds.list[b], s.rate(&as.list[a], &ds.list[b]))
					}
				}
			}
		}
	}
	if local, ok := s.alone(m, out); ok {
		return local
	}
	return out
}

// sized is n empty lists, in the memory of old ones.
func sized(old []shortlist, n int) []shortlist {
	if cap(old) < n {
		return make([]shortlist, n)
	}
	old = old[:n]
	clear(old)
	return old
}

// rating orders pairs.
type rating struct {
	avoid        int
	major, minor float64
}

func (a *rating) before(b *rating) bool {
	switch {
	case a.avoid != b.avoid:
		return a.avoid < b.avoid
	case a.major != b.major:
		return a.major < b.major
	}
	return a.minor < b.minor
}

func (s *scorer) rate(p, d *scored) rating {
	r := rating{avoid: p.avoid + d.avoid, minor: float64(d.n.last)}
	far := 0.0
	if at := s.member(p.n).Topology; at != "" {
		far = perLevel * float64(distance(at, s.member(d.n).Topology))
	}
	switch s.policy() {
	case RoundRobin: // each role for itself
		r.major, r.minor = p.cost, d.cost+far/1e3
	case PredictedTTFT:
		r.major = p.cost + d.cost + far*seqTime
	default:
		r.major = p.cost/tokensPerSeq + d.cost + far
	}
	return r
}

// best is the cheapest members of a class that the request may use.
func (s *scorer) best(c *class, role fleet.Role) (out shortlist) {
	consider := func(n *node) bool {
		for i := range out.n {
			if out.list[i].n == n {
				return false
			}
		}
		m := s.usable(n)
		if m == nil {
			return false
		}
		out.add(s.score(n, m, role))
		return true
	}
	resumed := func() { // the decode that has a part of the prompt
		if role == fleet.Decode {
			s.preferred(c, func(n *node) { consider(n) })
		}
	}
	switch policy := s.policy(); {
	case policy == RoundRobin:
		for n := c.root.next; n != &c.root && (out.n == 0 || out.list[0].avoid > 0); n = n.next {
			consider(n)
		}
	case policy == Random, policy == PowerOfTwo:
		want := 1
		if policy == PowerOfTwo {
			want = 2
		}
		for range 4 * want {
			n := c.nodes[s.p.rnd.IntN(len(c.nodes))]
			if w := s.weight(n); w == 1 || s.p.rnd.Float64() < w {
				if consider(n) {
					want--
				}
			}
			if want == 0 {
				break
			}
		}
	case s.key(policy) != 0:
		if n := c.onRing(s.key(policy), func(n *node) bool { m := s.usable(n); return m != nil && s.avoids(n, m, role) == 0 }); n != nil {
			consider(n)
		}
		resumed() // a broken transfer's blocks are worth more than the home
	case len(c.nodes) <= scanAll:
		for _, n := range c.nodes {
			consider(n)
		}
	default:
		resumed()
		s.sampled(c, func(n *node) { consider(n) }, role)
	}
	for n := c.root.next; out.n == 0 && n != &c.root; n = n.next { // all of those were excluded
		consider(n)
	}
	return out
}

// preferred looks at the member that the request prefers, if it is of the class.
func (s *scorer) preferred(c *class, look func(*node)) {
	if s.req.Prefer == "" {
		return
	}
	for _, n := range c.nodes {
		if n.key.id == s.req.Prefer {
			look(n)
		}
	}
}

// sampled looks at members of a large class: those that had the prompt's beginning in one of some roles, the
// least recently used, and some at random.
func (s *scorer) sampled(c *class, look func(*node), roles ...fleet.Role) {
	for _, w := range s.warms {
		if w.n.class == c {
			look(w.n)
		}
	}
	for _, m := range s.matches {
		for _, role := range roles {
			if n := m.node(role); n != nil && n.class == c {
				look(n)
			}
		}
	}
	n := c.root.next
	for range idlest {
		look(n)
		n = n.next
	}
	for range sample {
		look(c.nodes[s.p.rnd.IntN(len(c.nodes))])
	}
}

// key is the request's hash, 0 if the policy uses none.
func (s *scorer) key(policy string) uint64 {
	switch {
	case policy != ConsistentHash && policy != Session:
		return 0
	case s.req.Session != "":
		return max(hashString(s.req.Session), 1)
	case policy == ConsistentHash && len(s.req.Head) > 0:
		return max(hashString(s.req.Head), 1)
	}
	return 0
}

// avoids is how many reasons there are to choose n only for want of better.
func (s *scorer) avoids(n *node, m *fleet.Member, role fleet.Role) (reasons int) {
	for _, id := range s.req.Avoid {
		if id == n.key.id {
			reasons++
		}
	}
	length := s.req.Length
	if role == fleet.Prefill {
		length = s.req.Tokens
	}
	if m.MaxModelLen > 0 && length > m.MaxModelLen {
		reasons++
	}
	return reasons
}

// score is how unwelcome the request is at n: by most policies, for prefill in prompt tokens to
// compute before its answer, for decode in sequences beside it.
func (s *scorer) score(n *node, m *fleet.Member, role fleet.Role) scored {
	out := scored{n: n, share: s.share(n, m, role), avoid: s.avoids(n, m, role)}
	unit := 1.0
	if role == fleet.Prefill {
		// Its report and the routers' counts tell of the same work: the larger is nearer the truth.
		out.load = float64(max(n.queuedAll(), m.Load.QueuedTokens))
		out.fetched = s.fetched(n, out.share)
		out.cost = out.load + s.uncached(&out)
		unit = float64(max(s.req.Tokens, 1))
	} else {
		out.load = float64(max(n.seqsAll(), m.Load.Running+m.Load.Waiting))
		out.cost = out.load
	}
	full := role == fleet.Decode && m.MaxBatch > 0 && out.load >= float64(m.MaxBatch)
	switch s.policy() {
	case Random:
		out.cost, unit = s.p.rnd.ExpFloat64()/float64(len(n.class.nodes)), 0 // classes by their size
	case RoundRobin:
		out.cost, unit = float64(n.last), 0
	case PredictedTTFT:
		if role == fleet.Prefill {
			out.cost = n.time(linePrefill, out.cost)
		} else {
			out.cost = n.time(lineDecode, s.uncached(&out)) + seqTime*out.load
			if full {
				out.cost += batchTime * (1 + out.load - float64(m.MaxBatch))
			}
		}
		unit = 0
	case LeastTokens:
		if role == fleet.Decode {
			out.cost = max(float64(n.kvAll()), m.Load.KVUsed*float64(m.Blocks*m.Layout.BlockTokens)) / tokensPerSeq
		}
	default:
		warm := s.policy() == Prefix || s.policy() == KVEvents
		if role == fleet.Prefill {
			if warm {
				out.cost += n.recent(s.p.tick) / (2 * halfLife)
			}
			break
		}
		if full {
			out.cost += pastBatch
		}
		if used(n, m) > 0.9 {
			out.cost += fullPool
		}
		if warm {
			out.cost += coldPrefix*(1-out.share) + coldPrefix*n.recent(s.p.tick)/(2*halfLife)
		}
	}
	if role == fleet.Decode && s.req.Prefer == n.key.id {
		if s.policy() == PredictedTTFT {
			out.cost += preferred * seqTime
		} else {
			out.cost += preferred
		}
	}
	if w := s.weight(n); w < 1 && s.policy() != RoundRobin {
		out.cost = (out.cost+unit)/w - unit
	}
	if s.req.Explain {
		s.note(role, Candidate{ID: n.key.id, Cost: out.cost, Load: out.load, Match: out.share, Fetch: out.fetched})
	}
	return out
}

// weight is the share of work that a node takes. It rises from a tenth with its age, for one that
// came after the first of its class: where all are new, nobody waits.
func (s *scorer) weight(n *node) float64 {
	slow := s.p.cfg.SlowStart
	if slow == 0 || s.view.Now.IsZero() || n.born.IsZero() {
		return 1
	}
	grown := func(born time.Time) float64 { return float64(min(max(s.view.Now.Sub(born), 0)+slow/10, slow)) }
	w := min(grown(n.born)/grown(n.class.born), 1)
	if n.due(s.p.tick, w) {
		return 1
	}
	return w
}

// due reports whether a newcomer of weight w may have its next request now, like anybody else: it
// has none, and its last is 1/w rounds of its class ago. Its cost over a small weight would not do:
// where few requests run, even an idle newcomer's is the highest.
func (n *node) due(tick uint64, w float64) bool {
	return n.legsAll() == 0 && (!n.used || w*float64(tick-n.last) >= float64(len(n.class.nodes)))
}

// uncached is how many prompt tokens a candidate has neither itself nor from others.
func (s *scorer) uncached(c *scored) float64 {
	return float64(s.req.Tokens) * (1 - max(c.share, c.fetched))
}

// used is the fraction of n's block pool that is taken, by its report or by what we sent there.
func used(n *node, m *fleet.Member) float64 {
	pool := m.Blocks * m.Layout.BlockTokens
	if pool <= 0 {
		return m.Load.KVUsed
	}
	return max(m.Load.KVUsed, float64(n.kvAll())/float64(pool))
}

// rank is the data-parallel rank of n, from 1, that has at least half of the prompt; 0 for none.
// Prompts that share less must not all gather on one rank.
func (s *scorer) rank(n *node) int {
	for _, w := range s.req.Warm {
		if w.ID == n.key.id && w.Epoch == n.key.epoch && 2*w.Tokens >= float64(max(s.req.Tokens, 1)) {
			return w.Rank + 1
		}
	}
	return 0
}

// share is the part of the prompt that n has cached: by its events, else by what was sent there.
func (s *scorer) share(n *node, m *fleet.Member, role fleet.Role) float64 {
	if m.KVEvents != "" && s.byEvents() {
		for _, w := range s.warms {
			if w.n == n {
				return w.share
			}
		}
		return 0
	}
	if s.length == 0 {
		return 0
	}
	for _, t := range s.matches {
		if t.node(role) == n {
			return float64(t.bytes) / float64(s.length)
		}
	}
	return 0
}
