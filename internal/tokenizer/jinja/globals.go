package jinja

import (
	"cmp"
	"fmt"
	"strings"
)

// globals are the functions that every template has.
var globals = table(map[string]does{
	"raise_exception(message)": func(in *interp, _ value, a args) value {
		panic(&Error{Line: in.line, Msg: in.str(a.pos[0]), Raised: true})
	},
	"strftime_now(format)": func(in *interp, _ value, a args) value { return in.strftime(in.text(a.pos[0])) },
	"namespace": func(in *interp, _ value, a args) value {
		ns := &namespace{map[string]value{}}
		in.entries("namespace", a, func(k, v value) { ns.vars[in.str(k)] = v })
		return ns
	},
	"dict": func(in *interp, _ value, a args) value {
		d := &Dict{}
		in.entries("dict", a, d.set)
		return d
	},
	"range(start, stop, step=1)": rangeOf,
	"joiner(sep=', ')": func(_ *interp, _ value, a args) value {
		sep := value("")
		return &function{"joiner", func(*interp, args) value {
			now := sep
			sep = a.pos[0]
			return now
		}}
	},
})

// entries adds the entries of the mappings among a, then the named values.
func (in *interp) entries(of string, a args, add func(k, v value)) {
	for _, v := range a.pos {
		d, ok := v.(*Dict)
		if !ok {
			in.fail("%s of %s", of, kindOf(v))
		}
		in.charge(64 * len(d.keys))
		for i, k := range d.keys {
			in.hashes(k)
			add(k, d.vals[i])
		}
	}
	in.charge(64 * len(a.names))
	for i, n := range a.names {
		add(n, a.named[i])
	}
}

func rangeOf(in *interp, _ value, a args) value {
	from, to, by := int64(0), in.integer(a.pos[0]), in.integer(a.pos[2])
	if a.pos[1] != (absent{}) {
		from, to = to, in.integer(a.pos[1])
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

// timeLayouts are the layouts of package time for the directives of Python's strftime.
var timeLayouts = map[byte]string{'d': "02", 'm': "01", 'Y': "2006", 'y': "06", 'B': "January", 'b': "Jan", 'h': "Jan",
	'A': "Monday", 'a': "Mon", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'j': "002",
	'F': "2006-01-02", 'T': "15:04:05", 'D': "01/02/06", 'R': "15:04", 'e': "_2", 'z': "", 'Z': "", '%': "%"}

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
		bare := format[i] == '-' && i+1 < len(format) // %-d: without a leading zero
		if bare {
			i++
		}
		layout, ok := timeLayouts[format[i]]
		s := t.Format(layout)
		switch {
		case format[i] == 'f':
			s = fmt.Sprintf("%06d", t.Nanosecond()/1000)
		case !ok:
			in.fail("strftime_now: %%%c is not supported", format[i])
		case bare:
			s = cmp.Or(strings.TrimLeft(s, "0"), "0")
		}
		b.WriteString(s)
	}
	return b.String()
}
