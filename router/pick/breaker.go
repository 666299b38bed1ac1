package pick

import (
	"cmp"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
)

// Breaker configures the circuit breakers, one a worker. Failures in a row open it, and no request
// goes there. After a while it is half open: one request may try, and closes it or opens it again,
// for twice as long. A pair is chosen only if both breakers admit it, so no try is wasted.
type Breaker struct {
	Failures int           `key:"failures"` // in a row, to open a breaker; 0: none opens
	Open     time.Duration `key:"open"`     // how long it is open at first
	MaxOpen  time.Duration `key:"max_open"` // and at most
}

// DefaultBreaker opens for a second at first: clients retry for longer, and an engine's hiccup is
// shorter.
func DefaultBreaker() Breaker {
	return Breaker{Failures: 5, Open: time.Second, MaxOpen: 30 * time.Second}
}

func (b *Breaker) validate() error {
	return cmp.Or(config.AtLeast("failures", b.Failures, 0), config.Positive("open", b.Open), config.AtLeast("max_open", b.MaxOpen, b.Open))
}

// GuardState reports whether a worker gets requests.
type GuardState string

// States of a guard.
const (
	Closed   GuardState = "closed"    // it does
	Open     GuardState = "open"      // its breaker is open
	HalfOpen GuardState = "half_open" // one request is trying it
	Ejected  GuardState = "ejected"   // it is an outlier: see Ejection
)

// guard keeps requests from a worker that fails; under Picker.mu.
type guard struct {
	state GuardState
	until time.Time // of Open and Ejected
	why   string

	row    int       // failures since the last success
	opened int       // times in a row, for the doubling
	closed time.Time // when it recovered last
	health           // for ejection
}

// admits reports whether a request may go to the worker.
func (g *guard) admits(now time.Time) bool {
	switch g.state {
	case Closed:
		return true
	case HalfOpen:
		return false
	}
	return !now.Before(g.until)
}

// Guard is the state of a worker's guard.
type Guard struct {
	State GuardState `json:"state"`
	Until *time.Time `json:"until,omitempty"` // if open or ejected: when a request may try it
	Why   string     `json:"why,omitempty"`
}

// Guard returns the state of an instance's breaker.
func (p *Picker) Guard(id string, epoch uint64) Guard {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[nodeKey{id, epoch}]
	if n == nil || n.guard.state == Closed {
		return Guard{State: Closed}
	}
	g := Guard{State: n.guard.state, Why: n.guard.why}
	if g.State != HalfOpen {
		g.Until = new(n.guard.until)
	}
	return g
}

// Guarded counts the workers whose breaker is not closed, and those ejected.
func (p *Picker) Guarded() (open, ejected int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, n := range p.nodes {
		switch n.guard.state {
		case Open, HalfOpen:
			open++
		case Ejected:
			ejected++
		}
	}
	return open, ejected
}

// Event is a change of a guard.
type Event struct {
	ID   string
	Role fleet.Role
	Guard
	Was GuardState
}

// maxEvents bounds the events that nobody has fetched: the oldest go first.
const maxEvents = 1024

// Events returns the changes since the last call, and a channel that closes with the next one.
func (p *Picker) Events() ([]Event, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.events
	p.events = nil
	return out, p.turned()
}

// turned is a channel that closes with the next change of a guard; p.mu is held.
func (p *Picker) turned() <-chan struct{} {
	if p.turn == nil {
		p.turn = make(chan struct{})
	}
	return p.turn
}

// guardTo changes a guard; p.mu is held.
func (p *Picker) guardTo(n *node, state GuardState, until time.Time, why string) {
	g := &n.guard
	ev := Event{ID: n.key.id, Role: n.role, Was: g.state, Guard: Guard{State: state, Why: why}}
	if state == Open || state == Ejected {
		ev.Until = &until
	}
	g.state, g.until, g.why = state, until, why
	if len(p.events) == maxEvents {
		p.events = p.events[1:]
	}
	p.events = append(p.events, ev)
	if p.turn != nil {
		close(p.turn)
		p.turn = nil
	}
}

