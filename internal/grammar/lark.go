package grammar

import (
	"strings"
	"unicode/utf8"
)

// lark reads llguidance's dialect of Lark. Names that begin with a capital are terminals:
// inside them nothing is ignored. The language is that of the context-free grammar: unlike in
// Lark's and llguidance's lexers, a terminal need not match as much as it can.
func (g *builder) lark(text string, v *Vocabulary, space Whitespace) *expr {
	c := &cfg{g: g, v: v, text: text, space: space, rules: map[string]*cfgRule{}}
	for {
		c.lines()
		if !c.more() {
			return c.generate("start")
		}
		c.g.spend(2)
		if c.peek() == '%' {
			c.statement()
		} else {
			c.larkRule()
		}
		c.gap()
		if c.more() && c.peek() != '\n' && c.peek() != '%' {
			c.fail(c.pos, "an unexpected %q", c.text[c.pos])
		}
	}
}

// gap skips spaces and comments within a line, lines also line ends.
func (c *cfg) gap() {
	for c.more() {
		switch {
		case c.text[c.pos] == ' ' || c.text[c.pos] == '\t' || c.text[c.pos] == '\r' || strings.HasPrefix(c.text[c.pos:], "\\\n"):
			c.pos++
		case c.text[c.pos] == '#' || strings.HasPrefix(c.text[c.pos:], "//"):
			for c.more() && c.text[c.pos] != '\n' {
				c.pos++
			}
		default:
			return
		}
	}
}

func (c *cfg) lines() {
	for c.gap(); c.peek() == '\n'; c.gap() {
		c.pos++
	}
}

// within skips what may be between the parts of a rule: inside parentheses also line ends.
func (c *cfg) within(nested bool) {
	if nested {
		c.lines()
	} else {
		c.gap()
	}
}

func terminalName(name string) bool {
	name = strings.TrimLeft(name, "_")
	return name != "" && name[0] >= 'A' && name[0] <= 'Z'
}

func (c *cfg) larkRule() {
	at := c.pos
	if c.peek() == '?' || c.peek() == '!' { // about the shape of trees
		c.pos++
	}
	name := c.word()
	if name == "" {
		c.fail(at, "a rule's name is missing")
	}
	r := &cfgRule{name: name, at: at, terminal: terminalName(name)}
	if c.peek() == '{' {
		c.fail(at, "templates are not supported")
	}
	if c.peek() == '[' {
		c.attributes(r)
	}
	if c.take(".") { // a priority: which of several readings counts
		c.take("-")
		c.int()
	}
	c.gap()
	c.want(":")
	c.gap()
	if c.peek() == ':' {
		c.fail(at, "a parametric rule is not supported")
	}
	r.body = c.larkAlt(false)
	c.add(r)
}

// attributes reads [lazy, suffix="..."] behind a rule's name.
func (c *cfg) attributes(r *cfgRule) {
	c.want("[")
	for {
		c.gap()
		at := c.pos
		name := c.word()
		c.gap()
		switch name {
		case "lazy":
			r.lazy = true
		case "capture", "stop_capture":
			if c.take("=") {
				c.gap()
				c.quoted('"')
			}
		case "suffix":
			c.want("=")
			c.gap()
			r.suffix = c.larkAtom(false)
			if r.suffix == nil {
				c.fail(at, "a suffix is missing")
			}
		case "temperature":
			c.want("=")
			for c.gap(); c.peek() == '.' || c.peek() >= '0' && c.peek() <= '9'; c.pos++ {
			}
		default:
			c.fail(at, "the option %q of a rule is not supported", name)
		}
		c.gap()
		if !c.take(",") {
			break
		}
	}
	c.want("]")
}

func (c *cfg) larkAlt(nested bool) *cfgNode {
	defer c.deeper()()
	at := c.pos
	c.within(nested)
	c.bar(nested) // a bar in front of the first
	kids := []*cfgNode{c.larkCat(nested)}
	for c.bar(nested) {
		kids = append(kids, c.larkCat(nested))
	}
	return group(cfgAlt, kids, at)
}

// bar takes a |, which may be at the beginning of the next line.
func (c *cfg) bar(nested bool) bool {
	c.within(nested)
	from := c.pos
	c.lines()
	if c.take("|") {
		c.lines()
		return true
	}
	c.pos = from
	return false
}

