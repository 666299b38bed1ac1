package grammar

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

type reKind uint8

const (
	reClass reKind = iota // one character of ranges
	reCat
	reAlt
	reRep
	reBegin // ^
	reEnd   // $
)

// re is a regular expression over characters, as written.
type re struct {
	kind   reKind
	ranges []rune // pairs from, to; sorted, apart
	kids   []*re
	lo, hi int // of reRep; hi < 0: without end

	anchors int8 // whether anchored: 0 not known yet, 1 no, 2 yes
}

const maxRune = unicode.MaxRune

// parseRegex reads the syntax of RE2 and of Rust's regex crate, and of ECMAScript what does
// not contradict it. Lazy quantifiers mean what greedy ones do: the language is the same.
func parseRegex(text string, spent *budget) (*re, error) {
	p := &reParser{text: text, spent: spent}
	e, err := p.alt(0)
	if err == nil && p.pos < len(text) {
		err = p.fail("an unmatched )")
	}
	if err != nil {
		return nil, err
	}
	return e, nil
}

type reParser struct {
	text  string
	pos   int
	fold  bool // (?i)
	dot   bool // (?s): . matches a line end too
	loose bool // (?x)
	spent *budget
}

func (p *reParser) fail(format string, args ...any) error {
	return &Error{Reason: "regular expression: " + fmt.Sprintf(format, args...), Where: "offset " + strconv.Itoa(p.pos)}
}

func (p *reParser) more() bool { return p.pos < len(p.text) }

func (p *reParser) take(s string) bool {
	if strings.HasPrefix(p.text[p.pos:], s) {
		p.pos += len(s)
		return true
	}
	return false
}

func (p *reParser) rune() rune {
	r, n := utf8.DecodeRuneInString(p.text[p.pos:])
	p.pos += n
	return r
}

func (p *reParser) alt(depth int) (*re, error) {
	if depth > maxDepth {
		return nil, p.fail("nested deeper than %d", maxDepth)
	}
	flags := [3]bool{p.fold, p.dot, p.loose}
	var kids []*re
	for {
		e, err := p.cat(depth)
		if err != nil {
			return nil, err
		}
		kids = append(kids, e)
		if !p.take("|") {
			break
		}
	}
	p.fold, p.dot, p.loose = flags[0], flags[1], flags[2]
	if len(kids) == 1 {
		return kids[0], nil
	}
	return &re{kind: reAlt, kids: kids}, nil
}

func (p *reParser) cat(depth int) (*re, error) {
	var kids []*re
	for p.more() && p.text[p.pos] != '|' && p.text[p.pos] != ')' {
		if p.loose {
			if c := p.text[p.pos]; c == ' ' || c == '\t' || c == '\n' || c == '\r' {
				p.pos++
				continue
			} else if c == '#' {
				for p.more() && p.text[p.pos] != '\n' {
					p.pos++
				}
				continue
			}
		}
		p.spent.spend(1)
		e, err := p.atom(depth)
		if err != nil {
			return nil, err
		}
		if e == nil {
			continue // flags only
		}
		for n := 0; p.more(); n++ {
			lo, hi, ok, err := p.quantifier()
			if err != nil {
				return nil, err
			}
			if !ok {
				break
			}
			if e.kind == reBegin || e.kind == reEnd {
				return nil, p.fail("an anchor cannot be repeated")
			}
			if depth+n > maxDepth {
				return nil, p.fail("nested deeper than %d", maxDepth)
			}
			e = &re{kind: reRep, kids: []*re{e}, lo: lo, hi: hi}
		}
		kids = append(kids, e)
	}
	if len(kids) == 1 {
		return kids[0], nil
	}
	return &re{kind: reCat, kids: kids}, nil
}

