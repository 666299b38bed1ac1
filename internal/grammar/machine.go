package grammar

import (
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"
)

// cont is what is still to be read within a rule: e, and then what next says. The end of the
// rule is the cont without an e. Of a literal n bytes are read, of a concatenation n kids; a repetition has lo to hi
// rounds left (hi < 0: no end), and as more says; an automaton is in state n, with lo to hi characters left.
type cont struct {
	id     uint32
	e      *expr
	n      int32
	lo, hi int32
	more   *rounds
	next   *cont
	inside bool    // of a repetition with numbers
	mark   uint64  // of the last search that came here
	open   *opened // what can be read first; made on first use
}

type contKey struct {
	e, next   uint32
	n, lo, hi int32
	more      uint32
}

// opened is a cont with everything in front of its first bytes opened.
type opened struct {
	leaves []*cont // each begins with exprBytes, exprAuto, exprToken or exprCall; by id
	final  bool    // the rule may end here
	runs   []*cont
}

// state is a set of conts, as a deterministic automaton's. It is immutable but for links to
// other states, which are filled in as they are needed.
type state struct {
	id     uint64
	leaves []*cont
	final  bool
	busy   bool // has calls
	reads  bool // has bytes to read
	runs   []*cont
	next   []atomic.Pointer[state] // by byte class; nil: not known yet
	calls  atomic.Pointer[[]callEdge]
	tokens []*cont              // the leaves that are special tokens
	loop   atomic.Pointer[loop] // nil: not known yet
	// Where nothing but the rest of one literal can be read: that rest, if it has two bytes or more,
	// and the state behind it, nil if not known yet.
	lit    string
	passed atomic.Pointer[state]
	run    atomic.Pointer[run] // nil: not known yet
}

type callEdge struct {
	rule int32
	ret  *state
}

// machine makes states on demand. Its tables only find equal states again: when they outgrow
// their bound they are begun anew, and states made before stay valid.
type machine struct {
	rules    []*expr
	nullable []bool
	class    [256]uint8
	sample   []byte // a byte of each class

	dead *state // a state's next when no text goes on

	lastState atomic.Uint64
	mu        sync.Mutex
	lastCont  uint32
	conts     map[contKey]*cont
	rounds    map[string]*rounds
	end       *cont
	states    map[string]*state
	starts    []*state // by rule
	size      int64    // bytes of the tables, about
	limit     int64
	key       []byte
	stack     []*cont
	search    uint64
	depth     int              // of opened
	reads     map[leafKey]bool // scratch of alike
	wide      map[*expr]bool   // reads every plain character: see plain.go
	spent     *budget          // while compiling
}

func newMachine(rules []*expr, nullable []bool, roots []*expr, limit int64) *machine {
	m := &machine{rules: rules, nullable: nullable, limit: limit, wide: map[*expr]bool{}, reads: map[leafKey]bool{}}
	m.classes(append(roots, rules...))
	m.dead = &state{id: m.lastState.Add(1)}
	m.reset()
	return m
}

func (m *machine) reset() {
	m.conts = map[contKey]*cont{}
	m.rounds = map[string]*rounds{}
	m.states = map[string]*state{}
	m.starts = make([]*state, len(m.rules))
	m.lastCont++
	m.end = &cont{id: m.lastCont}
	m.size = 0
}

// classes parts the bytes into the classes that no node tells apart.
func (m *machine) classes(roots []*expr) {
	n := 1
	sets := map[byteSet]bool{}
	refine := func(set byteSet) {
		if n == 256 || sets[set] {
			return
		}
		sets[set] = true
		var split [256]uint8 // new class of what of the old one is in set
		var in, out [256]bool
		for b := range 256 {
			if set.has(byte(b)) {
				in[m.class[b]] = true
			} else {
				out[m.class[b]] = true
			}
		}
		for c := range n {
			if in[c] && out[c] {
				split[c] = uint8(n)
				n++
			}
		}
		for b := range 256 {
			if set.has(byte(b)) && split[m.class[b]] != 0 {
				m.class[b] = split[m.class[b]]
			}
		}
	}
	var single [256]bool
	seen := map[*expr]bool{}
	autos := map[*auto]bool{}
	work := slices.Clone(roots)
	for len(work) > 0 {
		e := work[len(work)-1]
		work = work[:len(work)-1]
		if e == nil || seen[e] {
			continue
		}
		seen[e] = true
		switch e.kind {
		case exprBytes:
			refine(e.set)
		case exprLit:
			for i := range len(e.text) {
				if b := e.text[i]; !single[b] {
					single[b] = true
					var set byteSet
					set.add(b, b)
					refine(set)
				}
			}
		case exprAuto:
			if !autos[e.auto] {
				autos[e.auto] = true
				for c := range e.auto.width() {
					refine(e.auto.classSet(c))
				}
			}
		}
		work = append(work, e.kids...)
	}
	m.sample = make([]byte, n)
	for b := 255; b >= 0; b-- {
		m.sample[m.class[b]] = byte(b)
	}
}

