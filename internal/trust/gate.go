package trust

import (
	"crypto/subtle"
	"sync"
	"sync/atomic"
)

// Header carries a token of purpose HTTP or Query to a worker.
const Header = "x-xpyd-fleet"

// Gate checks tokens for one purpose and audience. It derives what it accepts once for each change
// of the ring. It is safe for concurrent use; a nil *Gate accepts everything.
type Gate struct {
	ring     *Ring
	purpose  Purpose
	audience string
	now      atomic.Pointer[accepted]
}

// accepted are the tokens for one version of a ring.
type accepted struct {
	of     *[]Secret
	tokens [][]byte
}

// Gate returns a gate; a nil ring has a nil gate.
func (r *Ring) Gate(p Purpose, audience string) *Gate {
	if r == nil {
		return nil
	}
	return &Gate{ring: r, purpose: p, audience: audience}
}

// Accepts reports whether token is that of one of the ring's secrets, in constant time.
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

// maxTokens bounds the tokens kept: a whole fleet's, and some of former members.
const maxTokens = 4096

// Tokens makes the tokens that a process shows to members over HTTP, once for each run of a member.
// It is safe for concurrent use. With a nil ring they are empty.
type Tokens struct {
	ring *Ring

	mu   sync.RWMutex
	of   *[]Secret // the ring's version of made
	made map[shown]string
}

// shown is whom a token is shown to.
type shown struct {
	id      string
	epoch   uint64
	secrets string
}

// NewTokens makes an empty set for a ring.
func NewTokens(r *Ring) *Tokens { return &Tokens{ring: r} }

// HTTP returns the token for one run of a member that announced these secrets, "" if none is ours.
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
	token = ""
	if s, ok := t.ring.Shared(secrets); ok {
		token = s.Token(HTTP, Member(id, epoch))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of != in || len(t.made) >= maxTokens {
		t.of, t.made = in, map[shown]string{}
	}
	t.made[to] = token
	return token
}
