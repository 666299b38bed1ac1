package jinja

import (
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

var filters map[string]*builtin

// The filter map looks up filters, so that their table cannot be a plain initializer.
func init() {
	filters = table(map[string]does{
		"string()":           func(in *interp, v value, _ args) value { return in.str(v) },
		"safe forceescape()": same,
		"escape e()":         text(escape),
		"upper()":            text(upper),
		"lower()":            text(lower),
		"capitalize()":       text(capitalize),
		// What begins a word for this filter and for the method title differs.
		"title()":                       text(recase(func(r rune) bool { return !unicode.IsSpace(r) && !strings.ContainsRune("-({[<", r) })),
		"trim(chars=none)":              text(strip(true, true)),
		"replace(old, new, count=none)": text(replace),
		"indent(width=4, first=false, blank=false)": text(indent),
		"wordcount()": text(func(in *interp, s string, _ args) value {
			in.charge(8 * len(s))
			return int64(len(strings.Fields(s)))
		}),
		"format": func(in *interp, v value, a args) value {
			if len(a.names) > 0 {
				in.fail("format with named values is not supported")
			}
			return in.format(in.str(v), &List{items: a.pos, tuple: true})
		},
		"tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)": toJSON,

		"default d(default_value='', boolean=false)": orDefault,
		"abs()":                               abs,
		"round(precision=0, method='common')": round,
		"int(default=0, base=10)":             toInt,
		"float(default=0.0, base=10)":         toFloat,

		"length count()": length,
		"list":           func(in *interp, v value, _ args) value { return &List{items: in.copyOf(in.items(v))} },
		"first()":        func(in *interp, v value, _ args) value { return first(in.items(v)) },
		"last()": func(in *interp, v value, _ args) value {
			items := in.items(v)
			return first(items[max(0, len(items)-1):])
		},
		"reverse": func(in *interp, v value, _ args) value {
			items := in.copyOf(in.items(v))
			slices.Reverse(items)
			if _, ok := v.(string); ok {
				return in.join(&List{items: items}, "", "")
			}
			return &List{items: items}
		},
		"items()": func(in *interp, v value, _ args) value {
			if _, ok := v.(undefined); ok {
				return &List{}
			}
			return in.pairs("items", v)
		},
		"join(d='', attribute='')": func(in *interp, v value, a args) value {
			return in.join(v, in.str(a.pos[0]), in.str(a.pos[1]))
		},
		"sort(reverse=false, case_sensitive=false, attribute=none)": func(in *interp, v value, a args) value {
			return &List{items: in.sorted(in.items(v), truth(a.pos[0]), in.key(a.pos[2], a.pos[1]))}
		},
		"dictsort(case_sensitive=false, by='key', reverse=false)": func(in *interp, v value, a args) value {
			at, key := int64(0), in.key(nil, a.pos[0])
			if a.pos[1] == "value" {
				at = 1
			}
			pairs := in.pairs("dictsort", v).items
			return &List{items: in.sorted(pairs, truth(a.pos[2]), func(v value) value { return key(in.index(v, at)) })}
		},
		"min(case_sensitive=false, attribute=none)": func(in *interp, v value, a args) value {
			return first(in.sorted(in.items(v), false, in.key(a.pos[1], a.pos[0])))
		},
		"max(case_sensitive=false, attribute=none)": func(in *interp, v value, a args) value {
			return first(in.sorted(in.items(v), true, in.key(a.pos[1], a.pos[0])))
		},
		"unique(case_sensitive=false, attribute=none)": unique,
		"sum(attribute=none, start=0)":                 sum,
		"batch(linecount, fill_with=none)":             batch,
		"map":                                          mapped,
		"select":                                       selected(true, false),
		"reject":                                       selected(false, false),
		"selectattr":                                   selected(true, true),
		"rejectattr":                                   selected(false, true),
	})
}

func same(_ *interp, v value, _ args) value { return v }

func length(in *interp, v value, _ args) value { return int64(in.length(v)) }

func orDefault(_ *interp, v value, a args) value {
	if _, undef := v.(undefined); undef || truth(a.pos[1]) && !truth(v) {
		return a.pos[0]
	}
	return v
}

var escapes = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&#34;", "'", "&#39;")

func escape(in *interp, s string, _ args) value {
	in.charge(5 * len(s)) // beside what text charges
	return escapes.Replace(s)
}

func indent(in *interp, s string, a args) value {
	by, first, blank := in.indentOf(a.pos[0]), truth(a.pos[1]), truth(a.pos[2])
	lines := strings.Split(s, "\n")
	in.charge(16 * len(lines))
	for i, line := range lines {
		if i == 0 && !first || i > 0 && line == "" && !blank {
			continue
		}
		in.charge(len(by) + len(line))
		lines[i] = by + line
	}
	return strings.Join(lines, "\n")
}

// indentOf returns what an indent, a string or a number of blanks, stands for.
func (in *interp) indentOf(width value) string {
	if s, ok := width.(string); ok {
		return s
	}
	return in.repeat(" ", in.integer(width))
}

func abs(in *interp, v value, _ args) value {
	i, f, isInt, ok := number(v)
	if !ok {
		in.fail("abs of %s", kindOf(v))
	}
	if isInt {
		return max(i, -i)
	}
	return math.Abs(f)
}

func round(in *interp, v value, a args) value {
	i, f, isInt, ok := number(v)
	if !ok {
		in.fail("round of %s", kindOf(v))
	}
	digits, method := in.integer(a.pos[0]), in.text(a.pos[1])
	scale := math.Pow(10, float64(digits))
	switch {
	case method == "ceil":
		return math.Ceil(f*scale) / scale
	case method == "floor":
		return math.Floor(f*scale) / scale
	case isInt && digits >= 0:
		return i
	case isInt:
		return int64(math.RoundToEven(f*scale) / scale)
	case digits < 0:
		return math.RoundToEven(f*scale) / scale
	}
	f, _ = strconv.ParseFloat(strconv.FormatFloat(f, 'f', int(min(digits, 400)), 64), 64)
	return f
}

func toInt(in *interp, v value, a args) value {
	i, f, isInt, ok := number(v)
	switch v := v.(type) {
	case bigInt:
		return v
	case string:
		if n, ok := readInt(in.trimmed(v), in.integer(a.pos[1])); ok {
			return n
		}
		f, ok = in.readFloat(v)
	}
	switch {
	case isInt:
		return i
	case ok && !math.IsInf(f, 0) && !math.IsNaN(f):
		n, _ := big.NewFloat(f).Int(nil)
		return fromDigits(n.String())
	}
	return a.pos[0]
}

func toFloat(in *interp, v value, a args) value {
	_, f, _, ok := number(v)
	switch v := v.(type) {
	case bigInt:
		f, ok = in.readFloat(string(v))
	case string:
		f, ok = in.readFloat(v)
	}
	if !ok {
		return a.pos[0]
	}
	return f
}

// trimmed returns a string to read a number from.
func (in *interp) trimmed(s string) string {
	s = strings.TrimSpace(s)
	in.linear(8 * len(s))
	return s
}

// readFloat reads a number; one too large is infinite.
func (in *interp) readFloat(s string) (float64, bool) {
	f, err := strconv.ParseFloat(in.trimmed(s), 64)
	return f, err == nil || math.IsInf(f, 0)
}

// readInt is Python's int(s, base).
func readInt(s string, base int64) (value, bool) {
	const most = 4300 // digits, as in Python
	digits := strings.TrimLeft(s, "+-")
	if prefix := map[int64]string{2: "0b", 8: "0o", 16: "0x"}[base]; prefix != "" && len(digits) > 2 && strings.EqualFold(digits[:2], prefix) {
		digits = strings.TrimPrefix(digits[2:], "_")
	}
	if base != 0 && (base < 2 || base > 36) || len(digits) > most || strings.Contains("_"+digits+"_", "__") {
		return nil, false
	}
	n, ok := new(big.Int).SetString(strings.ReplaceAll(digits, "_", ""), int(base))
	switch {
	case !ok || strings.Count(s, "+")+strings.Count(s, "-") > 1:
		return nil, false
	case s[0] == '-':
		n.Neg(n)
	}
	return fromDigits(n.String()), true
}

func first(items []value) value {
	if len(items) == 0 {
		return undefined{what: "an item", of: "nothing"}
	}
	return items[0]
}

func (in *interp) copyOf(items []value) []value {
	in.charge(16 * len(items))
	return slices.Clone(items)
}

// path is v.a.b of the attribute argument "a.b"; digits are an index.
func (in *interp) path(v value, path string) value {
	in.linear(len(path))
	for part := range strings.SplitSeq(path, ".") {
		if n, err := strconv.ParseInt(part, 10, 64); err == nil {
			v = in.index(v, n)
		} else {
			v = in.index(v, part)
		}
	}
	return v
}

// key returns a function from a value to what orders or distinguishes it.
func (in *interp) key(attribute, caseSensitive value) func(value) value {
	return func(v value) value {
		if attribute != nil {
			v = in.path(v, in.str(attribute))
		}
		if s, ok := v.(string); ok && !truth(caseSensitive) {
			in.charge(len(s))
			return strings.ToLower(s)
		}
		return v
	}
}

// sorted returns items sorted by their keys.
func (in *interp) sorted(items []value, down bool, key func(value) value) []value {
	items = in.copyOf(items)
	slices.SortStableFunc(items, func(a, b value) int {
		if down {
			a, b = b, a
		}
		return in.compare(key(a), key(b), 0)
	})
	return items
}

func unique(in *interp, v value, a args) value {
	key, out := in.key(a.pos[1], a.pos[0]), &List{}
	var seen []value
	for _, x := range in.items(v) {
		k := key(x)
		if slices.ContainsFunc(seen, func(s value) bool { return in.equal(k, s, 0) }) {
			continue
		}
		in.charge(32)
		seen, out.items = append(seen, k), append(out.items, x)
	}
	return out
}

func sum(in *interp, v value, a args) value {
	total := a.pos[1]
	for _, x := range in.items(v) {
		in.step()
		if a.pos[0] != nil {
			x = in.path(x, in.str(a.pos[0]))
		}
		total = in.binary("+", total, x)
	}
	return total
}

// mapped is map(attribute=path, default=value) and map(filter, arguments of the filter…).
func mapped(in *interp, v value, a args) value {
	out := &List{}
	if attribute, ok := a.take("attribute"); ok {
		def, hasDef := a.take("default")
		for _, x := range in.items(v) {
			in.step()
			x = in.path(x, in.str(attribute))
			if _, undef := x.(undefined); undef && hasDef {
				x = def
			}
			out.items = append(out.items, x)
		}
	} else {
		if len(a.pos) == 0 {
			in.fail("map without a filter")
		}
		name := in.text(a.pos[0])
		in.deeper() // map('map', 'map', …)
		for _, x := range in.items(v) {
			in.step()
			out.items = append(out.items, in.filter(name, x, args{a.pos[1:], a.names, a.named}))
		}
		in.depth--
	}
	in.charge(16 * len(out.items))
	return out
}

// selected keeps the items whose test, by default their truth, has the result want. byAttr:
// the first argument is the attribute to test.
func selected(want, byAttr bool) does {
	return func(in *interp, v value, a args) value {
		out, pos, attribute := &List{}, a.pos, ""
		if byAttr {
			if len(pos) == 0 {
				in.fail("selectattr or rejectattr without an attribute")
			}
			attribute, pos = in.str(pos[0]), pos[1:]
		}
		for _, x := range in.items(v) {
			in.step()
			y := x
			if attribute != "" {
				y = in.path(x, attribute)
			}
			ok := truth(y)
			if len(pos) > 0 {
				ok = in.test(in.text(pos[0]), y, args{pos[1:], a.names, a.named})
			}
			if ok == want {
				out.items = append(out.items, x)
			}
		}
		in.charge(16 * len(out.items))
		return out
	}
}

func batch(in *interp, v value, a args) value {
	n := in.integer(a.pos[0])
	if n < 1 {
		in.fail("batch of %d", n)
	}
	out, row := &List{}, &List{}
	for _, x := range in.items(v) {
		if in.charge(32); len(row.items) == 0 || int64(len(row.items)) == n {
			row = &List{}
			out.items = append(out.items, row)
		}
		row.items = append(row.items, x)
	}
	for a.pos[1] != nil && len(out.items) > 0 && int64(len(row.items)) < n {
		in.charge(16)
		row.items = append(row.items, a.pos[1])
	}
	return out
}