// cons is e in front of next. A concatenation stays as it is until it is opened: what is
// shared in it need not be spelled out.
func (m *machine) cons(e *expr, next *cont) *cont {
	if e.kind == exprEmpty {
		return next
	}
	return m.consAt(e, e.n, e.min, e.max, next)
}

func (m *machine) consAt(e *expr, n, lo, hi int32, next *cont) *cont {
	return m.consOf(contKey{e: e.id, next: next.id, n: n, lo: lo, hi: hi}, e, nil, next)
}

func (m *machine) consOf(key contKey, e *expr, more *rounds, next *cont) *cont {
	c := m.conts[key]
	if c == nil {
		m.lastCont++
		c = &cont{id: m.lastCont, e: e, n: key.n, lo: key.lo, hi: key.hi, more: more, next: next}
		c.inside = next.inside || next.e != nil && next.e.counted()
		m.conts[key] = c
		m.size += 160
		m.spend(1)
	}
	return c
}

func (m *machine) spend(n int) {
	if m.spent != nil {
		m.spent.spendWhole(n)
	}
}

// maxOpen bounds the conts that one cont can begin with. A grammar that goes beyond it, which
// takes thousands of parts that may all be empty, cannot be read on at that place.
const maxOpen = 50_000

// maxLeaves likewise bounds what one state can read.
const maxLeaves = 4096

// tooMany refuses while compiling a state that can read more.
func (m *machine) tooMany(leaves []*cont) {
	if len(leaves) > maxLeaves {
		m.refuseWays()
	}
}

func (m *machine) refuseWays() {
	if m.spent != nil {
		m.spent.refuse("the grammar is too large: too many ways to read the same text")
	}
}

// opened finds what c can begin with.
func (m *machine) opened(c *cont) *opened {
	if c.open != nil {
		return c.open
	}
	root, o, seen := c, &opened{}, 0
	m.search++
	search, bottom := m.search, len(m.stack)
	m.stack = append(m.stack, c)
	for len(m.stack) > bottom {
		c := m.stack[len(m.stack)-1]
		m.stack = m.stack[:len(m.stack)-1]
		if c.mark == search {
			continue
		}
		c.mark = search
		seen++
		m.spend(1)
		if seen > maxOpen {
			m.stack = m.stack[:bottom]
			m.refuseWays()
			o = &opened{}
			break
		}
		if k := c.open; k != nil {
			o.leaves, o.runs, o.final = append(o.leaves, k.leaves...), append(o.runs, k.runs...), o.final || k.final
			seen += len(k.leaves)
			continue
		}
		e := c.e
		if e == nil {
			o.final = true
			continue
		}
		switch e.kind {
		case exprBytes, exprLit, exprToken:
			o.leaves = append(o.leaves, c)
		case exprAuto:
			o.leaves = append(o.leaves, c)
			if e.auto.fin[c.n] && c.lo == 0 {
				m.tail(c.next)
				m.stack = append(m.stack, c.next)
			}
		case exprCall:
			o.leaves = append(o.leaves, c)
			if m.nullable[e.n] {
				m.stack = append(m.stack, c.next)
			}
		case exprCat: // from its kid n on
			next := c.next
			if int(c.n)+1 < len(e.kids) {
				next = m.consAt(e, c.n+1, 0, 0, c.next)
			}
			m.stack = append(m.stack, m.cons(e.kids[c.n], next))
		case exprAlt:
			if e.free {
				o.runs = append(o.runs, c)
			}
			for _, k := range e.kids {
				m.stack = append(m.stack, m.cons(k, c.next))
			}
		case exprRep:
			o.runs = append(o.runs, c)
			if c.least() == 0 {
				m.tail(c.next)
				m.stack = append(m.stack, c.next)
			}
			m.stack = append(m.stack, m.cons(e.kids[0], m.round(c)))
		}
	}
	slices.SortFunc(o.leaves, byID)
	o.leaves = slices.Compact(o.leaves)
	m.tooMany(o.leaves)
	o.leaves = m.best(o.leaves)
	m.size += int64(len(o.leaves))*8 + 64
	root.open = o
	return o
}

// tail opens what is behind a repetition or an automaton, for each number of rounds and each state
// the same. It does so within bounds: how many repetitions follow each other is the grammar's.
func (m *machine) tail(c *cont) {
	if c.open != nil || m.depth == maxTail {
		return
	}
	m.depth++
	m.opened(c)
	m.depth--
}

const maxTail = 8

func byID(a, b *cont) int {
	switch {
	case a.id < b.id:
		return -1
	case a.id > b.id:
		return 1
	}
	return 0
}

