package jinja

import (
	"math"
	"math/big"
	"sort"
	"strconv"
	"strings"
)

// filter is v | name(a).
func (in *interp) filter(name string, v value, a args) value {
	none := func() { a.bind(in, name) }
	given := func(v, def value) value {
		if v == (absent{}) {
			return def
		}
		return v
	}
	switch name {
	case "tojson":
		p := a.bind(in, name, "ensure_ascii", "indent", "separators", "sort_keys")
		return in.tojson(v, given(p[1], nil), given(p[2], nil), truth(given(p[0], false)), truth(given(p[3], false)))
	case "length", "count":
		none()
		return int64(in.length(v))
	case "trim":
		p := a.bind(in, name, "chars")
		s := in.str(v)
		in.charge(len(s))
		return strip(in, s, "strip", p[0])
	case "upper", "lower", "title", "capitalize":
		none()
		s := in.str(v)
		in.charge(len(s))
		if name == "title" {
			name = "words"
		}
		return recase(s, name)
	case "replace":
		p := a.bind(in, name, "old", "new", "count")
		return in.replace(in.str(v), in.str(p[0]), in.str(p[1]), p[2])
	case "string":
		none()
		return in.str(v)
	case "safe", "forceescape":
		none()
		return v
	case "escape", "e":
		none()
		s := in.str(v)
		in.charge(6 * len(s))
		return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&#34;", "'", "&#39;").Replace(s)
	case "indent":
		p := a.bind(in, name, "width", "first", "blank")
		return in.indent(in.str(v), given(p[0], int64(4)), truth(given(p[1], false)), truth(given(p[2], false)))
	case "format":
		if len(a.names) > 0 {
			in.fail("format with named values is not supported")
		}
		return in.format(in.str(v), &List{items: a.pos, tuple: true})
	case "default", "d":
		p := a.bind(in, name, "default_value", "boolean")
		if _, undef := v.(undefined); undef || truth(given(p[1], false)) && !truth(v) {
			return given(p[0], "")
		}
		return v
	case "int", "float", "abs", "round":
		return in.numeric(name, v, a)
	case "wordcount":
		none()
		s := in.str(v)
		in.charge(8 * len(s))
		return int64(len(strings.Fields(s)))
	}
	return in.sequence(name, v, a)
}

