package grammar

import (
	"fmt"
	"unicode/utf8"
)

// spelling is how characters become bytes.
type spelling uint8

const (
	asUTF8 spelling = iota
	asJSON          // inside a JSON string: quotes, backslashes and control characters escaped
)

// class is one character of the ranges.
func (g *builder) class(ranges []rune, how spelling) *expr {
	key := string(rune(how)) + string(ranges)
	e := g.chars[key]
	if e == nil {
		e = g.newClass(normal(ranges), how)
		g.chars[key] = e
	}
	return e
}

func (g *builder) newClass(ranges []rune, how spelling) *expr {
	if how == asUTF8 {
		return g.utf8(ranges)
	}
	plain := both(ranges, []rune{0x20, 0x21, 0x23, 0x5b, 0x5d, 0x7e, 0x80, maxRune})
	kids := []*expr{g.utf8(plain)}
	for _, s := range jsonShort {
		if within(ranges, s.r) {
			kids = append(kids, g.lit(s.text))
		}
	}
	control := both(ranges, []rune{0, 0x1f, 0x7f, 0x7f})
	for i := 0; i < len(control); i += 2 {
		for r := control[i]; r <= control[i+1]; r++ {
			kids = append(kids, g.cat(g.lit(`\u00`), g.hexDigit(byte(r>>4)), g.hexDigit(byte(r&15))))
		}
	}
	return g.alt(kids...)
}

var jsonShort = []struct {
	r    rune
	text string
}{
	{'"', `\"`}, {'\\', `\\`}, {'\n', `\n`}, {'\r', `\r`}, {'\t', `\t`}, {'\b', `\b`}, {'\f', `\f`},
}

func (g *builder) hexDigit(v byte) *expr {
	var set byteSet
	if v < 10 {
		set.add('0'+v, '0'+v)
	} else {
		set.add('a'+v-10, 'a'+v-10)
		set.add('A'+v-10, 'A'+v-10)
	}
	return g.bytes(set)
}

func within(ranges []rune, r rune) bool {
	for i := 0; i < len(ranges); i += 2 {
		if r >= ranges[i] && r <= ranges[i+1] {
			return true
		}
	}
	return false
}

// both is what is in a and in b.
func both(a, b []rune) []rune {
	var out []rune
	for i, j := 0, 0; i < len(a) && j < len(b); {
		lo, hi := max(a[i], b[j]), min(a[i+1], b[j+1])
		if lo <= hi {
			out = append(out, lo, hi)
		}
		if a[i+1] < b[j+1] {
			i += 2
		} else {
			j += 2
		}
	}
	return out
}

// utf8 is one character of the ranges, in UTF-8: by length, then as a tree of bytes in which
// equal branches are one.
func (g *builder) utf8(ranges []rune) *expr {
	lengths := []struct {
		from, to rune
		lead     byte // what the first byte has above its bits of the character
		rest     int  // continuation bytes
	}{
		{0, 0x7f, 0, 0}, {0x80, 0x7ff, 0xc0, 1}, {0x800, 0xffff, 0xe0, 2}, {0x10000, maxRune, 0xf0, 3},
	}
	var kids []*expr
	for _, l := range lengths {
		part := both(ranges, []rune{l.from, l.to})
		if len(part) > 0 {
			kids = append(kids, g.utf8Tree(part, l.lead, l.rest))
		}
	}
	return g.alt(kids...)
}

// utf8Tree is one byte, whose bits above 6*rest are those of a character in ranges, and rest
// continuation bytes.
func (g *builder) utf8Tree(ranges []rune, lead byte, rest int) *expr {
	shift := uint(6 * rest)
	if rest == 0 {
		var set byteSet
		for i := 0; i < len(ranges); i += 2 {
			set.add(lead+byte(ranges[i]), lead+byte(ranges[i+1]))
		}
		return g.bytes(set)
	}
	var order []*expr
	heads := map[*expr]*byteSet{}
	low := rune(1)<<shift - 1
	add := func(from, to rune, tail *expr) {
		if heads[tail] == nil {
			heads[tail] = &byteSet{}
			order = append(order, tail)
		}
		heads[tail].add(lead+byte(from>>shift), lead+byte(to>>shift))
	}
	full := g.utf8Tree([]rune{0, low}, 0x80, rest-1)
	for i := 0; i < len(ranges); {
		block := ranges[i] >> shift
		if ranges[i]&low == 0 && ranges[i+1]-ranges[i] >= low {
			last := (ranges[i+1]+1)>>shift - 1 // the last whole block
			add(block<<shift, last<<shift, full)
			ranges[i] = (last + 1) << shift
			if ranges[i] > ranges[i+1] {
				i += 2
			}
			continue
		}
		var part []rune
		for i < len(ranges) && ranges[i]>>shift == block {
			to := min(ranges[i+1], block<<shift|low)
			part = append(part, ranges[i]&low, to&low)
			if to == ranges[i+1] {
				i += 2
				continue
			}
			ranges[i] = to + 1
			break
		}
		add(block<<shift, block<<shift, g.utf8Tree(part, 0x80, rest-1))
	}
	kids := make([]*expr, len(order))
	for i, tail := range order {
		kids[i] = g.cat(g.bytes(*heads[tail]), tail)
	}
	return g.alt(kids...)
}

