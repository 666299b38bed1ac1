package bind

import (
	"bytes"

	"github.com/xpyd/xpyd/engine"
)

// guide is where an answer stands: in its reasoning, at its beginning where it may yet become that, or
// behind.
type guide struct {
	think *think // nil: there is no reasoning, or it is over
	in    bool   // the reasoning has begun; else it may
	n     int    // bytes of the mark at hand that have come
	dead  bool   // of what comes behind, if the reasoning has not begun: it is no longer possible
	moved bool   // there is no longer nothing before the mark that begins the reasoning
	free  bool   // the answer is, until a call begins: it may also end in its reasoning
	place place
}

var _ engine.Forcer = (*guide)(nil)

// Fork implements engine.Guide.
func (g *guide) Fork() engine.Guide {
	c := *g
	c.place = g.place.fork()
	return &c
}

// Mask implements engine.Guide.
func (g *guide) Mask(bits []uint32) {
	switch {
	case g.think == nil:
		g.place.mask(bits)
	case g.in: // an end would leave the request without its answer
		fill(bits, len(g.think.tokens))
		for _, id := range g.place.s.ends {
			if unset(bits, id); g.free { // or it is the answer
				set(bits, id)
			}
		}
		for _, id := range g.think.tears(g.n) {
			unset(bits, id)
		}
	default:
		clear(bits)
		if !g.dead {
			g.place.mask(bits)
		}
		if g.n > 0 || !g.moved {
			for _, id := range g.think.opens(g.n) {
				set(bits, id)
			}
		}
	}
}

// Forced implements engine.Forcer.
func (g *guide) Forced() (token int32, ok bool) {
	if g.think != nil {
		return 0, false
	}
	return g.place.forced()
}

// Accept implements engine.Guide.
func (g *guide) Accept(token int32) bool {
	switch {
	case g.think == nil:
		return g.place.accept(token)
	case g.in:
		return g.thinks(token)
	}
	text := g.think.text(token)
	n, rest, may := 0, []byte(nil), false
	if g.n > 0 || !g.moved {
		n, rest, may = g.think.open.begins(g.n, text)
	}
	may = may && !g.think.tear(0, rest)
	if may && n == len(g.think.open.text) { // behind it anything may come, the mark that ends it too
		k, _, found := g.think.end.feed(0, rest)
		g.place = g.place.s.start()
		if g.in, g.n, g.dead = true, k, false; found {
			g.think, g.in = nil, false
		}
		return true
	}
	alive := !g.dead && g.place.accept(token)
	if !alive && !may {
		return false
	}
	if !may {
		n = 0
	}
	g.moved = g.moved || !g.free || may || len(bytes.TrimSpace(text)) > 0 // white space may stand before reasoning
	g.dead, g.n = !alive, n
	if !may && g.moved {
		g.think, g.n = nil, 0
	}
	return true
}

// thinks takes a token of the reasoning.
func (g *guide) thinks(token int32) bool {
	for _, id := range g.place.s.ends {
		if id == token {
			if g.free {
				*g = guide{place: place{s: &script{}}}
				return true
			}
			return false
		}
	}
	if int(token) >= len(g.think.tokens) || token < 0 {
		return false
	}
	text := g.think.text(token)
	if g.think.tear(g.n, text) {
		return false
	}
	n, _, found := g.think.end.feed(g.n, text)
	if g.n = n; found {
		g.think = nil
	}
	return true
}
