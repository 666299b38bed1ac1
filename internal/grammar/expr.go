package grammar

import "encoding/binary"

// byteSet is a set of byte values: bit b of word b/64.
type byteSet [4]uint64

func (s *byteSet) add(lo, hi byte) {
	for b := int(lo); b <= int(hi); b++ {
		s[b>>6] |= 1 << (b & 63)
	}
}

func (s *byteSet) has(b byte) bool { return s[b>>6]>>(b&63)&1 != 0 }

func (s *byteSet) empty() bool { return s[0]|s[1]|s[2]|s[3] == 0 }

type exprKind uint8

const (
	exprNone  exprKind = iota // no text at all
	exprEmpty                 // the empty text
	exprBytes                 // one byte of set
	exprLit                   // text, which is not empty
	exprCat                   // kids, one after the other
	exprAlt                   // one of kids
	exprRep                   // kids[0], min to max times; max < 0: without end
	exprCall                  // what the rule n derives; the only way to recurse
	exprAuto                  // what auto accepts from its state n, after lo to hi more characters
	exprToken                 // the special token n
)

// expr is a node of a grammar. Nodes are immutable and shared: two that look the same are the
// same pointer, so that what is built from them can be recognised by pointers too.
type expr struct {
	id       uint32
	kind     exprKind
	calls    bool // has an exprCall below
	nullable bool // derives the empty text, calls aside
	free     bool // of exprAlt: any number of plain characters may come, whichever
	set      byteSet
	text     string
	kids     []*expr
	min, max int32 // of exprRep; of exprAuto: see counts
	n        int32
	auto     *auto
}

// builder makes the nodes of one grammar within its budget.
type builder struct {
	*budget
	nodes map[string]*expr
	rules []*expr // by number; nil until defined
	names []string
	key   []byte
	chars map[string]*expr // what class made
	autos uint32           // made so far
	jsons map[Whitespace]*jsonTexts

	none, empty *expr
}

func newBuilder(b *budget) *builder {
	g := &builder{budget: b, nodes: map[string]*expr{}, chars: map[string]*expr{}, jsons: map[Whitespace]*jsonTexts{}}
	g.none = g.intern(expr{kind: exprNone})
	g.empty = g.intern(expr{kind: exprEmpty, nullable: true})
	return g
}

func (g *builder) intern(e expr) *expr {
	k := append(g.key[:0], byte(e.kind))
	switch e.kind {
	case exprBytes:
		for _, w := range e.set {
			k = binary.LittleEndian.AppendUint64(k, w)
		}
	case exprLit:
		k = append(k, e.text...)
	case exprAuto:
		k = binary.LittleEndian.AppendUint32(k, e.auto.id)
	}
	k = binary.LittleEndian.AppendUint32(k, uint32(e.n))
	k = binary.LittleEndian.AppendUint32(k, uint32(e.min))
	k = binary.LittleEndian.AppendUint32(k, uint32(e.max))
	for _, kid := range e.kids {
		k = binary.LittleEndian.AppendUint32(k, kid.id)
	}
	g.key = k
	if old := g.nodes[string(k)]; old != nil {
		return old
	}
	g.spend(2 + len(e.kids)/2)
	for _, kid := range e.kids {
		e.calls = e.calls || kid.calls
	}
	e.id = uint32(len(g.nodes))
	n := &e
	g.nodes[string(k)] = n
	return n
}

func (g *builder) bytes(set byteSet) *expr {
	if set.empty() {
		return g.none
	}
	return g.intern(expr{kind: exprBytes, set: set})
}

func (g *builder) lit(s string) *expr {
	switch len(s) {
	case 0:
		return g.empty
	case 1:
		var set byteSet
		set.add(s[0], s[0])
		return g.bytes(set)
	}
	g.spend(len(s) / 8)
	return g.intern(expr{kind: exprLit, text: s})
}

func (g *builder) cat(kids ...*expr) *expr {
	var flat []*expr
	for _, e := range kids {
		switch e.kind {
		case exprNone:
			return g.none
		case exprEmpty:
		case exprCat:
			flat = append(flat, e.kids...)
		default:
			flat = append(flat, e)
		}
	}
	switch len(flat) {
	case 0:
		return g.empty
	case 1:
		return flat[0]
	}
	// A long concatenation is a chain of pairs, so that its ends are shared.
	if len(flat) > 8 {
		half := len(flat) / 2
		return g.pair(g.catFlat(flat[:half]), g.catFlat(flat[half:]))
	}
	return g.catFlat(flat)
}

func (g *builder) catFlat(kids []*expr) *expr {
	if len(kids) == 1 {
		return kids[0]
	}
	null := true
	for _, e := range kids {
		null = null && e.nullable
	}
	return g.intern(expr{kind: exprCat, kids: append([]*expr(nil), kids...), nullable: null})
}

