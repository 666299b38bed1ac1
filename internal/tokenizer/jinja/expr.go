package jinja

import (
	"math"
	"strconv"
	"strings"
)

// tuple parses an expression, or several with commas between: a tuple. cond
// allows x if y else z at its top, which the iterable of a for does not.
func (p *parser) tuple(cond bool) expr {
	one := func() expr {
		if cond {
			return p.expr()
		}
		return p.or()
	}
	x := one()
	if !p.is(tokOp, ",") {
		return x
	}
	t := &listExpr{items: []expr{x}, tuple: true}
	for p.accept(tokOp, ",") {
		if k := p.kind(); k == tokBlockEnd || k == tokVarEnd || p.is(tokOp, ")") {
			break
		}
		t.items = append(t.items, one())
	}
	return t
}

func (p *parser) expr() expr {
	p.enter()
	defer func() { p.depth-- }()
	x := p.or()
	for n := 0; p.accept(tokName, "if"); n++ {
		p.limit(n)
		c := &condExpr{then: x, cond: p.or()}
		if p.accept(tokName, "else") {
			c.els = p.expr()
		}
		x = c
	}
	return x
}

// limit bounds operators in a row, which nest to the left.
func (p *parser) limit(n int) {
	if n > maxChain {
		p.fail("more than %d operators in a row", maxChain)
	}
}

func (p *parser) not() expr {
	if p.accept(tokName, "not") {
		p.enter()
		defer func() { p.depth-- }()
		return &unary{"not", p.not()}
	}
	return p.compare()
}

func (p *parser) compare() expr {
	first := p.additive()
	c := &compare{first: first}
	for {
		p.limit(len(c.ops))
		switch {
		case p.isOneOf(tokOp, " == != < <= > >= "), p.is(tokName, "in"):
			c.ops = append(c.ops, p.next().val)
		case p.is(tokName, "not") && p.toks[p.at+1].is(tokName, "in"):
			p.at += 2
			c.ops = append(c.ops, "not in")
		default:
			if len(c.ops) == 0 {
				return first
			}
			return c
		}
		c.rest = append(c.rest, p.additive())
	}
}

// isOneOf reports whether the current token is one of words, which have blanks around.
func (p *parser) isOneOf(kind tokKind, words string) bool {
	return p.kind() == kind && strings.Contains(words, " "+p.cur().val+" ")
}

// chain parses operators of one rank, which nest to the left.
func (p *parser) chain(kind tokKind, ops string, next func() expr) expr {
	x := next()
	for n := 0; p.isOneOf(kind, ops); n++ {
		p.limit(n)
		x = &binary{p.next().val, x, next()}
	}
	return x
}

// Jinja2's order, in which ~ binds closer than + and -, and a sign closer than **.
func (p *parser) or() expr             { return p.chain(tokName, " or ", p.and) }
func (p *parser) and() expr            { return p.chain(tokName, " and ", p.not) }
func (p *parser) additive() expr       { return p.chain(tokOp, " + - ", p.concat) }
func (p *parser) concat() expr         { return p.chain(tokOp, " ~ ", p.multiplicative) }
func (p *parser) multiplicative() expr { return p.chain(tokOp, " * / // % ", p.power) }
func (p *parser) power() expr          { return p.chain(tokOp, " ** ", func() expr { return p.unary(true) }) }

func (p *parser) unary(filtered bool) expr {
	p.enter()
	defer func() { p.depth-- }()
	var x expr
	if p.isOneOf(tokOp, " - + ") {
		x = &unary{p.next().val, p.unary(false)}
	} else {
		x = p.postfix(p.primary())
	}
	if !filtered {
		return x
	}
	for n := 0; ; n++ {
		p.limit(n)
		switch {
		case p.accept(tokOp, "|"):
			f := p.filterCall(x)
			x = &f
		case p.is(tokName, "is"):
			x = p.test(x)
		case p.is(tokOp, "("): // a call of what a filter returned
			x = &callExpr{x, p.args()}
		default:
			return x
		}
	}
}

