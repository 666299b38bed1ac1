package answer

import (
	"encoding/json"
	"slices"
)

// call is the call under way.
type call struct {
	name  string
	id    string
	named bool
	begun bool
	args  []byte // that came before the name
	have  bool   // there were arguments
	inner bool   // it is in the member "function"

	within within // a string that is passed on as the JSON that it holds
	val    value  // of a JSON value that is passed over, or passed on
	key    []byte
	escape bool
	role   role

	value  []byte // of a tag: text whose type is not clear yet
	types  types
	params int
	text   bool // the value is a string, of which something has been given
	plain  bool // it is JSON, of which something has been given
	tail   []byte

	py python
}

// role is what a member of a call's object is.
type role uint8

const (
	roleOther role = iota
	roleName
	roleArgs
)

// Members of a call's object. The name is also in "function" where there is no other.
var members = map[string]role{"name": roleName, "tool_name": roleName, "function": roleName,
	"arguments": roleArgs, "parameters": roleArgs}

// others are members that may stand before the name of a call without a mark; any other shows that an
// object is none.
var others = []string{"type", "id"}

// begin gives a call's name. It reports whether such a tool may be called.
func (p *Parser) begin() bool {
	c := &p.call
	if !p.known(c.name) || p.given == maxCalls {
		return false
	}
	c.begun = true
	if !p.opt.Whole {
		p.commit()
	}
	p.given++
	if !p.opt.Whole {
		p.before = p.given
	}
	p.add(Begin, []byte(c.name), c.id)
	return true
}

// known reports whether a tool may be called. What a mark says is a call is one, even of a tool that was
// not offered: whoever runs it can tell the model so.
func (p *Parser) known(name string) bool {
	return p.opt.Tools.Has(name) || !p.f.known && p.within.open != ""
}

// again is try for a further call of the same section.
func (p *Parser) again() {
	if !p.trying {
		in, list := p.within, p.inList
		p.try(in)
		p.inList = list
	}
	p.call = call{}
}

func (p *Parser) arguments(text []byte) { p.put(Arguments, text) }

// startJSON is at what may be an object that is a call, or a list of them.
func (p *Parser) startJSON() bool {
	if !p.spaces() {
		return false
	}
	if p.within.close != "" {
		if i, wait := p.next(p.within.close); wait {
			return false
		} else if i >= 0 {
			return p.fail()
		}
	}
	switch p.rest()[0] {
	case '{':
		p.take(1)
		p.step = (*Parser).member
		return true
	case '[':
		p.take(1)
		p.inList = true
		p.step = (*Parser).item
		return true
	}
	if p.f.named != nil { // Mistral's newer form
		p.step = p.f.named
		return true
	}
	return p.fail()
}

// item is before an object of a list.
func (p *Parser) item() bool {
	if !p.spaces() {
		return false
	}
	if p.rest()[0] != '{' {
		return p.fail()
	}
	p.again()
	p.take(1)
	p.step = (*Parser).member
	return true
}

// member is before a key, or the end of a call's object.
func (p *Parser) member() bool {
	if !p.spaces() {
		return false
	}
	switch c := p.rest()[0]; {
	case c == '"':
		p.take(1)
		p.call.key, p.call.escape = p.call.key[:0], false
		p.step = (*Parser).memberKey
	case c == '}' && !p.call.have && !p.call.begun:
		return p.objectEnd()
	default:
		return p.fail()
	}
	return true
}

// str goes over a string behind its quote into key. It reports whether it ended, and whether it is too
// long.
func (p *Parser) str(most int) (ended, long bool) {
	c := &p.call
	for i, b := range p.rest() {
		switch {
		case c.escape:
			c.escape = false
		case b == '\\':
			c.escape = true
		case b == '"':
			p.take(i + 1)
			return true, false
		}
		if len(c.key) == most {
			p.take(i)
			return false, true
		}
		c.key = append(c.key, b)
	}
	p.take(len(p.rest()))
	return false, false
}

func (p *Parser) memberKey() bool {
	ended, long := p.str(maxName)
	if long {
		return p.fail()
	}
	if !ended {
		return false
	}
	c := &p.call
	c.role = members[string(c.key)]
	switch {
	case c.role == roleName && string(c.key) == "function" && c.named:
		c.role = roleOther
	case c.role == roleOther && !c.named && p.within.open == "" && !p.among() && !slices.Contains(others, string(c.key)):
		return p.fail()
	}
	p.step = (*Parser).colon
	return true
}

func (p *Parser) colon() bool {
	if !p.spaces() {
		return false
	}
	if p.rest()[0] != ':' {
		return p.fail()
	}
	p.take(1)
	p.step = (*Parser).memberValue
	return true
}

// memberValue is at the first byte of a member's value.
func (p *Parser) memberValue() bool {
	if !p.spaces() {
		return false
	}
	c := &p.call
	if c.role == roleArgs && c.have {
		c.role = roleOther
	}
	if c.role == roleName && !c.begun {
		if p.rest()[0] == '{' && string(c.key) == "function" && !c.inner { // OpenAI's own form
			p.take(1)
			c.inner = true
			p.step = (*Parser).nextMember
			return true
		}
		if p.rest()[0] != '"' {
			return p.fail()
		}
		p.take(1)
		c.key, c.escape = c.key[:0], false
		p.step = (*Parser).memberName
		return true
	}
	c.val = value{}
	v := c.val
	if v.add(p.rest()[0]) == bad {
		return p.fail()
	}
	next := (*Parser).passValue
	if c.role == roleArgs {
		object, wait := p.serialized()
		if wait {
			return false
		}
		c.have = true
		if c.named && !p.begin() {
			return p.fail()
		}
		if object {
			p.take(1)
			c.within = within{}
			next = (*Parser).passSerialized
		}
	}
	p.step = next
	return true
}

