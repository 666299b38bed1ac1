package jinja

import (
	"cmp"
	"fmt"
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

func toJSON(in *interp, v value, a args) value {
	w := &jsonWriter{in: in, comma: ", ", colon: ": ", ascii: truth(a.pos[0]), sortedKeys: truth(a.pos[3])}
	if a.pos[1] != nil {
		w.newline, w.comma, w.indent = true, ",", in.indentOf(a.pos[1])
	}
	if a.pos[2] != nil {
		pair := in.items(a.pos[2])
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
	w.in.inside(depth)
	switch v := v.(type) {
	case nil:
		w.put("null")
	case bool, int64:
		w.put(fmt.Sprint(v))
	case bigInt:
		w.put(string(v))
	case float64:
		s := pyFloat(v)
		w.put(cmp.Or(map[string]string{"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[s], s))
	case string:
		w.str(v)
	case *List:
		w.group('[', ']', len(v.items), depth, func(i int) { w.write(v.items[i], depth+1) })
	case *Dict:
		keys := v.keys
		if w.sortedKeys {
			keys = w.in.sorted(keys, false, func(k value) value { return k })
		}
		w.group('{', '}', len(keys), depth, func(i int) {
			if k, ok := keys[i].(string); ok {
				w.str(k)
			} else { // numbers, booleans and null as strings
				w.b.WriteByte('"')
				w.write(keys[i], depth+1)
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
		switch i := strings.IndexRune("\"\\\n\r\t\b\f", r); {
		case i >= 0:
			w.b.WriteByte('\\')
			w.b.WriteByte(`"\nrtbf`[i])
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