func (p *reParser) quantifier() (lo, hi int, ok bool, err error) {
	start := p.pos
	switch p.text[p.pos] {
	case '*':
		lo, hi = 0, -1
	case '+':
		lo, hi = 1, -1
	case '?':
		lo, hi = 0, 1
	case '{':
		end := strings.IndexByte(p.text[p.pos:], '}')
		if end < 0 {
			return 0, 0, false, nil // a literal brace
		}
		a, b, comma := strings.Cut(p.text[p.pos+1:p.pos+end], ",")
		a, b = strings.TrimSpace(a), strings.TrimSpace(b)
		if lo, ok = number(a); !ok {
			if a != "" || !comma || b == "" {
				return 0, 0, false, nil
			}
			lo = 0
		}
		hi = lo
		if comma {
			if hi = -1; b != "" {
				if hi, ok = number(b); !ok {
					return 0, 0, false, nil
				}
			}
		}
		if lo > maxRepeat || hi > maxRepeat {
			return 0, 0, false, p.fail("a repetition of more than %d times", maxRepeat)
		}
		if hi >= 0 && lo > hi {
			return 0, 0, false, p.fail("a repetition of at least %d and at most %d times", lo, hi)
		}
		p.pos += end
	default:
		return 0, 0, false, nil
	}
	p.pos++
	if p.more() && (p.text[p.pos] == '?' || p.text[p.pos] == '+') {
		if p.text[p.pos] == '+' && p.text[start] != '{' {
			return 0, 0, false, p.fail("possessive quantifiers are not supported")
		}
		if p.text[p.pos] == '?' {
			p.pos++
		}
	}
	return lo, hi, true, nil
}

func number(s string) (int, bool) {
	if s == "" || len(s) > 9 {
		return maxRepeat + 1, s != "" && strings.Trim(s, "0123456789") == ""
	}
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0 && s[0] != '+'
}

// atom reads what a quantifier may follow; nil: a group of flags.
func (p *reParser) atom(depth int) (*re, error) {
	switch c := p.text[p.pos]; c {
	case '(':
		p.pos++
		return p.group(depth)
	case '[':
		p.pos++
		ranges, err := p.class(depth)
		return &re{kind: reClass, ranges: ranges}, err
	case '.':
		p.pos++
		if p.dot {
			return &re{kind: reClass, ranges: []rune{0, maxRune}}, nil
		}
		return &re{kind: reClass, ranges: []rune{0, '\n' - 1, '\n' + 1, maxRune}}, nil
	case '^':
		p.pos++
		return &re{kind: reBegin}, nil
	case '$':
		p.pos++
		return &re{kind: reEnd}, nil
	case '*', '+', '?':
		return nil, p.fail("nothing to repeat in front of %c", c)
	case '\\':
		switch {
		case p.take(`\A`):
			return &re{kind: reBegin}, nil
		case p.take(`\z`), p.take(`\Z`):
			return &re{kind: reEnd}, nil
		case p.take(`\b`), p.take(`\B`):
			return nil, p.fail("word boundaries are not supported")
		}
		ranges, err := p.escape()
		if err == nil && p.fold {
			ranges = p.folded(ranges)
		}
		return &re{kind: reClass, ranges: ranges}, err
	}
	r := p.rune()
	ranges := []rune{r, r}
	if p.fold {
		ranges = p.folded(ranges)
	}
	return &re{kind: reClass, ranges: ranges}, nil
}

