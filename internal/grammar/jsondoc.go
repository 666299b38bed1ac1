package grammar

import (
	"encoding/json"
	"strconv"
	"strings"
	"unicode/utf8"
)

type docKind uint8

const (
	docNull docKind = iota
	docFalse
	docTrue
	docNumber
	docString
	docArray
	docObject
)

// doc is a JSON value whose objects keep the order of their members: the order of properties
// in a text is that in the schema.
type doc struct {
	kind  docKind
	text  string // of a string its value, of a number as written
	items []*doc // of arrays; of objects the values
	keys  []string
	index map[string]int // of objects with many keys
}

// get is the member of an object; nil: there is none.
func (d *doc) get(key string) *doc {
	if d.index != nil {
		if i, ok := d.index[key]; ok {
			return d.items[i]
		}
		return nil
	}
	for i, k := range d.keys {
		if k == key {
			return d.items[i]
		}
	}
	return nil
}

type docParser struct {
	text string
	pos  int
}

// parseDoc reads a JSON text. Of members with the same key the last counts.
func parseDoc(text string) (*doc, error) {
	p := &docParser{text: text}
	d, err := p.value(0)
	if err != nil {
		return nil, err
	}
	p.space()
	if p.pos < len(text) {
		return nil, p.fail("more behind the end of the JSON value")
	}
	return d, nil
}

// parsePrefix reads a JSON value at the beginning of text, and returns how long it is.
func parsePrefix(text string) (*doc, int, error) {
	p := &docParser{text: text}
	d, err := p.value(0)
	return d, p.pos, err
}

func (p *docParser) fail(reason string) error {
	return &Error{Reason: "not valid JSON: " + reason, Where: "offset " + strconv.Itoa(p.pos)}
}

func (p *docParser) space() {
	for p.pos < len(p.text) {
		switch p.text[p.pos] {
		case ' ', '\t', '\n', '\r':
			p.pos++
		default:
			return
		}
	}
}

func (p *docParser) peek() byte {
	p.space()
	if p.pos < len(p.text) {
		return p.text[p.pos]
	}
	return 0
}

func (p *docParser) value(depth int) (*doc, error) {
	if depth > maxDepth {
		return nil, &Error{Reason: "the schema is nested deeper than " + strconv.Itoa(maxDepth), Where: "offset " + strconv.Itoa(p.pos)}
	}
	switch c := p.peek(); c {
	case '{':
		return p.object(depth)
	case '[':
		p.pos++
		d := &doc{kind: docArray}
		if p.peek() == ']' {
			p.pos++
			return d, nil
		}
		for {
			v, err := p.value(depth + 1)
			if err != nil {
				return nil, err
			}
			d.items = append(d.items, v)
			switch p.peek() {
			case ',':
				p.pos++
				continue
			case ']':
				p.pos++
				return d, nil
			}
			return nil, p.fail("a comma or ] is missing")
		}
	case '"':
		s, err := p.string()
		return &doc{kind: docString, text: s}, err
	case 0:
		return nil, p.fail("a value is missing")
	}
	for word, kind := range map[string]docKind{"null": docNull, "true": docTrue, "false": docFalse} {
		if strings.HasPrefix(p.text[p.pos:], word) {
			p.pos += len(word)
			return &doc{kind: kind}, nil
		}
	}
	end := p.pos
	for end < len(p.text) && strings.IndexByte("+-.0123456789eE", p.text[end]) >= 0 {
		end++
	}
	n := p.text[p.pos:end]
	if !json.Valid([]byte(n)) {
		return nil, p.fail("an unexpected character")
	}
	p.pos = end
	return &doc{kind: docNumber, text: n}, nil
}

func (p *docParser) object(depth int) (*doc, error) {
	p.pos++
	d := &doc{kind: docObject}
	if p.peek() == '}' {
		p.pos++
		return d, nil
	}
	for {
		if p.peek() != '"' {
			return nil, p.fail("a key is missing")
		}
		key, err := p.string()
		if err != nil {
			return nil, err
		}
		if p.peek() != ':' {
			return nil, p.fail("a colon is missing")
		}
		p.pos++
		v, err := p.value(depth + 1)
		if err != nil {
			return nil, err
		}
		d.put(key, v)
		switch p.peek() {
		case ',':
			p.pos++
			continue
		case '}':
			p.pos++
			return d, nil
		}
		return nil, p.fail("a comma or } is missing")
	}
}

func (d *doc) put(key string, v *doc) {
	if d.index == nil && len(d.keys) == 8 {
		d.index = make(map[string]int, 32)
		for i, k := range d.keys {
			d.index[k] = i
		}
	}
	if d.index != nil {
		if i, ok := d.index[key]; ok {
			d.items[i] = v
			return
		}
		d.index[key] = len(d.keys)
	} else {
		for i, k := range d.keys {
			if k == key {
				d.items[i] = v
				return
			}
		}
	}
	d.keys = append(d.keys, key)
	d.items = append(d.items, v)
}

func (p *docParser) string() (string, error) {
	start := p.pos
	for i := p.pos + 1; i < len(p.text); i++ {
		switch p.text[i] {
		case '\\':
			i++
		case '"':
			p.pos = i + 1
			s := p.text[start+1 : i]
			if strings.IndexByte(s, '\\') < 0 && utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return r < 0x20 }) < 0 {
				return s, nil
			}
			var out string
			if err := json.Unmarshal([]byte(p.text[start:i+1]), &out); err != nil {
				p.pos = start
				return "", p.fail("a string with a wrong escape or a control character")
			}
			return out, nil
		}
	}
	return "", p.fail("a string without an end")
}

// shown is the value as JSON, cut to a length that fits into an error.
func (d *doc) shown() string {
	var b strings.Builder
	d.write(&b)
	s := b.String()
	if len(s) > 60 {
		s = strings.ToValidUTF8(s[:60], "") + "..."
	}
	return s
}

func (d *doc) write(b *strings.Builder) {
	if b.Len() > 100 {
		return
	}
	switch d.kind {
	case docNull:
		b.WriteString("null")
	case docFalse:
		b.WriteString("false")
	case docTrue:
		b.WriteString("true")
	case docNumber:
		b.WriteString(d.text)
	case docString:
		b.WriteString(`"` + jsonText(d.text) + `"`)
	case docArray, docObject:
		open, end := "[", "]"
		if d.kind == docObject {
			open, end = "{", "}"
		}
		b.WriteString(open)
		for i, v := range d.items {
			if i > 0 {
				b.WriteString(",")
			}
			if d.kind == docObject {
				b.WriteString(`"` + jsonText(d.keys[i]) + `":`)
			}
			v.write(b)
		}
		b.WriteString(end)
	}
}
