package jinja

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// interp is one rendering.
type interp struct {
	globals map[string]value
	out     *strings.Builder
	steps   int
	bytes   int
	calls   int // depth of macro calls
	depth   int // of expressions, over all macro calls
	line    int
	now     func() time.Time

	ctx   context.Context
	check int // step count of the next look at ctx
}

type scope struct {
	vars   map[string]value
	parent *scope
}

func (in *interp) fail(format string, args ...any) {
	msg := fmt.Sprintf(format, args...)
	if len(msg) > maxMessage {
		msg = strings.ToValidUTF8(msg[:maxMessage], "") + "…"
	}
	panic(&Error{Line: in.line, Msg: msg})
}

// defined fails if v is undefined.
func (in *interp) defined(v value) {
	u, ok := v.(undefined)
	switch {
	case ok && u.of != "":
		in.fail("%s of %s is undefined", u.what, u.of)
	case ok:
		in.fail("%s is undefined", u.what)
	}
}

func (in *interp) step() { in.take(1) }

// linear accounts for an operation over n bytes that allocates nothing.
func (in *interp) linear(n int) { in.take(n / 64) }

func (in *interp) take(steps int) {
	if in.steps -= steps; in.steps >= in.check {
		return
	}
	if in.steps < 0 {
		in.fail("rendering takes too many steps")
	}
	if err := in.ctx.Err(); err != nil {
		panic(stopped{err})
	}
	in.check = max(0, in.steps-checkSteps)
}

// charge accounts for n bytes about to be allocated.
func (in *interp) charge(n int) {
	if in.bytes -= n; in.bytes < 0 {
		in.fail("rendering takes too much memory")
	}
}

func (in *interp) write(s string) {
	in.charge(len(s))
	in.out.WriteString(s)
}

func (in *interp) lookup(name string, sc *scope) value {
	for ; sc != nil; sc = sc.parent {
		if v, ok := sc.vars[name]; ok {
			return v
		}
	}
	if v, ok := in.globals[name]; ok {
		return v
	}
	if f := globals[name].of(nil); f != nil {
		return f
	}
	return undefined{what: name}
}

type flow uint8

const (
	goOn flow = iota
	breakLoop
	nextRound
)

func (in *interp) exec(body []stmt, sc *scope) flow {
	for _, s := range body {
		in.step()
		if f := in.stmt(s, sc); f != goOn {
			return f
		}
	}
	return goOn
}

func (in *interp) stmt(s stmt, sc *scope) flow {
	switch s := s.(type) {
	case *textStmt:
		in.write(s.text)
	case *outStmt:
		in.line = s.line
		in.write(in.str(in.eval(s.x, sc)))
	case *ifStmt:
		for i := range s.arms {
			in.line = s.arms[i].line
			if truth(in.eval(s.arms[i].cond, sc)) {
				return in.exec(s.arms[i].body, sc)
			}
		}
		return in.exec(s.els, sc)
	case *forStmt:
		return in.loop(s, sc)
	case *setStmt:
		in.line = s.line
		var v value
		if s.x != nil {
			v = in.eval(s.x, sc)
		} else {
			v = in.filtered(s.filters, in.capture(s.body, inner(sc)), sc)
		}
		in.assign(s.target, v, sc)
	case *macroStmt:
		sc.vars[s.name] = in.macro(s, sc)
	case *callStmt:
		in.line = s.line
		a := in.args(s.call.args, sc)
		a.set("caller", in.macro(s.caller, sc))
		in.write(in.str(in.call(in.eval(s.call.fn, sc), a)))
	case *filterStmt:
		in.line = s.line
		in.write(in.str(in.filtered(s.filters, in.capture(s.body, inner(sc)), sc)))
	case *withStmt:
		in.line = s.line
		in2 := inner(sc)
		for i, x := range s.values {
			in2.vars[s.names[i]] = in.eval(x, sc)
		}
		return in.exec(s.body, in2)
	case *loopCtl:
		if s.brk {
			return breakLoop
		}
		return nextRound
	}
	return goOn
}

func inner(sc *scope) *scope { return &scope{vars: map[string]value{}, parent: sc} }

// capture returns body's output.
func (in *interp) capture(body []stmt, sc *scope) string {
	outer := in.out
	in.out = &strings.Builder{}
	in.exec(body, sc)
	s := in.out.String()
	in.out = outer
	return s
}