func (p *parser) primary() expr {
	t := p.next()
	switch t.kind {
	case tokName:
		switch t.val {
		case "true", "True":
			return &literal{true}
		case "false", "False":
			return &literal{false}
		case "none", "None":
			return &literal{nil}
		case "varargs":
			p.extra.varargs = true
		case "kwargs":
			p.extra.kwargs = true
		}
		return &nameExpr{t.val}
	case tokString:
		parts := []string{t.val}
		for p.kind() == tokString {
			parts = append(parts, p.next().val)
		}
		return &literal{strings.Join(parts, "")}
	case tokInt:
		return &literal{fromDigits(t.val)}
	case tokFloat:
		f, err := strconv.ParseFloat(t.val, 64)
		if err != nil || math.IsInf(f, 0) {
			p.fail("number %s is too large", t.val)
		}
		return &literal{f}
	case tokOp:
		switch t.val {
		case "(":
			if p.accept(tokOp, ")") {
				return &listExpr{tuple: true}
			}
			x := p.tuple(true)
			p.expect(tokOp, ")")
			return x
		case "[":
			l := &listExpr{}
			p.list("]", func() { l.items = append(l.items, p.expr()) })
			return l
		case "{":
			d := &dictExpr{}
			p.list("}", func() {
				d.keys = append(d.keys, p.expr())
				p.expect(tokOp, ":")
				d.vals = append(d.vals, p.expr())
			})
			return d
		}
	}
	p.at--
	p.fail("unexpected %q", t.val)
	return nil
}

func (p *parser) postfix(x expr) expr {
	for n := 0; ; n++ {
		p.limit(n)
		switch {
		case p.accept(tokOp, "."):
			if t := p.cur(); t.kind == tokInt {
				i, _ := strconv.ParseInt(t.val, 10, 64)
				p.at++
				x = &indexExpr{x, &literal{i}}
			} else {
				x = &attrExpr{x, p.name()}
			}
		case p.accept(tokOp, "["):
			x = p.subscript(x)
		case p.is(tokOp, "("):
			x = &callExpr{x, p.args()}
		default:
			return x
		}
	}
}

func (p *parser) subscript(x expr) expr {
	var parts [3]expr
	n := 0
	for {
		switch {
		case p.accept(tokOp, ":"):
			if n++; n > 2 {
				p.fail("slice with more than three parts")
			}
		case p.accept(tokOp, "]"):
			if n > 0 {
				return &sliceExpr{x, parts[0], parts[1], parts[2]}
			}
			if parts[0] == nil {
				p.fail("empty subscript")
			}
			return &indexExpr{x, parts[0]}
		case parts[n] != nil:
			p.fail("unexpected %q in a subscript", p.cur().val)
		default:
			parts[n] = p.expr()
		}
	}
}

func (p *parser) args() callArgs {
	var a callArgs
	p.expect(tokOp, "(")
	p.list(")", func() {
		switch {
		case p.kind() == tokName && p.toks[p.at+1].is(tokOp, "="):
			a.names = append(a.names, p.name())
			p.at++
			a.named = append(a.named, p.expr())
		case len(a.names) > 0:
			p.fail("positional argument after a named one")
		default:
			a.pos = append(a.pos, p.expr())
		}
	})
	return a
}

// filterCall parses name(args) after a | or filter.
func (p *parser) filterCall(x expr) filterExpr {
	f := filterExpr{x: x, name: p.name()}
	for p.accept(tokOp, ".") {
		f.name += "." + p.name()
	}
	if p.is(tokOp, "(") {
		f.args = p.args()
	}
	return f
}

func (p *parser) filterChain() []filterExpr {
	var out []filterExpr
	for p.accept(tokOp, "|") {
		p.limit(len(out))
		out = append(out, p.filterCall(nil))
	}
	return out
}

// test parses is [not] name [args]; one argument needs no parentheses.
func (p *parser) test(x expr) expr {
	p.expect(tokName, "is")
	t := &testExpr{x: x, not: p.accept(tokName, "not")}
	t.name = p.name()
	switch cur := p.cur(); {
	case p.is(tokOp, "("):
		t.args = p.args()
	case cur.kind == tokString, cur.kind == tokInt, cur.kind == tokFloat, p.isOneOf(tokOp, " [ { "),
		cur.kind == tokName && !p.isOneOf(tokName, " else or and is if in not recursive "):
		t.args.pos = []expr{p.postfix(p.primary())}
	}
	return t
}
