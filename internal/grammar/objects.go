package grammar

import "slices"

// objectForm is how an object is written.
type objectForm struct {
	open, between, end *expr                                 // before all, between two members, behind all
	member             func(name string, v *schema) *expr    // none: there can be no such member
	extras             func(s *schema, names []string) *expr // a member whose name is not in names
}

func (p *schemaParser) objectOf(s *schema) *expr {
	j := p.j
	return p.membersOf(s, objectForm{
		open: p.g.cat(p.g.lit("{"), j.ws), between: j.comma, end: p.g.lit("}"), extras: p.extras,
		member: func(name string, v *schema) *expr {
			if !j.allows(name) {
				return p.g.none
			}
			return p.g.cat(j.quoted(p.g.lit(jsonText(name))), j.colon, p.generate(v), j.ws)
		},
	})
}

// membersOf is an object in some form.
func (p *schemaParser) membersOf(s *schema, form objectForm) *expr {
	g := p.g
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
		e := form.member(name, v)
		if e.kind == exprNone && !required[name] {
			return
		}
		members = append(members, member{e, required[name]})
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
	extra := form.extras(s, names)

	// How many members there are matters if it is bounded: open[c] and more[c] are what may
	// come in front of a member, and behind one, once c have been. From the last member on.
	count := s.least
	if s.most >= 0 {
		count = s.most
	}
	g.spend(2 * count)
	end := form.end
	open, more := make([]*expr, count+1), make([]*expr, count+1)
	for c := range count + 1 {
		g.spend(1)
		most := -1
		if s.most >= 0 {
			most = s.most - c
		}
		open[c] = g.none
		if most != 0 && extra.kind != exprNone {
			open[c] = g.cat(g.list(extra, form.between, max(s.least-c, 1), most), end)
		}
		more[c] = g.cat(form.between, open[c])
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
			nextMore[c] = g.cat(form.between, nextOpen[c])
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
	return g.cat(form.open, inside)
}

// extras is a member whose name is not in names: it matches a pattern, or is any other.
func (p *schemaParser) extras(s *schema, names []string) *expr {
	g, j := p.g, p.j
	var kids []*expr
	var taken *auto
	apart := len(s.patterns) > 0 || j.without != nil // by automata
	if apart && len(names) > 0 {
		words := make([]*expr, len(names))
		for i, n := range names {
			words[i] = g.jsonSpelled(n)
		}
		taken = g.compile(g.alt(words...))
	}
	var left *auto // what matches no pattern; nil: nothing
	if apart {
		left = g.product(p.anyChars(), taken, true)
	}
	for _, pat := range s.patterns {
		a := p.automatonOf(stringPart{partPattern, pat.name})
		if a == nil {
			continue
		}
		left = g.product(left, a, true)
		if v := p.generate(pat.s); v.kind != exprNone {
			name := g.automaton(g.product(p.within(a), taken, true), 0, -1)
			kids = append(kids, g.cat(j.quoted(name), j.colon, v, j.ws))
		}
	}
	v := p.generate(s.other(s.others))
	if v.kind == exprNone {
		return g.alt(kids...)
	}
	name := j.chars
	if apart {
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