func (c *cfg) larkCat(nested bool) *cfgNode {
	n := &cfgNode{kind: cfgCat, at: c.pos}
	for {
		c.within(nested)
		k := c.larkRepeated(nested)
		if k == nil {
			break
		}
		c.within(nested)
		if c.peek() == '&' {
			k = &cfgNode{kind: cfgAnd, kids: []*cfgNode{k}, at: k.at}
			for c.take("&") {
				c.within(nested)
				more := c.larkRepeated(nested)
				if more == nil {
					c.fail(c.pos, "nothing behind an &")
				}
				k.kids = append(k.kids, more)
				c.within(nested)
			}
		}
		n.kids = append(n.kids, k)
	}
	if c.take("->") {
		c.gap()
		c.word()
	}
	return group(cfgCat, n.kids, n.at)
}

func (c *cfg) larkRepeated(nested bool) *cfgNode {
	n := c.larkAtom(nested)
	for n != nil {
		c.g.spend(1)
		c.gap()
		more := false
		if n, more = c.quantified(n, c.gap); more {
			continue
		}
		if c.peek() != '~' {
			return n
		}
		from := c.pos
		c.pos++
		c.gap()
		if b := c.peek(); b < '0' || b > '9' {
			c.pos = from
			return n // a negation, of what comes next
		}
		lo := c.int()
		hi := lo
		c.gap()
		if c.take("..") {
			c.gap()
			hi = c.int()
		}
		if lo > hi {
			c.fail(c.pos, "a repetition of at least %d and at most %d times", lo, hi)
		}
		n = c.rep(n, lo, hi)
	}
	return nil
}

// larkAtom reads what a quantifier may follow; nil: there is none.
func (c *cfg) larkAtom(nested bool) *cfgNode {
	defer c.deeper()()
	at := c.pos
	c.g.spend(1)
	switch b := c.peek(); {
	case b == '"':
		return c.larkString()
	case b == '/':
		return c.leaf(c.larkRegex(), at)
	case b == '(' || b == '[':
		c.pos++
		n := c.larkAlt(true)
		c.lines()
		if b == '(' {
			c.want(")")
			return n
		}
		c.want("]")
		return c.rep(n, 0, 1)
	case b == '~':
		c.pos++
		c.gap()
		n := c.larkAtom(nested)
		if n == nil {
			c.fail(at, "nothing behind a ~")
		}
		return &cfgNode{kind: cfgNot, kids: []*cfgNode{n}, at: at}
	case b == '<':
		c.pos++
		return c.special()
	case b == '@':
		c.fail(at, "references to other grammars are not supported")
	case b == '%':
		return c.larkEmbedded()
	case isName(b) && b != '-':
		name := c.word()
		if c.peek() == '{' && c.pos+1 < len(c.text) && isName(c.text[c.pos+1]) && (c.text[c.pos+1] < '0' || c.text[c.pos+1] > '9') {
			c.fail(at, "templates are not supported")
		}
		if c.peek() == ':' && c.pos+1 < len(c.text) && c.text[c.pos+1] == ':' {
			c.fail(at, "parametric rules are not supported")
		}
		return &cfgNode{kind: cfgName, name: name, at: at}
	}
	return nil
}

// larkEmbedded reads %json {...}; nil: another statement begins.
func (c *cfg) larkEmbedded() *cfgNode {
	at := c.pos
	switch {
	case c.take("%json"):
		c.lines()
		if c.peek() != '{' {
			c.fail(at, "an object is missing behind %%json")
		}
		d, n, err := parsePrefix(c.text[c.pos:])
		if err != nil {
			c.fail(at, "%v", err)
		}
		c.pos += n
		e, err := c.g.jsonSchemaDoc(d, c.space)
		if err != nil {
			c.fail(at, "%v", err)
		}
		return c.leaf(e, at)
	case strings.HasPrefix(c.text[c.pos:], "%regex"):
		c.fail(at, "%%regex is not supported")
	}
	return nil
}

// larkString reads "...", "..."i and "a".."z".
func (c *cfg) larkString() *cfgNode {
	at := c.pos
	s := c.quoted('"')
	if c.peek() == 'i' && (c.pos+1 == len(c.text) || !isName(c.text[c.pos+1])) {
		c.pos++
		var kids []*expr
		for _, r := range s {
			kids = append(kids, c.g.class(folded([]rune{r, r}), asUTF8))
		}
		return c.leaf(c.g.cat(kids...), at)
	}
	from := c.pos
	c.gap()
	if !c.take("..") {
		c.pos = from
		return c.leaf(c.g.lit(s), at)
	}
	c.gap()
	if c.peek() != '"' {
		c.fail(at, "a range must end with a string")
	}
	to := c.quoted('"')
	lo, n := utf8.DecodeRuneInString(s)
	hi, m := utf8.DecodeRuneInString(to)
	if n != len(s) || m != len(to) || n == 0 || m == 0 || lo > hi {
		c.fail(at, "a range from %q to %q", s, to)
	}
	return c.leaf(c.g.class([]rune{lo, hi}, asUTF8), at)
}

