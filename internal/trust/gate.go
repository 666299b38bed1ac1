package trust

import (
	"crypto/subtle"
	"sync"
	"sync/atomic"
)

// Header is what carries a token of HTTP, Query or the like to a worker.
const Header = "x-xpyd-fleet"

// Gate checks tokens for one purpose and audience. What it accepts is derived once
// for each change of the ring. It is safe for concurrent use; a nil *Gate belongs to
// a process that trusts everyone.
type Gate struct {
	ring     *Ring
	purpose  Purpose
	audience string
	now      atomic.Pointer[accepted]
}

// accepted is what a gate accepts of one version of a ring.
type accepted struct {
	of     *[]Secret
	tokens [][]byte
}

// Gate returns a gate; nil of a nil ring.
func (r *Ring) Gate(p Purpose, audience string) *Gate {
	if r == nil {
		return nil
	}
	return &Gate{ring: r, purpose: p, audience: audience}
}

// Accepts reports whether token is that of one of the ring's secrets. It takes
// the same time whatever the token is.
func (g *Gate) Accepts(token []byte) bool {
	if g == nil {
		return true
	}
	a, in := g.now.Load(), g.ring.now.Load()
	if a == nil || a.of != in {
		a = &accepted{of: in}
		for _, s := range *in {
			a.tokens = append(a.tokens, []byte(s.Token(g.purpose, g.audience)))
		}
		g.now.Store(a)
	}
	ok := 0
	for _, t := range a.tokens {
		ok |= subtle.ConstantTimeCompare(t, token)
	}
	return ok == 1
}

// maxTokens is how many tokens are kept: those of a whole fleet, and of members
// that are no more until then.
const maxTokens = 4096

// Tokens are what a process shows to members over HTTP, each made once for one
// run of a member. It is safe for concurrent use; those of a nil ring are empty.
type Tokens struct {
	ring *Ring

	mu   sync.RWMutex
	of   *[]Secret // the ring's version that made is of
	made map[shown]string
}

// shown is to whom a token is.
type shown struct {
	id      string
	epoch   uint64
	secrets string
}

// NewTokens makes an empty set of a ring's.
func NewTokens(r *Ring) *Tokens { return &Tokens{ring: r} }

// HTTP returns the token for one run of a member whose announcement names its
// secrets; "" if it has none of ours.
func (t *Tokens) HTTP(id string, epoch uint64, secrets string) string {
	if t.ring == nil {
		return ""
	}
	to, in := shown{id, epoch, secrets}, t.ring.now.Load()
	t.mu.RLock()
	token, ok := t.made[to]
	ok = ok && t.of == in
	t.mu.RUnlock()
	if ok {
		return token
	}
	if s, ok := t.ring.Shared(secrets); ok {
		token = s.Token(HTTP, Member(id, epoch))
	} else {
		token = ""
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of != in || len(t.made) >= maxTokens {
		t.of, t.made = in, map[shown]string{}
	}
	t.made[to] = token
	return token
}
