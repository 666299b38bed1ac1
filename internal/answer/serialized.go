package answer

import (
	"strconv"
	"unicode/utf8"
)

// Some models write a call's arguments as a string that holds the object. They are passed on as the object.

// within is where a string of JSON within JSON stands.
type within struct {
	escape bool
	digits int  // of \u that must still come
	unit   rune // so far
}

// serialized reports whether the value at hand is a string that holds an object: its text begins as one.
func (p *Parser) serialized() (object, wait bool) {
	text := p.rest()
	if text[0] != '"' {
		return false, false
	}
	opened := false
	for i := 1; i < len(text); i++ {
		switch c := text[i]; {
		case c == ' ':
		case c == '\\' && i+1 == len(text):
			return false, !p.end
		case c == '\\' && text[i+1] == 'n':
			i++
		case !opened:
			if c != '{' {
				return false, false
			}
			opened = true
		default:
			return c == '}' || c == '\\' && text[i+1] == '"', false
		}
		if i > maxSpace {
			return false, false
		}
	}
	return false, !p.end
}

// passSerialized goes over such a string behind its quote.
func (p *Parser) passSerialized() bool {
	c := &p.call
	var text []byte
	for i, b := range p.rest() {
		plain, ended, ok := c.within.add(b)
		for _, b := range plain {
			switch c.val.add(b) {
			case bad, before:
				ok = false
			case done:
				c.val = value{state: atEnd}
			}
		}
		if !ok {
			p.pass(text)
			p.take(i)
			return p.broken()
		}
		if text = append(text, plain...); ended {
			p.pass(text)
			p.take(i + 1)
			if c.val.state != atEnd {
				return p.fail()
			}
			p.step = (*Parser).afterMember
			return true
		}
	}
	p.pass(text)
	p.take(len(p.rest()))
	return false
}

// pass gives arguments, or keeps them until the call's name is known.
func (p *Parser) pass(text []byte) {
	if p.call.begun {
		p.arguments(text)
	} else {
		p.call.args = append(p.call.args, text...)
	}
}

// add takes a string's next byte and returns what it stands for.
func (w *within) add(b byte) (text []byte, ended, ok bool) {
	switch {
	case w.digits > 0:
		if !isHex(b) {
			return nil, false, false
		}
		n, _ := strconv.ParseUint(string(b), 16, 8)
		w.unit = w.unit<<4 | rune(n)
		if w.digits--; w.digits > 0 {
			return nil, false, true
		}
		if w.unit >= 0xD800 && w.unit < 0xE000 { // half a character stays as it is
			return append([]byte(`\u`), strconv.FormatInt(int64(w.unit), 16)...), false, true
		}
		return utf8.AppendRune(nil, w.unit), false, true
	case w.escape:
		w.escape = false
		switch b {
		case '"', '\\', '/':
			return []byte{b}, false, true
		case 'n':
			return []byte{'\n'}, false, true
		case 't':
			return []byte{'\t'}, false, true
		case 'r':
			return []byte{'\r'}, false, true
		case 'u':
			w.digits, w.unit = 4, 0
			return nil, false, true
		}
		return nil, false, false
	case b == '"':
		return nil, true, true
	case b == '\\':
		w.escape = true
		return nil, false, true
	case b < 0x20:
		return nil, false, false
	}
	return []byte{b}, false, true
}