func (c *cfg) larkRegex() *expr {
	at := c.pos
	c.pos++
	from := c.pos
	for inClass := false; ; c.pos++ {
		if !c.more() || c.text[c.pos] == '\n' {
			c.fail(at, "a regular expression without an end")
		}
		b := c.text[c.pos]
		if b == '\\' {
			c.pos++
		} else if b == '[' {
			inClass = true
		} else if b == ']' {
			inClass = false
		} else if b == '/' && !inClass {
			break
		}
	}
	text := c.text[from:c.pos]
	c.pos++
	flags := ""
	for strings.IndexByte("imsxu", c.peek()) >= 0 && c.more() {
		if c.peek() != 'u' {
			flags += string(c.peek())
		}
		c.pos++
	}
	if flags != "" {
		text = "(?" + flags + ":" + text + ")"
	}
	e, err := parseRegex(text, c.g.budget)
	if err != nil {
		c.fail(at, "%v", err)
	}
	return c.g.whole(e, asUTF8)
}

// statement reads a line that begins with %.
func (c *cfg) statement() {
	at := c.pos
	c.pos++
	switch word := c.word(); word {
	case "ignore":
		c.ignored = append(c.ignored, c.larkAlt(false))
	case "import":
		c.larkImport(at)
	case "llguidance":
		c.gap()
		d, n, err := parsePrefix(c.text[c.pos:])
		if err != nil {
			c.fail(at, "%v", err)
		}
		c.pos += n
		for i, key := range d.keys {
			on := d.items[i].kind == docTrue
			switch {
			case key == "ignore_once":
				c.once = on
			case key == "allow_initial_skip":
				c.leading = on
			case key == "no_forcing" || !on:
			default:
				c.fail(at, "the option %q is not supported", key)
			}
		}
	default:
		c.fail(at, "%%%s is not supported", word)
	}
}

// larkCommon is what `%import common` knows, as regular expressions.
var larkCommon = map[string]string{
	"DIGIT": `[0-9]`, "HEXDIGIT": `[0-9a-fA-F]`, "INT": `[0-9]+`, "SIGNED_INT": `[+-]?[0-9]+`,
	"DECIMAL": `[0-9]+\.[0-9]*|\.[0-9]+`, "FLOAT": `[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?`,
	"SIGNED_FLOAT":   `[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)`,
	"NUMBER":         `[0-9]+|[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?`,
	"SIGNED_NUMBER":  `[+-]?(?:[0-9]+|[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)`,
	"ESCAPED_STRING": `"(?:[^"\\\n]|\\[^\n])*"`, "LCASE_LETTER": `[a-z]`, "UCASE_LETTER": `[A-Z]`, "LETTER": `[A-Za-z]`,
	"WORD": `[A-Za-z]+`, "CNAME": `[_A-Za-z][_A-Za-z0-9]*`, "WS_INLINE": `[ \t]+`, "WS": `[ \t\f\r\n]+`, "CR": `\r`, "LF": `\n`,
	"NEWLINE": `(?:\r?\n)+`, "SH_COMMENT": `#[^\n]*`, "CPP_COMMENT": `//[^\n]*`, "C_COMMENT": `(?s:/\*(?:[^*]|\*+[^*/])*\*+/)`,
	"SQL_COMMENT": `--[^\n]*`,
}

func (c *cfg) larkImport(at int) {
	c.gap()
	if !c.take("common") {
		c.fail(at, "only the library \"common\" can be imported")
	}
	c.gap()
	one := func() {
		name := c.word()
		pattern, ok := larkCommon[name]
		if !ok {
			c.fail(at, "the library \"common\" has no %q", name)
		}
		c.gap()
		if c.take("->") {
			c.gap()
			name = c.word()
		}
		e, err := parseRegex(pattern, c.g.budget)
		if err != nil {
			c.fail(at, "%v", err)
		}
		c.add(&cfgRule{name: name, at: at, terminal: true, body: c.leaf(c.g.whole(e, asUTF8), at)})
	}
	if c.take(".") {
		one()
		return
	}
	c.want("(")
	for {
		c.lines()
		one()
		c.lines()
		if !c.take(",") {
			break
		}
	}
	c.want(")")
}
