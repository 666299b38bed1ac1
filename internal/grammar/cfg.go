package grammar

import (
	"fmt"
	"strconv"
	"strings"
)

// A grammar written in EBNF or Lark is read into a tree of these.
type cfgKind uint8

const (
	cfgCat cfgKind = iota
	cfgAlt
	cfgRep  // kids[0], lo to hi times
	cfgName // of a rule or terminal
	cfgLeaf // e
	cfgAnd  // in terminals: all of kids
	cfgNot  // in terminals: anything but kids[0]
)

type cfgNode struct {
	kind   cfgKind
	kids   []*cfgNode
	lo, hi int
	name   string
	at     int // in the text
	e      *expr
}

type cfgRule struct {
	name     string
	at       int
	body     *cfgNode
	terminal bool
	lazy     bool     // the shortest match counts
	suffix   *cfgNode // what the match ends with; implies lazy

	number, bare int32 // its rules, or -1; bare: without what is ignored in front of its first lexeme
	null         bool
	term         *expr // of a terminal, once it is made
	busy         bool
}

// cfg is a grammar being read.
type cfg struct {
	g     *builder
	v     *Vocabulary
	space Whitespace
	text  string
	pos   int
	depth int

	rules   map[string]*cfgRule
	order   []*cfgRule
	pending []pendingRule

	ignored []*cfgNode // %ignore
	once    bool       // at most one ignored text in one place
	leading bool       // ignored texts may come first
	skip    *expr
}

func (c *cfg) fail(at int, format string, args ...any) {
	line := 1 + strings.Count(c.text[:min(at, len(c.text))], "\n")
	panic(&Error{Reason: fmt.Sprintf(format, args...), Where: "line " + strconv.Itoa(line)})
}

func (c *cfg) deeper() func() {
	c.depth++
	if c.depth > maxDepth {
		c.fail(c.pos, "nested deeper than %d", maxDepth)
	}
	return func() { c.depth-- }
}

func (c *cfg) add(r *cfgRule) {
	c.g.spend(2)
	if c.rules[r.name] != nil {
		c.fail(r.at, "%q is defined twice", r.name)
	}
	r.number, r.bare = -1, -1
	c.rules[r.name] = r
	c.order = append(c.order, r)
}

// generate makes the rules' nodes, and returns that of the rule start.
func (c *cfg) generate(start string) *expr {
	first := c.rules[start]
	if first == nil {
		c.fail(0, "there is no rule %q", start)
	}
	for _, r := range c.order { // mistakes also where nothing leads to
		c.check(r.body)
		if r.suffix != nil {
			c.check(r.suffix)
		}
	}
	c.skip = c.g.empty
	if len(c.ignored) > 0 {
		kids := make([]*expr, len(c.ignored))
		for i, n := range c.ignored {
			c.check(n)
			kids[i] = c.terminal(n)
		}
		c.skip = c.g.alt(kids...)
		if c.once {
			c.skip = c.g.opt(c.skip)
		} else {
			c.skip = c.g.rep(c.skip, 0, -1)
		}
	}
	for changed := true; changed; {
		changed = false
		for _, r := range c.order {
			if !r.null && !r.isTerminal() && c.null(r.body) {
				r.null, changed = true, true
			}
		}
	}
	bare := c.skip.kind != exprEmpty && !c.leading
	e := c.ruleExpr(first, bare)
	for i := 0; i < len(c.pending); i++ {
		p := c.pending[i]
		n, body := p.r.number, c.rule(p.r.body, p.bare)
		if p.bare {
			n = p.r.bare
		}
		c.g.define(n, body)
	}
	if bare && c.nullRule(first) {
		e = c.g.opt(e)
	}
	return e
}

func (r *cfgRule) isTerminal() bool { return r.terminal || r.lazy || r.suffix != nil }

// check looks for names that are not defined.
func (c *cfg) check(n *cfgNode) {
	if n.kind == cfgName && c.rules[n.name] == nil {
		c.fail(n.at, "%q is not defined", n.name)
	}
	for _, k := range n.kids {
		c.check(k)
	}
}

// null says whether n derives the empty text, by what is known of the rules.
func (c *cfg) null(n *cfgNode) bool {
	switch n.kind {
	case cfgAlt:
		for _, k := range n.kids {
			if c.null(k) {
				return true
			}
		}
		return false
	case cfgRep:
		return n.lo == 0 || c.null(n.kids[0])
	case cfgName:
		return c.nullRule(c.rules[n.name])
	case cfgLeaf:
		return n.e.nullable
	case cfgAnd, cfgNot:
		return c.terminal(n).nullable
	}
	for _, k := range n.kids {
		if !c.null(k) {
			return false
		}
	}
	return true
}

