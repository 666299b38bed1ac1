package grammar

import (
	"slices"
	"strings"
)

// jsonTexts are the parts of JSON's grammar, for one rule about white space.
type jsonTexts struct {
	g        *builder
	ws       *expr // at each place where white space may be
	comma    *expr
	colon    *expr
	char     *expr // of a string
	chars    *expr // any number of them
	str      *expr
	number   *expr
	yes, no  *expr
	null     *expr
	value    *expr            // any; a call of its rule, made on first use
	whole    *auto            // chars, as an automaton; made on first use
	negative map[string]*expr // the inside of any string but this
	without  []string         // texts that no string has
}

func (g *builder) json(space Whitespace) *jsonTexts {
	if j := g.jsons[space]; j != nil {
		return j
	}
	var ws byteSet
	for _, b := range " \t\n\r" {
		ws.add(byte(b), byte(b))
	}
	n := maxSpace
	if space == Compact {
		n = 0
	}
	j := g.jsonWith(g.rep(g.bytes(ws), 0, n))
	g.jsons[space] = j
	return j
}

func (g *builder) jsonWith(ws *expr) *jsonTexts {
	j := &jsonTexts{g: g, ws: ws, negative: map[string]*expr{}}
	j.comma = g.cat(g.lit(","), ws)
	j.colon = g.cat(ws, g.lit(":"), ws)
	j.char = g.class([]rune{0, maxRune}, asJSON)
	j.chars = g.rep(j.char, 0, -1)
	j.str = j.quoted(j.chars)
	j.yes, j.no, j.null = g.lit("true"), g.lit("false"), g.lit("null")
	digits := g.rep(j.digit('0', '9'), 1, -1)
	var sign, e byteSet
	sign.add('+', '+')
	sign.add('-', '-')
	e.add('e', 'e')
	e.add('E', 'E')
	j.number = g.cat(g.opt(g.lit("-")), j.natural(), g.opt(g.cat(g.lit("."), digits)),
		g.opt(g.cat(g.bytes(e), g.opt(g.bytes(sign)), digits)))
	return j
}

func (j *jsonTexts) quoted(inside *expr) *expr { return j.g.cat(j.g.lit(`"`), inside, j.g.lit(`"`)) }

func (j *jsonTexts) digit(lo, hi byte) *expr {
	if lo > hi {
		return j.g.none
	}
	var set byteSet
	set.add(lo, hi)
	return j.g.bytes(set)
}

// natural is a number from 0 on, without leading zeros.
func (j *jsonTexts) natural() *expr {
	return j.g.alt(j.g.lit("0"), j.g.cat(j.digit('1', '9'), j.g.rep(j.digit('0', '9'), 0, -1)))
}

// any is any JSON value.
func (j *jsonTexts) any() *expr {
	if j.value == nil {
		r := j.g.newRule("value")
		j.value = j.g.call(r)
		j.g.define(r, j.g.alt(
			j.object(), j.array(j.value), j.str, j.number, j.yes, j.no, j.null))
	}
	return j.value
}

// object is any JSON object.
func (j *jsonTexts) object() *expr {
	member := j.g.cat(j.str, j.colon, j.any(), j.ws)
	return j.g.cat(j.g.lit("{"), j.ws, j.g.list(member, j.comma, 0, -1), j.g.lit("}"))
}

func (j *jsonTexts) array(item *expr) *expr {
	return j.g.cat(j.g.lit("["), j.ws, j.g.list(j.g.cat(item, j.ws), j.comma, 0, -1), j.g.lit("]"))
}

// list is lo to hi items with between between two; hi < 0: any number.
func (g *builder) list(item, between *expr, lo, hi int) *expr {
	if hi == 0 || item.kind == exprNone && lo == 0 {
		return g.empty
	}
	most := -1
	if hi > 0 {
		most = hi - 1
	}
	some := g.cat(item, g.rep(g.cat(between, item), max(lo-1, 0), most))
	if lo == 0 {
		return g.opt(some)
	}
	return some
}

// cut takes from strings, keys too, what has one of some texts within.
func (j *jsonTexts) cut(texts []string) {
	j.without = texts
	j.whole = j.g.product(j.g.compile(j.chars), j.g.compile(j.g.around(texts)), true)
	j.chars = j.g.automaton(j.whole, 0, -1)
	j.str = j.quoted(j.chars)
}

// allows reports whether a string may be name.
func (j *jsonTexts) allows(name string) bool {
	text := jsonText(name)
	return !slices.ContainsFunc(j.without, func(s string) bool { return strings.Contains(text, s) })
}

// around is the texts that have one of some within.
func (g *builder) around(texts []string) *expr {
	var all byteSet
	all.add(0, 255)
	any := g.rep(g.bytes(all), 0, -1)
	kids := make([]*expr, len(texts))
	for i, s := range texts {
		kids[i] = g.lit(s)
	}
	return g.cat(any, g.alt(kids...), any)
}

func (g *builder) jsonObject(space Whitespace) *expr { return g.json(space).object() }
