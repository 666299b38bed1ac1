// Package pick chooses the pair of workers for a request: a function of the
// request, the fleet's snapshot, the counts of what this router has in flight,
// and what it has learnt of how long things take. It starts nothing, reads no
// clock and does no I/O.
//
// Only pairs that can serve are considered: both members live, not draining,
// eligible in the caller's eyes (probed), and compatible with each other. The
// two members are chosen together, never one by one.
//
// A choice costs the same in a fleet of any size: members are kept in classes
// that are alike in all that compatibility looks at, lists and rings are
// mended when members come and go (Refresh), and of large classes only the
// warm, some random and the least recently used members are compared.
//
// Load is counted when a request is dispatched and given back when its leg
// ends (Choice.EndPrefill, Choice.EndDecode); nothing but those calls changes a
// count, so counts cannot leak by time or sweep.
package pick

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Request is what a choice depends on.
type Request struct {
	Model   string   // "" while no model is served that could be meant
	Chain   Chain    // of the prompt's text; the zero value matches nothing
	Tokens  int      // prompt tokens, estimated
	Output  int      // tokens it may generate, over all choices
	Seqs    int      // sequences that decode will run; at least 1
	Exclude []string // ids never to choose
	Avoid   []string // ids to choose only for want of better; each mention weighs
	Prefer  string   // a decode that holds a part of the prompt already, not cached for all; "" for none
	Explain bool

	// Warm says who has how much of the prompt, by the workers' own events.
	// Tokenized says that it is the whole truth about those that publish
	// events; Tokens is exact then.
	Warm      []Warm
	Tokenized bool
	Fetch     Fetch
	// Session is the client's word for what belongs together; Head is the
	// prompt's beginning, which ConsistentHash takes where there is none.
	Session string
	Head    []byte
	// Local reports whether decode of a dialect could serve the request alone
	// though it can be split; nil says no.
	Local func(dialect string) bool
}

// Warm is a prefix that a worker has, in tokens of the prompt, those in slow
// tiers counted in part.
type Warm struct {
	ID     string
	Epoch  uint64
	Tokens float64
	Rank   int // of the data-parallel ranks behind ID, the one that has it
}

// Errors of Pick. ErrNoPair is wrapped with the reason.
var (
	ErrNoModel = errors.New("no worker serves this model")
	ErrNoPair  = errors.New("no pair of workers can take this request")
)

// Picker holds the counts and the prefix index of one router. It is safe for
// concurrent use. Locks: build, then mu.
type Picker struct {
	cfg   Config
	table atomic.Pointer[table]

	build   sync.Mutex // one Refresh at a time; nodes and classes change under both locks
	stamp   uint64     // of the last Refresh
	classes map[classID]*class

	mu     sync.Mutex
	policy string
	rnd    *rand.Rand
	index  *index
	nodes  map[nodeKey]*node
	tick   uint64 // dispatches so far: the clock of recency and memory
	local  explorer
	scorer scorer
	events []Event       // of guards, not fetched yet
	turn   chan struct{} // closes when a guard changes; nil while nobody waits
	values []float64     // of Judge, for its memory
	notes  notes
	named  map[string]*node // by id
}

// New makes a picker; rnd is used under the picker's lock only.
func New(cfg Config, rnd *rand.Rand) *Picker {
	return &Picker{cfg: cfg, policy: cfg.Policy, rnd: rnd, index: newIndex(cfg.AffinityBytes),
		nodes: map[nodeKey]*node{}, named: map[string]*node{}, classes: map[classID]*class{}}
}

// SetPolicy changes the policy.
func (p *Picker) SetPolicy(policy string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.policy = policy
}

// Policy is the one in force.
func (p *Picker) Policy() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.policy
}

// View is the fleet as one pick sees it. Eligible says which members the
// caller trusts; nil trusts all. Generation must rise whenever Eligible's
// answers change.
type View struct {
	Snapshot   *fleet.Snapshot
	Eligible   func(*fleet.Member) bool
	Generation uint64
	// Now is for newcomers' slow start; zero: none.
	Now time.Time
	// Behind says that somebody else calls Refresh for each view, so that a
	// choice need not wait for it: newcomers may be missed for a moment, but
	// never is a member chosen that this view does not have.
	Behind bool
}

// Choice is a pair that was chosen, and the load that it stands for. Prefill
// and Decode are the same member if that one does both phases.
type Choice struct {
	Prefill, Decode *fleet.Member
	// Local says why decode serves a request alone that could be split; ""
	// when it is split, or when the engine has no other half.
	Local   string
	Explain *Explain // when asked for
	// PrefillRank and DecodeRank are the data-parallel ranks that have at least
	// half of the prompt, counted from 1; 0 for any.
	PrefillRank, DecodeRank int

	p            *Picker
	pn, dn       *node
	tokens       int
	kv, seqs     int
	work         float64 // prompt tokens to compute before the answer: the queue's and its own
	moved        float64 // prompt tokens that decode does not have
	at           int64   // when it was made: Unix nanoseconds of the view's clock, 0 without one
	pOver, dOver bool    // under p.mu, as what follows: whether the choice tries a half-open breaker
	pTrial       bool
	dTrial       bool
}

// EndPrefill gives back prefill's share of the load. Later calls do nothing.
func (c *Choice) EndPrefill() {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.endPrefill()
}

