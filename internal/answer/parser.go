package answer

import (
	"bytes"
	"strings"
)

const (
	maxHold  = 8 << 10 // bytes of a stream that may be a call, or a value whose type is not clear
	maxSpace = 1 << 10 // whitespace that may stand before a call
	maxName  = 256     // bytes of a name or key
	maxCalls = 128     // of an answer; what follows is content
)

// MaxHeld bounds the bytes that a stream's Parser holds back, and MaxCalls the calls that it gives.
const (
	MaxHeld  = 2*maxHold + maxSpace
	MaxCalls = maxCalls
)

// Kind is what an event is.
type Kind uint8

// Kinds of events. Arguments follow the Begin of their call, and no other call's come between.
const (
	Content   Kind = iota
	Reasoning      // what the model thinks before it answers
	Begin          // of a call: its name
	Arguments      // a piece of a call's arguments, which together are JSON if the model's are
)

// Event is a piece of an answer.
type Event struct {
	Kind  Kind
	Index int    // of the call, from 0
	Text  string // or Begin's name
	ID    string // Begin's, where the format has the model write one that its template wants back
}

// Options are a request's.
type Options struct {
	Tools    *Tools // that may be called; nil: any
	Whole    bool   // the answer is sent at once; see the package comment
	Single   bool   // only the first call is wanted
	Thinking bool   // the prompt has opened the reasoning
	Thought  bool   // the prompt has closed it already
	Bound    bool   // nothing but its mark ends the reasoning: what follows is bound
}

// piece is an event under way.
type piece struct {
	kind  Kind
	index int
	text  []byte
	id    string
}

type step func(*Parser) bool // reports whether it got on; otherwise it needs more text

// Parser reads one answer. It is not safe for concurrent use.
type Parser struct {
	f     *Format // nil: no calls are looked for
	think *Think  // nil: no reasoning
	opt   Options

	in   []byte // not looked at yet, from pos
	pos  int
	end  bool
	step step

	out  []piece
	list []Event

	space []byte // before what may be a call
	said  bool   // there was content since the beginning or the last call

	thinkEnds []string // what may end the reasoning: its mark, and marks of sections

	opened bool // there was a section's mark
	failed bool // there was what turned out to be no call

	// What may be a call.
	raw    []byte  // its text, while it may be given back
	pend   []piece // Whole: what becomes of it
	trying bool    // raw is kept
	given  int     // calls given, or pending
	before int     // of them, before this attempt
	within section // what it is in
	inList bool
	call   call
	header header
}

// New returns a parser of a tool format and a reasoning format, each of which may be nil.
func New(f *Format, t *Think, o Options) *Parser {
	p := &Parser{f: f, think: t, opt: o, step: (*Parser).content}
	if t != nil {
		p.thinkEnds = append(p.thinkEnds, t.end)
	}
	if f != nil && t != nil && t.calls && !o.Bound {
		for _, s := range f.sections {
			if !s.call {
				p.thinkEnds = append(p.thinkEnds, s.open)
			}
		}
	}
	switch {
	case f != nil && f.kind == kindHarmony || t != nil && t.harmony:
		p.step = (*Parser).channelText
	case t == nil:
	case o.Thinking:
		p.step = (*Parser).thinkOpened
	case o.Thought:
	case t.opened:
		p.step = (*Parser).thinkOpened
	default:
		p.step = (*Parser).thinkMaybe
	}
	return p
}

// Feed takes the next text and returns what became of it and of text before. The slice is valid until
// the next call.
func (p *Parser) Feed(text string) []Event {
	if p.f == nil && p.think == nil {
		p.list = append(p.list[:0], Event{Kind: Content, Text: text})
		return p.list
	}
	p.in = append(p.in[:copy(p.in, p.in[p.pos:])], text...)
	p.pos = 0
	p.run()
	return p.events()
}

// run goes over the text at hand.
func (p *Parser) run() {
	for {
		for p.step(p) {
		}
		if !p.bounded() || len(p.raw)+len(p.in)-p.pos < maxHold {
			return
		}
		p.fail()
	}
}

