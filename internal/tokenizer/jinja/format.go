package jinja

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
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

// formatFields is Python's s.format(…), for {}, {0}, {name}, !r and the plainer
// specifications.
func formatFields(in *interp, v value, a args) value {
	s := v.(string)
	in.charge(len(s))
	var b strings.Builder
	next := 0
	for at := 0; at < len(s); at++ {
		c := s[at]
		if c != '{' && c != '}' {
			b.WriteByte(c)
			continue
		}
		if at+1 < len(s) && s[at+1] == c {
			b.WriteByte(c)
			at++
			continue
		}
		n := strings.IndexByte(s[at:], '}')
		if n < 1 {
			in.fail("bad format: single %q", c)
		}
		name, spec, _ := strings.Cut(s[at+1:at+n], ":")
		name, conversion, _ := strings.Cut(name, "!")
		at += n
		if name == "" {
			name = strconv.Itoa(next)
			next++
		}
		var v value = absent{}
		if i, err := strconv.Atoi(name); err == nil && i >= 0 && i < len(a.pos) {
			v = a.pos[i]
		} else if i := slices.Index(a.names, name); i >= 0 {
			v = a.named[i]
		}
		switch {
		case v == absent{}:
			in.fail("no value for {%s} of the format", name)
		case conversion == "r":
			v = in.formatOne("", 'r', v)
		case conversion != "":
			v = in.str(v)
		}
		out := in.formatField(spec, v)
		in.charge(len(out))
		b.WriteString(out)
	}
	return b.String()
}

// formatField formats a value by [<>][+][0][width][.precision][dfsx].
func (in *interp) formatField(spec string, v value) string {
	if spec == "" {
		return in.str(v)
	}
	_, _, isInt, isNumber := number(v)
	rest := strings.TrimLeft(spec, "<>")
	left := spec[0] == '<' || spec[0] != '>' && !isNumber
	verb := byte('s')
	if end := len(rest) - 1; end >= 0 && strings.IndexByte("dfsx", rest[end]) >= 0 {
		verb, rest = rest[end], rest[:end]
		if isNumber == (verb == 's') || (verb == 'd' || verb == 'x') && !isInt {
			in.fail("format {:%s} of %s", spec, kindOf(v))
		}
	} else if _, isBool := v.(bool); isBool || isNumber && strings.ContainsAny(rest, ".+") {
		in.fail("format {:%s} of %s is not supported", spec, kindOf(v))
	}
	if left {
		rest = "-" + rest
	}
	return in.formatOne(rest, verb, v)
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
	layout := "%"
	for _, flag := range []string{"-", "+", "0"} {
		if strings.Contains(flags, flag) && (flag == "-" || verb != 's' && verb != 'r') {
			layout += flag
		}
	}
	i, f, isInt, ok := number(v)
	switch {
	case verb == 's' || verb == 'r':
		s := in.str(v)
		if verb == 'r' {
			s = in.reprOf(v)
		}
		if !hasPrecision {
			prec = len(s)
		}
		return fmt.Sprintf(layout+"*.*s", n, prec, s)
	case !ok:
		in.fail("format %%%c of %s", verb, kindOf(v))
	case verb == 'd' || verb == 'i':
		if !isInt {
			i = int64(f)
		}
		return fmt.Sprintf(layout+"*d", n, i)
	case verb == 'x' && isInt:
		return fmt.Sprintf(layout+"*x", n, i)
	case verb == 'f':
		if !hasPrecision {
			prec = 6
		}
		return fmt.Sprintf(layout+"*.*f", n, prec, f)
	}
	in.fail("format %%%c is not supported", verb)
	return ""
}