// DonePrefill is EndPrefill of a prefill that did its part.
func (c *Choice) DonePrefill() {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.p.succeeded(c.pn, &c.pTrial, c.at)
	c.endPrefill()
}

func (c *Choice) endPrefill() {
	if c.pTrial {
		c.pTrial = false
		c.p.leave(c.pn)
	}
	if !c.pOver {
		c.pOver = true
		c.pn.queued -= c.tokens
		c.pn.count(-1)
		c.p.note(c.pn)
	}
}

// EndDecode gives back decode's share of the load. Later calls do nothing.
func (c *Choice) EndDecode() {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if c.dTrial {
		c.dTrial = false
		c.p.leave(c.dn)
	}
	if !c.dOver {
		c.dOver = true
		c.dn.kv -= c.kv
		c.dn.seqs -= c.seqs
		c.dn.count(-1)
		c.p.note(c.dn)
	}
}

// Pick chooses a pair and counts it as loaded. The caller ends both legs of
// the choice, each once it is over.
func (p *Picker) Pick(v View, req *Request) (*Choice, error) {
	if !v.Behind {
		p.Refresh(v)
	}
	for first := true; ; first = false {
		c, err := p.pick(v, req)
		if err == nil || !first || !p.table.Load().older(v) {
			return c, err
		}
		p.Refresh(v) // it may know somebody
	}
}

func (p *Picker) pick(v View, req *Request) (*Choice, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.table.Load()
	m := t.model(req.Model)
	switch {
	case m == nil && req.Model == "":
		return nil, fmt.Errorf("%w: nobody is live and takes new work whose model could be meant", ErrNoPair)
	case m == nil:
		return nil, fmt.Errorf("%w: %q", ErrNoModel, req.Model)
	}
	s := &p.scorer
	s.begin(p, &v, req, t.older(v))
	defer s.end()
	s.warm()
	for range maxBehind {
		pair := s.pair(m)
		if pair.p == nil {
			break
		}
		if s.trusted(pair.p.n) && s.trusted(pair.d.n) {
			return p.take(s, pair), nil
		}
	}
	if p.amnesty(m, v.Now) {
		if pair := s.pair(m); pair.p != nil && s.trusted(pair.p.n) && s.trusted(pair.d.n) {
			return p.take(s, pair), nil
		}
	}
	if err := p.shut(m, v.Now); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("%w: %s", ErrNoPair, m.why(v))
}

// maxBehind is how many choices of an outdated table may turn out wrong before
// it has to be made anew.
const maxBehind = 8

// take counts the pair as loaded and remembers where the prefix went.
func (p *Picker) take(s *scorer, pair pair) *Choice {
	req, pn, dn := s.req, pair.p.n, pair.d.n
	seqs := max(req.Seqs, 1)
	c := &Choice{
		Prefill: s.member(pn), Decode: s.member(dn), Local: pair.local,
		p: p, pn: pn, dn: dn, tokens: req.Tokens, kv: req.Tokens + req.Output, seqs: seqs,
		work: pair.p.load + s.uncached(pair.p), moved: s.uncached(pair.d),
	}
	if pair.local != "" {
		c.work = c.moved // measured by what decode computes
	}
	if !s.view.Now.IsZero() {
		c.at = s.view.Now.UnixNano()
	}
	c.dTrial = p.enter(dn, s.view.Now)
	c.pTrial = p.enter(pn, s.view.Now) // not for an engine that does both
	c.PrefillRank, c.DecodeRank = s.rank(pn), s.rank(dn)
	if req.Explain {
		c.Explain = s.explain(pair)
	}
	p.tick++
	pn.use(p.tick, float64(req.Tokens))
	dn.use(p.tick, float64(seqs))
	pn.queued += c.tokens
	dn.kv += c.kv
	dn.seqs += seqs
	pn.count(1)
	dn.count(1)
	p.note(pn)
	p.note(dn)
	p.noteHint(req.Chain, p.index.put(req.Chain, pn, dn), pn, dn)
	return c
}

// Ready reports whether some pair of some model that counts can take work.
func (p *Picker) Ready(v View, counts func(model string) bool) bool {
	p.Refresh(v)
	for _, m := range p.table.Load().models {
		if m.ready() && counts(m.name) {
			return true
		}
	}
	return false
}

// Models are those that the view's members have, each with whether some pair of
// its can take work.
func (p *Picker) Models(v View) map[string]bool {
	p.Refresh(v)
	out := map[string]bool{}
	for _, m := range p.table.Load().models {
		out[m.name] = m.ready()
	}
	return out
}

// Loads is what this router has in flight on one worker.
type Loads struct {
	Legs   int `json:"legs"`
	Tokens int `json:"tokens"` // prompt tokens being prefilled
	Seqs   int `json:"seqs"`   // sequences being decoded
	KV     int `json:"kv"`     // tokens that decode may hold for them
}

// Loads returns the counts of an instance.
func (p *Picker) Loads(id string, epoch uint64) Loads {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[nodeKey{id, epoch}]
	if n == nil {
		return Loads{}
	}
	return Loads{Legs: n.legs, Tokens: n.queued, Seqs: n.seqs, KV: n.kv}
}

// AffinityBytes is the memory that the prefix index takes now.
func (p *Picker) AffinityBytes() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.index.bytes()
}
