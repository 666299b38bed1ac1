package jinja

import (
	"math"
	"strings"
	"unicode/utf8"
)

func (in *interp) args(c callArgs, sc *scope) args {
	a := args{names: c.names}
	for _, x := range c.pos {
		a.pos = append(a.pos, in.eval(x, sc))
	}
	for _, x := range c.named {
		a.named = append(a.named, in.eval(x, sc))
	}
	return a
}

func (in *interp) call(f value, a args) value {
	fn, ok := f.(*function)
	if !ok {
		in.defined(f)
		in.fail("%s cannot be called", kindOf(f))
	}
	return fn.call(in, a)
}

// eval bounds the stack: the parser's bounds multiply (levels of operators, parentheses,
// macro calls).
func (in *interp) eval(x expr, sc *scope) value {
	in.step()
	in.deeper()
	v := in.evaluate(x, sc)
	in.depth--
	return v
}

// deeper counts a level of recursion, which in.depth-- ends; after a failure nothing more
// is evaluated.
func (in *interp) deeper() {
	if in.depth++; in.depth > maxDepth {
		in.fail("expressions nested deeper than %d", maxDepth)
	}
}

func (in *interp) evaluate(x expr, sc *scope) value {
	switch x := x.(type) {
	case *literal:
		return x.v
	case *nameExpr:
		return in.lookup(x.name, sc)
	case *listExpr:
		in.charge(48 + 16*len(x.items))
		l := &List{items: make([]value, len(x.items)), tuple: x.tuple}
		for i, it := range x.items {
			l.items[i] = in.eval(it, sc)
		}
		return l
	case *dictExpr:
		in.charge(80 + 64*len(x.keys))
		d := &Dict{}
		for i := range x.keys {
			k := in.eval(x.keys[i], sc)
			if !isKey(k) {
				in.fail("%s cannot be a key", kindOf(k))
			}
			in.hashes(k)
			d.set(k, in.eval(x.vals[i], sc))
		}
		return d
	case *unary:
		return in.unary(x.op, in.eval(x.x, sc))
	case *binary:
		l := in.eval(x.l, sc)
		switch {
		case x.op == "and" && !truth(l), x.op == "or" && truth(l):
			return l
		}
		return in.binary(x.op, l, in.eval(x.r, sc))
	case *compare:
		l := in.eval(x.first, sc)
		for i, op := range x.ops {
			r := in.eval(x.rest[i], sc)
			if !in.compareOp(op, l, r) {
				return false
			}
			l = r
		}
		return true
	case *condExpr:
		switch {
		case truth(in.eval(x.cond, sc)):
			return in.eval(x.then, sc)
		case x.els == nil:
			return undefined{what: "the value of an if without else"}
		}
		return in.eval(x.els, sc)
	case *attrExpr:
		return in.attr(in.eval(x.x, sc), x.name)
	case *indexExpr:
		return in.index(in.eval(x.x, sc), in.eval(x.at, sc))
	case *sliceExpr:
		return in.slice(x, sc)
	case *callExpr:
		return in.call(in.eval(x.fn, sc), in.args(x.args, sc))
	case *filterExpr:
		return in.filter(x.name, in.eval(x.x, sc), in.args(x.args, sc))
	case *testExpr:
		return in.test(x.name, in.eval(x.x, sc), in.args(x.args, sc)) != x.not
	}
	in.fail("unknown expression %T", x)
	return nil
}

func (in *interp) compareOp(op string, l, r value) bool {
	switch op {
	case "==":
		return in.equal(l, r, 0)
	case "!=":
		return !in.equal(l, r, 0)
	case "in":
		return in.contains(r, l)
	case "not in":
		return !in.contains(r, l)
	}
	c := in.compare(l, r, 0)
	switch op {
	case "<":
		return c < 0
	case "<=":
		return c <= 0
	case ">":
		return c > 0
	}
	return c >= 0
}

func (in *interp) contains(set, v value) bool {
	switch set := set.(type) {
	case string:
		s, ok := v.(string)
		if !ok {
			in.fail("a string cannot contain %s", kindOf(v))
		}
		in.linear(len(set))
		return strings.Contains(set, s)
	case *Dict:
		in.hashes(v)
		_, ok := set.get(v)
		return ok
	}
	for _, x := range in.items(set) {
		if in.equal(x, v, 0) {
			return true
		}
	}
	return false
}

// hashes accounts for a lookup of key.
func (in *interp) hashes(key value) {
	if s, ok := key.(string); ok {
		in.linear(len(s))
	}
}

// attr is v.name: what Python's getattr finds, else the item of that key.
func (in *interp) attr(v value, name string) value {
	in.defined(v)
	if f := method(v, name); f != nil {
		return f
	}
	switch v := v.(type) {
	case *namespace:
		if x, ok := v.vars[name]; ok {
			return x
		}
	case *loop:
		if get := loopAttrs[name]; get != nil {
			return get(v)
		}
	case *Dict:
		if x, ok := v.get(name); ok {
			return x
		}
	case *function:
		if name == "name" {
			return v.name
		}
	}
	return undefined{what: name, of: kindOf(v)}
}

// index is v[at]: the item, else the attribute of that name.
func (in *interp) index(v, at value) value {
	in.hashes(at)
	in.defined(v)
	switch v := v.(type) {
	case *Dict:
		if x, ok := v.get(at); ok {
			return x
		}
	case *List:
		if i, _, isInt, _ := number(at); isInt {
			if i < 0 {
				i += int64(len(v.items))
			}
			if i >= 0 && i < int64(len(v.items)) {
				return v.items[i]
			}
		}
	case string:
		if i, _, isInt, _ := number(at); isInt {
			in.charge(len(v) / 4)
			if n := int64(utf8.RuneCountInString(v)); i < 0 {
				i += n
			}
			for _, r := range v {
				if i == 0 {
					return string(r)
				}
				i--
			}
		}
	}
	if s, ok := at.(string); ok {
		return in.attr(v, s)
	}
	return undefined{what: "an item", of: kindOf(v)}
}

// runeAt returns where the character n of s begins, or the end of s.
func runeAt(s string, n int) int {
	for i := range s {
		if n == 0 {
			return i
		}
		n--
	}
	return len(s)
}

// slice is v[from:to:step] of a list or a string.
func (in *interp) slice(x *sliceExpr, sc *scope) value {
	v := in.eval(x.x, sc)
	part := func(e expr, def int) int {
		if e == nil {
			return def
		}
		n := in.eval(e, sc)
		if n == nil {
			return def
		}
		i, _, isInt, _ := number(n)
		if !isInt {
			in.fail("slice with %s", kindOf(n))
		}
		return int(i)
	}
	step, from, to := part(x.step, 1), math.MinInt, math.MaxInt
	if step == 0 {
		in.fail("slice with step 0")
	}
	if step < 0 {
		from, to = to, from
	}
	from, to = part(x.from, from), part(x.to, to)
	s, isString := v.(string)
	l, isList := v.(*List)
	if !isString && !isList {
		in.defined(v)
		in.fail("%s cannot be sliced", kindOf(v))
	}
	n := in.length(v)
	clamp := func(i int) int { // as Python's slice.indices
		if i < 0 {
			i += n
		}
		if step < 0 {
			return min(max(i, -1), n-1)
		}
		return min(max(i, 0), n)
	}
	a, b := clamp(from), clamp(to)
	if isString && step == 1 {
		b = max(a, b)
		if n == len(s) { // ASCII
			return s[a:b]
		}
		return s[runeAt(s, a):runeAt(s, b)]
	}
	src := in.items(v)
	in.charge(16 * n)
	out := []value{}
	for i := a; step > 0 && i < b || step < 0 && i > b; {
		out = append(out, src[i])
		if step > n || step < -n {
			break
		}
		i += step
	}
	if isList {
		return &List{items: out, tuple: l.tuple}
	}
	var sb strings.Builder
	for _, c := range out {
		sb.WriteString(c.(string))
	}
	return sb.String()
}