func (p *Parser) memberName() bool {
	ended, long := p.str(maxName)
	if long {
		return p.fail()
	}
	if !ended {
		return false
	}
	c := &p.call
	if err := json.Unmarshal(slices.Concat([]byte{'"'}, c.key, []byte{'"'}), &c.name); err != nil {
		return p.fail()
	}
	c.named = true
	if c.have && !c.begun { // the arguments came first
		if !p.begin() {
			return p.fail()
		}
		p.arguments(c.args)
		c.args = nil
	}
	p.step = (*Parser).afterMember
	return true
}

// passValue goes over a value: a call's arguments, or another member.
func (p *Parser) passValue() bool {
	n, v := p.scan()
	text := p.rest()[:n]
	if p.call.role == roleArgs && n > 0 {
		if p.call.begun {
			p.arguments(text)
		} else {
			p.call.args = append(p.call.args, text...)
		}
	}
	p.take(n)
	switch {
	case v == bad && p.call.role == roleArgs:
		return p.broken()
	case v == bad:
		return p.fail()
	case v == more:
		return false
	}
	p.step = (*Parser).afterMember
	return true
}

// scan returns how many of the bytes at hand belong to call.val.
func (p *Parser) scan() (n int, v verdict) {
	for i, b := range p.rest() {
		switch v := p.call.val.add(b); v {
		case done:
			return i + 1, v
		case before, bad:
			return i, v
		}
	}
	if p.end && p.call.val.whole() {
		return len(p.rest()), before
	}
	return len(p.rest()), more
}

func (p *Parser) afterMember() bool {
	if !p.spaces() {
		return false
	}
	switch p.rest()[0] {
	case ',':
		p.take(1)
		p.step = (*Parser).nextMember
		return true
	case '}':
		return p.objectEnd()
	}
	return p.fail()
}

func (p *Parser) nextMember() bool {
	if !p.spaces() {
		return false
	}
	if p.rest()[0] != '"' {
		return p.fail()
	}
	p.take(1)
	p.call.key, p.call.escape = p.call.key[:0], false
	p.step = (*Parser).memberKey
	return true
}

// among reports whether an object stands in a list behind a call: it need not be one, too.
func (p *Parser) among() bool { return p.opt.Whole && p.inList && p.given > p.before }

// objectEnd is at the end of what may be a call.
func (p *Parser) objectEnd() bool {
	c := &p.call
	if c.inner {
		c.inner = false
		p.take(1)
		p.step = (*Parser).afterMember
		return true
	}
	switch {
	case c.begun:
	case !c.named && p.among():
	case !c.named || c.have || p.f.needArgs:
		return p.fail()
	default:
		if !p.begin() {
			return p.fail()
		}
		p.arguments([]byte("{}"))
	}
	p.take(1)
	p.step = (*Parser).afterValue
	if p.inList {
		p.step = (*Parser).afterItem
	}
	return true
}

func (p *Parser) afterItem() bool {
	if !p.spaces() {
		return false
	}
	switch p.rest()[0] {
	case ',':
		p.take(1)
		p.step = (*Parser).item
		return true
	case ']':
		p.take(1)
		p.step = (*Parser).afterValue
		return true
	}
	return p.fail()
}

// afterValue is behind a call or a list of them: there may be another, or the section's end.
func (p *Parser) afterValue() bool {
	if p.within.close == "" {
		p.commit()
	}
	text, n := p.rest(), 0
	skip := func() (wait bool) {
		for n < len(text) && n <= maxSpace && isSpace(text[n]) {
			n++
		}
		return n == len(text) && n <= maxSpace && !p.end
	}
	if skip() {
		return false
	}
	switch has, may := begins(text[n:], p.within.close); {
	case p.within.close == "" || n > maxSpace:
	case has:
		p.take(n + len(p.within.close))
		return p.leave()
	case may && !p.end:
		return false
	}
	if p.f.several && !p.inList {
		if n < len(text) && text[n] == ';' {
			if n++; skip() {
				return false
			}
		}
		if n < len(text) && text[n] == '{' {
			p.again()
			p.take(n + 1)
			p.step = (*Parser).member
			return true
		}
	}
	if p.opt.Whole && p.within.close != "" {
		return p.fail()
	}
	return p.leave()
}

// broken is at a byte that makes a call's JSON invalid. Of a stream, all up to the section's end
// becomes arguments: the client has the beginning.
func (p *Parser) broken() bool {
	if !p.call.begun || p.opt.Whole {
		return p.fail()
	}
	p.step = (*Parser).passBroken
	return true
}

func (p *Parser) passBroken() bool {
	n, which := p.until(p.within.close, p.f.callEnd)
	if n > 0 {
		p.arguments(p.rest()[:n])
		p.take(n)
	}
	if which < 0 {
		return false
	}
	p.take(len([]string{p.within.close, p.f.callEnd}[which]))
	if which == 1 && p.f.callEnd != "" {
		p.step = (*Parser).nextCall
		return true
	}
	return p.leave()
}
