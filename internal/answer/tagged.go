package answer

import (
	"bytes"
	"strings"
)

// Calls of a name and tags, each with a key and a value. What becomes of a value depends on the
// tool's schema: a string is one whatever it looks like, and is passed on as it comes; anything else
// is held back to its end.

// taggedBegin is behind a call's name.
func (p *Parser) taggedBegin() bool {
	if !p.begin() {
		return p.fail()
	}
	p.step = (*Parser).tag
	return true
}

// tag is before a key, or the call's end.
func (p *Parser) tag() bool {
	if !p.spaces() {
		return false
	}
	i, wait := p.next(p.f.keyOpen, p.f.callEnd, p.within.close)
	switch {
	case wait:
		return false
	case i == 0:
		p.take(len(p.f.keyOpen))
		p.call.key = p.call.key[:0]
		p.step = (*Parser).tagKey
	case i >= 1:
		if p.call.params == 0 {
			p.arguments([]byte("{"))
		}
		p.arguments([]byte("}"))
		p.take(len([]string{"", p.f.callEnd, p.within.close}[i]))
		p.commit()
		if p.step = (*Parser).nextCall; i == 2 || p.f.call == "" {
			return p.leave()
		}
	case p.call.params == 0 && p.rest()[0] == '{':
		p.call.role, p.call.val = roleArgs, value{}
		p.step = (*Parser).namedValue
	default:
		return p.fail()
	}
	return true
}

func (p *Parser) tagKey() bool {
	n, which := p.until(p.f.keyEnd...)
	n = min(n, maxName+1-len(p.call.key))
	p.call.key = append(p.call.key, p.rest()[:n]...)
	p.take(n)
	if len(p.call.key) > maxName {
		if !p.trying {
			p.sayText(p.call.key)
		}
		return p.fail()
	}
	if which < 0 {
		return false
	}
	c := &p.call
	key := strings.TrimSpace(string(c.key))
	c.types = p.opt.Tools.typesOf(c.name, key)
	switch mark := p.f.keyEnd[which]; {
	case strings.Contains(mark, `string="true"`): // DeepSeek's newest says so itself
		c.types = typeString
	case strings.Contains(mark, `string="false"`):
		c.types = 0
	}
	p.take(len(p.f.keyEnd[which]))
	sep := ", "
	if c.params == 0 {
		sep = "{"
	}
	c.params++
	c.value, c.text, c.plain, c.tail = c.value[:0], false, false, c.tail[:0]
	p.arguments(appendString([]byte(sep), []byte(key)))
	p.arguments([]byte(": "))
	p.step = (*Parser).tagValue
	if p.f.valueOpen != "" {
		p.step = (*Parser).tagOpen
	}
	return true
}

// tagOpen is between a key and its value.
func (p *Parser) tagOpen() bool {
	if !p.spaces() {
		return false
	}
	i, wait := p.next(p.f.valueOpen)
	switch {
	case wait:
		return false
	case i < 0:
		return p.fail()
	}
	p.take(len(p.f.valueOpen))
	p.step = (*Parser).tagValue
	return true
}

func (p *Parser) tagValue() bool {
	n, which := p.until(p.f.valueEnds...)
	c := &p.call
	text := p.rest()[:n]
	switch {
	case n == 0:
	case c.plain:
		p.arguments(text)
	case c.text:
		p.addText(text)
	case c.types == typeString:
		c.text = true
		if p.f.newlines {
			text = bytes.TrimPrefix(text, []byte("\n"))
		}
		p.arguments([]byte(`"`))
		p.addText(text)
	default:
		room := min(len(text), maxHold+1-len(c.value))
		if c.value = append(c.value, text[:room]...); len(c.value) > maxHold {
			p.tagLong()
			if text = text[room:]; c.plain {
				p.arguments(text)
			} else {
				p.addText(text)
			}
		}
	}
	p.take(n)
	if which < 0 {
		if p.end && !p.opt.Whole {
			p.tagCut()
		}
		return false
	}
	if which == 1 {
		p.take(len(p.f.eos))
		return true
	}
	if which == 0 {
		p.take(len(p.f.valueEnd))
	}
	switch {
	case c.plain:
	case c.text && c.types == typeString:
		if p.f.newlines {
			c.tail = bytes.TrimSuffix(c.tail, []byte("\n"))
		}
		p.arguments(append(appendEscaped(nil, p.decode(c.tail)), '"'))
	case c.text && p.f.flat:
		p.arguments(append(appendEscaped(nil, p.decode(c.tail)), '"'))
	case c.text:
		p.arguments([]byte(`"`))
	case c.types == typeString:
		p.arguments([]byte(`""`))
	default:
		p.arguments(p.typed(c.value, c.types))
	}
	c.value, c.tail = c.value[:0], c.tail[:0]
	p.step = (*Parser).tag
	return true
}

