package grammar

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// What EBNF and Lark have in common.

func (c *cfg) more() bool { return c.pos < len(c.text) }

func (c *cfg) peek() byte {
	if c.more() {
		return c.text[c.pos]
	}
	return 0
}

func (c *cfg) take(s string) bool {
	if strings.HasPrefix(c.text[c.pos:], s) {
		c.pos += len(s)
		return true
	}
	return false
}

func (c *cfg) want(s string) {
	if !c.take(s) {
		c.fail(c.pos, "%q is missing", s)
	}
}

func isName(b byte) bool {
	return b == '_' || b == '-' || b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z'
}

func (c *cfg) word() string {
	from := c.pos
	for c.more() && isName(c.text[c.pos]) {
		c.pos++
	}
	return c.text[from:c.pos]
}

func (c *cfg) int() int {
	from := c.pos
	for c.more() && c.text[c.pos] >= '0' && c.text[c.pos] <= '9' {
		c.pos++
	}
	n, ok := number(c.text[from:c.pos])
	if !ok {
		c.fail(from, "a number is missing")
	}
	if n > maxRepeat {
		c.fail(from, "a repetition of more than %d times", maxRepeat)
	}
	return n
}

// braces reads m,n} behind a {.
func (c *cfg) braces(space func()) (lo, hi int) {
	space()
	if c.peek() != ',' {
		lo = c.int()
	}
	space()
	hi = lo
	if c.take(",") {
		space()
		if hi = -1; c.peek() != '}' {
			hi = c.int()
		}
		space()
	}
	c.want("}")
	if hi >= 0 && lo > hi {
		c.fail(c.pos, "a repetition of at least %d and at most %d times", lo, hi)
	}
	return lo, hi
}

func (c *cfg) rep(n *cfgNode, lo, hi int) *cfgNode {
	c.g.bound(lo)
	return &cfgNode{kind: cfgRep, kids: []*cfgNode{n}, lo: lo, hi: hi, at: n.at}
}

func (c *cfg) leaf(e *expr, at int) *cfgNode { return &cfgNode{kind: cfgLeaf, e: e, at: at} }

func group(kind cfgKind, kids []*cfgNode, at int) *cfgNode {
	if len(kids) == 1 {
		return kids[0]
	}
	return &cfgNode{kind: kind, kids: kids, at: at}
}

// quoted reads a string with escapes up to its end quote, which is behind the first one.
func (c *cfg) quoted(end byte) string {
	start := c.pos
	c.pos++
	var out []byte
	for {
		switch b := c.peek(); {
		case !c.more() || b == '\n':
			c.fail(start, "a string without an end")
		case b == end:
			c.pos++
			return string(out)
		case b == '\\':
			out = utf8.AppendRune(out, c.escaped())
		default:
			out = append(out, b)
			c.pos++
		}
	}
}

// escaped reads an escape.
func (c *cfg) escaped() rune {
	at := c.pos
	c.pos++
	if !c.more() {
		c.fail(at, `a \ at the end`)
	}
	b := c.text[c.pos]
	c.pos++
	switch b {
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	case 'f':
		return '\f'
	case 'b':
		return '\b'
	case 'v':
		return '\v'
	case '0':
		return 0
	case 'x', 'u', 'U':
		n := map[byte]int{'x': 2, 'u': 4, 'U': 8}[b]
		if c.pos+n > len(c.text) {
			c.fail(at, "an escape with too few digits")
		}
		v, err := strconv.ParseUint(c.text[c.pos:c.pos+n], 16, 32)
		if err != nil || v > maxRune || v >= 0xd800 && v < 0xe000 {
			c.fail(at, "an escape with a wrong number")
		}
		c.pos += n
		return rune(v)
	}
	if b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '1' && b <= '9' {
		c.fail(at, `an unknown escape: \%c`, b)
	}
	c.pos--
	r, n := utf8.DecodeRuneInString(c.text[c.pos:])
	c.pos += n
	return r
}

// special reads a special token behind its <: a name up to >, or [ids].
func (c *cfg) special() *cfgNode {
	at := c.pos - 1
	end := strings.IndexByte(c.text[c.pos:], '>')
	if end < 0 || strings.ContainsAny(c.text[c.pos:c.pos+end], "\n\"") {
		c.fail(at, "a special token's name without an end")
	}
	name := c.text[c.pos : c.pos+end]
	c.pos += end + 1
	if ids, ok := strings.CutPrefix(name, "["); ok {
		return c.leaf(c.tokens(strings.TrimSuffix(ids, "]"), at), at)
	}
	id, ok := c.v.names["<"+name+">"]
	if !ok {
		c.fail(at, "the model has no special token <%s>", name)
	}
	return c.leaf(c.g.token(id), at)
}

// tokens reads special tokens by number: 1,3-5.
func (c *cfg) tokens(list string, at int) *expr {
	var kids []*expr
	for part := range strings.SplitSeq(list, ",") {
		from, to, ranged := strings.Cut(strings.TrimSpace(part), "-")
		lo, err := strconv.Atoi(from)
		hi := lo
		if err == nil && ranged {
			hi, err = strconv.Atoi(to)
		}
		if err != nil || lo < 0 || hi < lo || hi >= len(c.v.tokens) {
			c.fail(at, "%q is no token, and no range of them", part)
		}
		for id := lo; id <= hi; id++ {
			if c.v.tokens[id] != nil {
				c.fail(at, "token %d is not a special one", id)
			}
			kids = append(kids, c.g.token(int32(id)))
		}
	}
	return c.g.alt(kids...)
}
