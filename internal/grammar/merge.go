package grammar

import (
	"math/big"
	"slices"
)

// either is what is valid against one of opts at least.
func (p *schemaParser) either(opts []*schema) *schema {
	var flat []*schema
	for _, o := range opts {
		switch o.kind {
		case never:
		case anything:
			return o
		case anyOf:
			flat = append(flat, o.opts...)
		default:
			flat = append(flat, o)
		}
	}
	switch len(flat) {
	case 0:
		return p.nothing()
	case 1:
		return flat[0]
	}
	p.g.spend(len(flat))
	return &schema{kind: anyOf, opts: flat, at: p.pointer()}
}

// one is what is valid against one of opts exactly.
func (p *schemaParser) one(opts []*schema) *schema {
	var flat []*schema
	for _, o := range opts {
		switch o.kind {
		case never:
		case oneOf:
			flat = append(flat, o.opts...)
		default:
			flat = append(flat, o)
		}
	}
	switch len(flat) {
	case 0:
		return p.nothing()
	case 1:
		return flat[0]
	}
	for i, a := range flat {
		for _, b := range flat[i+1:] {
			if !p.disjoint(a, b, 0) {
				return &schema{kind: oneOf, opts: flat, at: p.pointer()}
			}
		}
	}
	return p.either(flat)
}

// maxMerge bounds how deep two schemas are merged: recursive ones could go on for ever.
const maxMerge = 40

// both is what is valid against a and b. The order of properties is a's, then b's.
func (p *schemaParser) both(a, b *schema) *schema { return p.merge(a, b, 0) }

func (p *schemaParser) merge(a, b *schema, depth int) *schema {
	p.g.spend(10)
	if depth > maxMerge {
		p.g.refuse("schemas that are joined (by allOf or keywords beside $ref) call themselves, or are nested too deeply")
	}
	switch {
	case a.kind == anything || b.kind == never:
		return b
	case b.kind == anything || a.kind == never:
		return a
	case a.kind == isRef && b.kind == isRef && a.ref == b.ref:
		return a
	case a.kind == isRef:
		return p.merge(p.deref(a.ref), b, depth+1)
	case b.kind == isRef:
		return p.merge(a, p.deref(b.ref), depth+1)
	case a.kind == oneOf || a.kind == anyOf:
		opts := make([]*schema, len(a.opts))
		for i, o := range a.opts {
			opts[i] = p.merge(o, b, depth+1)
		}
		if a.kind == oneOf {
			return p.one(opts)
		}
		return p.either(opts)
	case b.kind == oneOf || b.kind == anyOf:
		opts := make([]*schema, len(b.opts))
		for i, o := range b.opts {
			opts[i] = p.merge(a, o, depth+1)
		}
		if b.kind == oneOf {
			return p.one(opts)
		}
		return p.either(opts)
	case a.kind != b.kind:
		return p.nothing()
	}
	s := *a
	switch a.kind {
	case isBool:
		if a.value != nil && b.value != nil && *a.value != *b.value {
			return p.nothing()
		}
		if a.value == nil {
			return b
		}
	case isNumber:
		s.lo, s.hi, s.integer = larger(a.lo, b.lo), smaller(a.hi, b.hi), a.integer || b.integer
		s.multiple = common(a.multiple, b.multiple)
		if s.lo != nil && s.hi != nil && s.lo.at.Cmp(s.hi.at) > 0 {
			return p.nothing()
		}
	case isString:
		s.shortest = max(a.shortest, b.shortest)
		s.longest = least(a.longest, b.longest)
		s.words = slices.Clone(a.words)
		for _, w := range b.words {
			if !slices.Contains(s.words, w) {
				s.words = append(s.words, w)
			}
		}
		if len(s.words) > 1 && s.words[0].kind == partLiteral && s.words[1].kind == partLiteral {
			return p.nothing()
		}
	case isArray:
		s.least, s.most = max(a.least, b.least), least(a.most, b.most)
		s.prefix = nil
		for i := range max(len(a.prefix), len(b.prefix)) {
			s.prefix = append(s.prefix, p.merge(a.item(i), b.item(i), depth+1))
		}
		s.items = p.mergeOpt(a.items, b.items, depth)
	case isObject:
		return p.objects(a, b, depth)
	}
	return &s
}

func (p *schemaParser) mergeOpt(a, b *schema, depth int) *schema {
	if a == nil || b == nil {
		if a == nil {
			return b
		}
		return a
	}
	return p.merge(a, b, depth+1)
}

// item is the schema of the item at i.
func (s *schema) item(i int) *schema {
	if i < len(s.prefix) {
		return s.prefix[i]
	}
	return s.other(s.items)
}

func (s *schema) other(o *schema) *schema {
	if o == nil {
		return &schema{kind: anything}
	}
	return o
}

func least(a, b int) int {
	if a < 0 || b >= 0 && b < a {
		return b
	}
	return a
}