// bounded reports whether what may be a call may only be so long.
func (p *Parser) bounded() bool { return p.trying && !p.opt.Whole }

// Flush says that no more text comes, and returns the rest.
func (p *Parser) Flush() []Event {
	p.in = p.in[:copy(p.in, p.in[p.pos:])]
	p.pos, p.end = 0, true
	for p.run(); p.trying; p.run() {
		p.fail()
	}
	if len(p.space) > 0 && (p.given == 0 || p.said && !p.f.trim) {
		p.put(Content, p.space)
	}
	p.space = nil
	return p.events()
}

// Thinking reports whether the text last fed was reasoning.
func (p *Parser) Thinking() bool { return p.think != nil && p.header.kind == Reasoning }

// Held is how many bytes are held back.
func (p *Parser) Held() int {
	n := len(p.in) - p.pos + len(p.raw) + len(p.space) + len(p.call.args) + len(p.call.value)
	for i := range p.pend {
		n += len(p.pend[i].text)
	}
	return n
}

func (p *Parser) events() []Event {
	p.list = p.list[:0]
	for i := range p.out {
		o := &p.out[i]
		p.list = append(p.list, Event{Kind: o.kind, Index: o.index, Text: string(o.text), ID: o.id})
		o.text = o.text[:0]
	}
	p.out = p.out[:0]
	return p.list
}

// put adds to the latest event if that is of the same kind.
func (p *Parser) put(kind Kind, text []byte) {
	p.add(kind, text, "")
}

func (p *Parser) add(kind Kind, text []byte, id string) {
	index := 0
	if kind == Begin || kind == Arguments {
		if index = p.given - 1; p.opt.Single && index > 0 {
			return
		}
	}
	list := &p.out
	if p.opt.Whole && p.trying {
		list = &p.pend
	}
	if n := len(*list); n > 0 && kind != Begin && (*list)[n-1].kind == kind && (*list)[n-1].index == index {
		(*list)[n-1].text = append((*list)[n-1].text, text...)
		return
	}
	if n := len(*list); n < cap(*list) { // its text's memory is used again
		*list = (*list)[:n+1]
		o := &(*list)[n]
		*o = piece{kind, index, append(o.text[:0], text...), id}
		return
	}
	*list = append(*list, piece{kind, index, bytes.Clone(text), id})
}

// rest is what was not looked at yet, as far as it may be held back: so that where an attempt ends does
// not depend on how much is at hand.
func (p *Parser) rest() []byte {
	if p.bounded() {
		return p.in[p.pos:min(len(p.in), p.pos+maxHold-len(p.raw))]
	}
	return p.in[p.pos:]
}

// take goes over n bytes.
func (p *Parser) take(n int) {
	if p.trying {
		p.raw = append(p.raw, p.in[p.pos:p.pos+n]...)
	}
	p.pos += n
}

// say gives n bytes as content.
func (p *Parser) say(n int) {
	text := p.in[p.pos : p.pos+n]
	p.pos += n
	p.sayText(text)
}

func (p *Parser) sayText(text []byte) {
	if len(text) == 0 {
		return
	}
	if p.f == nil || p.said && !p.f.trim {
		p.put(Content, text)
		return
	}
	if p.f.trim {
		all := append(p.space, text...)
		solid := bytes.TrimRight(all, " \t\r\n")
		if len(all)-len(solid) > maxSpace {
			solid = all[:len(all)-maxSpace]
		}
		if len(solid) > 0 {
			p.put(Content, solid)
			p.said = true
		}
		p.space = all[:copy(all, all[len(solid):])]
		return
	}
	if solid := bytes.TrimLeft(text, " \t\r\n"); len(solid) == 0 && len(p.space)+len(text) <= maxSpace {
		p.space = append(p.space, text...)
		return
	}
	if len(p.space) > 0 {
		p.put(Content, p.space)
		p.space = p.space[:0]
	}
	p.put(Content, text)
	p.said = true
}

// try begins what may be a call.
func (p *Parser) try(in section) {
	p.raw, p.trying, p.before, p.within, p.inList = p.raw[:0], true, p.given, in, false
	p.call = call{}
}

