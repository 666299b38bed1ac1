package jinja

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// value is what a template computes with: nil (none), undefined, bool, int64,
// bigInt, float64, string, *List, *Dict, *namespace, *loop or *function.
type value = any

// bigInt is an integer beyond int64, in decimal. It can be passed on and printed, not
// computed with.
type bigInt string

// undefined is a missing name, attribute or item.
type undefined struct{ what, of string }

// List is a sequence. Make one with NewList.
type List struct {
	items []value
	tuple bool
}

// NewList returns a list of items, which are as FromGo returns them.
func NewList(items ...any) *List { return &List{items: items} }

// Items returns the items of l, not to be changed.
func (l *List) Items() []any { return l.items }

type namespace struct{ vars map[string]value }

type function struct {
	name string
	call func(in *interp, a args) value
}

// Dict is a mapping that keeps the order of its keys, as Python's does. Make one with
// FromJSON, or pass json.RawMessage as a variable.
type Dict struct {
	keys  []value
	vals  []value
	index map[value]int // of more than few keys: most have few, and a map is large
}

const few = 8

// Get returns the value of key k.
func (d *Dict) Get(k string) (any, bool) { return d.get(k) }

// With returns a copy of d in which k has the value v, which is as FromGo returns it; a new
// key comes last.
func (d *Dict) With(k string, v any) *Dict {
	c := &Dict{keys: slices.Clip(d.keys), vals: slices.Clone(d.vals), index: maps.Clone(d.index)}
	c.set(k, v)
	return c
}

func (d *Dict) set(k, v value) {
	if i := d.find(k); i >= 0 {
		d.vals[i] = v
		return
	}
	d.keys = append(d.keys, k)
	d.vals = append(d.vals, v)
	switch {
	case d.index != nil:
		d.index[hashKey(k)] = len(d.keys) - 1
	case len(d.keys) > few:
		d.index = make(map[value]int, 2*few)
		for i, k := range d.keys {
			d.index[hashKey(k)] = i
		}
	}
}

// find returns the index of key k, or -1.
func (d *Dict) find(k value) int {
	h := hashKey(k)
	if d.index != nil {
		if i, ok := d.index[h]; ok {
			return i
		}
		return -1
	}
	return slices.IndexFunc(d.keys, func(k value) bool { return hashKey(k) == h })
}

func (d *Dict) get(k value) (value, bool) {
	if !isKey(k) {
		return nil, false
	}
	if i := d.find(k); i >= 0 {
		return d.vals[i], true
	}
	return nil, false
}

func isKey(k value) bool {
	switch k.(type) {
	case string, int64, bigInt, float64, bool, nil:
		return true
	}
	return false
}

// hashKey maps equal keys to one: 1, 1.0 and true.
func hashKey(k value) value {
	i, f, isInt, ok := number(k)
	switch {
	case !ok:
		return k
	case isInt:
		return i
	case f == math.Trunc(f) && math.Abs(f) < 1<<62:
		return int64(f)
	}
	return f
}

func truth(v value) bool {
	switch v := v.(type) {
	case nil, undefined:
		return false
	case bool:
		return v
	case int64:
		return v != 0
	case float64:
		return v != 0
	case string:
		return v != ""
	case *List:
		return len(v.items) > 0
	case *Dict:
		return len(v.keys) > 0
	}
	return true
}

// str is Python's str(v), what {{ v }} prints.
func (in *interp) str(v value) string {
	switch v := v.(type) {
	case string:
		return v
	case undefined:
		return ""
	}
	return in.reprOf(v)
}

func (in *interp) reprOf(v value) string {
	var b strings.Builder
	in.repr(&b, v, 0)
	return b.String()
}

// inside accounts for a look at a value, depth levels inside another.
func (in *interp) inside(depth int) {
	in.step()
	if depth > maxNest {
		in.fail("value nested deeper than %d", maxNest)
	}
}

// repr writes Python's repr(v).
func (in *interp) repr(b *strings.Builder, v value, depth int) {
	in.inside(depth)
	group := func(opening, closing string, n int, item func(i int)) {
		b.WriteString(opening)
		for i := range n {
			if i > 0 {
				b.WriteString(", ")
			}
			item(i)
		}
		b.WriteString(closing)
	}
	switch v := v.(type) {
	case nil:
		b.WriteString("None")
	case undefined:
		b.WriteString("Undefined")
	case bool:
		b.WriteString(map[bool]string{false: "False", true: "True"}[v])
	case int64:
		b.WriteString(strconv.FormatInt(v, 10))
	case bigInt:
		in.charge(len(v))
		b.WriteString(string(v))
	case float64:
		b.WriteString(pyFloat(v))
	case string:
		in.charge(len(v))
		in.quote(b, v)
	case *List:
		opening, closing := "[", "]"
		if v.tuple {
			opening, closing = "(", ")"
			if len(v.items) == 1 {
				closing = ",)"
			}
		}
		group(opening, closing, len(v.items), func(i int) { in.repr(b, v.items[i], depth+1) })
	case *Dict:
		group("{", "}", len(v.keys), func(i int) {
			in.repr(b, v.keys[i], depth+1)
			b.WriteString(": ")
			in.repr(b, v.vals[i], depth+1)
		})
	default:
		fmt.Fprintf(b, "<%s>", kindOf(v))
	}
}

