// Package pick chooses the pair of workers for a request, from the request, the fleet's snapshot,
// what this router has in flight and what it has learnt of how long things take. It starts
// nothing, reads no clock and does no I/O.
//
// It considers only pairs whose members are live, not draining, eligible to the caller (probed)
// and compatible, and chooses both together.
//
// A choice costs the same in a fleet of any size: members are kept in classes alike in all that
// compatibility looks at, lists and rings change when members come and go (Refresh), and of large
// classes only the warm, some random and the least recently used members are compared.
//
// Load is counted when a request is dispatched and given back when its leg ends (Choice.EndPrefill,
// Choice.EndDecode). Nothing else changes a count, so counts cannot leak.
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
	Length  int      // of the longest sequence, with the prompt: who takes none so long is chosen only for want of better
	Output  int      // tokens it may generate, over all choices
	Seqs    int      // sequences that decode will run; at least 1
	Gap     float64  // seconds between tokens that are promised to whom it is for; 0: what the worker promises
	Exclude []string // ids never to choose
	Avoid   []string // ids to choose only for want of better; each mention weighs
	Prefer  string   // a decode that holds a part of the prompt already, not cached for all; "" for none
	Explain bool
	// Room is how many tokens decode must have room for, beside what it has and may yet get, with a
	// margin; 0: it may have none. It is for what could stay where it is: if nobody has room, no
	// ejected worker is asked.
	Room int

	// Warm says who has how much of the prompt, by the workers' own events. With Tokenized it is
	// complete for those that publish events, and Tokens is exact.
	Warm      []Warm
	Tokenized bool
	Fetch     Fetch
	// Session is the client's word for what belongs together. Without one, ConsistentHash takes
	// Head, the prompt's beginning.
	Session string
	Head    []byte
	// Local reports whether decode of a dialect could serve the request alone though it can be
	// split; nil says no.
	Local func(dialect string) bool
}

// Warm is a prefix that a worker has, in tokens of the prompt, those in slow tiers counted in part.
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

// Picker holds the counts and the prefix index of one router. It is safe for concurrent use.
// Locks: build, then mu.
type Picker struct {
	cfg   Config
	table atomic.Pointer[table]

	build   sync.Mutex // one Refresh at a time; nodes and classes change under both locks
	stamp   uint64     // of the last Refresh
	classes map[classID]*class
	kinds   map[kind]*costs

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
		nodes: map[nodeKey]*node{}, named: map[string]*node{}, classes: map[classID]*class{}, kinds: map[kind]*costs{}}
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

// View is the fleet as one pick sees it. Eligible says which members the caller trusts (nil: all);
// Generation must rise whenever its answers change.
type View struct {
	Snapshot   *fleet.Snapshot
	Eligible   func(*fleet.Member) bool
	Generation uint64
	Now        time.Time // for newcomers' slow start; zero: none
	// Behind: somebody else calls Refresh for each view, so that a choice need not wait for it. It
	// may miss newcomers for a moment, but never chooses a member that this view does not have.
	Behind bool
}

// Choice is a pair that was chosen, and the load that it stands for. Prefill and Decode are the
// same member if that one does both phases.
type Choice struct {
	Prefill, Decode *fleet.Member
	// Local says why decode alone serves a request that could be split, else "".
	Local   string
	Explain *Explain // when asked for
	// PrefillRank and DecodeRank are the data-parallel ranks that have at least half of the
	// prompt, counted from 1; 0 for any.
	PrefillRank, DecodeRank int

	p               *Picker
	prefill, decode leg     // under p.mu
	work            float64 // prompt tokens to compute before the answer: the queue's and its own
	moved           float64 // prompt tokens that decode does not have
	at              int64   // when it was made: Unix nanoseconds of the view's clock, 0 without one
}

// leg is one half of a choice.
type leg struct {
	n     *node
	load  Loads
	over  bool
	trial bool // it tries a half-open breaker
}

func (c *Choice) leg(role fleet.Role) *leg {
	if role == fleet.Decode {
		return &c.decode
	}
	return &c.prefill
}

