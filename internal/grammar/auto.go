package grammar

import "slices"

// auto is a whole deterministic automaton over bytes, for what only a whole one can say: that
// a text is in two languages at once, or in one but not in another. From each of its states
// some text is accepted.
type auto struct {
	id     uint32
	class  [256]uint8
	trans  [][]int32 // [state][class]; negative: no text goes on
	fin    []bool
	start  int32
	counts *counts // of automata of JSON strings whose length is bounded
}

func (a *auto) width() int {
	n := 0
	for _, c := range a.class {
		n = max(n, int(c)+1)
	}
	return n
}

func (a *auto) classSet(c int) (set byteSet) {
	for b, of := range a.class {
		if int(of) == c {
			set.add(byte(b), byte(b))
		}
	}
	return set
}

// read is where byte b leads from state n with lo to hi characters left.
func (a *auto) read(n, lo, hi int32, b byte) (int32, int32, int32, bool) {
	t := a.trans[n][a.class[b]]
	if t < 0 {
		return 0, 0, 0, false
	}
	if a.counts == nil {
		return t, 0, -1, true
	}
	if a.counts.heads[n] {
		if hi == 0 {
			return 0, 0, 0, false
		}
		lo, hi = max(lo-1, 0), max(hi-1, -1)
	}
	return t, lo, hi, a.counts.reaches(t, lo, hi)
}

// automaton is the node of a; with counts, of those of its texts that have lo to hi characters.
func (g *builder) automaton(a *auto, lo, hi int) *expr {
	if a == nil {
		return g.none
	}
	if a.counts != nil && !a.counts.reaches(a.start, int32(lo), int32(hi)) {
		return g.none
	}
	return g.intern(expr{kind: exprAuto, auto: a, n: a.start, min: int32(lo), max: int32(hi), nullable: a.fin[a.start] && lo == 0})
}

// compile makes the automaton of a node without calls and tokens; nil if there is no text.
func (g *builder) compile(e *expr) *auto {
	if e.calls {
		g.refuse("recursion where only a regular expression may be")
	}
	m := newMachine([]*expr{e}, []bool{false}, nil, 1<<62)
	m.spent = g.budget
	a := &auto{class: m.class}
	states := []*state{m.startLocked(0)}
	number := map[*state]int32{states[0]: 0}
	for i := 0; i < len(states); i++ {
		s := states[i]
		row := make([]int32, len(m.sample))
		for c := range row {
			t := m.stepLocked(s, uint8(c))
			if t == m.dead {
				row[c] = -1
				continue
			}
			n, ok := number[t]
			if !ok {
				n = int32(len(states))
				number[t] = n
				states = append(states, t)
			}
			row[c] = n
		}
		g.spendWhole(len(row))
		a.trans = append(a.trans, row)
		a.fin = append(a.fin, s.final)
		if len(s.tokens) > 0 {
			g.refuse("a special token inside a terminal")
		}
	}
	return g.trimmed(a)
}

// backward are an automaton's transitions from the states that they lead to: those to s are
// from[at[s]:at[s+1]], each of its classes apart.
type backward struct{ at, from []int32 }

func (b *backward) of(s int32) []int32 { return b.from[b.at[s]:b.at[s+1]] }

func (a *auto) back() *backward {
	n := len(a.trans)
	b := &backward{at: make([]int32, n+2)}
	for _, row := range a.trans {
		for _, t := range row {
			if t >= 0 {
				b.at[t+2]++
			}
		}
	}
	for s := range n {
		b.at[s+2] += b.at[s+1]
	}
	b.from = make([]int32, b.at[n+1])
	for s, row := range a.trans {
		for _, t := range row {
			if t >= 0 {
				b.from[b.at[t+1]] = int32(s)
				b.at[t+1]++
			}
		}
	}
	return b
}

// trimmed leaves out the states from which nothing is accepted, and gives a an id.
func (g *builder) trimmed(a *auto) *auto {
	n := len(a.trans)
	back := a.back()
	live := make([]bool, n)
	var work []int32
	for s, f := range a.fin {
		if f {
			live[s] = true
			work = append(work, int32(s))
		}
	}
	for len(work) > 0 {
		s := work[len(work)-1]
		work = work[:len(work)-1]
		for _, p := range back.of(s) {
			if !live[p] {
				live[p] = true
				work = append(work, p)
			}
		}
	}
	if !live[a.start] {
		return nil
	}
	number := make([]int32, n)
	var kept int32
	for s := range n {
		number[s] = -1
		if live[s] {
			number[s] = kept
			kept++
		}
	}
	b := &auto{class: a.class, start: number[a.start]}
	for s, row := range a.trans {
		if !live[s] {
			continue
		}
		for c, t := range row {
			if t >= 0 {
				row[c] = number[t]
			}
		}
		b.trans = append(b.trans, row)
		b.fin = append(b.fin, a.fin[s])
	}
	b.id = g.autoID()
	return b
}