// common is the least number that both divide.
func common(a, b *big.Rat) *big.Rat {
	if a == nil || b == nil {
		if a == nil {
			return b
		}
		return a
	}
	// For a = n/d and b = m/d, with the same d: lcm(n, m)/d.
	d := new(big.Int).Mul(a.Denom(), b.Denom())
	n, m := new(big.Int).Mul(a.Num(), b.Denom()), new(big.Int).Mul(b.Num(), a.Denom())
	gcd := new(big.Int).GCD(nil, nil, n, m)
	return new(big.Rat).SetFrac(n.Mul(n, m.Div(m, gcd)), d)
}

func find(list []property, name string) *schema {
	for _, p := range list {
		if p.name == name {
			return p.s
		}
	}
	return nil
}

// value is the schema of the property name.
func (p *schemaParser) valueOf(s *schema, name string) *schema {
	if v := find(s.props, name); v != nil {
		return v
	}
	for _, pat := range s.patterns {
		if p.nameMatches(pat.name, name) {
			return pat.s
		}
	}
	return s.other(s.others)
}

func (p *schemaParser) objects(a, b *schema, depth int) *schema {
	s := &schema{kind: isObject, at: a.at, least: max(a.least, b.least), most: least(a.most, b.most)}
	inA := make(map[string]bool, len(a.props))
	p.g.spend(len(a.props) + len(b.props))
	inB := make(map[string]*schema, len(b.props))
	for _, prop := range b.props {
		inB[prop.name] = prop.s
	}
	for _, prop := range a.props {
		inA[prop.name] = true
		v := inB[prop.name]
		if v == nil {
			v = p.valueOf(b, prop.name)
		}
		s.props = append(s.props, property{prop.name, p.merge(prop.s, v, depth+1)})
	}
	for _, prop := range b.props {
		if !inA[prop.name] {
			s.props = append(s.props, property{prop.name, p.merge(p.valueOf(a, prop.name), prop.s, depth+1)})
		}
	}
	for _, pat := range a.patterns {
		v := find(b.patterns, pat.name)
		if v == nil {
			v = b.other(b.others)
		}
		s.patterns = append(s.patterns, property{pat.name, p.merge(pat.s, v, depth+1)})
	}
	for _, pat := range b.patterns {
		if find(a.patterns, pat.name) == nil {
			s.patterns = append(s.patterns, property{pat.name, p.merge(a.other(a.others), pat.s, depth+1)})
		}
	}
	if len(a.patterns) > 0 && len(b.patterns) > 0 {
		p.disjointPatterns(s.patterns)
	}
	s.others = p.mergeOpt(a.others, b.others, depth)
	s.required = slices.Clone(a.required)
	for _, r := range b.required {
		if !slices.Contains(s.required, r) {
			s.required = append(s.required, r)
		}
	}
	if s.most >= 0 && (s.least > s.most || len(s.required) > s.most) {
		return p.nothing()
	}
	return s
}

// disjoint says that nothing is valid against both a and b. It may not find out.
func (p *schemaParser) disjoint(a, b *schema, depth int) bool {
	p.g.spend(1)
	if depth > 12 {
		return false
	}
	switch {
	case a.kind == never || b.kind == never:
		return true
	case a.kind == anything || b.kind == anything:
		return false
	case a.kind == isRef:
		if s := a.ref.known; s != nil {
			return p.disjoint(s, b, depth+1)
		}
		return false
	case b.kind == isRef:
		return p.disjoint(b, a, depth)
	case a.kind == anyOf || a.kind == oneOf:
		for _, o := range a.opts {
			if !p.disjoint(o, b, depth+1) {
				return false
			}
		}
		return true
	case b.kind == anyOf || b.kind == oneOf:
		return p.disjoint(b, a, depth)
	case a.kind != b.kind:
		return true
	}
	switch a.kind {
	case isBool:
		return a.value != nil && b.value != nil && *a.value != *b.value
	case isNumber:
		return apart(a.lo, b.hi) || apart(b.lo, a.hi)
	case isString:
		if a.longest >= 0 && a.longest < b.shortest || b.longest >= 0 && b.longest < a.shortest {
			return true
		}
		return len(a.words) > 0 && len(b.words) > 0 && p.strangers(a.words, b.words)
	case isArray:
		if a.most >= 0 && a.most < b.least || b.most >= 0 && b.most < a.least {
			return true
		}
		for i := range min(max(a.least, b.least), max(len(a.prefix), len(b.prefix), 1)) {
			if p.disjoint(a.item(i), b.item(i), depth+1) {
				return true
			}
		}
	case isObject:
		for _, s := range []*schema{a, b} {
			for _, name := range s.required {
				if p.disjoint(p.valueOf(a, name), p.valueOf(b, name), depth+1) {
					return true
				}
			}
		}
	}
	return false
}

// apart says that all of the range from lo on is above the range up to hi.
func apart(lo, hi *bound) bool {
	if lo == nil || hi == nil {
		return false
	}
	c := lo.at.Cmp(hi.at)
	return c > 0 || c == 0 && (lo.open || hi.open)
}

// strangers says that no string has all of a and of b.
func (p *schemaParser) strangers(a, b []stringPart) bool {
	if a[0].kind == partLiteral && b[0].kind == partLiteral {
		return a[0].text != b[0].text
	}
	x := p.automatonOf(a[0])
	for _, w := range append(slices.Clone(a[1:]), b...) {
		x = p.g.product(x, p.automatonOf(w), false)
	}
	return x == nil
}