// EndPrefill gives back prefill's share of the load. Later calls do nothing.
func (c *Choice) EndPrefill() { c.end(&c.prefill, false) }

// DonePrefill is EndPrefill of a prefill that did its part.
func (c *Choice) DonePrefill() { c.end(&c.prefill, true) }

// EndDecode gives back decode's share of the load. Later calls do nothing.
func (c *Choice) EndDecode() { c.end(&c.decode, false) }

func (c *Choice) end(l *leg, succeeded bool) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if succeeded {
		c.succeeded(l)
	}
	if g := &l.n.guard; l.trial && g.state == HalfOpen { // its place to try is unused
		c.p.guardTo(l.n, Open, g.until, g.why) // until has passed
	}
	l.trial = false
	if !l.over {
		l.over = true
		l.n.count(&l.load, -1)
		c.p.note(l.n)
	}
}

// Pick chooses a pair and counts it as loaded. The caller ends each leg of the choice once.
func (p *Picker) Pick(v View, req *Request) (*Choice, error) {
	if !v.Behind {
		p.Refresh(v)
	}
	for first := true; ; first = false {
		t := p.table.Load() // what is chosen from is this or a newer one
		c, err := p.pick(v, req)
		if err == nil || !first || !t.older(v) {
			return c, err
		}
		p.Refresh(v) // the new table, which another pick may have made by now, may know more members
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
			return p.choose(s, pair), nil
		}
	}
	if req.Room == 0 && p.amnesty(m, v.Now) {
		if pair := s.pair(m); pair.p != nil && s.trusted(pair.p.n) && s.trusted(pair.d.n) {
			return p.choose(s, pair), nil
		}
	}
	if shut := p.shut(m, v.Now); shut != nil {
		return nil, shut
	}
	return nil, fmt.Errorf("%w: %s", ErrNoPair, m.why(v))
}

// maxBehind is how many choices of an outdated table may be wrong before it is made anew.
const maxBehind = 8

// choose counts the pair as loaded and remembers where the prefix went.
func (p *Picker) choose(s *scorer, pair pair) *Choice {
	req, pn, dn := s.req, pair.p.n, pair.d.n
	seqs := max(req.Seqs, 1)
	c := &Choice{
		Prefill: s.member(pn), Decode: s.member(dn), Local: pair.local, p: p,
		prefill: leg{n: pn, load: Loads{Legs: 1, Tokens: req.Tokens}},
		decode:  leg{n: dn, load: Loads{Legs: 1, Seqs: seqs, KV: req.Tokens + req.Output}},
		work:    pair.p.load + s.uncached(pair.p), moved: s.uncached(pair.d),
	}
	if pair.local == LocalMixed || s.mixes() {
		c.prefill.load.Tokens = int(s.uncached(pair.p))
		c.decode.load.KV = int(s.uncached(pair.d)) + req.Output
	}
	if pair.local != "" {
		c.work = c.moved // measured by what decode computes
	}
	if !s.view.Now.IsZero() {
		c.at = s.view.Now.UnixNano()
	}
	c.decode.trial = p.enter(dn, s.view.Now)
	c.prefill.trial = p.enter(pn, s.view.Now) // not for an engine that does both
	c.PrefillRank, c.DecodeRank = s.rank(pn), s.rank(dn)
	if req.Explain {
		c.Explain = s.explain(pair)
	}
	p.tick++
	if pn != dn { // of one that does both, sequences count: see score
		pn.use(p.tick, float64(req.Tokens))
	}
	dn.use(p.tick, float64(seqs))
	for _, l := range [2]*leg{&c.prefill, &c.decode} {
		l.n.count(&l.load, 1)
		p.note(l.n)
	}
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

// Models returns the models of the view's members, each with whether some pair can take work.
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
	if n := p.nodes[nodeKey{id, epoch}]; n != nil {
		return n.own
	}
	return Loads{}
}

// AffinityBytes is the memory that the prefix index takes now.
func (p *Picker) AffinityBytes() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.index.bytes()
}
