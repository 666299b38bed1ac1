package grammar

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"
)

// Kind is the language that a Spec is written in.
type Kind uint8

// The kinds of Spec.
const (
	JSONSchema Kind = iota + 1 // a JSON Schema
	JSONObject                 // any JSON object; Text is ignored
	Regex                      // a regular expression, which the whole text matches
	Choice                     // a JSON array of strings: the text is one of them
	EBNF                       // GBNF, as in llama.cpp and XGrammar; the text is a root
	Lark                       // llguidance's dialect of Lark; the text is a start
	Arguments                  // of a call, in a Form: see ArgumentsText
)

// Spec is what binds a text. It is comparable: it is the cache's key.
type Spec struct {
	Kind  Kind
	Text  string
	Space Whitespace // of JSONSchema and JSONObject
}

// Whitespace says where JSON may have white space. Whatever it is, there is none in front of
// the first byte or behind the last.
type Whitespace uint8

// The rules for white space. A schema's own x-guidance overrides them.
const (
	Flexible Whitespace = iota // up to maxSpace spaces, tabs and line ends at each place
	Compact                    // none
)

// maxSpace is the longest run of white space: enough for a line end and eight steps of
// indentation by two, and an end for a small model that would go on for ever.
const maxSpace = 20

// Compile compiles s for v. The error is an *Error: what the user has to mend.
func Compile(s Spec, v *Vocabulary, l Limits) (g *Grammar, err error) {
	l = l.withDefaults()
	if len(s.Text) > l.Bytes {
		return nil, &Error{Reason: "the grammar is too large: " + sizes(len(s.Text), l.Bytes)}
	}
	if !utf8.ValidString(s.Text) {
		return nil, &Error{Reason: "the grammar is not valid UTF-8"}
	}
	b := &budget{left: l.States + 4*len(s.Text), automata: l.States, deadline: time.Now().Add(l.Time)}
	defer func() {
		if r := recover(); r != nil {
			e, ok := r.(*Error)
			if !ok { // a mistake in here must not end the process that serves others
				e = &Error{Reason: fmt.Sprintf("%s: %v", bug, r)}
			}
			g, err = nil, e
		}
	}()
	n := newBuilder(b)
	root, err := n.parse(s, v)
	if err != nil {
		return nil, err
	}
	root = n.prune(n.inline(root))
	if root.kind == exprNone {
		return nil, &Error{Reason: "no text is in the grammar"}
	}
	m := newMachine(n.rules, n.nullables(), []*expr{root}, l.Memory/2)
	return newGrammar(v, m, root, l.Memory/2, int64(len(n.nodes))*200+int64(len(s.Text)), b), nil
}

// bug begins the reason of an Error that is not the user's fault.
const bug = "a mistake in the compiler of grammars"

// parse turns a Spec into nodes.
func (g *builder) parse(s Spec, v *Vocabulary) (*expr, error) {
	switch s.Kind {
	case JSONSchema:
		return g.jsonSchema(s.Text, s.Space)
	case JSONObject:
		return g.jsonObject(s.Space), nil
	case Regex:
		e, err := parseRegex(s.Text, g.budget)
		if err != nil {
			return nil, err
		}
		return g.whole(e, asUTF8), nil
	case Choice:
		return g.choice(s.Text)
	case EBNF:
		return g.ebnf(s.Text, v), nil
	case Lark:
		return g.lark(s.Text, v, s.Space), nil
	case Arguments:
		return g.arguments(s.Text, v)
	}
	return nil, &Error{Reason: "an unknown kind of grammar"}
}

func (g *builder) choice(text string) (*expr, error) {
	var words []string
	if err := json.Unmarshal([]byte(text), &words); err != nil {
		return nil, &Error{Reason: "a choice must be an array of strings: " + err.Error()}
	}
	if len(words) == 0 {
		return nil, &Error{Reason: "a choice must have at least one string"}
	}
	slices.Sort(words)
	return g.words(slices.Compact(words)), nil
}

