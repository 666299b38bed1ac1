package bind

import "slices"

// matcher follows a text along a grammar: internal/grammar's.
type matcher interface {
	Mask(bits []uint32)
	Accept(token int32) bool
	MayEnd() bool
	Forced() (token int32, ok bool)
	clone() matcher
}

// script is what comes behind the reasoning: tokens and texts in turn. It is shared and immutable.
type script struct {
	ends  []int32
	first []option
	// Behind a text: how it goes on. None: an end.
	next []option
	// Behind the most-th text, if there can be so many: those of next that only an end follows.
	most    int
	closing []option
	last    bool // the text may be the last: an end may come at once behind it
	// Where the answer is free until a call begins. An end of the script is where it is free again.
	free     *finder
	lastOnly bool // behind a text nothing but an end may come all the same
}

// option is one way to go on: tokens, then the text of a grammar, or if there is none an end.
type option struct {
	tokens []int32
	number func(n int) []int32     // more tokens: of the n-th text, from 0; nil: none
	begin  func() (matcher, error) // nil: an end follows
}

// place is where an answer stands in a script. The zero value is its begin.
type place struct {
	s *script
	// Within tokens: of these options the first at tokens have come.
	options []option
	at      int
	text    matcher // else within, or behind, a text
	texts   int     // that have begun
	over    bool    // only an end may come
	free    bool    // or it is free: within the text of a node of s.free
	node    int32
}

func (s *script) start() place {
	p := place{s: s, options: s.first, free: s.free != nil}
	p.settle()
	return p
}

func (p *place) fork() place {
	q := *p
	if p.text != nil {
		q.text = p.text.clone()
	}
	return q
}

// settle goes over an option all of whose tokens have come. Of those that only an end follows, the
// tokens may begin another's, which then may still come.
func (p *place) settle() bool {
	i := slices.IndexFunc(p.options, func(o option) bool { return len(o.tokens) == p.at })
	if i < 0 {
		return true
	}
	o := p.options[i]
	switch {
	case o.begin == nil && p.s.free != nil:
		p.loosen()
		return true
	case o.begin == nil:
		p.options, p.over = slices.Delete(slices.Clone(p.options), i, i+1), true
		return true
	case o.number != nil:
		p.options, p.at = []option{{tokens: o.number(p.texts), begin: o.begin}}, 0
		return true
	}
	p.options, p.at = nil, 0
	m, err := o.begin()
	if err != nil { // it was compiled when the request came
		p.over, p.s = false, &script{}
		return false
	}
	p.text = m
	p.texts++
	return true
}

// loosen has the answer be free.
func (p *place) loosen() { *p = place{s: p.s, texts: p.texts, free: true} }

// triggers reports whether a call may begin.
func (p *place) triggers() bool { return p.texts < p.s.most }

// next is how the script goes on behind the text.
func (p *place) next() []option {
	if p.s.most > 0 && p.texts >= p.s.most {
		return p.s.closing
	}
	return p.s.next
}

// fill sets the first n bits and no other.
func fill(bits []uint32, n int) {
	clear(bits)
	for i := range min(n/32, len(bits)) {
		bits[i] = 1<<32 - 1
	}
	if n/32 < len(bits) {
		bits[n/32] = 1<<(n%32) - 1
	}
}

func set(bits []uint32, id int32) {
	if w := int(id) / 32; id >= 0 && w < len(bits) {
		bits[w] |= 1 << (id % 32)
	}
}

func unset(bits []uint32, id int32) {
	if w := int(id) / 32; id >= 0 && w < len(bits) {
		bits[w] &^= 1 << (id % 32)
	}
}

func (p *place) mask(bits []uint32) {
	switch {
	case p.free:
		fill(bits, len(p.s.free.tokens))
		p.allowEnds(bits)
		if !p.triggers() {
			return
		}
		for _, id := range p.s.free.tears(p.node, p.texts > 0) {
			unset(bits, id)
		}
	case p.text != nil:
		p.text.Mask(bits)
		if len(p.s.next) == 0 {
			return
		}
		for _, id := range p.s.ends { // the grammar's end is not the answer's
			unset(bits, id)
		}
		if !p.text.MayEnd() {
			return
		}
		for _, o := range p.next() {
			set(bits, o.tokens[0])
		}
		if p.s.last {
			p.allowEnds(bits)
		}
	default:
		clear(bits)
		if p.over {
			p.allowEnds(bits)
		}
		for _, o := range p.options {
			set(bits, o.tokens[p.at])
		}
	}
}

// forced is the only token of mask, if there is only one.
func (p *place) forced() (token int32, ok bool) {
	switch {
	case p.free, p.s == nil:
		return 0, false
	case p.text != nil:
		token, ok = p.text.Forced()
		switch {
		case len(p.s.next) == 0:
			return token, ok
		case p.text.MayEnd(), ok && slices.Contains(p.s.ends, token): // then what is next may come
			return 0, false
		}
		return token, ok
	case p.over || len(p.options) == 0:
		return 0, false
	}
	token = p.options[0].tokens[p.at]
	for _, o := range p.options[1:] {
		if o.tokens[p.at] != token {
			return 0, false
		}
	}
	return token, true
}

func (p *place) allowEnds(bits []uint32) {
	for _, id := range p.s.ends {
		set(bits, id)
	}
}

func (p *place) accept(token int32) bool {
	end := slices.Contains(p.s.ends, token)
	switch {
	case p.free:
		return p.acceptFree(token, end)
	case p.text != nil && p.s.free != nil && len(p.s.next) == 0 && !p.s.lastOnly:
		if !p.text.Accept(token) {
			return false
		}
		if p.text.MayEnd() { // the call has ended
			p.loosen()
		}
		return true
	case p.text != nil && len(p.s.next) == 0:
		return p.text.Accept(token)
	case p.text != nil && end:
		if !p.s.last || !p.text.MayEnd() {
			return false
		}
		*p = place{s: &script{}}
		return true
	case p.text != nil && p.text.Accept(token):
		return true
	case p.text != nil:
		return p.text.MayEnd() && p.follow(p.next(), 0, token)
	case p.over && end:
		*p = place{s: &script{}}
		return true
	}
	return p.follow(p.options, p.at, token)
}

// follow takes the next token of some options.
func (p *place) follow(options []option, at int, token int32) bool {
	var left []option
	for _, o := range options {
		if o.tokens[at] == token {
			left = append(left, o)
		}
	}
	if left == nil {
		return false
	}
	p.options, p.at, p.text, p.over = left, at+1, nil, false
	return p.settle()
}

// acceptFree takes a token where the answer is free.
func (p *place) acceptFree(token int32, end bool) bool {
	f := p.s.free
	switch {
	case end:
		*p = place{s: &script{}}
		return true
	case token < 0 || int(token) >= len(f.tokens):
		return false
	case !p.triggers():
		return true
	}
	node, found, rest := f.feed(p.node, p.texts > 0, f.tokens[token])
	if found == nil {
		p.node = node
		return true
	}
	if len(rest) > 0 {
		return false
	}
	p.free, p.node, p.options, p.at = false, 0, found.then, 0
	return p.settle()
}