func (p *reParser) group(depth int) (*re, error) {
	flags := [3]bool{p.fold, p.dot, p.loose}
	restore := func() { p.fold, p.dot, p.loose = flags[0], flags[1], flags[2] }
	if p.take("?") {
		switch {
		case p.take("="), p.take("!"), p.take("<="), p.take("<!"):
			return nil, p.fail("look-around is not supported")
		case p.take(">"):
			return nil, p.fail("atomic groups are not supported")
		case p.take("P<"), p.take("<"):
			end := strings.IndexByte(p.text[p.pos:], '>')
			if end <= 0 {
				return nil, p.fail("a group's name without an end")
			}
			p.pos += end + 1
		case p.take("P="), p.take("P>"):
			return nil, p.fail("references to groups are not supported")
		default:
			on := true
			for {
				if !p.more() {
					return nil, p.fail("an unmatched (")
				}
				c := p.text[p.pos]
				p.pos++
				switch c {
				case '-':
					on = false
					continue
				case 'i':
					p.fold = on
					continue
				case 's':
					p.dot = on
					continue
				case 'x':
					p.loose = on
					continue
				case 'u', 'U':
					continue
				case ')':
					return nil, nil // from here to the end of the group around it
				case ':':
				default:
					return nil, p.fail("flag %q is not supported", c)
				}
				break
			}
		}
	}
	e, err := p.alt(depth + 1)
	restore()
	if err != nil {
		return nil, err
	}
	if !p.take(")") {
		return nil, p.fail("an unmatched (")
	}
	if e.kind == reCat && len(e.kids) == 0 {
		return e, nil
	}
	return &re{kind: reCat, kids: []*re{e}}, nil
}

// class reads what is behind a [.
func (p *reParser) class(depth int) ([]rune, error) {
	if depth > maxDepth {
		return nil, p.fail("nested deeper than %d", maxDepth)
	}
	not := p.take("^")
	var set []rune
	for first := true; ; first = false {
		if !p.more() {
			return nil, p.fail("an unmatched [")
		}
		if p.text[p.pos] == ']' && !first {
			p.pos++
			break
		}
		if p.text[p.pos] == ']' && first && !strings.Contains(p.text[p.pos+1:], "]") {
			p.pos++ // [] and [^], as ECMAScript has them
			break
		}
		if p.take("[:") {
			end := strings.Index(p.text[p.pos:], ":]")
			if end < 0 {
				p.pos -= 1
				set = append(set, '[', '[')
				continue
			}
			r, ok := posix[strings.TrimPrefix(p.text[p.pos:p.pos+end], "^")]
			if !ok {
				return nil, p.fail("no class is named %q", p.text[p.pos:p.pos+end])
			}
			if p.text[p.pos] == '^' {
				r = negate(r)
			}
			set = append(set, r...)
			p.pos += end + 2
			continue
		}
		lo, err := p.member()
		if err != nil {
			return nil, err
		}
		if len(lo) == 2 && lo[0] == lo[1] && p.pos+1 < len(p.text) && p.text[p.pos] == '-' && p.text[p.pos+1] != ']' {
			at := p.pos
			p.pos++
			hi, err := p.member()
			if err != nil {
				return nil, err
			}
			if len(hi) != 2 || hi[0] != hi[1] { // [a-\d]: the dash is itself
				set = append(append(set, lo...), '-', '-')
				set = append(set, hi...)
				continue
			}
			if hi[0] < lo[0] {
				p.pos = at
				return nil, p.fail("a range from %q to %q", lo[0], hi[0])
			}
			set = append(set, lo[0], hi[0])
			continue
		}
		set = append(set, lo...)
	}
	p.spent.spend(len(set))
	set = normal(set)
	if p.fold {
		set = p.folded(set)
	}
	if not {
		set = negate(set)
	}
	return set, nil
}

func (p *reParser) member() ([]rune, error) {
	if p.text[p.pos] == '\\' {
		if p.take(`\b`) {
			return []rune{'\b', '\b'}, nil
		}
		return p.escape()
	}
	r := p.rune()
	return []rune{r, r}, nil
}

