package grammar

import (
	"math/big"
	"slices"
	"strconv"
	"strings"
)

type schemaKind uint8

const (
	anything schemaKind = iota
	never
	isNull
	isBool
	isNumber
	isString
	isArray
	isObject
	anyOf
	oneOf
	isRef
)

// schema is a JSON Schema brought into a form that says for each type what it may be. It is
// immutable once made.
type schema struct {
	kind schemaKind
	at   string // JSON pointer

	value *bool // of isBool: only this

	// of isNumber
	lo, hi   *bound
	integer  bool
	multiple *big.Rat

	// of isString
	words    []stringPart // all of them
	shortest int          // in characters
	longest  int          // negative: no bound

	// of isArray
	prefix []*schema
	items  *schema // of those behind prefix; nil: anything
	least  int     // of isObject too
	most   int     // negative: no bound

	// of isObject
	props    []property // in the order in which they come
	patterns []property
	others   *schema // of names that are neither in props nor match; nil: anything
	required []string

	opts []*schema // of anyOf and oneOf
	ref  *target   // of isRef
}

type stringPart struct {
	kind partKind
	text string
}

type partKind uint8

const (
	partLiteral partKind = iota
	partPattern
	partFormat
)

type property struct {
	name string // or pattern
	s    *schema
}

// schemaParser reads a schema into that form.
type schemaParser struct {
	g       *builder
	root    *doc
	path    []string // where it is, as a JSON pointer's parts
	targets map[*doc]*target
	ids     map[string]*doc // of resources that have an $id, and their anchors
	oneOfs  bool            // oneOf means anyOf
	autos   map[string]*auto
	strings map[string]*expr // that several things bind
	j       *jsonTexts
	bases   []string  // of the references in what is being read
	pending []*target // whose rules are to be defined
}

func newSchemaParser(g *builder, root *doc) *schemaParser {
	return &schemaParser{g: g, root: root, targets: map[*doc]*target{}, ids: map[string]*doc{}, autos: map[string]*auto{}, strings: map[string]*expr{}}
}

var typeNames = []string{"null", "boolean", "number", "string", "array", "object"}

// unsupported bind a value in ways that are not supported. What is neither here nor read by
// parse is an annotation, or means nothing to JSON Schema.
var unsupported = map[string]bool{
	"not": true, "if": true, "contains": true, "propertyNames": true, "dependencies": true,
	"dependentRequired": true, "dependentSchemas": true, "unevaluatedItems": true, "unevaluatedProperties": true,
	"$dynamicRef": true, "$recursiveRef": true, "uniqueItems": true,
}

func (p *schemaParser) pointer() string {
	var b strings.Builder
	b.WriteByte('#')
	for _, s := range p.path {
		b.WriteByte('/')
		b.WriteString(strings.ReplaceAll(strings.ReplaceAll(s, "~", "~0"), "/", "~1"))
	}
	if s := b.String(); len(s) <= 200 {
		return s
	}
	return strings.ToValidUTF8(b.String()[:200], "") + "..."
}

// in is f at a place below.
func (p *schemaParser) in(part string, f func()) {
	p.path = append(p.path, part)
	if len(p.path) > 2*maxDepth {
		p.g.refuse("the schema is nested too deeply")
	}
	f()
	p.path = p.path[:len(p.path)-1]
}

func (p *schemaParser) nothing() *schema { return &schema{kind: never, at: p.pointer()} }

// parse reads the schema d.
func (p *schemaParser) parse(d *doc) *schema {
	p.g.spend(2)
	switch d.kind {
	case docTrue:
		return &schema{kind: anything}
	case docFalse:
		return p.nothing()
	case docObject:
	default:
		p.g.refuse("a schema must be an object or a boolean, not %s", d.shown())
	}
	if id := p.baseOf(d); id != "" && d != p.root && !strings.HasPrefix(id, "#") {
		if base, ok := join(p.base(), id); ok {
			p.bases = append(p.bases, strings.TrimSuffix(base, "#"))
			defer func() { p.bases = p.bases[:len(p.bases)-1] }()
		}
	}
	for i, key := range d.keys {
		if unsupported[key] && d.items[i].kind != docFalse {
			p.in(key, func() { p.g.refuse("%q is not supported", key) })
		}
	}
	// In order of appearance: what comes first decides the order of properties. Keywords that
	// depend on each other are read together.
	out := &schema{kind: anything}
	group := map[string]*doc{}
	flush := func() {
		if len(group) == 0 {
			return
		}
		if t := d.get("type"); t != nil {
			group["type"] = t
		}
		out = p.both(out, p.typed(d, group))
		group = map[string]*doc{}
	}
	for i, key := range d.keys {
		v := d.items[i]
		switch key {
		case "const", "enum", "allOf", "anyOf", "oneOf", "$ref":
			flush()
			p.in(key, func() { out = p.both(out, p.applied(key, v)) })
		case "type", "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
			"items", "prefixItems", "additionalItems", "minItems", "maxItems",
			"minLength", "maxLength", "pattern", "format",
			"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf":
			group[key] = v
		}
	}
	flush()
	return out
}

