package jinja

import "strings"

var tests = table(map[string]does{
	"defined": func(_ *interp, v value, _ args) value {
		_, undef := v.(undefined)
		return !undef
	},
	"undefined": isA[undefined],
	"none":      func(_ *interp, v value, _ args) value { return v == nil },
	"true":      func(_ *interp, v value, _ args) value { return v == true },
	"false":     func(_ *interp, v value, _ args) value { return v == false },
	"string":    isA[string],
	"boolean":   isA[bool],
	"mapping":   isA[*Dict],
	"callable":  isA[*function],
	"float":     isA[float64],
	"integer": func(_ *interp, v value, _ args) value {
		switch v.(type) {
		case int64, bigInt:
			return true
		}
		return false
	},
	"number": func(_ *interp, v value, _ args) value {
		_, isBig := v.(bigInt)
		_, _, _, ok := number(v)
		return ok || isBig
	},
	"sequence iterable": isSequence,
	"upper":             text(isCase(strings.ToUpper, strings.ToLower)),
	"lower":             text(isCase(strings.ToLower, strings.ToUpper)),
	"odd":               func(in *interp, v value, _ args) value { return in.integer(v)&1 == 1 },
	"even":              func(in *interp, v value, _ args) value { return in.integer(v)&1 == 0 },
	"divisibleby(num)": func(in *interp, v value, a args) value {
		n := in.integer(a.pos[0])
		if n == 0 {
			in.fail("division by zero")
		}
		i, _, isInt, _ := number(v)
		return isInt && i%n == 0
	},
	"sameas(other)":           func(_ *interp, v value, a args) value { return v == a.pos[0] },
	"in(other)":               func(in *interp, v value, a args) value { return in.contains(a.pos[0], v) },
	"eq equalto ==(other)":    comparing("=="),
	"ne !=(other)":            comparing("!="),
	"lt lessthan <(other)":    comparing("<"),
	"le <=(other)":            comparing("<="),
	"gt greaterthan >(other)": comparing(">"),
	"ge >=(other)":            comparing(">="),
})

func isA[T any](_ *interp, v value, _ args) value {
	_, ok := v.(T)
	return ok
}

func isSequence(_ *interp, v value, _ args) value {
	switch v.(type) {
	case string, *List, *Dict, undefined:
		return true
	}
	return false
}

// isCase reports whether a string has letters of the case that mine makes, and no others.
func isCase(mine, other func(string) string) onText {
	return func(_ *interp, s string, _ args) value { return s == mine(s) && s != other(s) }
}

func comparing(op string) does {
	return func(in *interp, v value, a args) value { return in.compareOp(op, v, a.pos[0]) }
}