var (
	digits = []rune{'0', '9'}
	word   = []rune{'0', '9', 'A', 'Z', '_', '_', 'a', 'z'}
	space  = normal([]rune{'\t', '\r', ' ', ' ', 0x85, 0x85, 0xa0, 0xa0, 0x1680, 0x1680, 0x2000, 0x200a, 0x2028, 0x2029, 0x202f, 0x202f, 0x205f, 0x205f, 0x3000, 0x3000})
	posix  = map[string][]rune{
		"alnum": {'0', '9', 'A', 'Z', 'a', 'z'}, "alpha": {'A', 'Z', 'a', 'z'}, "ascii": {0, 0x7f},
		"blank": {'\t', '\t', ' ', ' '}, "cntrl": {0, 0x1f, 0x7f, 0x7f}, "digit": {'0', '9'},
		"graph": {'!', '~'}, "lower": {'a', 'z'}, "print": {' ', '~'}, "punct": {'!', '/', ':', '@', '[', '`', '{', '~'},
		"space": {'\t', '\r', ' ', ' '}, "upper": {'A', 'Z'}, "word": {'0', '9', 'A', 'Z', '_', '_', 'a', 'z'},
		"xdigit": {'0', '9', 'A', 'F', 'a', 'f'},
	}
)

// escape reads a \ and what is behind it, as a set of characters.
func (p *reParser) escape() ([]rune, error) {
	p.pos++
	if !p.more() {
		return nil, p.fail(`a \ at the end`)
	}
	r := p.rune()
	one := func(r rune) ([]rune, error) { return []rune{r, r}, nil }
	switch r {
	case 'd':
		return digits, nil
	case 'D':
		return negate(digits), nil
	case 'w':
		return word, nil
	case 'W':
		return negate(word), nil
	case 's':
		return space, nil
	case 'S':
		return negate(space), nil
	case 'n':
		return one('\n')
	case 't':
		return one('\t')
	case 'r':
		return one('\r')
	case 'f':
		return one('\f')
	case 'v':
		return one('\v')
	case 'a':
		return one('\a')
	case 'e':
		return one(0x1b)
	case '0':
		return one(0)
	case 'c':
		if p.more() {
			if c := p.text[p.pos] &^ 0x20; c >= 'A' && c <= 'Z' {
				p.pos++
				return one(rune(c - '@'))
			}
		}
		return nil, p.fail(`\c without a letter`)
	case 'x', 'u', 'U':
		return p.hex(r)
	case 'p', 'P':
		return p.property(r == 'P')
	}
	if r >= '1' && r <= '9' {
		return nil, p.fail("references to groups are not supported")
	}
	if r < utf8.RuneSelf && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z') {
		return nil, p.fail(`an unknown escape: \%c`, r)
	}
	return one(r)
}

func (p *reParser) hex(kind rune) ([]rune, error) {
	n := map[rune]int{'x': 2, 'u': 4, 'U': 8}[kind]
	text := ""
	if p.take("{") {
		end := strings.IndexByte(p.text[p.pos:], '}')
		if end < 0 {
			return nil, p.fail("an escape without an end")
		}
		text = p.text[p.pos : p.pos+end]
		p.pos += end + 1
	} else if p.pos+n <= len(p.text) {
		text = p.text[p.pos : p.pos+n]
		p.pos += n
	}
	v, err := strconv.ParseUint(text, 16, 32)
	if err != nil || v > maxRune {
		return nil, p.fail("an escape with a wrong number")
	}
	r := rune(v)
	if r >= 0xd800 && r < 0xdc00 && kind == 'u' && p.take(`\u`) && p.pos+4 <= len(p.text) {
		low, err := strconv.ParseUint(p.text[p.pos:p.pos+4], 16, 16)
		if err != nil || low < 0xdc00 || low > 0xdfff {
			return nil, p.fail("half of a surrogate pair")
		}
		p.pos += 4
		r = (r-0xd800)<<10 + rune(low) - 0xdc00 + 0x10000
	}
	return []rune{r, r}, nil
}