func (p *schemaParser) applied(key string, v *doc) *schema {
	switch key {
	case "const":
		return p.literal(v)
	case "$ref":
		if v.kind != docString {
			p.g.refuse("$ref must be a string")
		}
		return &schema{kind: isRef, ref: p.resolve(v.text), at: p.pointer()}
	}
	if v.kind != docArray {
		p.g.refuse("%s must be an array", key)
	}
	opts := make([]*schema, len(v.items))
	for i, o := range v.items {
		p.in(strconv.Itoa(i), func() {
			if key == "enum" {
				opts[i] = p.literal(o)
			} else {
				opts[i] = p.parse(o)
			}
		})
	}
	switch {
	case key == "allOf":
		out := &schema{kind: anything}
		for _, o := range opts {
			out = p.both(out, o)
		}
		return out
	case key == "oneOf" && !p.oneOfs:
		return p.one(opts)
	}
	return p.either(opts)
}

// literal is the schema of one value.
func (p *schemaParser) literal(v *doc) *schema {
	p.g.spend(1)
	s := &schema{at: p.pointer()}
	switch v.kind {
	case docNull:
		s.kind = isNull
	case docTrue, docFalse:
		b := v.kind == docTrue
		s.kind, s.value = isBool, &b
	case docNumber:
		n := p.decimal(v)
		s.kind, s.lo, s.hi = isNumber, &bound{at: n}, &bound{at: n}
	case docString:
		s.kind, s.longest = isString, -1
		s.words = []stringPart{{partLiteral, v.text}}
	case docArray:
		s.kind, s.least, s.most, s.items = isArray, len(v.items), len(v.items), p.nothing()
		for i, item := range v.items {
			p.in(strconv.Itoa(i), func() { s.prefix = append(s.prefix, p.literal(item)) })
		}
	case docObject:
		s.kind, s.most, s.others = isObject, -1, p.nothing()
		for i, key := range v.keys {
			p.in(key, func() { s.props = append(s.props, property{key, p.literal(v.items[i])}) })
			s.required = append(s.required, key)
		}
	}
	return s
}

func (p *schemaParser) decimal(v *doc) *big.Rat {
	n, ok := decimal(v.text)
	if !ok {
		p.g.refuse("a number of more than %d digits", maxDigits)
	}
	return n
}

// typed is what the keywords of a group say, for each type that the schema may have.
func (p *schemaParser) typed(d *doc, group map[string]*doc) *schema {
	names := typeNames
	if t := group["type"]; t != nil {
		p.in("type", func() {
			switch {
			case t.kind == docString:
				names = []string{t.text}
			case t.kind == docArray && len(t.items) > 0:
				names = nil
				for _, n := range t.items {
					if n.kind != docString {
						p.g.refuse("type must be a string or an array of strings")
					}
					names = append(names, n.text)
				}
			default:
				p.g.refuse("type must be a string or an array of strings")
			}
		})
	}
	if slices.Contains(names, "number") {
		names = slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == "integer" })
	}
	opts := make([]*schema, len(names))
	for i, n := range names {
		opts[i] = p.ofType(n, d, group)
	}
	return p.either(opts)
}

func (p *schemaParser) ofType(name string, d *doc, group map[string]*doc) *schema {
	at := p.pointer()
	switch name {
	case "null":
		return &schema{kind: isNull, at: at}
	case "boolean":
		return &schema{kind: isBool, at: at}
	case "number", "integer":
		return p.numeric(group, name == "integer")
	case "string":
		return p.str(group)
	case "array":
		return p.arr(d, group)
	case "object":
		return p.obj(d, group)
	}
	p.in("type", func() { p.g.refuse("no type is named %q", name) })
	return nil
}

func (p *schemaParser) numeric(group map[string]*doc, integer bool) *schema {
	s := &schema{kind: isNumber, integer: integer, at: p.pointer()}
	number := func(key string) *big.Rat {
		v := group[key]
		if v == nil {
			return nil
		}
		var n *big.Rat
		p.in(key, func() {
			if v.kind != docNumber {
				p.g.refuse("%s must be a number", key)
			}
			n = p.decimal(v)
		})
		return n
	}
	end := func(plain, exclusive string) *bound {
		var b *bound
		if n := number(plain); n != nil {
			b = &bound{at: n}
		}
		switch v := group[exclusive]; {
		case v == nil || v.kind == docFalse:
		case v.kind == docTrue: // of draft 4: says how the other is meant
			if b != nil {
				b.open = true
			}
		default:
			x := &bound{at: number(exclusive), open: true}
			if plain == "minimum" {
				b = larger(b, x)
			} else {
				b = smaller(b, x)
			}
		}
		return b
	}
	s.lo, s.hi = end("minimum", "exclusiveMinimum"), end("maximum", "exclusiveMaximum")
	if m := number("multipleOf"); m != nil {
		if m.Sign() == 0 {
			p.in("multipleOf", func() { p.g.refuse("multipleOf must not be zero") })
		}
		s.multiple = m.Abs(m)
	}
	return s
}

