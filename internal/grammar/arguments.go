package grammar

import (
	"encoding/json"
	"slices"
	"strings"
	"unicode"
)

// Form is how the arguments of a call are written that are no plain JSON object: a member after the other,
// each a key and a value. Strings stand as they are up to what ends a value, or are Python's.
type Form struct {
	Open      []Piece  `json:"open,omitempty"`       // before the first member
	Between   []Piece  `json:"between,omitempty"`    // two members
	End       []Piece  `json:"end,omitempty"`        // behind the last
	Key       []Piece  `json:"key,omitempty"`        // before a key
	KeyEnd    []Piece  `json:"key_end,omitempty"`    // behind it
	StringEnd []Piece  `json:"string_end,omitempty"` // instead of KeyEnd before a string; none: KeyEnd
	Close     []Piece  `json:"close,omitempty"`      // behind a value
	Pad       string   `json:"pad,omitempty"`        // on both sides of a value
	Stops     []string `json:"stops,omitempty"`      // texts that end a value
	Entities  []string `json:"entities,omitempty"`   // texts that in a string stand for others
	Python    bool     `json:"python,omitempty"`
	Object    bool     `json:"object,omitempty"` // it is a JSON object, in which no string has one of Stops; then End
}

// Piece is a part of a mark: text, or a special token.
type Piece struct {
	Text  string `json:"text,omitempty"`
	Token int32  `json:"token,omitempty"` // where there is no text
	May   bool   `json:"may,omitempty"`   // it may be left out
}

type arguments struct {
	Form   Form   `json:"form"`
	Schema string `json:"schema"`
}

// ArgumentsText is the Text of a Spec of the kind Arguments.
func ArgumentsText(f Form, schema string) string {
	text, _ := json.Marshal(arguments{f, schema}) // of these types never an error
	return string(text)
}

// argWriter makes the nodes of a call's arguments.
type argWriter struct {
	*schemaParser
	f     Form
	v     *Vocabulary
	chars *auto // any text
	body  *auto // what may stand in a value
}

// maxKey bounds the bytes of a key.
const maxKey = 200

func (g *builder) arguments(text string, v *Vocabulary) (*expr, error) {
	var in arguments
	if err := json.Unmarshal([]byte(text), &in); err != nil {
		return nil, &Error{Reason: "the form of arguments cannot be read: " + err.Error()}
	}
	d, err := parseDoc(in.Schema)
	if err != nil {
		return nil, err
	}
	for _, list := range []*[]string{&in.Form.Stops, &in.Form.Entities} {
		*list = slices.DeleteFunc(*list, func(s string) bool { return s == "" })
	}
	w := &argWriter{f: in.Form, v: v, schemaParser: newSchemaParser(g, d)}
	outer := g.where
	g.where = w.pointer
	defer func() { g.where = outer }()
	if err := w.options(d, Flexible); err != nil {
		return nil, err
	}
	w.j = w.texts()
	w.collect(d, "")
	if w.f.Object {
		e := w.generate(&schema{kind: isRef, ref: w.target(d, nil, w.rootBase())})
		w.rules()
		return g.cat(e, w.mark(w.f.End)), nil
	}
	e := w.call(w.deref(w.target(d, nil, w.rootBase())), 0)
	w.rules()
	return e, nil
}

// texts are the parts of the values' JSON.
func (w *argWriter) texts() *jsonTexts {
	g := w.g
	j := g.jsonWith(w.j.ws)
	if w.f.Python {
		j.yes, j.no, j.null = g.lit("True"), g.lit("False"), g.lit("None")
		return j
	}
	any := g.rep(g.class([]rune{0, maxRune}, asUTF8), 0, -1)
	w.chars = g.compile(any)
	var within []string
	stops := []*expr{g.around(w.f.Stops)}
	for _, s := range w.f.Stops {
		if !strings.HasPrefix(s, "\n") { // behind which JSON has no such text
			within = append(within, s)
		}
		if rest, ok := strings.CutPrefix(s, w.f.Pad); ok && w.f.Pad != "" {
			stops = append(stops, g.cat(g.lit(rest), any))
		}
	}
	w.body = w.chars
	if e := g.alt(stops...); e.kind != exprNone {
		w.body = g.product(w.chars, g.compile(e), true)
	}
	if within != nil {
		j.cut(within)
	}
	return j
}

