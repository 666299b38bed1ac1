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
	p := &schemaParser{g: g, root: d, targets: map[*doc]*target{}, ids: map[string]*doc{}, autos: map[string]*auto{}, strings: map[string]*expr{}}
	outer := g.where
	g.where = p.pointer
	defer func() { g.where = outer }()
	if err := p.options(d, space); err != nil {
		return nil, err
	}
	p.collect(d, "")
	root := p.target(d, nil, p.rootBase())
	e := p.generate(&schema{kind: isRef, ref: root})
	for len(p.pending) > 0 {
		t := p.pending[len(p.pending)-1]
		p.pending = p.pending[:len(p.pending)-1]
		p.path = t.path
		g.define(t.rule, p.generate(p.deref(t)))
	}
	return e, nil
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
		return g.lit("null")
	case isBool:
		switch {
		case s.value == nil:
			return g.alt(g.lit("true"), g.lit("false"))
		case *s.value:
			return g.lit("true")
		}
		return g.lit("false")
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
		if o.kind == isString && len(o.words) == 1 && o.words[0].kind == partLiteral && o.shortest == 0 && o.longest < 0 && oneSpelling(o.words[0].text) {
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
	case len(s.words) == 0:
		return j.quoted(g.rep(j.char, s.shortest, s.longest))
	case len(s.words) == 1 && !bounded:
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
	a := p.automatonOf(s.words[0])
	for _, w := range s.words[1:] {
		a = g.product(a, p.automatonOf(w), false)
	}
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

func (p *schemaParser) objectOf(s *schema) *expr {
	g, j := p.g, p.j
	type member struct {
		e        *expr
		required bool
	}
	required := make(map[string]bool, len(s.required))
	for _, r := range s.required {
		required[r] = true
	}
	var members []member
	names := make([]string, 0, len(s.props))
	add := func(name string, v *schema) {
		names = append(names, name)
		e := p.generate(v)
		if e.kind == exprNone && !required[name] {
			return
		}
		members = append(members, member{
			g.cat(j.quoted(g.lit(jsonText(name))), j.colon, e, j.ws), required[name],
		})
		delete(required, name)
	}
	for _, prop := range s.props {
		add(prop.name, prop.s)
	}
	for _, name := range s.required {
		if required[name] {
			add(name, p.valueOf(s, name))
		}
	}
	if len(members) > maxLeaves/2 {
		g.where = func() string { return s.at }
		g.refuse("an object of more than %d properties", maxLeaves/2)
	}
	extra := p.extras(s, names)

	// How many members there are matters if it is bounded: open[c] and more[c] are what may
	// come in front of a member, and behind one, once c have been. From the last member on.
	count := s.least
	if s.most >= 0 {
		count = s.most
	}
	g.spend(2 * count)
	end := g.lit("}")
	open, more := make([]*expr, count+1), make([]*expr, count+1)
	for c := range count + 1 {
		g.spend(1)
		most := -1
		if s.most >= 0 {
			most = s.most - c
		}
		open[c] = g.none
		if most != 0 && extra.kind != exprNone {
			open[c] = g.cat(j.list(extra, max(s.least-c, 1), most), end)
		}
		more[c] = g.cat(j.comma, open[c])
		if c >= s.least {
			more[c] = g.alt(more[c], end)
		}
	}
	closable := true
	for i := len(members) - 1; i >= 0; i-- {
		m := members[i]
		closable = closable && !m.required
		nextOpen, nextMore := make([]*expr, count+1), make([]*expr, count+1)
		for c := range min(count, i) + 1 {
			g.spend(1)
			behind := g.none
			if c < count {
				behind = more[c+1]
			} else if s.most < 0 {
				behind = more[c]
			}
			nextOpen[c] = g.cat(m.e, behind)
			if !m.required {
				nextOpen[c] = g.alt(nextOpen[c], open[c])
			}
			nextMore[c] = g.cat(j.comma, nextOpen[c])
			if closable && c >= s.least {
				nextMore[c] = g.alt(nextMore[c], end)
			}
		}
		open, more = nextOpen, nextMore
	}
	inside := open[0]
	if closable && s.least == 0 {
		inside = g.alt(inside, end)
	}
	return g.cat(g.lit("{"), j.ws, inside)
}

// extras is a member whose name is not in names: it matches a pattern, or is any other.
func (p *schemaParser) extras(s *schema, names []string) *expr {
	g, j := p.g, p.j
	var kids []*expr
	var taken *auto
	if len(s.patterns) > 0 && len(names) > 0 {
		words := make([]*expr, len(names))
		for i, n := range names {
			words[i] = g.jsonSpelled(n)
		}
		taken = g.compile(g.alt(words...))
	}
	var left *auto // what matches no pattern; nil: nothing
	if len(s.patterns) > 0 {
		left = g.product(p.anyChars(), taken, true)
	}
	for _, pat := range s.patterns {
		a := p.automatonOf(stringPart{partPattern, pat.name})
		if a == nil {
			continue
		}
		left = g.product(left, a, true)
		if v := p.generate(pat.s); v.kind != exprNone {
			name := g.automaton(g.product(a, taken, true), 0, -1)
			kids = append(kids, g.cat(j.quoted(name), j.colon, v, j.ws))
		}
	}
	v := p.generate(s.other(s.others))
	if v.kind == exprNone {
		return g.alt(kids...)
	}
	name := j.chars
	if len(s.patterns) > 0 {
		name = g.automaton(left, 0, -1)
	} else if len(names) > 0 {
		name = p.notWords(names)
	}
	return g.alt(append(kids, g.cat(j.quoted(name), j.colon, v, j.ws))...)
}

// notWords is the inside of any JSON string but those of words.
func (p *schemaParser) notWords(words []string) *expr {
	list := make([][]rune, len(words))
	for i, w := range words {
		list[i] = []rune(w)
	}
	slices.SortFunc(list, slices.Compare)
	return p.notRunes(list)
}

func (p *schemaParser) notRunes(words [][]rune) *expr {
	if len(words) != 1 {
		return p.newNotRunes(words)
	}
	key := string(words[0])
	e := p.j.negative[key]
	if e == nil {
		e = p.newNotRunes(words)
		p.j.negative[key] = e
	}
	return e
}

func (p *schemaParser) newNotRunes(words [][]rune) *expr {
	g := p.g
	var kids []*expr
	if len(words) > 0 && len(words[0]) == 0 {
		words = words[1:]
	} else {
		kids = append(kids, g.empty)
	}
	var heads []rune
	for i := 0; i < len(words); {
		k := i
		head := words[i][0]
		var rest [][]rune
		for k < len(words) && words[k][0] == head {
			if n := len(rest); n == 0 || !slices.Equal(rest[n-1], words[k][1:]) {
				rest = append(rest, words[k][1:])
			}
			k++
		}
		i = k
		heads = append(heads, head, head)
		kids = append(kids, g.cat(g.class([]rune{head, head}, asJSON), p.notRunes(rest)))
	}
	if heads == nil {
		kids = append(kids, g.rep(p.j.char, 1, -1))
	} else {
		kids = append(kids, g.cat(g.class(negate(heads), asJSON), p.j.chars))
	}
	e := g.alt(kids...)
	if e.kind == exprAlt {
		e.free = true // whatever comes can still become another word
	}
	return e
}
