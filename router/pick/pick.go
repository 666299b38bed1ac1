// Package pick chooses the pair of workers for a request: a pure function of
// the request, the fleet's snapshot and the counts of what this router has in
// flight. It starts nothing, reads no clock and does no I/O.
//
// Only pairs that can serve are considered: both members live, not draining,
// eligible in the caller's eyes (probed), and compatible with each other. The
// two members are chosen together, never one by one.
//
// Load is counted when a request is dispatched and given back when its leg
// ends (Choice.EndPrefill, Choice.EndDecode); nothing but those calls changes a
// count, so counts cannot leak by time or sweep.
package pick

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Policies.
const (
	Prefix      = "prefix"       // least loaded, less what a warm cache saves (default)
	LeastLoaded = "least_loaded" // tokens and sequences in flight
	RoundRobin  = "round_robin"  // least recently used
	Random      = "random"
	PowerOfTwo  = "power_of_two" // the less loaded of two random ones
)

// Config configures a Picker.
type Config struct {
	// Policy is one of the constants above. It can be changed while running.
	Policy string `koanf:"policy"`
	// AffinityBytes bounds the memory of the prefix index.
	AffinityBytes int `koanf:"affinity_bytes" unit:"bytes"`
}

// DefaultConfig is the prefix policy with a 16 MiB index.
func DefaultConfig() Config { return Config{Policy: Prefix, AffinityBytes: 16 << 20} }

// keyError is a value that Validate refuses.
type keyError struct{ key, msg string }

func (e *keyError) Error() string     { return e.key + ": " + e.msg }
func (e *keyError) ConfigKey() string { return e.key }

// Validate refuses what New cannot work with; the error's ConfigKey method
// names the key.
func (c Config) Validate() error {
	if !slices.Contains([]string{Prefix, LeastLoaded, RoundRobin, Random, PowerOfTwo}, c.Policy) {
		return &keyError{"policy", fmt.Sprintf("%q is none of prefix, least_loaded, round_robin, random, power_of_two", c.Policy)}
	}
	if c.AffinityBytes < 0 {
		return &keyError{"affinity_bytes", fmt.Sprintf("%d is negative", c.AffinityBytes)}
	}
	return nil
}

// Request is what a choice depends on.
type Request struct {
	Model   string
	Chain   Chain    // of the prompt; the zero value matches nothing
	Tokens  int      // prompt tokens, estimated
	Output  int      // tokens it may generate, over all choices
	Seqs    int      // sequences that decode will run; at least 1
	Exclude []string // ids never to choose
	Avoid   []string // ids to choose only for want of better; each mention weighs
	Prefer  string   // a decode that holds a part of the prompt already, not cached for all; "" for none
	Explain bool
}

// Errors of Pick. ErrNoPair is wrapped with the reason.
var (
	ErrNoModel = errors.New("no worker serves this model")
	ErrNoPair  = errors.New("no pair of workers can take this request")
)

// Picker holds the counts and the prefix index of one router. It is safe for
// concurrent use.
type Picker struct {
	mu     sync.Mutex
	policy string
	rnd    *rand.Rand
	index  *index
	nodes  map[nodeKey]*node
	tick   uint64 // dispatches so far: the clock of recency and memory
	table  *table
}

// New makes a picker; rnd is used under the picker's lock only.
func New(cfg Config, rnd *rand.Rand) *Picker {
	return &Picker{policy: cfg.Policy, rnd: rnd, index: newIndex(cfg.AffinityBytes), nodes: map[nodeKey]*node{}}
}

// SetPolicy changes the policy.
func (p *Picker) SetPolicy(policy string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.policy = policy
}

// View is the fleet as one pick sees it. Eligible says which members the
// caller trusts; nil trusts all. Generation must change whenever Eligible's
// answers do.
type View struct {
	Snapshot   *fleet.Snapshot
	Eligible   func(*fleet.Member) bool
	Generation uint64
}

// Choice is a pair that was chosen, and the load that it stands for. Prefill
// and Decode are the same member if that one does both phases.
type Choice struct {
	Prefill, Decode *fleet.Member
	Explain         *Explain // when asked for

	p            *Picker
	pn, dn       *node
	tokens       int
	kv, seqs     int
	pOver, dOver bool // under p.mu
}

// EndPrefill gives back prefill's share of the load. Later calls do nothing.
func (c *Choice) EndPrefill() {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if !c.pOver {
		c.pOver = true
		c.pn.queued -= c.tokens
		c.pn.legs--
	}
}

// EndDecode gives back decode's share of the load. Later calls do nothing.
func (c *Choice) EndDecode() {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if !c.dOver {
		c.dOver = true
		c.dn.kv -= c.kv
		c.dn.seqs -= c.seqs
		c.dn.legs--
	}
}

// Pick chooses a pair and counts it as loaded. The caller ends both legs of
// the choice, each once it is over.
func (p *Picker) Pick(v View, req *Request) (*Choice, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.refresh(v)
	m := t.models[req.Model]
	if m == nil {
		return nil, fmt.Errorf("%w: %q", ErrNoModel, req.Model)
	}
	s := &scorer{p: p, snap: v.Snapshot, req: req}
	s.matches, s.length = p.index.match(req.Chain)
	pn, dn := s.pair(m)
	if pn == nil {
		return nil, fmt.Errorf("%w: %s", ErrNoPair, m.why(v))
	}
	return p.take(s, pn, dn), nil
}

// take counts the pair as loaded and remembers where the prefix went.
func (p *Picker) take(s *scorer, pn, dn *node) *Choice {
	req := s.req
	seqs := max(req.Seqs, 1)
	c := &Choice{
		Prefill: &s.snap.Members[pn.at], Decode: &s.snap.Members[dn.at],
		p: p, pn: pn, dn: dn, tokens: req.Tokens, kv: req.Tokens + req.Output, seqs: seqs,
	}
	if req.Explain {
		c.Explain = s.explain(pn, dn)
	}
	p.tick++
	pn.use(p.tick, float64(req.Tokens))
	dn.use(p.tick, float64(seqs))
	pn.queued += c.tokens
	dn.kv += c.kv
	dn.seqs += seqs
	pn.legs++
	dn.legs++
	p.index.put(req.Chain, pn, dn)
	return c
}

// Ready reports whether some pair of some model can take work.
func (p *Picker) Ready(v View) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.refresh(v).models {
		if m.ready() {
			return true
		}
	}
	return false
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
