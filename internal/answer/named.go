package answer

import (
	"bytes"
	"slices"
	"strings"
)

// Calls of a name, a mark and JSON.

// nextCall is in a section, before a call or the section's end.
func (p *Parser) nextCall() bool {
	if !p.spaces() {
		if !p.end {
			return false
		}
		return p.sectionEnd()
	}
	marks := append([]string{p.f.call, p.within.close}, p.f.noise...)
	i, wait := p.next(marks...)
	switch {
	case wait:
		return false
	case i == 0:
		p.again()
		p.take(len(p.f.call))
		p.step = (*Parser).name
	case i == 1:
		if p.given == p.before && p.trying {
			return p.fail()
		}
		p.take(len(p.within.close))
		return p.leave()
	case i > 1:
		p.take(len(marks[i]))
	default:
		return p.sectionEnd()
	}
	return true
}

// sectionEnd is where a section ends without its mark.
func (p *Parser) sectionEnd() bool {
	if p.trying {
		return p.fail()
	}
	return p.leave()
}

// name is behind the mark of a call.
func (p *Parser) name() bool {
	if len(p.call.value) == 0 && !p.spaces() {
		return false
	}
	n, which := p.until(p.f.nameEnd...)
	text := p.rest()[:min(n, maxName+1-len(p.call.value))]
	if bad := bytes.IndexFunc(text, p.f.notName); bad >= 0 {
		p.take(bad)
		return p.fail()
	} else if len(p.call.value)+len(text) > maxName {
		p.take(len(text))
		return p.fail()
	}
	p.call.value = append(p.call.value, p.rest()[:n]...)
	p.take(n)
	if which < 0 {
		return false
	}
	c := &p.call
	name := strings.TrimSpace(string(c.value))
	c.value = c.value[:0]
	if p.f.id != nil {
		c.id, name = p.f.id(name)
	}
	c.name, c.named = name, true
	if name == "" || !p.known(name) {
		return p.fail()
	}
	if mark := p.f.nameEnd[which]; !slices.Contains(p.f.stay, mark) {
		p.take(len(mark))
	}
	p.step = p.f.behindName
	return true
}

// namedArgs is before a call's JSON.
func (p *Parser) namedArgs() bool {
	if !p.spaces() {
		return false
	}
	i, wait := p.next(p.f.fence...)
	switch {
	case wait:
		return false
	case i >= 0:
		p.take(len(p.f.fence[i]))
		return true
	case p.rest()[0] != '{':
		return p.fail()
	}
	if !p.begin() {
		return p.fail()
	}
	p.call.role, p.call.val = roleArgs, value{}
	p.step = (*Parser).namedValue
	return true
}

func (p *Parser) namedValue() bool {
	n, v := p.scan()
	if n > 0 {
		p.arguments(p.rest()[:n])
		p.take(n)
	}
	switch v {
	case bad:
		return p.broken()
	case more:
		return false
	}
	p.step = (*Parser).namedEnd
	return true
}

// namedEnd is behind a call's JSON.
func (p *Parser) namedEnd() bool {
	if p.f.callEnd == "" {
		return p.leave()
	}
	if !p.spaces() {
		return false
	}
	marks := append([]string{p.f.callEnd}, p.f.fence...)
	i, wait := p.next(marks...)
	switch {
	case wait:
		return false
	case i < 0:
		return p.sectionEnd()
	}
	p.take(len(marks[i]))
	if i == 0 {
		p.commit()
		p.step = (*Parser).nextCall
	}
	return true
}