// pyFloat is Python's repr of a float.
func pyFloat(f float64) string {
	switch {
	case math.IsNaN(f):
		return "nan"
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	}
	s := strconv.FormatFloat(f, 'e', -1, 64)
	exp, _ := strconv.Atoi(s[strings.IndexByte(s, 'e')+1:])
	if exp < -4 || exp >= 16 {
		return s // both write at least two digits of exponent
	}
	s = strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// quote writes a Python string literal.
func (in *interp) quote(b *strings.Builder, s string) {
	q := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		q = '"'
	}
	b.WriteByte(q)
	for _, r := range s {
		if r != rune(q) && r != '\\' && (r == ' ' || unicode.IsPrint(r)) {
			b.WriteRune(r)
			continue
		}
		in.charge(9)                                       // more than the character took
		switch i := strings.IndexRune("'\"\\\n\r\t", r); { // either quote here is q
		case i >= 0:
			b.WriteByte('\\')
			b.WriteByte(`'"\nrt`[i])
		case r < 0x100:
			fmt.Fprintf(b, `\x%02x`, r)
		case r < 0x10000:
			fmt.Fprintf(b, `\u%04x`, r)
		default:
			fmt.Fprintf(b, `\U%08x`, r)
		}
	}
	b.WriteByte(q)
}

func kindOf(v value) string {
	switch v.(type) {
	case nil:
		return "none"
	case undefined:
		return "undefined"
	case bool:
		return "boolean"
	case int64:
		return "integer"
	case bigInt:
		return "integer beyond 64 bits"
	case float64:
		return "float"
	case string:
		return "string"
	case *List:
		return "list"
	case *Dict:
		return "mapping"
	case *function:
		return "function"
	}
	return strings.TrimPrefix(fmt.Sprintf("%T", v), "*jinja.")
}

// number returns v as a number; a bool counts as 0 or 1.
func number(v value) (i int64, f float64, isInt, ok bool) {
	switch v := v.(type) {
	case bool:
		if v {
			return 1, 1, true, true
		}
		return 0, 0, true, true
	case int64:
		return v, float64(v), true, true
	case float64:
		return 0, v, false, true
	}
	return 0, 0, false, false
}

func (in *interp) equal(a, b value, depth int) bool {
	in.inside(depth)
	if x, fx, xi, ok := number(a); ok {
		y, fy, yi, ok := number(b)
		return ok && (xi && yi && x == y || !(xi && yi) && fx == fy)
	}
	switch a := a.(type) {
	case nil:
		return b == nil
	case undefined:
		_, ok := b.(undefined)
		return ok
	case string:
		s, ok := b.(string)
		if !ok || len(a) != len(s) {
			return false
		}
		in.linear(len(a))
		return a == s
	case *List:
		o, ok := b.(*List)
		if !ok || len(a.items) != len(o.items) || a.tuple != o.tuple {
			return false
		}
		for i := range a.items {
			if !in.equal(a.items[i], o.items[i], depth+1) {
				return false
			}
		}
		return true
	case *Dict:
		o, ok := b.(*Dict)
		if !ok || len(a.keys) != len(o.keys) {
			return false
		}
		for i, k := range a.keys {
			in.hashes(k)
			v, ok := o.get(k)
			if !ok || !in.equal(a.vals[i], v, depth+1) {
				return false
			}
		}
		return true
	}
	return a == b // pointers
}

// compare orders two numbers, strings or lists.
func (in *interp) compare(a, b value, depth int) int {
	in.step()
	x, fx, xi, ok1 := number(a)
	y, fy, yi, ok2 := number(b)
	switch {
	case ok1 && ok2 && xi && yi:
		return order(x, y)
	case ok1 && ok2:
		return order(fx, fy)
	}
	if s, ok := a.(string); ok {
		if t, ok := b.(string); ok {
			in.linear(min(len(s), len(t)))
			return strings.Compare(s, t)
		}
	}
	if s, ok := a.(*List); ok {
		if t, ok := b.(*List); ok && depth < maxNest {
			for i := 0; i < len(s.items) && i < len(t.items); i++ {
				if !in.equal(s.items[i], t.items[i], depth+1) {
					return in.compare(s.items[i], t.items[i], depth+1)
				}
			}
			return order(len(s.items), len(t.items))
		}
	}
	in.fail("cannot order %s and %s", kindOf(a), kindOf(b))
	return 0
}

func order[T int | int64 | float64](a, b T) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// items returns what a for loop over v yields.
func (in *interp) items(v value) []value {
	switch v := v.(type) {
	case undefined:
		return nil
	case *List:
		return v.items
	case *Dict:
		return v.keys
	case string:
		in.charge(32 * len(v))
		out := make([]value, 0, len(v))
		for _, r := range v {
			out = append(out, string(r))
		}
		return out
	}
	in.fail("%s is not iterable", kindOf(v))
	return nil
}

func (in *interp) length(v value) int {
	switch v := v.(type) {
	case undefined:
		return 0
	case string:
		in.linear(len(v))
		return utf8.RuneCountInString(v)
	case *List:
		return len(v.items)
	case *Dict:
		return len(v.keys)
	}
	in.fail("%s has no length", kindOf(v))
	return 0
}
