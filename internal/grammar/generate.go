package grammar

import (
	"fmt"
	"slices"
)

// jsonSchema turns a schema into nodes.
func (g *builder) jsonSchema(text string, space Whitespace) (*expr, error) {
	d, err := parseDoc(text)
	if err != nil {
		return nil, err
	}
	return g.jsonSchemaDoc(d, space)
}

func (g *builder) jsonSchemaDoc(d *doc, space Whitespace) (*expr, error) {
	p := newSchemaParser(g, d)
	outer := g.where
	g.where = p.pointer
	defer func() { g.where = outer }()
	if err := p.options(d, space); err != nil {
		return nil, err
	}
	p.collect(d, "")
	root := p.target(d, nil, p.rootBase())
	e := p.generate(&schema{kind: isRef, ref: root})
	p.rules()
	return e, nil
}

// rules defines the rules that have been called.
func (p *schemaParser) rules() {
	for len(p.pending) > 0 {
		t := p.pending[len(p.pending)-1]
		p.pending = p.pending[:len(p.pending)-1]
		p.path = t.path
		p.g.define(t.rule, p.generate(p.deref(t)))
	}
}

// options reads x-guidance, llguidance's settings inside a schema.
func (p *schemaParser) options(d *doc, space Whitespace) error {
	p.j = p.g.json(space)
	if d.kind != docObject {
		return nil
	}
	x := d.get("x-guidance")
	if x == nil || x.kind != docObject {
		return nil
	}
	if v := x.get("whitespace_flexible"); v != nil {
		space = Flexible
		if v.kind == docFalse {
			space = Compact
		}
		p.j = p.g.json(space)
	}
	if v := x.get("whitespace_pattern"); v != nil && v.kind == docString {
		e, err := parseRegex(v.text, p.g.budget)
		if err != nil {
			return err
		}
		p.j = p.g.jsonWith(p.g.opt(p.g.whole(e, asUTF8)))
	}
	for _, key := range []string{"coerce_one_of", "lenient"} {
		if v := x.get(key); v != nil && v.kind == docTrue {
			p.oneOfs = true
		}
	}
	return nil
}

// generate is the texts of the values that are valid against s.
func (p *schemaParser) generate(s *schema) *expr {
	g, j := p.g, p.j
	g.spend(1)
	switch s.kind {
	case anything:
		return j.any()
	case isNull:
		return j.null
	case isBool:
		switch {
		case s.value == nil:
			return g.alt(j.yes, j.no)
		case *s.value:
			return j.yes
		}
		return j.no
	case isNumber:
		return p.number(s)
	case isString:
		return p.stringOf(s)
	case isArray:
		return p.arrayOf(s)
	case isObject:
		return p.objectOf(s)
	case anyOf:
		return p.options1(s.opts)
	case oneOf:
		p.path = nil
		g.where = func() string { return s.at }
		g.refuse("oneOf is supported where its branches cannot be valid at once, as different types or constants; use anyOf")
	case isRef:
		t := s.ref
		if !t.made {
			t.made = true
			t.rule = g.newRule("")
			p.pending = append(p.pending, t)
		}
		return g.call(t.rule)
	}
	return g.none
}

// options1 is one of opts. Constant strings, which an enum has many of, become one tree.
func (p *schemaParser) options1(opts []*schema) *expr {
	var words []string
	var kids []*expr
	for _, o := range opts {
		if o.kind == isString && len(o.words) == 1 && o.words[0].kind == partLiteral && o.shortest == 0 && o.longest < 0 && oneSpelling(o.words[0].text) && p.j.without == nil {
			words = append(words, jsonText(o.words[0].text))
			continue
		}
		kids = append(kids, p.generate(o))
	}
	if len(words) > 0 {
		slices.Sort(words)
		kids = append(kids, p.j.quoted(p.g.words(slices.Compact(words))))
	}
	return p.g.alt(kids...)
}

// oneSpelling says that a JSON string has s in one spelling only.
func oneSpelling(s string) bool {
	for _, r := range s {
		if r < 0x20 || r == 0x7f {
			return false
		}
	}
	return true
}

func (p *schemaParser) number(s *schema) *expr {
	g, j := p.g, p.j
	if s.multiple != nil {
		m := j.multiples(s.multiple)
		if m == nil {
			g.where = func() string { return s.at }
			g.refuse("multipleOf is supported for numbers of a few digits only")
		}
		plain := j.numbers(s.lo, s.hi, s.integer)
		if s.lo == nil && s.hi == nil && !s.integer {
			plain = g.cat(j.integers(nil, nil), g.opt(g.cat(g.lit("."), g.rep(j.digit('0', '9'), 1, -1))))
		}
		return g.automaton(g.product(g.compile(plain), m, false), 0, -1)
	}
	if s.lo == nil && s.hi == nil && !s.integer {
		return j.number
	}
	return j.numbers(s.lo, s.hi, s.integer)
}

func (p *schemaParser) stringOf(s *schema) *expr {
	g, j := p.g, p.j
	if s.longest >= 0 && s.shortest > s.longest {
		return g.none
	}
	bounded := s.shortest > 0 || s.longest >= 0
	switch {
	case len(s.words) == 0 && !bounded:
		return j.str
	case len(s.words) == 0 && j.without == nil:
		return j.quoted(g.rep(j.char, s.shortest, s.longest))
	case len(s.words) == 1 && !bounded && j.without == nil:
		return j.quoted(p.partExpr(s.words[0]))
	}
	key := fmt.Sprintf("%d %d %q", s.shortest, s.longest, s.words)
	e, ok := p.strings[key]
	if !ok {
		e = p.joinedString(s, bounded)
		p.strings[key] = e
	}
	return e
}