func (g *builder) autoID() uint32 {
	g.autos++
	return g.autos
}

// product is the automaton of the texts of a that b accepts too; with not, of those that b
// does not. b may be nil, for no text.
func (g *builder) product(a, b *auto, not bool) *auto {
	if a == nil {
		return nil
	}
	if b == nil {
		if not {
			return a
		}
		return nil
	}
	type pair struct{ a, b int32 }
	g.spendWhole(16) // the classes
	p := &auto{}
	var split []pair // by class
	seen := map[pair]uint8{}
	for i := range 256 {
		k := pair{int32(a.class[i]), int32(b.class[i])}
		c, ok := seen[k]
		if !ok {
			c = uint8(len(split))
			seen[k] = c
			split = append(split, k)
		}
		p.class[i] = c
	}
	states := []pair{{a.start, b.start}}
	key := func(s pair) uint64 { return uint64(s.a)<<32 | uint64(uint32(s.b)) }
	number := map[uint64]int32{key(states[0]): 0}
	for i := 0; i < len(states); i++ {
		s := states[i]
		row := make([]int32, len(split))
		for c, k := range split {
			t := pair{a.trans[s.a][k.a], -1}
			if s.b >= 0 {
				t.b = b.trans[s.b][k.b]
			}
			if t.a < 0 || (t.b < 0 && !not) {
				row[c] = -1
				continue
			}
			if t == states[len(states)-1] { // most often many bytes lead to one state
				row[c] = int32(len(states)) - 1
				continue
			}
			n, ok := number[key(t)]
			if !ok {
				n = int32(len(states))
				number[key(t)] = n
				states = append(states, t)
			}
			row[c] = n
		}
		g.spendWhole(1 + len(row)/2)
		p.trans = append(p.trans, row)
		p.fin = append(p.fin, a.fin[s.a] && (s.b >= 0 && b.fin[s.b]) != not)
	}
	return g.trimmed(p)
}

// filled is a without the empty text.
func (a *auto) filled(g *builder) *auto {
	g.spendWhole(len(a.trans))
	b := &auto{class: a.class, start: int32(len(a.trans))}
	for _, row := range a.trans {
		b.trans = append(b.trans, append([]int32(nil), row...))
	}
	b.trans = append(b.trans, append([]int32(nil), a.trans[a.start]...))
	b.fin = append(append([]bool(nil), a.fin...), false)
	return g.trimmed(b)
}

// lazy is the texts of a no beginning of which is a text of a.
func (g *builder) lazy(a *auto) *auto {
	if a == nil {
		return nil
	}
	b := &auto{class: a.class, start: a.start, fin: a.fin}
	for s, row := range a.trans {
		row = append([]int32(nil), row...)
		if a.fin[s] {
			for c := range row {
				row[c] = -1
			}
		}
		b.trans = append(b.trans, row)
	}
	return g.trimmed(b)
}

// negated is every text of bytes that a does not accept.
func (g *builder) negated(a *auto) *auto {
	var all byteSet
	all.add(0, 255)
	return g.product(g.compile(g.rep(g.bytes(all), 0, -1)), a, true)
}

// counts let an automaton of the insides of JSON strings bound their length in characters.
type counts struct {
	heads []bool     // by state: the next byte begins a character
	least []int32    // by state: the fewest characters still to come
	exact [][]uint64 // by state: bit n set if n characters may still come; nil if never asked
	most  []int32    // by state: the most, or -1 for any number
}

// reaches says whether from s some text is accepted that has lo to hi more characters.
func (c *counts) reaches(s, lo, hi int32) bool {
	if hi >= 0 && c.least[s] > hi {
		return false
	}
	if lo <= c.least[s] {
		return true
	}
	if c.most[s] >= 0 && c.most[s] < lo {
		return false
	}
	if hi < 0 {
		return true
	}
	for n := lo; n <= hi; n++ {
		if c.exact[s][n>>6]>>(n&63)&1 != 0 {
			return true
		}
	}
	return false
}