// whole is the texts that e matches from beginning to end.
func (g *builder) whole(e *re, how spelling) *expr {
	return g.regex(trail(lead(e, nil), nil), how)
}

// search is the texts that have a match of e somewhere.
func (g *builder) search(e *re, how spelling) *expr {
	any := &re{kind: reRep, kids: []*re{{kind: reClass, ranges: []rune{0, maxRune}}}, lo: 0, hi: -1}
	return g.regex(trail(lead(e, any), any), how)
}

// nothing matches the empty text.
func nothing() *re { return &re{kind: reCat} }

// lead puts any in front of e, but where e begins with ^. It is about the first of what e
// consists of: further inside, ^ can be met by nothing but an empty text in front, which
// regex refuses.
func lead(e, any *re) *re {
	switch e.kind {
	case reBegin:
		return nothing()
	case reAlt:
		kids := make([]*re, len(e.kids))
		for i, k := range e.kids {
			kids[i] = lead(k, any)
		}
		return &re{kind: reAlt, kids: kids}
	case reCat:
		for i, k := range e.kids {
			if k.kind == reEnd {
				continue // $^: both are met by the empty text
			}
			if !anchored(k) {
				break
			}
			kids := append(append([]*re(nil), e.kids[:i]...), lead(k, any))
			rest := e.kids[i+1:]
			for len(rest) > 0 && k.kind == reBegin && anchored(rest[0]) { // ^^
				kids = append(kids, lead(rest[0], nil))
				rest = rest[1:]
			}
			return &re{kind: reCat, kids: append(kids, rest...)}
		}
	case reRep:
		if anchored(e.kids[0]) && e.hi == 1 { // (^a)?
			return &re{kind: reAlt, kids: []*re{lead(e.kids[0], any), lead(nothing(), any)}}
		}
	}
	if any == nil {
		return e
	}
	return &re{kind: reCat, kids: []*re{any, e}}
}

func trail(e, any *re) *re {
	switch e.kind {
	case reEnd:
		return nothing()
	case reAlt:
		kids := make([]*re, len(e.kids))
		for i, k := range e.kids {
			kids[i] = trail(k, any)
		}
		return &re{kind: reAlt, kids: kids}
	case reCat:
		if n := len(e.kids); n > 0 && anchored(e.kids[n-1]) {
			last := e.kids[n-1]
			kids := append([]*re(nil), e.kids[:n-1]...)
			for last.kind == reEnd && len(kids) > 0 && kids[len(kids)-1].kind == reEnd { // $$
				kids = kids[:len(kids)-1]
			}
			return &re{kind: reCat, kids: append(kids, trail(last, any))}
		}
	case reRep:
		if anchored(e.kids[0]) && e.hi == 1 {
			return &re{kind: reAlt, kids: []*re{trail(e.kids[0], any), trail(nothing(), any)}}
		}
	}
	if any == nil {
		return e
	}
	return &re{kind: reCat, kids: []*re{e, any}}
}

// anchored says whether there is an anchor anywhere in e.
func anchored(e *re) bool {
	if e.anchors == 0 {
		e.anchors = 1
		if e.kind == reBegin || e.kind == reEnd {
			e.anchors = 2
		}
		for _, k := range e.kids {
			if anchored(k) {
				e.anchors = 2
			}
		}
	}
	return e.anchors == 2
}

// regex is the node of e, in which anchors are left only where they cannot be met, or not simply.
func (g *builder) regex(e *re, how spelling) *expr {
	switch e.kind {
	case reClass:
		return g.class(e.ranges, how)
	case reAlt:
		kids := make([]*expr, len(e.kids))
		for i, k := range e.kids {
			kids[i] = g.regex(k, how)
		}
		return g.alt(kids...)
	case reCat:
		kids := make([]*expr, len(e.kids))
		for i, k := range e.kids {
			kids[i] = g.regex(k, how)
		}
		return g.cat(kids...)
	case reRep:
		return g.rep(g.regex(e.kids[0], how), e.lo, e.hi)
	}
	g.refuse("regular expression: ^ and $ are supported at the ends only")
	return nil
}

// jsonText is s as a JSON string's inside, in the one spelling that most writers use.
func jsonText(s string) string {
	var out []byte
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			out = append(out, '\\', byte(r))
		case r == '\n':
			out = append(out, `\n`...)
		case r == '\r':
			out = append(out, `\r`...)
		case r == '\t':
			out = append(out, `\t`...)
		case r == '\b':
			out = append(out, `\b`...)
		case r == '\f':
			out = append(out, `\f`...)
		case r < 0x20:
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			out = utf8.AppendRune(out, r)
		}
	}
	return string(out)
}

// jsonSpelled is s as a JSON string's inside, in all spellings that a JSON string may have here.
func (g *builder) jsonSpelled(s string) *expr {
	if oneSpelling(s) {
		return g.lit(jsonText(s))
	}
	kids := make([]*expr, 0, len(s))
	for _, r := range s {
		kids = append(kids, g.class([]rune{r, r}, asJSON))
	}
	return g.cat(kids...)
}