func (p *reParser) property(not bool) ([]rune, error) {
	name := ""
	if p.take("{") {
		end := strings.IndexByte(p.text[p.pos:], '}')
		if end < 0 {
			return nil, p.fail("a property without an end")
		}
		name = p.text[p.pos : p.pos+end]
		p.pos += end + 1
	} else if p.more() {
		name = string(p.rune())
	}
	if strings.HasPrefix(name, "^") {
		name, not = name[1:], !not
	}
	if _, value, ok := strings.Cut(name, "="); ok {
		name = value
	}
	var set []rune
	switch long := longNames[name]; {
	case name == "Any":
		set = []rune{0, maxRune}
	case name == "ASCII":
		set = []rune{0, 0x7f}
	case unicode.Categories[name] != nil:
		set = tableRanges(unicode.Categories[name])
	case unicode.Scripts[name] != nil:
		set = tableRanges(unicode.Scripts[name])
	case unicode.Properties[name] != nil:
		set = tableRanges(unicode.Properties[name])
	case long != "":
		set = tableRanges(unicode.Categories[long])
	default:
		return nil, p.fail("no property is named %q", name)
	}
	if not {
		set = negate(set)
	}
	p.spent.spend(len(set))
	return set, nil
}

var longNames = map[string]string{
	"Letter": "L", "Alphabetic": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Number": "N",
	"Decimal_Number": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z", "Mark": "M", "Other": "C",
}

func tableRanges(t *unicode.RangeTable) []rune {
	var set []rune
	for _, r := range t.R16 {
		for c := rune(r.Lo); c <= rune(r.Hi); c += rune(r.Stride) {
			if r.Stride == 1 {
				set = append(set, c, rune(r.Hi))
				break
			}
			set = append(set, c, c)
		}
	}
	for _, r := range t.R32 {
		for c := rune(r.Lo); c <= rune(r.Hi); c += rune(r.Stride) {
			if r.Stride == 1 {
				set = append(set, c, rune(r.Hi))
				break
			}
			set = append(set, c, c)
		}
	}
	return normal(set)
}

// normal sorts ranges, joins those that meet, and takes out surrogates, which no text has.
func normal(set []rune) []rune {
	type pair struct{ lo, hi rune }
	var pairs []pair
	for i := 0; i < len(set); i += 2 {
		lo, hi := set[i], set[i+1]
		if lo < 0xd800 && hi >= 0xd800 {
			pairs = append(pairs, pair{lo, 0xd7ff})
			lo = 0xe000
		} else if lo >= 0xd800 && lo < 0xe000 {
			lo = 0xe000
		}
		if lo <= hi && !(hi >= 0xd800 && hi < 0xe000) {
			pairs = append(pairs, pair{lo, hi})
		}
	}
	slices.SortFunc(pairs, func(a, b pair) int { return int(a.lo - b.lo) })
	var out []rune
	for _, p := range pairs {
		if n := len(out); n > 0 && p.lo <= out[n-1]+1 {
			out[n-1] = max(out[n-1], p.hi)
			continue
		}
		out = append(out, p.lo, p.hi)
	}
	return out
}

func negate(set []rune) []rune {
	set = normal(set)
	var out []rune
	next := rune(0)
	for i := 0; i < len(set); i += 2 {
		if set[i] > next {
			out = append(out, next, set[i]-1)
		}
		next = set[i+1] + 1
	}
	if next <= maxRune {
		out = append(out, next, maxRune)
	}
	return normal(out)
}

func (p *reParser) folded(set []rune) []rune {
	n := 0
	for i := 0; i < len(set); i += 2 {
		n += int(min(set[i+1], 0x1e943) - set[i] + 1)
	}
	p.spent.spend(max(n, 0) / 8)
	return folded(set)
}

// folded adds the other case of each character.
func folded(set []rune) []rune {
	out := slices.Clone(set)
	add := func(r rune) {
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			out = append(out, f, f)
		}
	}
	for i := 0; i < len(set); i += 2 {
		for r := set[i]; r <= min(set[i+1], 0x1e943); r++ { // the last letter with a case
			add(r)
		}
	}
	return normal(out)
}