func (g *builder) pair(a, b *expr) *expr {
	return g.intern(expr{kind: exprCat, kids: []*expr{a, b}, nullable: a.nullable && b.nullable})
}

func (g *builder) alt(kids ...*expr) *expr {
	var flat []*expr
	var set byteSet
	seen := make(map[*expr]bool, len(kids))
	var add func(list []*expr)
	add = func(list []*expr) {
		for _, e := range list {
			switch {
			case e.kind == exprNone || seen[e]:
			case e.kind == exprAlt && !e.free && len(e.kids) <= 4: // longer ones stay, so that chains are linear
				add(e.kids)
			case e.kind == exprBytes:
				for i, w := range e.set {
					set[i] |= w
				}
			default:
				seen[e] = true
				flat = append(flat, e)
			}
		}
	}
	add(kids)
	if !set.empty() {
		flat = append(flat, g.bytes(set))
	}
	switch len(flat) {
	case 0:
		return g.none
	case 1:
		return flat[0]
	}
	null := false
	for _, e := range flat {
		null = null || e.nullable
	}
	return g.intern(expr{kind: exprAlt, kids: flat, nullable: null})
}

func (g *builder) opt(e *expr) *expr { return g.alt(e, g.empty) }

// rep is e, lo to hi times; hi < 0 is without end.
func (g *builder) rep(e *expr, lo, hi int) *expr {
	if hi >= 0 && lo > hi {
		return g.none
	}
	if e.kind == exprEmpty || hi == 0 {
		return g.empty
	}
	if e.kind == exprNone {
		if lo == 0 {
			return g.empty
		}
		return g.none
	}
	if lo == 1 && hi == 1 {
		return e
	}
	if e.nullable && !e.calls {
		// Rounds that read nothing change nothing: leave them out, so that each one reads.
		e, lo = g.filled(e), 0
		if e.kind == exprNone {
			return g.empty
		}
	}
	if e.kind == exprRep && e.max < 0 && e.min <= 1 && hi < 0 && lo <= 1 {
		return g.rep(e.kids[0], min(lo, int(e.min)), -1) // (x*)*, (x+)*, ...
	}
	g.bound(lo)
	g.bound(hi)
	return g.intern(expr{kind: exprRep, kids: []*expr{e}, min: int32(lo), max: int32(max(hi, -1)), nullable: lo == 0 || e.nullable})
}

// filled is e without the empty text; e has no calls.
func (g *builder) filled(e *expr) *expr {
	if !e.nullable {
		return e
	}
	switch e.kind {
	case exprAlt:
		kids := make([]*expr, len(e.kids))
		for i, k := range e.kids {
			kids[i] = g.filled(k)
		}
		return g.alt(kids...)
	case exprCat: // all kids are nullable: the first that reads something is kid i
		kids := make([]*expr, len(e.kids))
		for i, k := range e.kids {
			kids[i] = g.cat(append([]*expr{g.filled(k)}, e.kids[i+1:]...)...)
		}
		return g.alt(kids...)
	case exprRep:
		return g.rep(e.kids[0], 1, int(e.max))
	case exprAuto:
		return g.automaton(e.auto.filled(g), 0, -1)
	}
	return g.none // the empty text itself
}

// newRule reserves a rule; define says what it derives.
func (g *builder) newRule(name string) int32 {
	g.spend(1)
	g.rules = append(g.rules, nil)
	g.names = append(g.names, name)
	return int32(len(g.rules) - 1)
}

func (g *builder) define(r int32, e *expr) { g.rules[r] = e }

func (g *builder) call(r int32) *expr {
	e := g.intern(expr{kind: exprCall, n: r})
	e.calls = true
	return e
}

func (g *builder) token(id int32) *expr { return g.intern(expr{kind: exprToken, n: id}) }

// words is one of the given texts: a tree of their beginnings, so that a step looks only at
// the bytes that can come next. words must be sorted and without duplicates.
func (g *builder) words(words []string) *expr {
	if len(words) == 0 {
		return g.none
	}
	if len(words) == 1 {
		return g.lit(words[0])
	}
	common := len(words[0])
	last := words[len(words)-1]
	for i := range min(common, len(last)) {
		if words[0][i] != last[i] {
			common = i
			break
		}
	}
	common = min(common, len(last))
	if common > 0 {
		rest := make([]string, len(words))
		for i, w := range words {
			rest[i] = w[common:]
		}
		return g.cat(g.lit(words[0][:common]), g.words(rest))
	}
	var kids []*expr
	if words[0] == "" {
		kids = append(kids, g.empty)
		words = words[1:]
	}
	for i := 0; i < len(words); {
		j := i
		for j < len(words) && words[j][0] == words[i][0] {
			j++
		}
		kids = append(kids, g.words(words[i:j]))
		i = j
	}
	return g.alt(kids...)
}
