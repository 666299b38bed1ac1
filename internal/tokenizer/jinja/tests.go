package jinja

// test is v is name(a).
func (in *interp) test(name string, v value, a args) bool {
	_, undef := v.(undefined)
	i, _, isInt, isNumber := number(v)
	_, isBool := v.(bool)
	_, isBig := v.(bigInt)
	arg := func() value { return a.bind(in, name, "other")[0] }
	switch name {
	case "defined":
		return !undef
	case "undefined":
		return undef
	case "none":
		return v == nil
	case "string":
		_, ok := v.(string)
		return ok
	case "boolean":
		return isBool
	case "true":
		return v == true
	case "false":
		return v == false
	case "number":
		return isNumber || isBig
	case "integer":
		return isInt && !isBool || isBig
	case "float":
		return isNumber && !isInt
	case "mapping":
		_, ok := v.(*Dict)
		return ok
	case "sequence", "iterable":
		switch v.(type) {
		case string, *List, *Dict, undefined:
			return true
		}
		return false
	case "callable":
		_, ok := v.(*function)
		return ok
	case "odd":
		return in.integer(v)&1 == 1
	case "even":
		return in.integer(v)&1 == 0
	case "divisibleby":
		n := in.integer(arg())
		if n == 0 {
			in.fail("division by zero")
		}
		return isInt && i%n == 0
	case "upper", "lower":
		s := in.str(v)
		in.charge(2 * len(s))
		return isCase(s, name)
	case "sameas":
		o := arg()
		return v == o && kindOf(v) == kindOf(o)
	case "in":
		return in.contains(arg(), v)
	case "filter", "test":
		in.fail("test %q is not supported", name)
	}
	ops := map[string]string{"eq": "==", "equalto": "==", "==": "==", "ne": "!=", "!=": "!=", "lt": "<", "lessthan": "<",
		"<": "<", "le": "<=", "<=": "<=", "gt": ">", "greaterthan": ">", ">": ">", "ge": ">=", ">=": ">="}
	op, ok := ops[name]
	if !ok {
		in.fail("no test %q", name)
	}
	return in.compareOp(op, v, arg())
}