// larger is the tighter of two lower ends, smaller of two upper ones; nil is no end.
func larger(a, b *bound) *bound {
	if a == nil || b == nil {
		if a == nil {
			return b
		}
		return a
	}
	if c := a.at.Cmp(b.at); c > 0 || c == 0 && a.open {
		return a
	}
	return b
}

func smaller(a, b *bound) *bound {
	if a == nil || b == nil {
		return larger(a, b)
	}
	if c := a.at.Cmp(b.at); c < 0 || c == 0 && a.open {
		return a
	}
	return b
}

// count reads a keyword that is a number of things.
func (p *schemaParser) count(group map[string]*doc, key string, missing int) int {
	v := group[key]
	if v == nil {
		return missing
	}
	n := missing
	p.in(key, func() {
		if v.kind == docNumber {
			if r := p.decimal(v); r.IsInt() && r.Sign() >= 0 {
				n = maxRepeat + 1
				if r.Num().IsInt64() && r.Num().Int64() <= maxRepeat {
					n = int(r.Num().Int64())
				} else if strings.HasPrefix(key, "max") {
					n = -1 // so large that it does not matter
				}
				p.g.bound(n)
				return
			}
		}
		p.g.refuse("%s must be a whole number, not below zero", key)
	})
	return n
}

func (p *schemaParser) str(group map[string]*doc) *schema {
	s := &schema{kind: isString, at: p.pointer()}
	s.shortest, s.longest = p.count(group, "minLength", 0), p.count(group, "maxLength", -1)
	for _, key := range []string{"pattern", "format"} {
		v := group[key]
		if v == nil {
			continue
		}
		p.in(key, func() {
			if v.kind != docString {
				p.g.refuse("%s must be a string", key)
			}
			switch {
			case key == "pattern":
				s.words = append(s.words, stringPart{partPattern, v.text})
			case formats[v.text] != "":
				s.words = append(s.words, stringPart{partFormat, v.text})
				if most := longestOf[v.text]; most > 0 && (s.longest < 0 || s.longest > most) {
					s.longest = most
				}
			case openFormats[v.text]:
				p.g.refuse("the format %q is not supported", v.text)
			}
		})
	}
	return s
}

func (p *schemaParser) arr(_ *doc, group map[string]*doc) *schema {
	s := &schema{kind: isArray, at: p.pointer()}
	s.least, s.most = p.count(group, "minItems", 0), p.count(group, "maxItems", -1)
	prefix, items, more := group["prefixItems"], group["items"], group["additionalItems"]
	from := "prefixItems"
	if items != nil && items.kind == docArray { // before 2020-12
		prefix, from, items = items, "items", more
		if more != nil {
			p.in("additionalItems", func() { s.items = p.parse(more) })
		}
	} else if items != nil {
		p.in("items", func() { s.items = p.parse(items) })
	}
	if prefix != nil {
		p.in(from, func() {
			if prefix.kind != docArray {
				p.g.refuse("%s must be an array", from)
			}
			for i, v := range prefix.items {
				p.in(strconv.Itoa(i), func() { s.prefix = append(s.prefix, p.parse(v)) })
			}
		})
	}
	return s
}

func (p *schemaParser) obj(d *doc, group map[string]*doc) *schema {
	s := &schema{kind: isObject, at: p.pointer()}
	s.least, s.most = p.count(group, "minProperties", 0), p.count(group, "maxProperties", -1)
	read := func(key string, v *doc) (list []property) {
		if v == nil {
			return nil
		}
		p.in(key, func() {
			if v.kind != docObject {
				p.g.refuse("%s must be an object", key)
			}
			for i, name := range v.keys {
				p.in(name, func() { list = append(list, property{name, p.parse(v.items[i])}) })
			}
		})
		return list
	}
	s.props = read("properties", group["properties"])
	s.patterns = read("patternProperties", group["patternProperties"])
	if v := group["additionalProperties"]; v != nil {
		p.in("additionalProperties", func() { s.others = p.parse(v) })
		// It is about the names that are not in properties, also if these are read later.
		if group["properties"] == nil {
			if names := d.get("properties"); names != nil {
				for _, n := range names.keys {
					s.props = append(s.props, property{n, &schema{kind: anything}})
				}
			}
		}
	}
	if v := group["required"]; v != nil {
		p.in("required", func() {
			if v.kind != docArray {
				if v.kind == docTrue || v.kind == docFalse { // of draft 3, about the property itself
					return
				}
				p.g.refuse("required must be an array of strings")
			}
			for _, n := range v.items {
				if n.kind != docString {
					p.g.refuse("required must be an array of strings")
				}
				if !slices.Contains(s.required, n.text) {
					s.required = append(s.required, n.text)
				}
			}
		})
	}
	p.disjointPatterns(s.patterns)
	// A property's value is valid against the patterns that its name matches, too.
	for i, prop := range s.props {
		for _, pat := range s.patterns {
			if p.nameMatches(pat.name, prop.name) {
				s.props[i].s = p.both(s.props[i].s, pat.s)
			}
		}
	}
	return s
}