// mark is a text with special tokens.
func (w *argWriter) mark(pieces []Piece) *expr {
	kids := make([]*expr, len(pieces))
	for i, p := range pieces {
		switch {
		case p.Text != "":
			kids[i] = w.g.lit(p.Text)
		case p.Token < 0 || int(p.Token) >= len(w.v.tokens) || w.v.tokens[p.Token] != nil:
			w.g.refuse("token %d is not a special one", p.Token)
		default:
			kids[i] = w.g.token(p.Token)
		}
		if p.May {
			kids[i] = w.g.opt(kids[i])
		}
	}
	return w.g.cat(kids...)
}

// call is the arguments that s allows.
func (w *argWriter) call(s *schema, depth int) *expr {
	if depth > maxDepth {
		w.g.refuse("a reference that leads back to itself")
	}
	switch s.kind {
	case isRef:
		return w.call(w.deref(s.ref), depth+1)
	case anyOf:
		kids := make([]*expr, len(s.opts))
		for i, o := range s.opts {
			kids[i] = w.call(o, depth+1)
		}
		return w.g.alt(kids...)
	case oneOf:
		return w.generate(s) // says why not
	case anything:
		s = &schema{kind: isObject, most: -1}
	case isObject:
	default:
		return w.g.none
	}
	if len(s.patterns) > 0 {
		w.g.where = func() string { return s.at }
		w.g.refuse("patternProperties of a call's arguments are not supported for a model that writes no JSON")
	}
	return w.membersOf(s, objectForm{open: w.mark(w.f.Open), between: w.mark(w.f.Between), end: w.mark(w.f.End),
		member: func(name string, v *schema) *expr {
			if !w.isKey(name) {
				return w.g.none
			}
			return w.member(w.g.lit(name), v)
		},
		extras: func(s *schema, names []string) *expr {
			v := s.other(s.others)
			if v.kind == never {
				return w.g.none
			}
			return w.member(w.otherKey(names), v)
		}})
}

// isKey reports whether a key can be written so that it is read as the same.
func (w *argWriter) isKey(name string) bool {
	bad := func(r rune) bool { return unicode.IsControl(r) || strings.ContainsRune(`<>"`, r) }
	if w.f.Python {
		bad = func(r rune) bool { return r < unicode.MaxASCII && r != '_' && !isWord(byte(r)) }
	}
	return name != "" && len(name) <= maxKey && strings.TrimSpace(name) == name && !strings.ContainsFunc(name, bad)
}

func isWord(b byte) bool { return b >= '0' && b <= '9' || b|0x20 >= 'a' && b|0x20 <= 'z' || b == '_' }

// otherKey is a key that the schema does not name: a word.
func (w *argWriter) otherKey(names []string) *expr {
	g := w.g
	var set byteSet
	for b := range byte(0x80) {
		if isWord(b) {
			set.add(b, b)
		}
	}
	words := g.compile(g.rep(g.bytes(set), 1, 64))
	if len(names) > 0 {
		names = slices.Clone(names)
		slices.Sort(names)
		words = g.product(words, g.compile(g.words(slices.Compact(names))), true)
	}
	return g.automaton(words, 0, -1)
}

// member is a key and a value of s.
func (w *argWriter) member(key *expr, s *schema) *expr {
	g := w.g
	key = g.cat(w.mark(w.f.Key), key)
	end, end2 := w.mark(w.f.KeyEnd), w.mark(w.f.Close)
	if w.f.Python {
		return g.cat(key, end, w.generate(s), end2)
	}
	var v parted
	w.part(s, &v, 0)
	pad := g.lit(w.f.Pad)
	if w.f.StringEnd != nil { // what follows is said
		if v.any {
			v = parted{strings: []*schema{{kind: isString, longest: -1}}, others: []*schema{{kind: anything}}}
		}
		v.kinds = 0
		return g.cat(key, g.alt(
			g.cat(w.mark(w.f.StringEnd), pad, w.raw(&v), pad),
			g.cat(end, pad, w.generateAll(v.others), pad)), end2)
	}
	if v.any { // is what it looks like
		v = parted{strings: []*schema{{kind: isString, longest: -1}}}
	}
	return g.cat(key, end, pad, g.alt(w.raw(&v), w.generateAll(v.others)), pad, end2)
}

// parted is a schema in parts: for strings, and for the other types.
type parted struct {
	strings, others []*schema
	kinds           uint32 // of others, a bit for each schemaKind
	any             bool   // whatever it is
}

func (w *argWriter) part(s *schema, v *parted, depth int) {
	if depth > maxDepth {
		w.g.refuse("a reference that leads back to itself")
	}
	w.g.spend(1)
	switch s.kind {
	case anything:
		v.any = true
	case never:
	case isString:
		v.strings = append(v.strings, s)
	case anyOf:
		for _, o := range s.opts {
			w.part(o, v, depth+1)
		}
	case isRef:
		t := w.deref(s.ref)
		if t.kind == anything || t.kind == isString || t.kind == anyOf || t.kind == isRef {
			w.part(t, v, depth+1)
			return
		}
		v.others, v.kinds = append(v.others, s), v.kinds|1<<t.kind
	default:
		v.others, v.kinds = append(v.others, s), v.kinds|1<<s.kind
	}
}