// inline puts rules in place of their calls, but for the rules that can come to call
// themselves: only these need a stack.
func (g *builder) inline(root *expr) *expr {
	const unseen, open = 0, 1
	state := make([]int32, len(g.rules)) // order of discovery, from 1
	low := make([]int32, len(g.rules))
	onStack := make([]bool, len(g.rules))
	recursive := make([]bool, len(g.rules))
	var stack []int32
	var order []int32 // callees in front of callers
	next := int32(open)
	called := make([][]int32, len(g.rules))
	for i, e := range g.rules {
		called[i] = callees(e)
	}
	type frame struct {
		r int32
		i int
	}
	visit := func(r int32) {
		frames := []frame{{r, 0}}
		state[r], low[r] = next, next
		next++
		stack, onStack[r] = append(stack, r), true
		for len(frames) > 0 {
			f := &frames[len(frames)-1]
			if f.i < len(called[f.r]) {
				c := called[f.r][f.i]
				f.i++
				switch {
				case c == f.r:
					recursive[c] = true
				case state[c] == unseen:
					state[c], low[c] = next, next
					next++
					stack, onStack[c] = append(stack, c), true
					frames = append(frames, frame{c, 0})
				case onStack[c]:
					low[f.r] = min(low[f.r], state[c])
				}
				continue
			}
			r := f.r
			frames = frames[:len(frames)-1]
			if len(frames) > 0 {
				up := frames[len(frames)-1].r
				low[up] = min(low[up], low[r])
			}
			if low[r] == state[r] {
				size := 0
				for {
					c := stack[len(stack)-1]
					stack, onStack[c] = stack[:len(stack)-1], false
					order = append(order, c)
					size++
					if c == r {
						break
					}
				}
				if size > 1 {
					for _, c := range order[len(order)-size:] {
						recursive[c] = true
					}
				}
			}
		}
	}
	for r := range g.rules {
		if state[r] == unseen {
			visit(int32(r))
		}
	}
	memo := map[*expr]*expr{}
	replace := func(e *expr) *expr {
		if recursive[e.n] {
			return e
		}
		return g.rules[e.n]
	}
	for _, r := range order {
		g.rules[r] = g.rewrite(g.rules[r], memo, replace)
	}
	return g.rewrite(root, memo, replace)
}

// callees are the rules that e calls.
func callees(e *expr) []int32 {
	var out []int32
	seen := map[*expr]bool{}
	var walk func(e *expr)
	walk = func(e *expr) {
		if !e.calls || seen[e] {
			return
		}
		seen[e] = true
		if e.kind == exprCall {
			out = append(out, e.n)
		}
		for _, k := range e.kids {
			walk(k)
		}
	}
	walk(e)
	return out
}

// rewrite is e with replace(c) in place of each call c.
func (g *builder) rewrite(e *expr, memo map[*expr]*expr, replace func(*expr) *expr) *expr {
	if !e.calls {
		return e
	}
	if n, ok := memo[e]; ok {
		return n
	}
	n := e
	kids := make([]*expr, len(e.kids))
	same := true
	for i, k := range e.kids {
		kids[i] = g.rewrite(k, memo, replace)
		same = same && kids[i] == k
	}
	switch {
	case e.kind == exprCall:
		n = replace(e)
	case same:
	case e.kind == exprCat:
		n = g.cat(kids...)
	case e.kind == exprAlt:
		n = g.alt(kids...)
	case e.kind == exprRep:
		n = g.rep(kids[0], int(e.min), int(e.max))
	}
	memo[e] = n
	return n
}

// nullables says which rules derive the empty text.
func (g *builder) nullables() []bool {
	null := make([]bool, len(g.rules))
	for changed := true; changed; {
		changed = false
		memo := map[*expr]bool{}
		for i, e := range g.rules {
			if !null[i] && nullable(e, null, memo) {
				null[i], changed = true, true
			}
		}
	}
	return null
}

// nullable says whether e derives the empty text, if the rules that do are null. It goes
// below nodes with calls only.
func nullable(e *expr, null []bool, memo map[*expr]bool) bool {
	return derives(e, null, memo, func(e *expr) bool { return e.nullable })
}

// derives reports whether e has a property that a choice has if one of its kids has it, and a sequence
// if all have: known has it of rules, bare of what calls none.
func derives(e *expr, known []bool, memo map[*expr]bool, bare func(*expr) bool) bool {
	if !e.calls {
		return bare(e)
	}
	if d, ok := memo[e]; ok {
		return d
	}
	of := func(k *expr) bool { return derives(k, known, memo, bare) }
	d := false
	switch e.kind {
	case exprCall:
		d = known[e.n]
	case exprCat:
		d = !slices.ContainsFunc(e.kids, func(k *expr) bool { return !of(k) })
	case exprAlt:
		d = slices.ContainsFunc(e.kids, of)
	case exprRep:
		d = e.min == 0 || of(e.kids[0])
	}
	memo[e] = d
	return d
}

// prune takes out what derives no text at all, such as a rule that always calls itself, so
// that every way into the grammar leads to a member of its language.
func (g *builder) prune(root *expr) *expr {
	good := make([]bool, len(g.rules))
	all := true
	for changed := true; changed; {
		changed, all = false, true
		memo := map[*expr]bool{}
		for i, e := range g.rules {
			if !good[i] && productive(e, good, memo) {
				good[i], changed = true, true
			}
			all = all && good[i]
		}
	}
	if all {
		return root
	}
	memo := map[*expr]*expr{}
	replace := func(e *expr) *expr {
		if good[e.n] {
			return e
		}
		return g.none
	}
	for i, e := range g.rules {
		g.rules[i] = g.rewrite(e, memo, replace)
	}
	return g.rewrite(root, memo, replace)
}

func productive(e *expr, good []bool, memo map[*expr]bool) bool {
	return derives(e, good, memo, func(e *expr) bool { return e.kind != exprNone })
}

func sizes(n, limit int) string { return fmt.Sprintf("%d bytes, and the limit is %d", n, limit) }