// enter lets a chosen request through a guard whose time is over, and reports whether it is the
// one that tries it; p.mu is held.
func (p *Picker) enter(n *node, now time.Time) (trial bool) {
	switch n.guard.state {
	case Open:
		p.guardTo(n, HalfOpen, time.Time{}, n.guard.why)
		return true
	case Ejected:
		p.recover(n, now)
	}
	return false
}

// recover closes a guard; the worker starts slowly, like a newcomer.
func (p *Picker) recover(n *node, now time.Time) {
	p.guardTo(n, Closed, time.Time{}, "")
	n.guard.row, n.guard.closed, n.born = 0, now, now
	n.guard.health.reset()
}

// succeeded notes that a worker did its part of a choice. p.mu is held.
func (c *Choice) succeeded(l *leg) {
	g := &l.n.guard
	g.row = 0
	g.good++
	if l.trial && g.state == HalfOpen {
		c.p.recover(l.n, time.Unix(0, c.at))
	}
	l.trial = false
}

// Succeeded notes that a worker did its part, where neither DonePrefill nor Answered is called.
func (c *Choice) Succeeded(role fleet.Role) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.succeeded(c.leg(role))
}

// Fault says how a worker failed.
type Fault uint8

// Faults.
const (
	Broken Fault = iota // its connection, or a 5xx: counts for its breaker and its ejection
	Poor                // a bad answer, maybe not its fault: counts for its ejection
)

// Failed notes that a worker failed its part, except by a 4xx, by a client that left, or for lack
// of room.
func (c *Choice) Failed(role fleet.Role, fault Fault, now time.Time) {
	p := c.p
	p.mu.Lock()
	defer p.mu.Unlock()
	l := c.leg(role)
	g := &l.n.guard
	g.bad++
	if fault != Broken || p.cfg.Breaker.Failures == 0 {
		return
	}
	g.row++
	switch {
	case l.trial && g.state == HalfOpen:
		l.trial = false
	case g.state != Closed || g.row < p.cfg.Breaker.Failures:
		return
	}
	b := &p.cfg.Breaker
	if g.state == Closed && now.Sub(g.closed) > b.MaxOpen {
		g.opened = 0
	}
	d := doubled(b.Open, g.opened, b.MaxOpen)
	g.opened++
	// A fifth of it is drawn, so that routers side by side do not all try at once.
	p.guardTo(l.n, Open, now.Add(d-time.Duration(p.rnd.Int64N(int64(d)/5+1))), fmt.Sprintf("%d failures in a row", g.row))
}

// doubled is d, doubled n times, most at most.
func doubled(d time.Duration, n int, most time.Duration) time.Duration {
	if d > most>>n { // d<<n may be more than there are bits for
		return most
	}
	return d << n
}

// Shut is the ErrNoPair of a model whose workers are there, but guarded.
type Shut struct {
	Until   time.Time       // when the first may be tried; zero while one is being tried
	Changed <-chan struct{} // closes when a guard changes
	who     string
}

func (e *Shut) Error() string { return fmt.Sprintf("%v: %s", ErrNoPair, e.who) }

// Unwrap makes it an ErrNoPair.
func (e *Shut) Unwrap() error { return ErrNoPair }

// shut returns the guards that keep the model from having a pair, or nil. p.mu is held.
func (p *Picker) shut(m *model, now time.Time) *Shut {
	var e *Shut
	for n := range m.nodes {
		if n.guard.admits(now) {
			continue
		}
		if e == nil {
			e = &Shut{Changed: p.turned(), who: fmt.Sprintf("%s worker %s is not used: its breaker is %s after %s", n.class.id.Role, n.key.id, n.guard.state, n.guard.why)}
		}
		if until := n.guard.until; n.guard.state != HalfOpen && (e.Until.IsZero() || until.Before(e.Until)) {
			e.Until = until
		}
	}
	return e
}
