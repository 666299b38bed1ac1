package jinja

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

var stringMethods, listMethods, dictMethods, loopMethods map[string]*builtin

// A method can look up methods (join those of its items), so that the tables cannot be plain
// initializers.
func init() {
	// The methods of Python's str that make a new string or answer a question.
	stringMethods = table(map[string]does{
		"strip(chars=none)":             text(strip(true, true)),
		"lstrip(chars=none)":            text(strip(true, false)),
		"rstrip(chars=none)":            text(strip(false, true)),
		"startswith(prefix)":            text(affixed(strings.HasPrefix)),
		"endswith(prefix)":              text(affixed(strings.HasSuffix)),
		"split(sep=none, maxsplit=-1)":  text(split(false)),
		"rsplit(sep=none, maxsplit=-1)": text(split(true)),
		"splitlines()":                  text(splitLines),
		"partition(sep)":                text(partition(strings.Index, 0)),
		"rpartition(sep)":               text(partition(strings.LastIndex, 2)),
		"replace(old, new, count=none)": text(replace),
		"format":                        formatFields,
		"join(iterable)":                text(func(in *interp, s string, a args) value { return in.join(a.pos[0], s, "") }),
		"find(sub)":                     text(find(strings.Index, false)),
		"rfind(sub)":                    text(find(strings.LastIndex, false)),
		"index(sub)":                    text(find(strings.Index, true)),
		"rindex(sub)":                   text(find(strings.LastIndex, true)),
		"count(sub)":                    text(func(in *interp, s string, a args) value { return int64(strings.Count(s, in.text(a.pos[0]))) }),
		"removeprefix(prefix)":          text(func(in *interp, s string, a args) value { return strings.TrimPrefix(s, in.text(a.pos[0])) }),
		"removesuffix(suffix)":          text(func(in *interp, s string, a args) value { return strings.TrimSuffix(s, in.text(a.pos[0])) }),
		"upper()":                       text(upper),
		"lower casefold()":              text(lower),
		"capitalize()":                  text(capitalize),
		"title()": text(recase(func(r rune) bool {
			return unicode.IsUpper(r) || unicode.IsLower(r) || unicode.IsTitle(r)
		})),
		"isdigit isnumeric isdecimal()": text(every(unicode.IsDigit)),
		"isalpha()":                     text(every(unicode.IsLetter)),
		"isalnum()":                     text(every(func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) })),
		"isspace()":                     text(every(unicode.IsSpace)),
		"isupper()":                     text(isCase(strings.ToUpper, strings.ToLower)),
		"islower()":                     text(isCase(strings.ToLower, strings.ToUpper)),
	})
	listMethods = table(map[string]does{
		"index(value)": func(in *interp, v value, a args) value {
			i := slices.IndexFunc(v.(*List).items, func(x value) bool { return in.equal(x, a.pos[0], 0) })
			if i < 0 {
				in.fail("%s is not in the list", in.str(a.pos[0]))
			}
			return int64(i)
		},
		"count(value)": func(in *interp, v value, a args) value {
			n := int64(0)
			for _, x := range v.(*List).items {
				if in.equal(x, a.pos[0], 0) {
					n++
				}
			}
			return n
		},
	})
	dictMethods = table(map[string]does{
		"items()":  func(in *interp, v value, _ args) value { return in.pairs("items", v) },
		"keys()":   func(in *interp, v value, _ args) value { return &List{items: in.copyOf(v.(*Dict).keys)} },
		"values()": func(in *interp, v value, _ args) value { return &List{items: in.copyOf(v.(*Dict).vals)} },
		"copy":     same, // immutable
		"get(key, default=none)": func(in *interp, v value, a args) value {
			in.hashes(a.pos[0])
			if x, ok := v.(*Dict).get(a.pos[0]); ok {
				return x
			}
			return a.pos[1]
		},
	})
	loopMethods = table(map[string]does{
		"cycle": func(in *interp, v value, a args) value {
			if len(a.pos) == 0 {
				in.fail("cycle without values")
			}
			return a.pos[v.(*loop).at%len(a.pos)]
		},
		"changed": func(in *interp, v value, a args) value {
			l, now := v.(*loop), &List{items: a.pos}
			if l.last != nil && in.equal(l.last, now, 0) {
				return false
			}
			l.last = now
			return true
		},
	})
}

// method returns the method of that name of v, or nil.
func method(v value, name string) *function {
	switch v.(type) {
	case string:
		return stringMethods[name].of(v)
	case *List:
		return listMethods[name].of(v)
	case *Dict:
		return dictMethods[name].of(v)
	case *loop:
		return loopMethods[name].of(v)
	}
	return nil
}

// pairs returns the items of a mapping, as the method items does.
func (in *interp) pairs(of string, v value) *List {
	d, ok := v.(*Dict)
	if !ok {
		in.fail("%s of %s", of, kindOf(v))
	}
	in.charge(80 * len(d.keys))
	l := &List{}
	for i, k := range d.keys {
		l.items = append(l.items, &List{items: []value{k, d.vals[i]}, tuple: true})
	}
	return l
}