// joinedString is a string that several things bind at once: patterns and formats, and its length.
func (p *schemaParser) joinedString(s *schema, bounded bool) *expr {
	g, j := p.g, p.j
	outer := g.where
	g.where = func() string { return s.at }
	defer func() { g.where = outer }()
	a := p.automaton(s.words)
	if bounded && a != nil {
		a = g.counted(a, p.anyChars(), s.shortest, s.longest)
		if a == nil {
			return g.none
		}
		if a.counts.least[a.start] >= int32(s.shortest) && (s.longest < 0 || a.counts.most[a.start] >= 0 && a.counts.most[a.start] <= int32(s.longest)) {
			a.counts = nil // the texts are of the right length anyway
			return j.quoted(g.automaton(a, 0, -1))
		}
		return j.quoted(g.automaton(a, s.shortest, s.longest))
	}
	return j.quoted(g.automaton(a, 0, -1))
}

// automaton is of the insides of strings that are all of words.
func (p *schemaParser) automaton(words []stringPart) *auto {
	if len(words) == 0 {
		return p.anyChars()
	}
	a := p.within(p.automatonOf(words[0]))
	for _, w := range words[1:] {
		a = p.g.product(a, p.automatonOf(w), false)
	}
	return a
}

// within is what of a, the inside of a string, stands where the string does.
func (p *schemaParser) within(a *auto) *auto {
	if p.j.without == nil {
		return a
	}
	return p.g.product(a, p.anyChars(), false)
}

// anyChars is the automaton of any number of characters in a JSON string.
func (p *schemaParser) anyChars() *auto {
	if p.j.whole == nil {
		p.j.whole = p.g.compile(p.j.chars)
	}
	return p.j.whole
}

// partExpr is the inside of the JSON strings that w allows.
func (p *schemaParser) partExpr(w stringPart) *expr {
	switch w.kind {
	case partLiteral:
		return p.g.jsonSpelled(w.text)
	case partFormat:
		e, err := parseRegex(formats[w.text], p.g.budget)
		if err != nil {
			p.g.refuse("the format %q: %v", w.text, err)
		}
		return p.g.whole(e, asJSON)
	}
	e, err := parseRegex(w.text, p.g.budget)
	if err != nil {
		p.g.refuse("pattern %.80q: %v", w.text, err)
	}
	return p.g.search(e, asJSON)
}

func (p *schemaParser) automatonOf(w stringPart) *auto {
	key := string(rune('0'+w.kind)) + w.text
	a, ok := p.autos[key]
	if !ok {
		if e := p.partExpr(w); e.kind != exprNone {
			a = p.g.compile(e)
		}
		p.autos[key] = a
	}
	return a
}

// nameMatches says whether a property's name matches a pattern.
func (p *schemaParser) nameMatches(pattern, name string) bool {
	a := p.automatonOf(stringPart{partPattern, pattern})
	if a == nil {
		return false
	}
	s := a.start
	for _, b := range []byte(jsonText(name)) {
		if b == 0x7f { // spelled raw in names, and never in other strings
			return false
		}
		if s = a.trans[s][a.class[b]]; s < 0 {
			return false
		}
	}
	return a.fin[s]
}

// disjointPatterns refuses patterns that a name could match two of.
func (p *schemaParser) disjointPatterns(list []property) {
	for i, a := range list {
		for _, b := range list[i+1:] {
			x, y := p.automatonOf(stringPart{partPattern, a.name}), p.automatonOf(stringPart{partPattern, b.name})
			if p.g.product(x, y, false) != nil {
				p.in("patternProperties", func() {
					p.g.refuse("a name can match both %.60q and %.60q, which is not supported", a.name, b.name)
				})
			}
		}
	}
}

func (p *schemaParser) arrayOf(s *schema) *expr {
	g, j := p.g, p.j
	end := g.lit("]")
	item := func(v *schema) *expr { return g.cat(p.generate(v), j.ws) }
	n := len(s.prefix)
	if s.most >= 0 {
		n = min(n, s.most)
	}
	if s.most >= 0 && s.least > s.most {
		return g.none
	}
	// What follows k items, from the last on.
	var after *expr
	rest := item(s.other(s.items))
	if s.most < 0 || s.most > n {
		most := -1
		if s.most >= 0 {
			most = s.most - n
		}
		after = g.cat(g.rep(g.cat(j.comma, rest), max(s.least-n, 0), most), end)
	} else {
		after = end
	}
	for k := n - 1; k >= 1; k-- {
		more := g.cat(j.comma, item(s.prefix[k]), after)
		if k >= s.least {
			more = g.alt(more, end)
		}
		after = more
	}
	var first *expr
	switch {
	case n > 0:
		first = g.cat(item(s.prefix[0]), after)
	case s.most == 0:
		first = g.none
	default:
		most := -1
		if s.most >= 0 {
			most = s.most - 1
		}
		first = g.cat(rest, g.rep(g.cat(j.comma, rest), max(s.least-1, 0), most), end)
	}
	if s.least == 0 {
		first = g.alt(first, end)
	}
	return g.cat(g.lit("["), j.ws, first)
}