// fail gives up on what is no call: its text is content, up to where that showed. A call that has
// begun in a stream stays.
func (p *Parser) fail() bool {
	p.failed = true
	if p.trying {
		p.trying, p.pend = false, p.pend[:0]
		p.given = p.before
		text := p.raw
		p.raw = p.raw[len(p.raw):]
		if p.Thinking() { // it was the thought of a call
			p.failed = false
			p.put(Reasoning, text)
			p.call, p.step = call{}, (*Parser).thoughts
			return true
		}
		p.sayText(text)
	}
	p.call = call{}
	p.step = (*Parser).content
	return true
}

// commit gives the calls of an attempt for good.
func (p *Parser) commit() {
	if p.trying {
		if p.header.kind == Reasoning {
			p.header.kind = Content
		}
		p.trying, p.raw = false, p.raw[:0]
		p.space = p.space[:0]
		for _, o := range p.pend {
			p.release(o)
		}
		p.pend = nil
	}
	p.before, p.said = p.given, false
}

// release gives a pending event.
func (p *Parser) release(o piece) {
	if n := len(p.out); n > 0 && o.kind != Begin && p.out[n-1].kind == o.kind && p.out[n-1].index == o.index {
		p.out[n-1].text = append(p.out[n-1].text, o.text...)
		return
	}
	p.out = append(p.out, o)
}

// leave ends a section.
func (p *Parser) leave() bool {
	p.commit()
	p.call = call{}
	p.step = (*Parser).content
	return true
}

// content gives text up to where a call may begin.
func (p *Parser) content() bool {
	text := p.rest()
	if len(text) == 0 {
		return false
	}
	if p.f == nil {
		p.say(len(text))
		return true
	}
	for i, c := range text {
		if !p.f.first[c] {
			continue
		}
		for _, m := range p.f.drop {
			switch has, may := begins(text[i:], m); {
			case p.failed:
			case has:
				p.say(i)
				p.pos += len(m)
				p.said = p.said && p.f.trim
				return true
			case may && !p.end:
				p.say(i)
				return false
			}
		}
		for _, s := range p.f.sections {
			if s.call && !p.opened && !p.f.loose {
				continue
			}
			switch has, may := begins(text[i:], s.open); {
			case has:
				p.say(i)
				p.try(s)
				p.take(len(s.open))
				p.opened = true
				p.step = p.f.start
				if s.call {
					p.step = (*Parser).name
				}
				return true
			case may && !p.end:
				p.say(i)
				return false
			}
		}
		if strings.IndexByte(p.f.bare, c) >= 0 && p.given < maxCalls {
			p.say(i)
			p.try(section{})
			p.step = p.f.start
			return true
		}
	}
	p.say(len(text))
	return true
}

// begins reports whether text begins with a mark, or may once more of it is there.
func begins(text []byte, mark string) (has, may bool) {
	if len(text) < len(mark) {
		return false, string(text) == mark[:len(text)]
	}
	return string(text[:len(mark)]) == mark, false
}

// next looks for the longest of several marks at the front. wait reports that more text is needed to
// know.
func (p *Parser) next(marks ...string) (which int, wait bool) {
	which = -1
	for i, m := range marks {
		if m == "" {
			continue
		}
		has, may := begins(p.rest(), m)
		if has && (which < 0 || len(m) > len(marks[which])) {
			which = i
		}
		wait = wait || may
	}
	return which, wait && !p.end
}

// until returns how much text there is before the first of several marks, and which it is; -1 if none
// is there yet, with the length of what surely comes before one.
func (p *Parser) until(marks ...string) (n, which int) {
	text := p.rest()
	for i, c := range text {
		for j, m := range marks {
			if m == "" || m[0] != c {
				continue
			}
			switch has, may := begins(text[i:], m); {
			case has:
				return i, j
			case may && !p.end:
				return i, -1
			}
		}
	}
	return len(text), -1
}

// spaces goes over whitespace. It reports whether something follows.
func (p *Parser) spaces() bool {
	text := p.rest()
	n := 0
	for n < len(text) && isSpace(text[n]) {
		n++
	}
	p.take(n)
	return n < len(text)
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }
