package jinja

import (
	"slices"
	"strings"
)

// builtin is a filter, test, method or function.
type builtin struct {
	name   string
	params []param
	raw    bool // it reads the arguments as the call has them
	do     does
}

// does computes a builtin's result from the value it is applied to (none for a function) and
// its arguments: one per parameter, in order.
type does = func(in *interp, v value, a args) value

// table makes builtins of rows. A row's key is a signature as a macro has it, with one name
// or several: "length count()", "replace(old, new, count=none)". Without parentheses the
// builtin reads raw arguments.
func table(rows map[string]does) map[string]*builtin {
	t := make(map[string]*builtin, len(rows))
	for signature, do := range rows {
		names, list, ok := strings.Cut(signature, "(")
		var params []param
		if ok {
			p := &parser{toks: lex("{{(" + list + "}}"), at: 1}
			params = p.params()
		}
		for name := range strings.FieldsSeq(names) {
			t[name] = &builtin{name, params, !ok, do}
		}
	}
	return t
}

func (b *builtin) call(in *interp, v value, a args) value {
	if b.raw {
		return b.do(in, v, a)
	}
	bound := a.bind(in, b.name, b.params)
	for i, p := range b.params {
		if bound[i] == (absent{}) && p.def != nil {
			bound[i] = in.eval(p.def, nil)
		}
	}
	return b.do(in, v, args{pos: bound})
}

// filter is v | name(a).
func (in *interp) filter(name string, v value, a args) value {
	b := filters[name]
	if b == nil {
		in.fail("no filter %q", name)
	}
	return b.call(in, v, a)
}

// test is v is name(a).
func (in *interp) test(name string, v value, a args) bool {
	b := tests[name]
	if b == nil {
		in.fail("no test %q", name)
	}
	return b.call(in, v, a).(bool)
}

// of makes a function of a builtin and the value it is applied to; nil for no builtin.
func (b *builtin) of(v value) *function {
	if b == nil {
		return nil
	}
	return &function{b.name, func(in *interp, a args) value { return b.call(in, v, a) }}
}

// onText is does for a string.
type onText = func(in *interp, s string, a args) value

// text makes a builtin of one that works on a string.
func text(do onText) does {
	return func(in *interp, v value, a args) value {
		s := in.str(v)
		in.charge(len(s))
		return do(in, s, a)
	}
}

// args are the evaluated arguments of a call.
type args struct {
	pos   []value
	names []string
	named []value
}

// absent stands for an argument that was not given.
type absent struct{}

func (a *args) set(name string, v value) {
	a.names, a.named = append(a.names, name), append(a.named, v)
}

func (a *args) take(name string) (value, bool) {
	i := slices.Index(a.names, name)
	if i < 0 {
		return nil, false
	}
	v := a.named[i]
	a.names = slices.Delete(slices.Clone(a.names), i, i+1)
	a.named = slices.Delete(slices.Clone(a.named), i, i+1)
	return v, true
}

// bind orders the arguments of a call by parameter; those not given are absent.
func (a args) bind(in *interp, fn string, params []param) []value {
	if len(a.pos) > len(params) {
		in.fail("%s takes at most %d arguments, have %d", fn, len(params), len(a.pos))
	}
	out := slices.Grow(slices.Clone(a.pos), len(params)-len(a.pos))
	for len(out) < len(params) {
		out = append(out, absent{})
	}
	for i, name := range a.names {
		at := slices.IndexFunc(params, func(p param) bool { return p.name == name })
		if at < 0 {
			in.fail("%s has no argument %s", fn, name)
		}
		if out[at] != (absent{}) {
			in.fail("%s has two values for %s", fn, name)
		}
		out[at] = a.named[i]
	}
	return out
}

// text returns v if it is a string, else fails.
func (in *interp) text(v value) string {
	s, ok := v.(string)
	if !ok {
		if v == (absent{}) {
			in.fail("argument missing")
		}
		in.fail("want a string, have %s", kindOf(v))
	}
	return s
}

// integer returns v if it is an integer or a boolean, else fails.
func (in *interp) integer(v value) int64 {
	i, _, isInt, _ := number(v)
	if !isInt {
		in.fail("want an integer, have %s", kindOf(v))
	}
	return i
}
