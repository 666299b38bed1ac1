package jinja

import (
	"fmt"
	"strings"
)

// builtin returns a function that every template has, or nil.
func builtin(name string) *function {
	switch name {
	case "raise_exception":
		return &function{name, func(in *interp, a args) value {
			panic(&Error{Line: in.line, Msg: in.str(a.bind(in, name, "message")[0]), Raised: true})
		}}
	case "strftime_now":
		return &function{name, func(in *interp, a args) value {
			return in.strftime(in.text(a.bind(in, name, "format")[0]))
		}}
	case "namespace":
		return &function{name, func(in *interp, a args) value {
			ns := &namespace{map[string]value{}}
			for _, v := range a.pos {
				d, ok := v.(*Dict)
				if !ok {
					in.fail("namespace of %s", kindOf(v))
				}
				in.charge(64 * len(d.keys))
				for i, k := range d.keys {
					in.hashes(k)
					ns.vars[in.str(k)] = d.vals[i]
				}
			}
			in.charge(64 * len(a.names))
			for i, n := range a.names {
				ns.vars[n] = a.named[i]
			}
			return ns
		}}
	case "dict":
		return &function{name, func(in *interp, a args) value {
			d := &Dict{}
			in.charge(64 * len(a.names))
			for _, v := range a.pos {
				src, ok := v.(*Dict)
				if !ok {
					in.fail("dict of %s", kindOf(v))
				}
				in.charge(64 * len(src.keys))
				for i, k := range src.keys {
					in.hashes(k)
					d.set(k, src.vals[i])
				}
			}
			for i, n := range a.names {
				d.set(n, a.named[i])
			}
			return d
		}}
	case "range":
		return &function{name, rangeOf}
	case "joiner":
		return &function{name, func(in *interp, a args) value {
			sep, used := value(", "), false
			if p := a.bind(in, name, "sep"); p[0] != (absent{}) {
				sep = p[0]
			}
			return &function{"joiner", func(*interp, args) value {
				if !used {
					used = true
					return ""
				}
				return sep
			}}
		}}
	}
	return nil
}

func rangeOf(in *interp, a args) value {
	p := a.bind(in, "range", "start", "stop", "step")
	from, to, by := int64(0), in.integer(p[0]), int64(1)
	if p[1] != (absent{}) {
		from, to = to, in.integer(p[1])
	}
	if p[2] != (absent{}) {
		by = in.integer(p[2])
	}
	if by == 0 {
		in.fail("range with step 0")
	}
	const most = 100_000 // as in Jinja2's sandbox
	l := &List{}
	for i := from; by > 0 && i < to || by < 0 && i > to; i += by {
		if len(l.items) == most {
			in.fail("range of more than %d", most)
		}
		in.charge(16)
		l.items = append(l.items, i)
		if by > 0 && i > to-by || by < 0 && i < to-by {
			break
		}
	}
	return l
}

// strftime is Python's strftime of the present time.
func (in *interp) strftime(format string) string {
	in.charge(8 * len(format)) // %B is September
	t := in.now()
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		bare := false // %-d: without a leading zero
		if format[i] == '-' && i+1 < len(format) {
			bare = true
			i++
		}
		layout := map[byte]string{'d': "02", 'm': "01", 'Y': "2006", 'y': "06", 'B': "January", 'b': "Jan", 'h': "Jan",
			'A': "Monday", 'a': "Mon", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'j': "002", 'f': "000000",
			'F': "2006-01-02", 'T': "15:04:05", 'D': "01/02/06", 'R': "15:04", 'e': "_2", 'z': "", 'Z': ""}
		l, ok := layout[format[i]]
		switch {
		case format[i] == '%':
			b.WriteByte('%')
		case !ok:
			in.fail("strftime_now: %%%c is not supported", format[i])
		case format[i] == 'f':
			fmt.Fprintf(&b, "%06d", t.Nanosecond()/1000)
		default:
			s := t.Format(l)
			if bare {
				s = strings.TrimLeft(s, "0")
				if s == "" {
					s = "0"
				}
			}
			b.WriteString(s)
		}
	}
	return b.String()
}