func (w *argWriter) generateAll(list []*schema) *expr {
	kids := make([]*expr, len(list))
	for i, s := range list {
		kids[i] = w.generate(s)
	}
	return w.g.alt(kids...)
}

// raw is the strings of a value, as they stand. Where the value may be something else, too, no string looks like that.
func (w *argWriter) raw(v *parted) *expr {
	g := w.g
	body := w.body
	if v.kinds != 0 && len(v.strings) > 0 {
		body = g.product(body, g.compile(w.looksLike(v.kinds)), true)
	}
	var words []string
	var kids []*expr
	for _, s := range v.strings {
		if len(s.words) == 1 && s.words[0].kind == partLiteral && s.shortest == 0 && s.longest < 0 {
			words = append(words, s.words[0].text)
			continue
		}
		kids = append(kids, w.rawOf(body, s))
	}
	if len(words) > 0 {
		slices.Sort(words)
		kids = append(kids, w.plain(g.product(body, g.compile(g.words(slices.Compact(words))), false)))
	}
	return g.alt(kids...)
}

// plain leaves out texts that do not stand for themselves.
func (w *argWriter) plain(a *auto) *expr {
	if len(w.f.Entities) > 0 && a != nil {
		a = w.g.product(a, w.g.compile(w.g.around(w.f.Entities)), true)
	}
	return w.g.automaton(a, 0, -1)
}

func (w *argWriter) rawOf(a *auto, s *schema) *expr {
	g := w.g
	bounded := s.shortest > 0 || s.longest >= 0
	if !bounded && len(s.words) == 0 {
		return g.automaton(a, 0, -1)
	}
	outer := g.where
	g.where = func() string { return s.at }
	defer func() { g.where = outer }()
	for _, word := range s.words {
		e := w.rawWord(word)
		if e.kind == exprNone {
			return e
		}
		a = g.product(a, g.compile(e), false)
	}
	if len(w.f.Entities) > 0 && a != nil {
		a = g.product(a, g.compile(g.around(w.f.Entities)), true)
	}
	if !bounded || a == nil {
		return g.automaton(a, 0, -1)
	}
	if s.longest >= 0 && s.shortest > s.longest {
		return g.none
	}
	if a = g.counted(a, w.chars, s.shortest, s.longest); a == nil {
		return g.none
	}
	return g.automaton(a, s.shortest, s.longest)
}

func (w *argWriter) rawWord(word stringPart) *expr {
	text := word.text
	switch word.kind {
	case partLiteral:
		return w.g.lit(text)
	case partFormat:
		text = formats[text]
	}
	e, err := parseRegex(text, w.g.budget)
	if err != nil {
		w.g.refuse("pattern %.80q: %v", text, err)
	}
	if word.kind == partFormat {
		return w.g.whole(e, asUTF8)
	}
	return w.g.search(e, asUTF8)
}

// looksLike is what is read as something else than a string where that may be of other kinds, and what is not read as
// it stands: white space at the ends, quotes.
func (w *argWriter) looksLike(kinds uint32) *expr {
	g := w.g
	var all byteSet
	all.add(0, 255)
	space := g.class([]rune{'\t', '\r', ' ', ' ', 0x85, 0x85, 0xa0, 0xa0, 0x1680, 0x1680, 0x2000, 0x200a, 0x2028, 0x2029, 0x202f, 0x202f, 0x205f, 0x205f, 0x3000, 0x3000}, asUTF8)
	any := g.rep(g.bytes(all), 0, -1)
	begins := func(s string) *expr {
		var set byteSet
		for _, b := range []byte(s) {
			set.add(b, b)
		}
		return g.cat(g.bytes(set), any)
	}
	kids := []*expr{g.cat(space, any), g.cat(any, space), begins(`"'`)}
	has := func(k schemaKind) bool { return kinds>>k&1 != 0 }
	if has(isNumber) {
		kids = append(kids, w.j.number)
	}
	if has(isBool) {
		kids = append(kids, g.lit("true"), g.lit("false"), g.lit("True"), g.lit("False"))
	}
	if has(isNull) {
		kids = append(kids, g.lit("null"), g.lit("None"))
	}
	if has(isArray) || has(isObject) {
		kids = append(kids, begins("[({"))
	}
	return g.alt(kids...)
}
