package jinja

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

func dictMethod(d *Dict, name string) *function {
	each := func(item func(i int) value) func(in *interp, a args) value {
		return func(in *interp, a args) value {
			a.bind(in, name)
			in.charge(80 * len(d.keys)) // of items the most: a pair each
			return collect(len(d.keys), item)
		}
	}
	switch name {
	case "items":
		return &function{name, each(func(i int) value {
			return &List{items: []value{d.keys[i], d.vals[i]}, tuple: true}
		})}
	case "keys":
		return &function{name, each(func(i int) value { return d.keys[i] })}
	case "values":
		return &function{name, each(func(i int) value { return d.vals[i] })}
	case "copy":
		return &function{name, func(*interp, args) value { return d }} // immutable
	case "get":
		return &function{name, func(in *interp, a args) value {
			p := a.bind(in, name, "key", "default")
			in.hashes(p[0])
			if v, ok := d.get(p[0]); ok {
				return v
			}
			if p[1] == (absent{}) {
				return nil
			}
			return p[1]
		}}
	}
	return nil
}

func collect(n int, item func(i int) value) value {
	l := &List{}
	for i := range n {
		l.items = append(l.items, item(i))
	}
	return l
}

func listMethod(l *List, name string) *function {
	switch name {
	case "index", "count":
		return &function{name, func(in *interp, a args) value {
			p := a.bind(in, name, "value")
			n := int64(0)
			for i, x := range l.items {
				if in.equal(x, p[0], 0) {
					if name == "index" {
						return int64(i)
					}
					n++
				}
			}
			if name == "index" {
				in.fail("%s is not in the list", in.str(p[0]))
			}
			return n
		}}
	}
	return nil
}

// stringMethod returns the methods of Python's str that make a new string or answer a
// question.
func stringMethod(s, name string) *function {
	fn := func(f func(in *interp, p []value) value, params ...string) *function {
		return &function{name, func(in *interp, a args) value {
			in.charge(len(s))
			return f(in, a.bind(in, name, params...))
		}}
	}
	switch name {
	case "strip", "lstrip", "rstrip":
		return fn(func(in *interp, p []value) value { return strip(in, s, name, p[0]) }, "chars")
	case "startswith", "endswith":
		return fn(func(in *interp, p []value) value {
			has := strings.HasPrefix
			if name == "endswith" {
				has = strings.HasSuffix
			}
			if l, ok := p[0].(*List); ok {
				for _, x := range l.items {
					in.step()
					if has(s, in.text(x)) {
						return true
					}
				}
				return false
			}
			return has(s, in.text(p[0]))
		}, "prefix")
	case "split", "rsplit":
		return fn(func(in *interp, p []value) value { return split(in, s, name == "rsplit", p[0], p[1]) }, "sep", "maxsplit")
	case "splitlines":
		return fn(func(in *interp, p []value) value {
			in.charge(16 * len(s))
			out := &List{}
			for rest := s; rest != ""; {
				n := strings.IndexAny(rest, "\n\r\v\f\u0085\u2028\u2029")
				if n < 0 {
					out.items = append(out.items, rest)
					break
				}
				_, w := utf8.DecodeRuneInString(rest[n:])
				if strings.HasPrefix(rest[n:], "\r\n") {
					w = 2
				}
				out.items = append(out.items, rest[:n])
				rest = rest[n+w:]
			}
			return out
		})
	case "partition", "rpartition":
		return fn(func(in *interp, p []value) value {
			sep := in.text(p[0])
			i := strings.Index(s, sep)
			parts := []value{s, "", ""}
			if name == "rpartition" {
				i = strings.LastIndex(s, sep)
				parts = []value{"", "", s}
			}
			if i >= 0 {
				parts = []value{s[:i], sep, s[i+len(sep):]}
			}
			return &List{items: parts, tuple: true}
		}, "sep")
	case "replace":
		return fn(func(in *interp, p []value) value { return in.replace(s, p[0], p[1], p[2]) }, "old", "new", "count")
	case "format":
		return &function{name, func(in *interp, a args) value { return in.formatFields(s, a) }}
	case "join":
		return fn(func(in *interp, p []value) value { return in.join(p[0], s, "") }, "iterable")
	case "find", "rfind", "index", "rindex":
		return fn(func(in *interp, p []value) value {
			i := strings.Index(s, in.text(p[0]))
			if name[0] == 'r' {
				i = strings.LastIndex(s, in.text(p[0]))
			}
			if i < 0 {
				if strings.HasSuffix(name, "index") {
					in.fail("substring not found")
				}
				return int64(-1)
			}
			return int64(utf8.RuneCountInString(s[:i]))
		}, "sub")
	case "count":
		return fn(func(in *interp, p []value) value { return int64(strings.Count(s, in.text(p[0]))) }, "sub")
	case "removeprefix":
		return fn(func(in *interp, p []value) value { return strings.TrimPrefix(s, in.text(p[0])) }, "prefix")
	case "removesuffix":
		return fn(func(in *interp, p []value) value { return strings.TrimSuffix(s, in.text(p[0])) }, "suffix")
	case "upper", "lower", "title", "capitalize", "casefold":
		return fn(func(*interp, []value) value { return recase(s, name) })
	case "isdigit", "isnumeric", "isdecimal":
		return fn(func(*interp, []value) value { return all(s, unicode.IsDigit) })
	case "isalpha":
		return fn(func(*interp, []value) value { return all(s, unicode.IsLetter) })
	case "isalnum":
		return fn(func(*interp, []value) value {
			return all(s, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) })
		})
	case "isspace":
		return fn(func(*interp, []value) value { return all(s, unicode.IsSpace) })
	case "isupper", "islower":
		return fn(func(*interp, []value) value { return isCase(s, name[2:]) })
	}
	return nil
}