func (in *interp) filtered(filters []filterExpr, v value, sc *scope) value {
	for i := range filters {
		v = in.filter(filters[i].name, v, in.args(filters[i].args, sc))
	}
	return v
}

func (in *interp) assign(t target, v value, sc *scope) {
	if t.attr != "" {
		ns, ok := in.lookup(t.names[0], sc).(*namespace)
		if !ok {
			in.fail("%s is not a namespace", t.names[0])
		}
		in.charge(32)
		ns.vars[t.attr] = v
		return
	}
	if !t.tuple {
		sc.vars[t.names[0]] = v
		return
	}
	items := in.items(v)
	if len(items) != len(t.names) {
		in.fail("%d values for %d names", len(items), len(t.names))
	}
	for i, n := range t.names {
		sc.vars[n] = items[i]
	}
}

// loop is the variable loop of a for statement.
type loop struct {
	items []value
	at    int
	last  *List // argument of changed()
}

func (in *interp) loop(s *forStmt, sc *scope) flow {
	in.line = s.line
	items := in.items(in.eval(s.iter, sc))
	if s.cond != nil {
		var kept []value
		for _, v := range items {
			in.step()
			body := inner(sc)
			in.assign(s.target, v, body)
			if truth(in.eval(s.cond, body)) {
				kept = append(kept, v)
			}
		}
		items = kept
	}
	if len(items) == 0 {
		return in.exec(s.els, sc)
	}
	l := &loop{items: items}
	for i, v := range items {
		in.step()
		l.at = i
		body := inner(sc)
		body.vars["loop"] = l
		in.assign(s.target, v, body)
		if in.exec(s.body, body) == breakLoop {
			break
		}
	}
	return goOn
}

// loopAttrs are the attributes of loop that are not methods.
var loopAttrs = map[string]func(l *loop) value{
	"index":     func(l *loop) value { return int64(l.at + 1) },
	"index0":    func(l *loop) value { return int64(l.at) },
	"revindex":  func(l *loop) value { return int64(len(l.items) - l.at) },
	"revindex0": func(l *loop) value { return int64(len(l.items) - l.at - 1) },
	"first":     func(l *loop) value { return l.at == 0 },
	"last":      func(l *loop) value { return l.at == len(l.items)-1 },
	"length":    func(l *loop) value { return int64(len(l.items)) },
	"depth":     func(*loop) value { return int64(1) }, // of recursion
	"depth0":    func(*loop) value { return int64(0) },
	"previtem":  func(l *loop) value { return l.item(l.at-1, "previtem") },
	"nextitem":  func(l *loop) value { return l.item(l.at+1, "nextitem") },
}

func (l *loop) item(i int, name string) value {
	if i < 0 || i >= len(l.items) {
		return undefined{what: name, of: "loop"}
	}
	return l.items[i]
}

// macro makes a macro callable; it sees the scope in which it was defined.
func (in *interp) macro(m *macroStmt, sc *scope) *function {
	in.charge(512) // with that scope
	return &function{m.name, func(in *interp, a args) value {
		if in.calls++; in.calls > maxNest {
			in.fail("macros called deeper than %d", maxNest)
		}
		in.take(len(m.params) * (1 + len(a.names)/8)) // to bind them
		body := inner(sc)
		if caller, ok := a.take("caller"); ok {
			body.vars["caller"] = caller
		}
		if m.extra.varargs {
			more := a.pos[min(len(m.params), len(a.pos)):]
			a.pos = a.pos[:len(a.pos)-len(more)]
			body.vars["varargs"] = &List{items: more, tuple: true}
		}
		if m.extra.kwargs {
			more, known := &Dict{}, args{pos: a.pos}
			for i, name := range a.names {
				if slices.ContainsFunc(m.params, func(p param) bool { return p.name == name }) {
					known.set(name, a.named[i])
				} else {
					in.charge(64)
					more.set(name, a.named[i])
				}
			}
			a, body.vars["kwargs"] = known, more
		}
		for i, v := range a.bind(in, m.name, m.params) {
			p := m.params[i]
			switch {
			case v != (absent{}):
			case p.def != nil:
				v = in.eval(p.def, body)
			default:
				v = undefined{what: p.name}
			}
			body.vars[p.name] = v
		}
		s := in.capture(m.body, body)
		in.calls--
		return s
	}}
}
