package answer

import (
	"bytes"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Calls as Python writes them: [f(a=1, b='x'), g()]. Values become JSON byte by byte.

// pyCall is before a call's name, behind the bracket or a comma.
func (p *Parser) pyCall() bool {
	if !p.spaces() {
		return false
	}
	if p.inList {
		p.again()
	} else if p.rest()[0] == '[' { // the first byte of the section
		p.take(1)
		p.inList = true
		return true
	} else {
		return p.fail()
	}
	p.step = (*Parser).pyName
	return true
}

func (p *Parser) pyName() bool {
	c := &p.call
	for i, b := range p.rest() {
		if word(b) || b == '.' && len(c.key) > 0 {
			if len(c.key) == maxName {
				return p.fail()
			}
			c.key = append(c.key, b)
			continue
		}
		if p.take(i); b != '(' || len(c.key) == 0 {
			return p.fail()
		}
		c.name = string(c.key)
		if !p.begin() {
			return p.fail()
		}
		p.take(1)
		p.arguments([]byte("{"))
		p.step = (*Parser).pyParam
		return true
	}
	p.take(len(p.rest()))
	return false
}

func word(c byte) bool {
	return c == '_' || c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z' || c >= utf8.RuneSelf
}

// pyParam is before a parameter's name, or the call's end.
func (p *Parser) pyParam() bool {
	if !p.spaces() {
		return false
	}
	if p.rest()[0] == ')' {
		p.take(1)
		p.arguments([]byte("}"))
		p.step = (*Parser).pyNext
		return true
	}
	p.call.key = p.call.key[:0]
	p.step = (*Parser).pyKey
	return true
}

func (p *Parser) pyKey() bool {
	c := &p.call
	for i, b := range p.rest() {
		if word(b) && len(c.key) < maxName {
			c.key = append(c.key, b)
			continue
		}
		if p.take(i); len(c.key) == 0 {
			return p.broken()
		}
		p.step = (*Parser).pyEqual
		return true
	}
	p.take(len(p.rest()))
	return false
}

func (p *Parser) pyEqual() bool {
	if !p.spaces() {
		return false
	}
	if p.rest()[0] != '=' {
		p.arguments(p.call.key)
		return p.broken()
	}
	p.take(1)
	c := &p.call
	var text []byte
	if c.params > 0 {
		text = append(text, ", "...)
	}
	c.params++
	p.arguments(append(appendString(text, c.key), ": "...))
	c.py = python{}
	p.step = (*Parser).pyValue
	return true
}

func (p *Parser) pyValue() bool {
	c := &p.call
	var text []byte
	for i, b := range p.rest() {
		var v verdict
		text, v = c.py.add(text, b)
		if v == more {
			continue
		}
		if v == done {
			i++
		}
		p.arguments(text)
		p.take(i)
		if v == bad {
			return p.broken()
		}
		p.step = (*Parser).pyAfter
		return true
	}
	p.arguments(text)
	p.take(len(p.rest()))
	return false
}

// pyAfter is behind a parameter's value.
func (p *Parser) pyAfter() bool {
	if !p.spaces() {
		return false
	}
	switch p.rest()[0] {
	case ',':
		p.take(1)
	case ')':
	default:
		return p.broken()
	}
	p.step = (*Parser).pyParam
	return true
}

// pyNext is behind a call.
func (p *Parser) pyNext() bool {
	if !p.spaces() {
		return false
	}
	switch p.rest()[0] {
	case ',':
		p.take(1)
		p.step = (*Parser).pyCall
	case ']':
		p.take(1)
		p.commit()
		p.step = (*Parser).pyEnd
	default:
		return p.fail()
	}
	return true
}

// pyEnd is behind the list.
func (p *Parser) pyEnd() bool {
	if p.within.close != "" {
		switch i, wait := p.next(p.within.close); {
		case wait || len(p.rest()) == 0 && !p.end:
			return false
		case i == 0:
			p.take(len(p.within.close))
		}
	}
	return p.leave()
}

// python turns a Python literal into JSON.
type python struct {
	open   []byte // brackets
	state  pyState
	quote  byte
	triple bool
	run    int    // quotes at the end of a triple string
	word   []byte // a number, a name, or an escape's digits
	digits int    // of an escape that must still come
	base   int
}

type pyState uint8

const (
	pyAtValue  pyState = iota
	pyAtItem           // a value or the bracket's end
	pyAtKey            // of a dict, or its end
	pyAtColon          // behind a key
	pyAtComma          // behind a value
	pyInWord           //
	pyQuoted           // behind the first quote
	pyQuoted2          // behind two
	pyInString         //
	pyInEscape         //
	pyInDigits         // of an escape
)

func (y *python) inDict() bool { return len(y.open) > 0 && y.open[len(y.open)-1] == '{' }

// key reports whether what is read is a dict's key: it is one before its colon.
func (y *python) add(dst []byte, c byte) ([]byte, verdict) {
	switch y.state {
	case pyInWord:
		if word(c) || c == '.' || (c == '+' || c == '-') && len(y.word) > 0 && y.word[len(y.word)-1]|0x20 == 'e' {
			if len(y.word) == maxName {
				return dst, bad
			}
			y.word = append(y.word, c)
			return dst, more
		}
		text, ok := pythonWord(y.word)
		if !ok {
			return append(dst, y.word...), bad
		}
		if y.base == 1 { // a key
			text = appendString(nil, y.word)
		}
		dst = append(dst, text...)
		if y.ended() == done {
			return dst, before
		}
		return y.add(dst, c)
	case pyQuoted:
		if c == y.quote {
			y.state = pyQuoted2
			return dst, more
		}
		y.state = pyInString
		return y.add(dst, c)
	case pyQuoted2:
		if c == y.quote {
			y.state, y.triple, y.run = pyInString, true, 0
			return dst, more
		}
		dst = append(dst, '"')
		if y.ended() == done {
			return dst, before
		}
		return y.add(dst, c)
	case pyInString:
		return y.inString(dst, c)
	case pyInEscape:
		return y.inEscape(dst, c)
	case pyInDigits:
		return y.inDigits(dst, c)
	}
	if isSpace(c) {
		return dst, more
	}
	return y.token(dst, c)
}

// ended is the verdict for what ends a value or a key.
func (y *python) ended() verdict {
	switch {
	case y.base == 1:
		y.state, y.base = pyAtColon, 0
		return more
	case len(y.open) == 0:
		return done
	}
	y.state = pyAtComma
	return more
}

func (y *python) token(dst []byte, c byte) ([]byte, verdict) {
	closes := func() ([]byte, verdict) {
		end := map[byte]byte{'[': ']', '(': ')', '{': '}'}[y.open[len(y.open)-1]]
		if c != end {
			return dst, bad
		}
		if y.open = y.open[:len(y.open)-1]; end == ')' {
			end = ']'
		}
		return append(dst, end), y.ended()
	}
	switch y.state {
	case pyAtColon:
		if c != ':' {
			return dst, bad
		}
		y.state = pyAtValue
		return append(dst, ": "...), more
	case pyAtComma:
		if c != ',' {
			return closes()
		}
		y.state, y.run = pyAtItem, 1 // the comma is written before the next one
		return dst, more
	case pyAtItem:
		if c == ']' || c == ')' || c == '}' {
			y.run = 0
			return closes()
		}
		if y.run == 1 {
			dst, y.run = append(dst, ", "...), 0
		}
		y.base = 0
		if y.inDict() {
			y.base = 1
		}
	}
	switch {
	case c == '\'' || c == '"':
		y.state, y.quote, y.triple, y.run = pyQuoted, c, false, 0
		return append(dst, '"'), more
	case word(c) || c == '-' || c == '+' || c == '.':
		y.state, y.word = pyInWord, append(y.word[:0], c)
		return dst, more
	case (c == '[' || c == '(' || c == '{') && y.base == 0 && len(y.open) < maxDepth:
		y.open, y.state, y.run = append(y.open, c), pyAtItem, 0
		if c == '(' {
			c = '['
		}
		return append(dst, c), more
	}
	return dst, bad
}

func (y *python) inString(dst []byte, c byte) ([]byte, verdict) {
	if y.triple {
		if c == y.quote {
			if y.run++; y.run < 3 {
				return dst, more
			}
			y.run = 0
			return append(dst, '"'), y.ended()
		}
		for ; y.run > 0; y.run-- {
			dst = appendEscaped(dst, []byte{y.quote})
		}
	} else if c == y.quote {
		return append(dst, '"'), y.ended()
	} else if c == '\n' {
		return dst, bad
	}
	if c == '\\' {
		y.state = pyInEscape
		return dst, more
	}
	return appendEscaped(dst, []byte{c}), more
}

func (y *python) inEscape(dst []byte, c byte) ([]byte, verdict) {
	y.state = pyInString
	y.word = y.word[:0]
	switch c {
	case 'n', 't', 'r', 'b', 'f', '\\', '"':
		return append(dst, '\\', c), more
	case '\'':
		return append(dst, c), more
	case '\n':
		return dst, more
	case 'a':
		return append(dst, `\u0007`...), more
	case 'v':
		return append(dst, `\u000b`...), more
	case 'x':
		y.state, y.digits = pyInDigits, 2
		return dst, more
	case 'u':
		y.state, y.digits = pyInDigits, 4
		return dst, more
	case 'U':
		y.state, y.digits = pyInDigits, 8
		return dst, more
	}
	return appendEscaped(dst, []byte{'\\', c}), more
}

func (y *python) inDigits(dst []byte, c byte) ([]byte, verdict) {
	if !isHex(c) {
		return dst, bad
	}
	y.word = append(y.word, c)
	if y.digits--; y.digits > 0 {
		return dst, more
	}
	y.state = pyInString
	if len(y.word) == 4 { // perhaps half a pair
		return append(append(dst, `\u`...), y.word...), more
	}
	n, _ := strconv.ParseUint(string(y.word), 16, 32)
	if n > utf8.MaxRune {
		return dst, bad
	}
	return appendEscaped(dst, utf8.AppendRune(nil, rune(n))), more
}

// pythonWord returns the JSON of a name or a number.
func pythonWord(w []byte) (json []byte, ok bool) {
	switch s := string(w); s {
	case "True", "true":
		return []byte("true"), true
	case "False", "false":
		return []byte("false"), true
	case "None", "null":
		return []byte("null"), true
	default:
		if validJSON(w) {
			return w, true
		}
		s = strings.TrimPrefix(s, "+")
		if n, err := strconv.ParseInt(s, 0, 64); err == nil {
			return strconv.AppendInt(nil, n, 10), true
		}
		plain := strings.ReplaceAll(s, "_", "")
		if _, err := strconv.ParseFloat(plain, 64); err != nil || strings.ContainsAny(plain, "nNxXpP") {
			return nil, false
		}
		plain = strings.TrimSuffix(strings.Replace(plain, ".e", ".0e", 1), ".")
		if sign, digits, _ := strings.Cut(plain, "."); sign == "" || sign == "-" {
			plain = sign + "0." + digits
		}
		return []byte(plain), validJSON([]byte(plain))
	}
}

// pythonValue turns a whole literal into JSON.
func pythonValue(text []byte) (json []byte, ok bool) {
	var y python
	text = bytes.TrimSpace(text)
	for i, c := range text {
		var v verdict
		switch json, v = y.add(json, c); v {
		case bad, before:
			return nil, false
		case done:
			return json, i == len(text)-1
		}
	}
	return nil, false
}
