package jinja

import (
	"fmt"
	"slices"
)

type parser struct {
	toks  []token
	at    int
	depth int
	loops int // for statements around, for break and continue
	extra extra
}

func (p *parser) fail(format string, args ...any) {
	panic(&Error{Line: p.cur().line, Msg: fmt.Sprintf(format, args...)})
}

func (p *parser) cur() *token   { return &p.toks[p.at] }
func (p *parser) kind() tokKind { return p.toks[p.at].kind }

func (p *parser) next() token {
	t := p.toks[p.at]
	if t.kind != tokEOF {
		p.at++
	}
	return t
}

// is reports whether the current token is the operator or name val.
func (p *parser) is(kind tokKind, val string) bool { return p.cur().is(kind, val) }

func (p *parser) accept(kind tokKind, val string) bool {
	if p.is(kind, val) {
		p.at++
		return true
	}
	return false
}

func (p *parser) expect(kind tokKind, val string) {
	if !p.accept(kind, val) {
		p.fail("want %q, have %q", val, p.cur().val)
	}
}

func (p *parser) name() string {
	if p.kind() != tokName {
		p.fail("want a name, have %q", p.cur().val)
	}
	return p.next().val
}

// tagEnd takes the end of a tag: tokBlockEnd or tokVarEnd.
func (p *parser) tagEnd(kind tokKind) {
	if p.kind() != kind {
		p.fail("want the end of the tag, have %q", p.cur().val)
	}
	p.at++
}

func (p *parser) blockEnd() { p.tagEnd(tokBlockEnd) }

// list takes what each takes, with commas between, up to a closing bracket.
func (p *parser) list(closing string, each func()) {
	for first := true; !p.accept(tokOp, closing); first = false {
		if !first {
			p.expect(tokOp, ",")
			if p.accept(tokOp, closing) {
				return
			}
		}
		each()
	}
}

func (p *parser) enter() {
	if p.depth++; p.depth > maxNest {
		p.fail("nested deeper than %d", maxNest)
	}
}

// body parses statements up to a tag that begins with one of ends, of which it
// takes the {% and the word; or, without ends, to the end of the template.
func (p *parser) body(ends ...string) []stmt {
	p.enter()
	defer func() { p.depth-- }()
	var out []stmt
	for {
		switch t := p.cur(); t.kind {
		case tokText:
			out = append(out, &textStmt{t.val})
			p.at++
		case tokVarBegin:
			p.at++
			x := p.tuple(true)
			p.tagEnd(tokVarEnd)
			out = append(out, &outStmt{x, t.line})
		case tokBlockBegin:
			p.at++
			word := p.cur().val
			if p.kind() != tokName {
				p.fail("want the name of a statement, have %q", word)
			}
			if slices.Contains(ends, word) {
				return out
			}
			if s := p.statement(); s != nil {
				out = append(out, s)
			}
		default:
			if len(ends) > 0 {
				p.fail("want %q, have %q", ends[0], t.val)
			}
			return out
		}
	}
}

// block parses the end of a tag, statements, and the tag of one word that ends them.
func (p *parser) block(end string) []stmt {
	p.blockEnd()
	body := p.body(end)
	p.at++
	p.blockEnd()
	return body
}

func (p *parser) statement() stmt {
	line := p.cur().line
	switch word := p.next().val; word {
	case "if":
		return p.ifStmt()
	case "for":
		return p.forStmt(line)
	case "set":
		return p.setStmt(line)
	case "macro":
		m := &macroStmt{name: p.name(), params: p.params()}
		p.macroBody(m, "endmacro")
		return m
	case "call":
		m := &macroStmt{name: "caller"}
		if p.is(tokOp, "(") {
			m.params = p.params()
		}
		call, ok := p.expr().(*callExpr)
		if !ok {
			p.fail("call wants a call")
		}
		p.macroBody(m, "endcall")
		return &callStmt{call, m, line}
	case "filter":
		s := &filterStmt{filters: []filterExpr{p.filterCall(nil)}, line: line}
		s.filters = append(s.filters, p.filterChain()...)
		s.body = p.block("endfilter")
		return s
	case "with":
		s := &withStmt{line: line}
		for p.kind() != tokBlockEnd {
			if len(s.names) > 0 {
				p.expect(tokOp, ",")
			}
			s.names = append(s.names, p.name())
			p.expect(tokOp, "=")
			s.values = append(s.values, p.expr())
		}
		s.body = p.block("endwith")
		return s
	case "generation": // marks an assistant's text for training; ignored here
		return &ifStmt{arms: []ifArm{{cond: &literal{true}, body: p.block("endgeneration"), line: line}}}
	case "break", "continue":
		if p.loops == 0 {
			p.fail("%s outside a loop", word)
		}
		p.blockEnd()
		return &loopCtl{word == "break"}
	default:
		p.fail("unknown statement %q", word)
		return nil
	}
}

// macroBody parses the body of a macro, in which an enclosing loop does not count.
func (p *parser) macroBody(m *macroStmt, end string) {
	loops, outer := p.loops, p.extra
	p.loops, p.extra = 0, extra{}
	m.body = p.block(end)
	m.extra = p.extra
	p.loops, p.extra = loops, extra{outer.varargs || m.extra.varargs, outer.kwargs || m.extra.kwargs}
}

func (p *parser) ifStmt() stmt {
	s := &ifStmt{}
	for {
		arm := ifArm{line: p.cur().line, cond: p.tuple(true)}
		p.blockEnd()
		arm.body = p.body("elif", "else", "endif")
		s.arms = append(s.arms, arm)
		switch p.next().val {
		case "else":
			s.els = p.block("endif")
			return s
		case "endif":
			p.blockEnd()
			return s
		}
	}
}

func (p *parser) forStmt(line int) stmt {
	s := &forStmt{line: line, target: p.target(false)}
	p.expect(tokName, "in")
	s.iter = p.tuple(false)
	if p.accept(tokName, "if") {
		s.cond = p.expr()
	}
	if p.is(tokName, "recursive") {
		p.fail("recursive loops are not supported")
	}
	p.blockEnd()
	p.loops++
	s.body = p.body("else", "endfor")
	p.loops--
	if p.next().val == "else" {
		s.els = p.block("endfor")
	} else {
		p.blockEnd()
	}
	return s
}

func (p *parser) target(attr bool) target {
	var t target
	paren := p.accept(tokOp, "(")
	for {
		t.names = append(t.names, p.name())
		if attr && len(t.names) == 1 && p.accept(tokOp, ".") {
			t.attr = p.name()
			break
		}
		if !p.accept(tokOp, ",") {
			break
		}
		t.tuple = true
		if p.kind() != tokName || p.is(tokName, "in") {
			break
		}
	}
	if paren {
		p.expect(tokOp, ")")
	}
	return t
}

func (p *parser) setStmt(line int) stmt {
	s := &setStmt{target: p.target(true), line: line}
	if p.accept(tokOp, "=") {
		s.x = p.tuple(true)
		p.blockEnd()
		return s
	}
	s.filters = p.filterChain()
	s.body = p.block("endset")
	return s
}

func (p *parser) params() []param {
	p.expect(tokOp, "(")
	var out []param
	p.list(")", func() {
		pr := param{name: p.name()}
		if p.accept(tokOp, "=") {
			pr.def = p.expr()
		}
		out = append(out, pr)
	})
	return out
}
