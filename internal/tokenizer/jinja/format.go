package jinja

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// format is Python's s % v, for %s %r %d %i %f %x and %%.
func (in *interp) format(s string, v value) string {
	vals := []value{v}
	if l, ok := v.(*List); ok && l.tuple {
		vals = l.items
	}
	in.charge(len(s))
	var b strings.Builder
	for at := 0; at < len(s); at++ {
		if s[at] != '%' {
			b.WriteByte(s[at])
			continue
		}
		end := at + 1
		for end < len(s) && (unicode.IsDigit(rune(s[end])) || strings.IndexByte("-+ .#", s[end]) >= 0) {
			end++
		}
		if end == len(s) {
			in.fail("incomplete format")
		}
		spec, verb := s[at+1:end], s[end]
		at = end
		if verb == '%' {
			b.WriteByte('%')
			continue
		}
		if len(vals) == 0 {
			in.fail("not enough values for the format")
		}
		out := in.formatOne(spec, verb, vals[0])
		vals = vals[1:]
		in.charge(len(out))
		b.WriteString(out)
	}
	return b.String()
}

// formatOne formats one value; spec is what stands between % and verb.
func (in *interp) formatOne(spec string, verb byte, v value) string {
	flags := strings.TrimLeft(spec, "-+ #0")
	width, precision, hasPrecision := strings.Cut(flags, ".")
	n, err1 := strconv.Atoi("0" + width)
	prec, err2 := strconv.Atoi("0" + precision)
	const most = 1000
	if err1 != nil || err2 != nil || n > most || prec > most {
		in.fail("bad format %%%s%c", spec, verb)
	}
	flags = spec[:len(spec)-len(flags)]
	i, f, isInt, ok := number(v)
	var s string
	switch {
	case verb == 's' || verb == 'r':
		s = in.str(v)
		if verb == 'r' {
			var b strings.Builder
			in.repr(&b, v, 0)
			s = b.String()
		}
		if hasPrecision && utf8.RuneCountInString(s) > prec {
			s = string([]rune(s)[:prec])
		}
		flags = strings.ReplaceAll(flags, "0", "")
	case !ok:
		in.fail("format %%%c of %s", verb, kindOf(v))
	case verb == 'd' || verb == 'i':
		if !isInt {
			i = int64(f)
		}
		s = strconv.FormatInt(i, 10)
	case verb == 'x' && isInt:
		s = strconv.FormatInt(i, 16)
	case verb == 'f':
		if !hasPrecision {
			prec = 6
		}
		s = strconv.FormatFloat(f, 'f', prec, 64)
	default:
		in.fail("format %%%c is not supported", verb)
	}
	if verb != 's' && verb != 'r' && strings.Contains(flags, "+") && s[0] != '-' {
		s = "+" + s
	}
	pad := n - utf8.RuneCountInString(s)
	switch {
	case pad <= 0:
	case strings.Contains(flags, "-"):
		s += strings.Repeat(" ", pad)
	case strings.Contains(flags, "0") && (s[0] == '-' || s[0] == '+'):
		s = s[:1] + strings.Repeat("0", pad) + s[1:]
	case strings.Contains(flags, "0"):
		s = strings.Repeat("0", pad) + s
	default:
		s = strings.Repeat(" ", pad) + s
	}
	return s
}