func (in *interp) numeric(name string, v value, a args) value {
	switch name {
	case "abs":
		a.bind(in, name)
		if i, f, isInt, ok := number(v); ok {
			if isInt && i >= 0 {
				return i
			} else if isInt {
				return -i
			}
			return math.Abs(f)
		}
		in.fail("abs of %s", kindOf(v))
	case "round":
		p := a.bind(in, name, "precision", "method")
		i, f, isInt, ok := number(v)
		if !ok {
			in.fail("round of %s", kindOf(v))
		}
		digits, method := int64(0), "common"
		if p[0] != (absent{}) {
			digits = in.integer(p[0])
		}
		if p[1] != (absent{}) {
			method = in.text(p[1])
		}
		scale := math.Pow(10, float64(digits))
		switch method {
		case "ceil":
			return math.Ceil(f*scale) / scale
		case "floor":
			return math.Floor(f*scale) / scale
		}
		switch {
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
	p := a.bind(in, name, "default", "base")
	_, f, isInt, ok := number(v)
	switch v := v.(type) {
	case string:
		s := strings.TrimSpace(v)
		in.linear(8 * len(s))
		base := int64(10)
		if p[1] != (absent{}) {
			base = in.integer(p[1])
		}
		if name == "int" {
			if n, ok := readInt(s, base); ok {
				return n
			}
		}
		x, err := strconv.ParseFloat(s, 64)
		f, ok = x, err == nil || math.IsInf(x, 0)
	case bigInt:
		if name == "int" {
			return v
		}
		f, _ = strconv.ParseFloat(string(v), 64)
		ok = true
	}
	switch {
	case isInt && name == "int":
		return in.binary("+", v, int64(0))
	case name == "float" && ok:
		return f
	case name == "int" && ok && !math.IsInf(f, 0) && !math.IsNaN(f):
		n, _ := big.NewFloat(f).Int(nil)
		return fromDigits(n.String())
	case p[0] != (absent{}):
		return p[0]
	case name == "float":
		return 0.0
	}
	return int64(0)
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

// sequence is a filter over the items of v.
func (in *interp) sequence(name string, v value, a args) value {
	flag := func(v value) bool { return v != (absent{}) && truth(v) }
	made := func(items []value) value {
		in.charge(16 * len(items))
		return &List{items: items}
	}
	switch name {
	case "list":
		return &List{items: in.copyOf(in.items(v))}
	case "first", "last":
		a.bind(in, name)
		items := in.items(v)
		if len(items) == 0 {
			return undefined{what: name, of: "nothing"}
		}
		if name == "last" {
			return items[len(items)-1]
		}
		return items[0]
	case "join":
		p := a.bind(in, name, "d", "attribute")
		sep, attribute := "", ""
		if p[0] != (absent{}) {
			sep = in.str(p[0])
		}
		if p[1] != (absent{}) {
			attribute = in.str(p[1])
		}
		return in.join(v, sep, attribute)
	case "reverse":
		items := in.copyOf(in.items(v))
		reverse(items)
		if _, ok := v.(string); ok {
			return in.join(&List{items: items}, "", "")
		}
		return &List{items: items}
	case "items":
		a.bind(in, name)
		if d, ok := v.(*Dict); ok {
			return in.call(dictMethod(d, "items"), args{})
		}
		if _, ok := v.(undefined); ok {
			return &List{}
		}
		in.fail("items of %s", kindOf(v))
	case "dictsort":
		return in.dictsort(v, a)
	case "sort":
		p := a.bind(in, name, "reverse", "case_sensitive", "attribute")
		return &List{items: in.sorted(in.copyOf(in.items(v)), flag(p[0]), in.key(p[2], flag(p[1])))}
	case "unique":
		p := a.bind(in, name, "case_sensitive", "attribute")
		return in.unique(v, in.key(p[1], flag(p[0])))
	case "min", "max":
		p := a.bind(in, name, "case_sensitive", "attribute")
		items := in.sorted(in.copyOf(in.items(v)), name == "max", in.key(p[1], flag(p[0])))
		if len(items) == 0 {
			return undefined{what: name, of: "nothing"}
		}
		return items[0]
	case "sum":
		p := a.bind(in, name, "attribute", "start")
		total := value(int64(0))
		if p[1] != (absent{}) {
			total = p[1]
		}
		for _, x := range in.items(v) {
			in.step()
			if p[0] != (absent{}) {
				x = in.path(x, in.str(p[0]))
			}
			total = in.binary("+", total, x)
		}
		return total
	case "map":
		return made(in.mapped(v, a))
	case "select", "reject", "selectattr", "rejectattr":
		return made(in.selected(name, v, a))
	case "batch":
		return in.batch(v, a)
	}
	in.fail("no filter %q", name)
	return nil
}

func (in *interp) copyOf(items []value) []value {
	in.charge(16 * len(items))
	return append([]value(nil), items...)
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

// key returns the value to order or distinguish values by.
func (in *interp) key(attribute value, caseSensitive bool) func(value) value {
	return func(v value) value {
		if attribute != (absent{}) && attribute != nil {
			v = in.path(v, in.str(attribute))
		}
		if s, ok := v.(string); ok && !caseSensitive {
			in.charge(len(s))
			return strings.ToLower(s)
		}
		return v
	}
}

func (in *interp) sorted(items []value, down bool, key func(value) value) []value {
	sort.SliceStable(items, func(i, j int) bool {
		c := in.compare(key(items[i]), key(items[j]), 0)
		return c < 0 && !down || c > 0 && down
	})
	return items
}

func (in *interp) dictsort(v value, a args) value {
	p := a.bind(in, "dictsort", "case_sensitive", "by", "reverse")
	d, ok := v.(*Dict)
	if !ok {
		in.fail("dictsort of %s", kindOf(v))
	}
	by := value(int64(0))
	if p[1] == "value" {
		by = int64(1)
	}
	key := in.key(absent{}, p[0] != (absent{}) && truth(p[0]))
	pairs := in.items(in.call(dictMethod(d, "items"), args{}))
	down := p[2] != (absent{}) && truth(p[2])
	return &List{items: in.sorted(pairs, down, func(v value) value { return key(in.index(v, by)) })}
}

func (in *interp) unique(v value, key func(value) value) value {
	out := &List{}
	var seen []value
next:
	for _, x := range in.items(v) {
		k := key(x)
		for _, s := range seen {
			if in.equal(k, s, 0) {
				continue next
			}
		}
		in.charge(32)
		seen, out.items = append(seen, k), append(out.items, x)
	}
	return out
}

func (in *interp) mapped(v value, a args) []value {
	var out []value
	if attribute, ok := a.take("attribute"); ok {
		def, hasDef := a.take("default")
		for _, x := range in.items(v) {
			in.step()
			x = in.path(x, in.str(attribute))
			if _, undef := x.(undefined); undef && hasDef {
				x = def
			}
			out = append(out, x)
		}
		return out
	}
	if len(a.pos) == 0 {
		in.fail("map without a filter")
	}
	name := in.text(a.pos[0])
	in.deeper() // map('map', 'map', …)
	for _, x := range in.items(v) {
		in.step()
		out = append(out, in.filter(name, x, args{a.pos[1:], a.names, a.named}))
	}
	in.depth--
	return out
}

func (in *interp) selected(name string, v value, a args) []value {
	var out []value
	pos := a.pos
	attribute := ""
	if strings.HasSuffix(name, "attr") {
		if len(pos) == 0 {
			in.fail("%s without an attribute", name)
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
		if ok == strings.HasPrefix(name, "select") {
			out = append(out, x)
		}
	}
	return out
}

func (in *interp) batch(v value, a args) value {
	p := a.bind(in, "batch", "linecount", "fill_with")
	n := in.integer(p[0])
	if n < 1 {
		in.fail("batch of %d", n)
	}
	out := &List{}
	var row []value
	flush := func() { out.items = append(out.items, &List{items: row}) }
	for _, x := range in.items(v) {
		if int64(len(row)) == n {
			flush()
			row = nil
		}
		row = append(row, x)
		in.charge(32)
	}
	if len(row) > 0 {
		for p[1] != (absent{}) && p[1] != nil && int64(len(row)) < n {
			in.charge(16)
			row = append(row, p[1])
		}
		flush()
	}
	return out
}

func (in *interp) indent(s string, width value, first, blank bool) string {
	by, ok := width.(string)
	if !ok {
		by = in.repeat(" ", in.integer(width)).(string)
	}
	lines := strings.Split(s, "\n")
	in.charge(len(s) + 16*len(lines))
	for i, line := range lines {
		if i == 0 && !first || i > 0 && line == "" && !blank {
			continue
		}
		in.charge(len(by) + len(line))
		lines[i] = by + line
	}
	return strings.Join(lines, "\n")
}
