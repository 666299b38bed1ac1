package jinja

import (
	"math"
	"math/bits"
	"slices"
	"strings"
)

func (in *interp) unary(op string, v value) value {
	if op == "not" {
		return !truth(v)
	}
	if n, ok := v.(bigInt); ok {
		in.charge(len(n))
		switch abs, negative := strings.CutPrefix(string(n), "-"); {
		case op == "+":
			return n
		case negative:
			return fromDigits(abs)
		}
		return fromDigits("-" + string(n))
	}
	i, f, isInt, ok := number(v)
	switch {
	case !ok:
		in.fail("bad operand %s for %s", kindOf(v), op)
	case op == "+" && isInt:
		return i
	case op == "+":
		return f
	case isInt:
		return -i
	}
	return -f
}

func (in *interp) binary(op string, l, r value) value {
	switch op {
	case "and", "or":
		return r
	case "~":
		a, b := in.str(l), in.str(r)
		in.charge(len(a) + len(b))
		return a + b
	}
	x, fx, xi, ok1 := number(l)
	y, fy, yi, ok2 := number(r)
	switch {
	case ok1 && ok2 && xi && yi:
		return in.intOp(op, x, y)
	case ok1 && ok2:
		return in.floatOp(op, fx, fy)
	}
	switch a := l.(type) {
	case string:
		if b, ok := r.(string); ok && op == "+" {
			in.charge(len(a) + len(b))
			return a + b
		}
		if op == "%" {
			return in.format(a, r)
		}
		if op == "*" && yi {
			return in.repeat(a, y)
		}
	case *List:
		if op == "*" && yi {
			return in.repeatList(a, y)
		}
		if b, ok := r.(*List); ok && op == "+" && a.tuple == b.tuple {
			in.charge(16 * (len(a.items) + len(b.items)))
			return &List{items: slices.Concat(a.items, b.items), tuple: a.tuple}
		}
	}
	if op == "*" && xi {
		switch r := r.(type) {
		case string:
			return in.repeat(r, x)
		case *List:
			return in.repeatList(r, x)
		}
	}
	in.defined(l)
	in.defined(r)
	in.fail("bad operands %s and %s for %s", kindOf(l), kindOf(r), op)
	return nil
}

func (in *interp) repeatList(l *List, n int64) value {
	n = max(n, 0)
	in.chargeTimes(n, 16*len(l.items))
	return &List{items: slices.Repeat(l.items, int(n)), tuple: l.tuple}
}

func (in *interp) repeat(s string, n int64) string {
	n = max(n, 0)
	in.chargeTimes(n, len(s))
	return strings.Repeat(s, int(n))
}

// chargeTimes accounts for n times size bytes about to be allocated.
func (in *interp) chargeTimes(n int64, size int) {
	if size > 0 {
		in.charge(int(min(n, int64(in.bytes/size)+1)) * size)
	}
}

func (in *interp) intOp(op string, x, y int64) value {
	overflow := func(bad bool) {
		if bad {
			in.fail("integer overflow")
		}
	}
	switch op {
	case "+":
		overflow((x+y < x) != (y < 0))
		return x + y
	case "-":
		overflow((x-y > x) != (y < 0))
		return x - y
	case "*":
		return in.mul(x, y)
	case "**":
		if y < 0 {
			return math.Pow(float64(x), float64(y))
		}
		n := int64(1)
		for ; y > 0; y-- {
			in.step()
			n = in.mul(n, x)
		}
		return n
	}
	if y == 0 {
		in.fail("division by zero")
	}
	overflow(x == math.MinInt64 && y == -1)
	switch op {
	case "/":
		return float64(x) / float64(y)
	case "//":
		q := x / y
		if x%y != 0 && (x < 0) != (y < 0) {
			q--
		}
		return q
	}
	m := x % y
	if m != 0 && (m < 0) != (y < 0) {
		m += y
	}
	return m
}

func (in *interp) mul(x, y int64) int64 {
	abs := func(n int64) uint64 {
		if n < 0 {
			return -uint64(n)
		}
		return uint64(n)
	}
	if hi, lo := bits.Mul64(abs(x), abs(y)); hi != 0 || lo > math.MaxInt64 {
		in.fail("integer overflow")
	}
	return x * y
}

func (in *interp) floatOp(op string, x, y float64) value {
	switch op {
	case "+":
		return x + y
	case "-":
		return x - y
	case "*":
		return x * y
	case "**":
		return math.Pow(x, y)
	}
	if y == 0 {
		in.fail("division by zero")
	}
	switch op {
	case "/":
		return x / y
	case "//":
		return math.Floor(x / y)
	}
	m := math.Mod(x, y)
	if m != 0 && (m < 0) != (y < 0) {
		m += y
	}
	return m
}