func (c *cfg) nullRule(r *cfgRule) bool {
	if r.isTerminal() {
		return c.terminalRule(r).nullable
	}
	return r.null
}

type pendingRule struct {
	r    *cfgRule
	bare bool
}

// ruleExpr is a call of r, or the terminal.
func (c *cfg) ruleExpr(r *cfgRule, bare bool) *expr {
	if r.isTerminal() {
		return c.lexeme(c.terminalRule(r), bare)
	}
	n := &r.number
	if bare {
		n = &r.bare
	}
	if *n < 0 {
		*n = c.g.newRule(r.name)
		c.pending = append(c.pending, pendingRule{r, bare})
	}
	return c.g.call(*n)
}

// lexeme is e with what is ignored in front of it.
func (c *cfg) lexeme(e *expr, bare bool) *expr {
	if bare || e.kind == exprNone {
		return e
	}
	return c.g.cat(c.skip, e)
}

// rule is the node of n inside a rule. With bare nothing is ignored in front of its first
// lexeme, and it is not the empty text.
func (c *cfg) rule(n *cfgNode, bare bool) *expr {
	defer c.deeper()()
	g := c.g
	switch n.kind {
	case cfgAlt:
		kids := make([]*expr, len(n.kids))
		for i, k := range n.kids {
			kids[i] = c.rule(k, bare)
		}
		return g.alt(kids...)
	case cfgRep:
		if !bare {
			return g.rep(c.rule(n.kids[0], false), n.lo, n.hi)
		}
		if n.hi == 0 {
			return g.none
		}
		return g.cat(c.rule(n.kids[0], true), g.rep(c.rule(n.kids[0], false), max(n.lo-1, 0), max(n.hi-1, -1)))
	case cfgName:
		return c.ruleExpr(c.rules[n.name], bare)
	case cfgLeaf:
		return c.lexeme(n.e, bare)
	case cfgAnd, cfgNot:
		return c.lexeme(c.terminal(n), bare)
	}
	if !bare {
		kids := make([]*expr, len(n.kids))
		for i, k := range n.kids {
			kids[i] = c.rule(k, false)
		}
		return g.cat(kids...)
	}
	var kids []*expr
	for i, k := range n.kids { // the first that is not empty is kid i
		rest := []*expr{c.rule(k, true)}
		for _, more := range n.kids[i+1:] {
			rest = append(rest, c.rule(more, false))
		}
		kids = append(kids, g.cat(rest...))
		if !c.null(k) {
			break
		}
	}
	return g.alt(kids...)
}

func (c *cfg) terminalRule(r *cfgRule) *expr {
	if r.term != nil {
		return r.term
	}
	if r.busy {
		c.fail(r.at, "the terminal %q calls itself", r.name)
	}
	r.busy = true
	e := c.terminal(r.body)
	if r.suffix != nil {
		e = c.g.cat(e, c.terminal(r.suffix))
	}
	if r.lazy || r.suffix != nil {
		c.onlyText(r.at, e)
		if e.kind != exprNone {
			e = c.g.automaton(c.g.lazy(c.g.compile(e)), 0, -1)
		}
	}
	r.term, r.busy = e, false
	return e
}

func (c *cfg) onlyText(at int, e *expr) {
	if e.calls {
		c.fail(at, "recursion, or JSON of any depth, inside a terminal")
	}
}

// terminal is the node of n inside a terminal, where nothing is ignored.
func (c *cfg) terminal(n *cfgNode) *expr {
	defer c.deeper()()
	g := c.g
	kids := make([]*expr, len(n.kids))
	for i, k := range n.kids {
		kids[i] = c.terminal(k)
	}
	switch n.kind {
	case cfgAlt:
		return g.alt(kids...)
	case cfgRep:
		return g.rep(kids[0], n.lo, n.hi)
	case cfgName:
		r := c.rules[n.name]
		if !r.isTerminal() {
			c.fail(n.at, "the rule %q inside a terminal", n.name)
		}
		return c.terminalRule(r)
	case cfgLeaf:
		return n.e
	case cfgAnd:
		var a *auto
		for i, k := range kids {
			c.onlyText(n.at, k)
			if k.kind == exprNone {
				return k
			}
			if b := g.compile(k); i == 0 {
				a = b
			} else {
				a = g.product(a, b, false)
			}
		}
		return g.automaton(a, 0, -1)
	case cfgNot:
		c.onlyText(n.at, kids[0])
		var a *auto
		if kids[0].kind != exprNone {
			a = g.compile(kids[0])
		}
		return g.automaton(g.negated(a), 0, -1)
	}
	return g.cat(kids...)
}