// tagLong decides what a long value is by its beginning.
func (p *Parser) tagLong() {
	c := &p.call
	text := c.value
	if !p.f.flat {
		text = bytes.TrimLeft(text, " \t\r\n")
	}
	var v value
	c.plain = len(text) > 0 && (text[0] == '{' || text[0] == '[') && (c.types == 0 && !p.f.flat || c.types&(typeObject|typeArray) != 0)
	for i := 0; c.plain && i < len(text); i++ {
		c.plain = v.add(text[i]) == more
	}
	if c.plain {
		p.arguments(text)
	} else {
		c.text = true
		p.arguments([]byte(`"`))
		p.addText(text)
	}
	c.value = c.value[:0]
}

// tagCut gives what is held of a value that has no end.
func (p *Parser) tagCut() {
	c := &p.call
	if len(c.value) > 0 {
		p.arguments(appendEscaped([]byte(`"`), bytes.TrimLeft(c.value, " \t\r\n")))
	}
	p.arguments(appendEscaped(nil, c.tail))
	c.value, c.tail = c.value[:0], c.tail[:0]
}

// addText passes a string on, but for what its end may take away.
func (p *Parser) addText(text []byte) {
	c := &p.call
	c.tail = append(c.tail, text...)
	keep := 0
	if c.types != typeString && !p.f.flat || p.f.newlines {
		for keep < min(len(c.tail), maxSpace) && isSpace(c.tail[len(c.tail)-1-keep]) {
			keep++
		}
	}
	if i := bytes.LastIndexByte(c.tail, '&'); p.f.entities && i >= len(c.tail)-len("&quot") && i >= 0 && bytes.IndexByte(c.tail[i:], ';') < 0 {
		keep = max(keep, len(c.tail)-i)
	}
	n := len(c.tail) - keep
	p.arguments(appendEscaped(nil, p.decode(c.tail[:n])))
	c.tail = c.tail[:copy(c.tail, c.tail[n:])]
}

// typed returns the JSON of a value that may have any of some types; 0: any.
func (p *Parser) typed(text []byte, t types) []byte {
	all := p.decode(text)
	for _, text = range [][]byte{bytes.TrimSpace(text), bytes.TrimSpace(all)} { // whose own strings may have what looks like an entity
		switch kind := jsonType(text); {
		case kind == 0, t != 0 && t&kind == 0, p.f.flat && t == 0 && kind&(typeObject|typeArray) != 0:
		default:
			return text
		}
	}
	for word, is := range map[string]string{"True": "true", "False": "false", "None": "null"} {
		if string(text) == word && (t == 0 || t&jsonType([]byte(is)) != 0) {
			return []byte(is)
		}
	}
	if t != 0 && t&(typeObject|typeArray) != 0 {
		if out, ok := pythonValue(text); ok && t&jsonType(out) != 0 {
			return out
		}
	}
	if p.f.flat {
		text = all
	}
	return appendString(nil, text)
}

var entities = strings.NewReplacer("&lt;", "<", "&gt;", ">", "&quot;", `"`, "&apos;", "'", "&amp;", "&")

// decode returns a value's text.
func (p *Parser) decode(text []byte) []byte {
	if !p.f.entities || bytes.IndexByte(text, '&') < 0 {
		return text
	}
	return []byte(entities.Replace(string(text)))
}

// jsonType is what JSON a text is; 0: none.
func jsonType(text []byte) types {
	if len(text) == 0 || !validJSON(text) {
		return 0
	}
	switch c := text[0]; {
	case c == '{':
		return typeObject
	case c == '[':
		return typeArray
	case c == '"':
		return typeQuoted
	case c == 't' || c == 'f':
		return typeBool
	case c == 'n':
		return typeNull
	case bytes.ContainsAny(text, ".eE"):
		return typeNumber
	}
	return typeInteger
}

// appendString appends text as a JSON string.
func appendString(dst, text []byte) []byte {
	return append(appendEscaped(append(dst, '"'), text), '"')
}

// appendEscaped appends text as it stands within a JSON string.
func appendEscaped(dst, text []byte) []byte {
	start := 0
	for i, c := range text {
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		dst = append(dst, text[start:i]...)
		start = i + 1
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, `\n`...)
		case '\r':
			dst = append(dst, `\r`...)
		case '\t':
			dst = append(dst, `\t`...)
		default:
			dst = append(dst, '\\', 'u', '0', '0', "0123456789abcdef"[c>>4], "0123456789abcdef"[c&15])
		}
	}
	return append(dst, text[start:]...)
}