func (m *machine) state(leaves []*cont, final bool, runs []*cont) *state {
	if len(leaves) == 0 && !final {
		return m.dead
	}
	k := m.key[:0]
	if final {
		k = append(k, 1)
	}
	for _, l := range leaves {
		k = binary.LittleEndian.AppendUint32(k, l.id)
	}
	m.key = k
	if s := m.states[string(k)]; s != nil {
		return s
	}
	s := &state{
		id: m.lastState.Add(1), leaves: leaves, final: final, runs: runs,
		next: make([]atomic.Pointer[state], len(m.sample)),
	}
	for _, l := range leaves {
		switch l.e.kind {
		case exprCall:
			s.busy = true
		case exprToken:
			s.tokens = append(s.tokens, l)
		default:
			s.reads = true
		}
	}
	if len(leaves) == 1 && !final && leaves[0].e.kind == exprLit && int(leaves[0].n)+1 < len(leaves[0].e.text) {
		s.lit = leaves[0].e.text[leaves[0].n:]
	}
	m.states[string(k)] = s
	m.size += int64(len(m.sample)*8 + len(leaves)*16 + 200)
	m.spend(1 + len(leaves)/8)
	return s
}

// union is the state of everything that the conts can begin with. It sorts conts.
func (m *machine) union(conts []*cont) *state {
	switch len(conts) {
	case 0:
		return m.dead
	case 1:
		if conts[0].simple() {
			return m.state(slices.Clone(conts), false, nil)
		}
		o := m.opened(conts[0])
		return m.state(o.leaves, o.final, o.runs)
	}
	slices.SortFunc(conts, byID)
	conts = slices.Compact(conts)
	var leaves []*cont
	var runs []*cont
	final := false
	for _, c := range conts {
		if c.simple() {
			leaves = append(leaves, c)
			continue
		}
		o := m.opened(c)
		leaves = append(leaves, o.leaves...)
		runs = append(runs, o.runs...)
		final = final || o.final
	}
	m.spend((len(conts) + len(leaves)) / 8)
	slices.SortFunc(leaves, byID)
	leaves = slices.Compact(leaves)
	m.tooMany(leaves)
	return m.state(m.best(leaves), final, runs)
}

// simple says that c begins with itself alone.
func (c *cont) simple() bool {
	return c.e != nil && (c.e.kind == exprLit || c.e.kind == exprBytes || c.e.kind == exprAuto && !c.e.auto.fin[c.n])
}

// literal is the state behind the literal that is all that s can read.
func (m *machine) literal(s *state) *state {
	if t := s.passed.Load(); t != nil {
		return t
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.trim()
	t := m.union([]*cont{s.leaves[0].next})
	s.passed.Store(t)
	return t
}

// step is the state behind a byte of class c. Only the first caller of each (s, c) computes.
func (m *machine) step(s *state, c uint8) *state {
	if t := s.next[c].Load(); t != nil {
		return t
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stepLocked(s, c)
}

func (m *machine) stepLocked(s *state, c uint8) *state {
	if t := s.next[c].Load(); t != nil {
		return t
	}
	m.trim()
	m.spend(len(s.leaves) / 64)
	b := m.sample[c]
	var conts []*cont
	for _, l := range s.leaves {
		switch l.e.kind {
		case exprBytes:
			if l.e.set.has(b) {
				conts = append(conts, l.next)
			}
		case exprLit:
			switch at := int(l.n); {
			case l.e.text[at] != b:
			case at+1 == len(l.e.text):
				conts = append(conts, l.next)
			default:
				conts = append(conts, m.consAt(l.e, l.n+1, 0, 0, l.next))
			}
		case exprAuto:
			if n, lo, hi, ok := l.e.auto.read(l.n, l.lo, l.hi, b); ok {
				conts = append(conts, m.consAt(l.e, n, lo, hi, l.next))
			}
		}
	}
	t := m.union(conts)
	s.next[c].Store(t)
	return t
}

// trim begins the tables anew when they are over their bound.
func (m *machine) trim() {
	if m.size > m.limit {
		m.reset()
	}
}

// start is the state at the beginning of a rule.
func (m *machine) start(rule int32) *state {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.startLocked(rule)
}

func (m *machine) startLocked(rule int32) *state {
	if s := m.starts[rule]; s != nil {
		return s
	}
	s := m.union([]*cont{m.cons(m.rules[rule], m.end)})
	m.starts[rule] = s
	return s
}

// edges are the calls that s can make, with the state to return to: one for each rule.
func (m *machine) edges(s *state) []callEdge {
	if p := s.calls.Load(); p != nil {
		return *p
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := s.calls.Load(); p != nil {
		return *p
	}
	m.trim()
	byRule := map[int32][]*cont{}
	var order []int32
	for _, l := range s.leaves {
		if l.e.kind == exprCall {
			if byRule[l.e.n] == nil {
				order = append(order, l.e.n)
			}
			byRule[l.e.n] = append(byRule[l.e.n], l.next)
		}
	}
	slices.Sort(order)
	list := make([]callEdge, 0, len(order))
	for _, r := range order {
		list = append(list, callEdge{r, m.union(byRule[r])})
	}
	s.calls.Store(&list)
	return list
}

// afterToken is the state behind the special token.
func (m *machine) afterToken(s *state, token int32) *state {
	m.mu.Lock()
	defer m.mu.Unlock()
	var conts []*cont
	for _, l := range s.tokens {
		if l.e.n == token {
			conts = append(conts, l.next)
		}
	}
	return m.union(conts)
}
