package jinja

import (
	"fmt"
	"sort"
	"strings"
)

// jsonWriter writes what Python's json.dumps does, as Hugging Face calls it.
type jsonWriter struct {
	in         *interp
	b          strings.Builder
	indent     string // one level; with newline
	newline    bool
	comma      string
	colon      string
	ascii      bool
	sortedKeys bool
}

func (in *interp) tojson(v, indent, separators value, ascii, sortKeys bool) string {
	w := &jsonWriter{in: in, comma: ", ", colon: ": ", ascii: ascii, sortedKeys: sortKeys}
	if indent != nil {
		w.newline = true
		w.comma = ","
		if s, ok := indent.(string); ok {
			w.indent = s
		} else {
			w.indent = in.repeat(" ", in.integer(indent)).(string)
		}
	}
	if separators != nil {
		pair := in.items(separators)
		if len(pair) != 2 {
			in.fail("tojson: separators want two strings")
		}
		w.comma, w.colon = in.text(pair[0]), in.text(pair[1])
	}
	w.write(v, 0)
	return w.b.String()
}

// put writes s, charged before.
func (w *jsonWriter) put(s string) {
	w.in.charge(len(s))
	w.b.WriteString(s)
}

func (w *jsonWriter) write(v value, depth int) {
	w.in.step()
	if depth > maxNest {
		w.in.fail("value nested deeper than %d", maxNest)
	}
	switch v := v.(type) {
	case nil:
		w.put("null")
	case bool:
		w.put(fmt.Sprint(v))
	case int64:
		w.put(fmt.Sprint(v))
	case bigInt:
		w.put(string(v))
	case float64:
		s := pyFloat(v)
		switch s {
		case "nan":
			s = "NaN"
		case "inf":
			s = "Infinity"
		case "-inf":
			s = "-Infinity"
		}
		w.put(s)
	case string:
		w.str(v)
	case *List:
		w.group('[', ']', len(v.items), depth, func(i int) { w.write(v.items[i], depth+1) })
	case *Dict:
		keys := v.keys
		if w.sortedKeys {
			keys = w.in.copyOf(keys)
			sort.SliceStable(keys, func(i, j int) bool { return w.in.compare(keys[i], keys[j], 0) < 0 })
		}
		w.group('{', '}', len(keys), depth, func(i int) {
			switch k := keys[i].(type) {
			case string:
				w.str(k)
			default: // numbers, booleans and null as strings
				w.b.WriteByte('"')
				w.write(k, depth+1)
				w.b.WriteByte('"')
			}
			w.put(w.colon)
			x, _ := v.get(keys[i])
			w.write(x, depth+1)
		})
	default:
		w.in.fail("%s has no JSON form", kindOf(v))
	}
}

func (w *jsonWriter) group(opening, closing byte, n, depth int, item func(i int)) {
	line := func(depth int) {
		if w.newline {
			w.in.charge(len(w.indent) * depth)
			w.b.WriteByte('\n')
			w.b.WriteString(strings.Repeat(w.indent, depth))
		}
	}
	w.b.WriteByte(opening)
	for i := range n {
		if i > 0 {
			w.put(w.comma)
		}
		line(depth + 1)
		item(i)
	}
	if n > 0 {
		line(depth)
	}
	w.b.WriteByte(closing)
}

func (w *jsonWriter) str(s string) {
	w.in.charge(len(s))
	w.b.WriteByte('"')
	for _, r := range s {
		if r < ' ' || w.ascii && r > '~' {
			w.in.charge(11) // more than the character took
		}
		switch {
		case r == '"' || r == '\\':
			w.b.WriteByte('\\')
			w.b.WriteRune(r)
		case r == '\n':
			w.b.WriteString(`\n`)
		case r == '\r':
			w.b.WriteString(`\r`)
		case r == '\t':
			w.b.WriteString(`\t`)
		case r == '\b':
			w.b.WriteString(`\b`)
		case r == '\f':
			w.b.WriteString(`\f`)
		case r < ' ' || w.ascii && r > '~' && r < 0x10000:
			fmt.Fprintf(&w.b, `\u%04x`, r)
		case w.ascii && r >= 0x10000:
			r -= 0x10000
			fmt.Fprintf(&w.b, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			w.b.WriteRune(r)
		}
	}
	w.b.WriteByte('"')
}