func all(s string, f func(rune) bool) bool {
	return s != "" && strings.IndexFunc(s, func(r rune) bool { return !f(r) }) < 0
}

func isCase(s, want string) bool {
	return s != strings.ToLower(s) && want == "upper" && s == strings.ToUpper(s) ||
		s != strings.ToUpper(s) && want == "lower" && s == strings.ToLower(s)
}

func recase(s, how string) string {
	switch how {
	case "upper":
		return strings.ReplaceAll(strings.ToUpper(s), "ß", "SS")
	case "lower", "casefold":
		return strings.ToLower(s)
	}
	inWord := false
	return strings.Map(func(r rune) rune {
		first := !inWord
		switch how {
		case "title":
			inWord = unicode.IsUpper(r) || unicode.IsLower(r) || unicode.IsTitle(r)
		case "words": // the filter title, which has its own idea of where a word begins
			inWord = !unicode.IsSpace(r) && !strings.ContainsRune("-({[<", r)
		default:
			inWord = true
		}
		if first {
			return unicode.ToTitle(r)
		}
		return unicode.ToLower(r)
	}, s)
}

// text returns v if it is a string, else fails.
func (in *interp) text(v value) string {
	s, ok := v.(string)
	if !ok {
		if v == (absent{}) {
			in.fail("argument missing")
		}
		in.fail("want a string, have %s", kindOf(v))
	}
	return s
}

func strip(in *interp, s, name string, chars value) string {
	cut := unicode.IsSpace
	if chars != (absent{}) && chars != nil {
		set := in.text(chars)
		cut = func(r rune) bool {
			in.linear(len(set))
			return strings.ContainsRune(set, r)
		}
	}
	if name != "rstrip" {
		s = strings.TrimLeftFunc(s, cut)
	}
	if name != "lstrip" {
		s = strings.TrimRightFunc(s, cut)
	}
	return s
}

func split(in *interp, s string, right bool, sep, limit value) value {
	n := int64(-1)
	if limit != (absent{}) {
		n = in.integer(limit)
	}
	var parts []string
	if sep == (absent{}) || sep == nil {
		in.charge(24 * len(s)) // a part takes two bytes of s at least
		parts = splitSpace(s, right, n)
	} else {
		by := in.text(sep)
		if by == "" {
			in.fail("split by an empty string")
		}
		in.charge(48 * (strings.Count(s, by) + 1))
		switch {
		case n < 0 || n > int64(len(s)):
			parts = strings.Split(s, by)
		case !right:
			parts = strings.SplitN(s, by, int(n)+1)
		default:
			for ; n > 0; n-- {
				i := strings.LastIndex(s, by)
				if i < 0 {
					break
				}
				parts = append(parts, s[i+len(by):])
				s = s[:i]
			}
			parts = append(parts, s)
			reverse(parts)
		}
	}
	return collect(len(parts), func(i int) value { return parts[i] })
}

// splitSpace splits at runs of white space, at most n times if n >= 0; the remainder keeps
// its far end.
func splitSpace(s string, right bool, n int64) []string {
	if fields := strings.Fields(s); n < 0 || int64(len(fields)) <= n {
		return fields
	}
	trim, index := strings.TrimLeftFunc, strings.IndexFunc
	if right {
		trim, index = strings.TrimRightFunc, strings.LastIndexFunc
	}
	var parts []string
	for s = trim(s, unicode.IsSpace); s != ""; n-- {
		i := index(s, unicode.IsSpace)
		if n == 0 || i < 0 {
			parts = append(parts, s)
			break
		}
		if right {
			_, w := utf8.DecodeRuneInString(s[i:])
			parts, s = append(parts, s[i+w:]), s[:i]
		} else {
			parts, s = append(parts, s[:i]), s[i:]
		}
		s = trim(s, unicode.IsSpace)
	}
	if right {
		reverse(parts)
	}
	return parts
}

func reverse[T any](s []T) {
	for i, j := 0, len(s)-1; i < j; i, j = i+1, j-1 {
		s[i], s[j] = s[j], s[i]
	}
}

func (in *interp) replace(s string, old, new, count value) string {
	o, w, n := in.text(old), in.text(new), -1
	if count != (absent{}) && count != nil {
		n = int(in.integer(count))
	}
	k := strings.Count(s, o)
	if n >= 0 {
		k = min(k, n)
	}
	in.charge(len(s))
	if len(w) > len(o) {
		if k > in.bytes/(len(w)-len(o)) {
			in.charge(in.bytes + 1)
		}
		in.charge(k * (len(w) - len(o)))
	}
	return strings.Replace(s, o, w, n)
}

func (in *interp) join(v value, sep, attribute string) string {
	var b strings.Builder
	for i, x := range in.items(v) {
		in.step()
		if attribute != "" {
			x = in.path(x, attribute)
		}
		s := in.str(x)
		in.charge(len(s) + len(sep))
		if i > 0 {
			b.WriteString(sep)
		}
		b.WriteString(s)
	}
	return b.String()
}

func (in *interp) integer(v value) int64 {
	i, _, isInt, _ := number(v)
	if !isInt {
		in.fail("want an integer, have %s", kindOf(v))
	}
	return i
}