// counted is a ready to be bounded to lo to hi characters. chars must be the automaton of any
// number of JSON characters, whose start is where a character begins, and a a part of it.
func (g *builder) counted(a, chars *auto, lo, hi int) *auto {
	a = g.product(a, chars, false)
	if a == nil {
		return nil
	}
	n := len(a.trans)
	c := &counts{heads: make([]bool, n), least: make([]int32, n), most: make([]int32, n)}
	// Where a character begins: walk both automata side by side.
	at := make([]int32, n)
	for i := range at {
		at[i] = -1
	}
	at[a.start] = chars.start
	work := []int32{a.start}
	for len(work) > 0 {
		s := work[len(work)-1]
		work = work[:len(work)-1]
		for b := range 256 {
			if t := a.trans[s][a.class[b]]; t >= 0 && at[t] < 0 {
				at[t] = chars.trans[at[s]][chars.class[b]]
				work = append(work, t)
			}
		}
	}
	for s := range n {
		c.heads[s] = chars.fin[at[s]]
	}
	c.shortest(a)
	c.longest(a)
	if lo > 0 && hi >= 0 {
		if n*(hi+1) > 1<<25 {
			g.refuse("a pattern together with a minimum and a maximum length of this size")
		}
		c.lengths(g, a, hi)
	}
	a.counts = c
	return a
}

func (c *counts) step(s int32) int32 {
	if c.heads[s] {
		return 1
	}
	return 0
}

// shortest fills least, from the states that accept back: those that are as near as any first.
func (c *counts) shortest(a *auto) {
	const far = int32(1) << 30
	back := a.back()
	var near, next []int32 // at this number of characters, and at one more
	for s, f := range a.fin {
		c.least[s] = far
		if f {
			near = append(near, int32(s))
		}
	}
	for l := int32(0); len(near) > 0; l++ {
		for len(near) > 0 {
			s := near[len(near)-1]
			near = near[:len(near)-1]
			if c.least[s] <= l {
				continue
			}
			c.least[s] = l
			for _, p := range back.of(s) {
				if c.heads[p] {
					next = append(next, p)
				} else {
					near = append(near, p)
				}
			}
		}
		near, next = next, near
	}
}

// longest fills most. Every cycle of an automaton of JSON characters holds a whole character.
func (c *counts) longest(a *auto) {
	const unknown, open = int32(-3), int32(-2)
	for s := range c.most {
		c.most[s] = unknown
	}
	type frame struct {
		s int32
		i int
	}
	for root := range a.trans {
		if c.most[root] != unknown {
			continue
		}
		c.most[root] = open
		stack := []frame{{int32(root), 0}}
		for len(stack) > 0 {
			f := &stack[len(stack)-1]
			if f.i == len(a.trans[f.s]) {
				best := int32(0)
				for _, t := range a.trans[f.s] {
					switch {
					case t < 0:
					case c.most[t] == open || c.most[t] == -1 || best < 0:
						best = -1
					default:
						best = max(best, c.most[t]+c.step(f.s))
					}
				}
				c.most[f.s] = best
				stack = stack[:len(stack)-1]
				continue
			}
			t := a.trans[f.s][f.i]
			f.i++
			if t >= 0 && c.most[t] == unknown {
				c.most[t] = open
				stack = append(stack, frame{t, 0})
			}
		}
	}
}

// lengths fills exact up to hi characters, in order of the number of characters; within one
// number the states inside a character come after those that they lead to.
func (c *counts) lengths(g *builder, a *auto, hi int) {
	n := len(a.trans)
	c.exact = make([][]uint64, n)
	for s := range c.exact {
		c.exact[s] = make([]uint64, hi/64+1)
	}
	set := func(s int32, l int) { c.exact[s][l>>6] |= 1 << (l & 63) }
	has := func(s int32, l int) bool { return c.exact[s][l>>6]>>(l&63)&1 != 0 }
	for s, f := range a.fin {
		if f {
			set(int32(s), 0)
		}
	}
	ahead, edges := make([][]int32, n), 0
	for s, row := range a.trans {
		row = slices.Compact(slices.Sorted(slices.Values(row)))
		if len(row) > 0 && row[0] < 0 {
			row = row[1:]
		}
		ahead[s] = row
		edges += len(row)
	}
	for l := 0; l <= hi; l++ {
		for changed := true; changed; {
			g.spendWhole(1 + (n+edges)/128)
			changed = false
			for s := int32(n) - 1; s >= 0; s-- {
				if has(s, l) || l < int(c.step(s)) {
					continue
				}
				for _, t := range ahead[s] {
					if has(t, l-int(c.step(s))) {
						set(s, l)
						changed = true
						break
					}
				}
			}
		}
	}
}
