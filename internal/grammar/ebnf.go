package grammar

// ebnf reads GBNF, as llama.cpp and XGrammar have it. A rule goes on until the next one
// begins, whatever the lines are.
func (g *builder) ebnf(text string, v *Vocabulary) *expr {
	c := &cfg{g: g, v: v, text: text, rules: map[string]*cfgRule{}}
	c.blank()
	for c.more() {
		at := c.pos
		name := c.word()
		c.blank()
		if name == "" || !c.take("::=") {
			c.fail(at, "a rule must begin with its name and ::=")
		}
		c.add(&cfgRule{name: name, at: at, body: c.ebnfAlt()})
		c.blank()
	}
	return c.generate("root")
}

// blank skips white space and comments.
func (c *cfg) blank() {
	for c.more() {
		switch c.text[c.pos] {
		case ' ', '\t', '\r', '\n':
			c.pos++
		case '#':
			for c.more() && c.text[c.pos] != '\n' {
				c.pos++
			}
		default:
			return
		}
	}
}

func (c *cfg) ebnfAlt() *cfgNode {
	defer c.deeper()()
	at := c.pos
	kids := []*cfgNode{c.ebnfCat()}
	for c.take("|") {
		kids = append(kids, c.ebnfCat())
	}
	return group(cfgAlt, kids, at)
}

func (c *cfg) ebnfCat() *cfgNode {
	n := &cfgNode{kind: cfgCat, at: c.pos}
	for {
		c.blank()
		atom := c.ebnfAtom()
		if atom == nil {
			return group(cfgCat, n.kids, n.at)
		}
		for more := true; more; {
			c.blank()
			if atom, more = c.quantified(atom, c.blank); more {
				c.g.spend(1)
			}
		}
		n.kids = append(n.kids, atom)
	}
}

// quantified reads one of the quantifiers that both languages have; false: none comes next.
func (c *cfg) quantified(n *cfgNode, blank func()) (*cfgNode, bool) {
	switch {
	case c.take("*"):
		return c.rep(n, 0, -1), true
	case c.take("+"):
		return c.rep(n, 1, -1), true
	case c.take("?"):
		return c.rep(n, 0, 1), true
	case c.take("{"):
		lo, hi := c.braces(blank)
		return c.rep(n, lo, hi), true
	}
	return n, false
}

// ebnfAtom reads what a quantifier may follow; nil: the end of the sequence.
func (c *cfg) ebnfAtom() *cfgNode {
	at := c.pos
	c.g.spend(1)
	switch b := c.peek(); {
	case b == '"':
		return c.leaf(c.g.lit(c.quoted('"')), at)
	case b == '[':
		p := &reParser{text: c.text, pos: c.pos + 1, spent: c.g.budget}
		ranges, err := p.class(0)
		if err != nil {
			c.fail(at, "%v", err)
		}
		c.pos = p.pos
		return c.leaf(c.g.class(ranges, asUTF8), at)
	case b == '.':
		c.pos++
		return c.leaf(c.g.class([]rune{0, maxRune}, asUTF8), at)
	case b == '(':
		c.pos++
		if c.peek() == '=' || c.peek() == '!' {
			c.fail(at, "look-ahead is not supported")
		}
		n := c.ebnfAlt()
		c.want(")")
		return n
	case b == '<':
		c.pos++
		return c.special()
	case isName(b):
		name := c.word()
		after := c.pos
		c.blank()
		if c.take("::=") { // the next rule
			c.pos = at
			return nil
		}
		c.pos = after
		if c.peek() == '(' {
			c.fail(at, "%s(...) is not supported", name)
		}
		return &cfgNode{kind: cfgName, name: name, at: at}
	case b == 0 || b == '|' || b == ')':
		if b == ')' && c.depth == 1 {
			c.fail(at, "an unmatched )")
		}
		return nil
	default:
		c.fail(at, "an unexpected %q", b)
	}
	return nil
}