func affixed(has func(s, affix string) bool) onText {
	return func(in *interp, s string, a args) value {
		l, ok := a.pos[0].(*List)
		if !ok {
			return has(s, in.text(a.pos[0]))
		}
		return slices.ContainsFunc(l.items, func(x value) bool {
			in.step()
			return has(s, in.text(x))
		})
	}
}

func splitLines(in *interp, s string, _ args) value {
	in.charge(16 * len(s))
	out := &List{}
	for s != "" {
		n := strings.IndexAny(s, "\n\r\v\f\u0085\u2028\u2029")
		if n < 0 {
			out.items = append(out.items, s)
			break
		}
		_, w := utf8.DecodeRuneInString(s[n:])
		if strings.HasPrefix(s[n:], "\r\n") {
			w = 2
		}
		out.items = append(out.items, s[:n])
		s = s[n+w:]
	}
	return out
}

// partition cuts a string in three; if the separator is missing, part whole of them is the
// string and the others are empty.
func partition(index func(s, sep string) int, whole int) onText {
	return func(in *interp, s string, a args) value {
		sep := in.text(a.pos[0])
		parts := []value{"", "", ""}
		if i := index(s, sep); i >= 0 {
			parts = []value{s[:i], sep, s[i+len(sep):]}
		} else {
			parts[whole] = s
		}
		return &List{items: parts, tuple: true}
	}
}

func find(index func(s, sub string) int, must bool) onText {
	return func(in *interp, s string, a args) value {
		i := index(s, in.text(a.pos[0]))
		if i >= 0 {
			i = utf8.RuneCountInString(s[:i])
		} else if must {
			in.fail("substring not found")
		}
		return int64(i)
	}
}

func every(is func(rune) bool) onText {
	return func(_ *interp, s string, _ args) value {
		return s != "" && strings.IndexFunc(s, func(r rune) bool { return !is(r) }) < 0
	}
}

func upper(_ *interp, s string, _ args) value {
	return strings.ReplaceAll(strings.ToUpper(s), "ß", "SS")
}

func lower(_ *interp, s string, _ args) value { return strings.ToLower(s) }

// recase gives the first character of each word title case and the others lower case; a word
// begins after a character that is not inside one, and at the start.
func recase(inside func(rune) bool) onText {
	return func(_ *interp, s string, _ args) value {
		inWord := false
		return strings.Map(func(r rune) rune {
			first := !inWord
			inWord = inside(r)
			if first {
				return unicode.ToTitle(r)
			}
			return unicode.ToLower(r)
		}, s)
	}
}

var capitalize = recase(func(rune) bool { return true })

func strip(left, right bool) onText {
	return func(in *interp, s string, a args) value {
		cut := unicode.IsSpace
		if a.pos[0] != nil {
			set := in.text(a.pos[0])
			cut = func(r rune) bool {
				in.linear(len(set))
				return strings.ContainsRune(set, r)
			}
		}
		if left {
			s = strings.TrimLeftFunc(s, cut)
		}
		if right {
			s = strings.TrimRightFunc(s, cut)
		}
		return s
	}
}

func split(right bool) onText {
	return func(in *interp, s string, a args) value {
		n := in.integer(a.pos[1])
		var parts []string
		if a.pos[0] == nil {
			in.charge(24 * len(s)) // a part takes two bytes of s at least
			parts = splitSpace(s, right, n)
		} else {
			sep := in.text(a.pos[0])
			if sep == "" {
				in.fail("split by an empty string")
			}
			in.charge(48 * (strings.Count(s, sep) + 1))
			switch {
			case n < 0 || n > int64(len(s)):
				parts = strings.Split(s, sep)
			case !right:
				parts = strings.SplitN(s, sep, int(n)+1)
			default:
				for i := 0; n > 0; n-- {
					if i = strings.LastIndex(s, sep); i < 0 {
						break
					}
					s, parts = s[:i], append(parts, s[i+len(sep):])
				}
				parts = append(parts, s)
				slices.Reverse(parts)
			}
		}
		l := &List{items: make([]value, len(parts))}
		for i, part := range parts {
			l.items[i] = part
		}
		return l
	}
}

// splitSpace splits at runs of white space, at most n times if n >= 0; the remainder keeps
// its far end.
func splitSpace(s string, right bool, n int64) []string {
	fields := strings.Fields(s)
	if n < 0 || int64(len(fields)) <= n {
		return fields
	}
	if right {
		last := fields[len(fields)-int(n):]
		for _, f := range slices.Backward(last) {
			s = strings.TrimRightFunc(s, unicode.IsSpace)
			s = s[:len(s)-len(f)]
		}
		return append([]string{strings.TrimRightFunc(s, unicode.IsSpace)}, last...)
	}
	for _, f := range fields[:n] {
		s = strings.TrimLeftFunc(s, unicode.IsSpace)[len(f):]
	}
	return append(fields[:n:n], strings.TrimLeftFunc(s, unicode.IsSpace))
}

func replace(in *interp, s string, a args) value {
	from, to, n := in.text(a.pos[0]), in.text(a.pos[1]), -1
	if a.pos[2] != nil {
		n = int(in.integer(a.pos[2]))
	}
	k := strings.Count(s, from)
	if n >= 0 {
		k = min(k, n)
	}
	in.chargeTimes(int64(k), max(0, len(to)-len(from)))
	return strings.Replace(s, from, to, n)
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
