package grammar

import (
	"encoding/binary"
	"slices"
)

// walker finds the tokens that may come next: it walks a trie of tokens side by side with
// the readings of the text so far. Three things make that short.
//
// What one reading allows does not depend on the others, so each is walked alone, and most
// are a mere automaton until a rule ends or begins.
//
// Inside a JSON string most tokens are allowed. Where a state stays as it is behind every
// plain character (see plainChar), the plain tokens are allowed all at once, and of the others
// only what is behind their plain characters is walked. Where the string's length is bounded,
// plain tokens of few enough characters are allowed at once, and the others are walked. Where it must
// have some characters at least, what may be behind 0, 1, 2 and so on is walked for each number apart. Where
// all strings but a few are allowed, as where a key must not be one of the names that have
// schemas of their own, only what differs from allowing all is walked.
type walker struct {
	*reader
	v        *Vocabulary
	bits     []uint32
	path     []*state   // by depth, of the automaton's walk
	into     []int32    // by depth, how far into the literal that is all that the state can read
	heads    []heads    // of the trie, if it is one of tails: which of them are allowed
	from, to uint8      // and by how many characters
	sets     [][]config // by depth, of the walk with stacks
	twin     []*state   // by depth, of differ
	spare    []uint32
	g        *Grammar
}

func (w *walker) allow(token int32) {
	if w.heads == nil {
		w.v.set(w.bits, token)
		return
	}
	for _, id := range w.heads[token].within(w.from, w.to) {
		w.bits[id>>5] |= 1 << (id & 31)
	}
}

// mask sets the bits of the tokens that may come behind set.
func (w *walker) mask(set []config) {
	if len(set) > manyReadings {
		// Together, as a token is read: so many can grow beyond the bounds of close.
		w.walkSet(&w.v.all, set, 0, int32(len(w.v.all.nodes)))
	} else {
		first := true
		for _, s := range set {
			if s.at.reads {
				w.reading(s, first)
				first = false
			}
		}
	}
	for _, s := range set {
		for _, l := range s.at.tokens {
			w.bits[l.e.n>>5] |= 1 << (l.e.n & 31)
		}
	}
}

// reading adds the tokens that may come behind one reading. alone says that no bit is set yet.
func (w *walker) reading(s config, alone bool) {
	l := w.loop(s.at)
	if l.slice < 0 {
		if w.run(s.at).slice != plainRun {
			if d := w.beside(s.at); d != nil {
				w.likeness(s, config{d, s.top}, alone)
				return
			}
		}
		w.byRun(s, func(t *trie, s config) { w.walk(t, s, 0, int32(len(t.nodes))) })
		return
	}
	if s.top != w.bottom && slices.ContainsFunc(l.behind, func(s *state) bool { return s.final }) { // a token may go on behind the rule
		w.walk(&w.v.all, s, 0, int32(len(w.v.all.nodes)))
		return
	}
	p := &w.v.plain[l.slice]
	if l.behind == nil {
		if d := w.beside(s.at); d != nil {
			w.likeness(s, config{d, s.top}, alone)
			return
		}
		w.or(p.mask)
		w.walk(&p.other, s, 0, int32(len(p.other.nodes)))
		return
	}
	w.or(p.mask)
	w.heads = p.heads
	for n, at := range l.behind {
		w.from, w.to = uint8(n), uint8(n)
		if n+1 == len(l.behind) && !l.more {
			w.to = manyChars
		}
		w.walk(&p.tails, config{at, s.top}, 0, int32(len(p.tails.nodes)))
	}
	w.heads = nil
	if l.more {
		w.walk(&p.far, s, 0, int32(len(p.far.nodes)))
	}
	for _, t := range p.long {
		if l.most >= 0 && t.chars > l.most {
			break
		}
		w.v.set(w.bits, t.id)
	}
	w.walk(&p.heavy, s, 0, int32(len(p.heavy.nodes)))
	if l.control {
		w.walk(&p.control, s, 0, int32(len(p.control.nodes)))
	}
}

func (w *walker) or(mask []uint32) {
	for i, b := range mask {
		w.bits[i] |= b
	}
}

// beside finds a state behind s that stays as it is behind every plain character: where s
// excepts a few strings from all, that is the state once the text is none of these. Nil: none.
func (w *walker) beside(s *state) *state {
	for _, b := range []byte("~^`|@") {
		d := w.m.step(s, w.m.class[b])
		if d == w.m.dead || d == s {
			continue
		}
		if l := w.loop(d); len(l.behind) == 1 && l.most < 0 {
			return d
		}
		if r := w.run(d); r.slice == plainRun && r.next == d && !d.busy && !d.final {
			return d
		}
	}
	return nil
}

// likeness adds the tokens that may come behind s: those behind d, but for the few behind
// which the two are not in the same state.
func (w *walker) likeness(s, d config, alone bool) {
	if alone {
		w.reference(d)
		w.byRun(s, func(t *trie, s config) { w.differ(t, s, d) })
		return
	}
	have := w.bits
	if len(w.spare) != len(have) {
		w.spare = make([]uint32, len(have))
	}
	w.bits = w.spare
	clear(w.bits)
	w.reference(d)
	w.byRun(s, func(t *trie, s config) { w.differ(t, s, d) })
	w.bits, w.spare = have, w.bits
	w.or(w.spare)
}

// reference sets bits to what reading finds behind d.
func (w *walker) reference(d config) {
	key := "d" + string(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, d.at.id), d.top.id))
	if k := w.g.cached(key); k != nil {
		k.write(w.bits)
		return
	}
	w.reading(d, true)
	w.g.keep(key, newMask(w.bits))
}

// differ corrects bits, which are those of t's tokens behind d, to those behind s.
func (w *walker) differ(t *trie, s, d config) {
	m := w.m
	if len(w.path) < maxToken+2 {
		w.path = make([]*state, maxToken+2)
	}
	if len(w.twin) < maxToken+2 {
		w.twin = make([]*state, maxToken+2)
	}
	path, twin := w.path, w.twin
	path[0], twin[0] = s.at, d.at
	for i := int32(0); i < int32(len(t.nodes)); {
		n := &t.nodes[i]
		c := m.class[n.b]
		before := path[n.depth-1]
		ours, theirs := before.next[c].Load(), (*state)(nil)
		if ours == nil {
			ours = m.step(before, c)
		}
		if from := twin[n.depth-1]; from == m.dead {
			theirs = from
		} else if from != nil {
			if theirs = from.next[c].Load(); theirs == nil {
				theirs = m.step(from, c)
			}
		}
		if ours == theirs {
			i = n.skip
			continue
		}
		if ours == m.dead || ours.busy || ours.final && s.top != w.bottom {
			w.forbid(t, i, n.skip)
			if ours != m.dead {
				w.deep(t, config{ours, s.top}, i)
			}
			i = n.skip
			continue
		}
		if n.token >= 0 {
			w.allow(n.token)
		}
		if theirs != nil && (theirs.busy || theirs.final && s.top != w.bottom) {
			theirs = nil // what it comes to is more than a state
		}
		path[n.depth], twin[n.depth] = ours, theirs
		i++
	}
}

// forbid clears the bits of the tokens among the nodes.
func (w *walker) forbid(t *trie, lo, hi int32) {
	for i := lo; i < hi; i++ {
		id := t.nodes[i].token
		switch {
		case id < 0:
		case w.heads == nil:
			w.drop(id)
			w.drop(w.v.twins[id]...)
		default:
			w.drop(w.heads[id].within(w.from, w.to)...)
		}
	}
}

func (w *walker) drop(ids ...int32) {
	for _, id := range ids {
		w.bits[id>>5] &^= 1 << (id & 31)
	}
}

const manyReadings = 32

// loop says how plain characters do behind a state.
type loop struct {
	slice int // the slice whose plain tokens are all allowed, or -1
	// behind are the states behind 0, 1, 2 and so on of the plain characters, if it does not matter
	// which they are; else nil. What the last allows of the slice's tails is allowed behind more, too,
	// unless more is set: then more than maxBehind are told apart.
	behind  []*state
	more    bool
	most    int32 // plain characters; negative: any number
	control bool  // a control character may come, now or behind plain ones
}

func (w *walker) loop(s *state) *loop {
	l := s.loop.Load()
	if l == nil {
		l = w.m.plainLoop(s)
		s.loop.Store(l)
	}
	return l
}

// walk allows the tokens among the nodes lo to hi, which are all children of one node, that
// may come behind s. What s can return to or call has readings of its own, and is left out.
func (w *walker) walk(t *trie, s config, lo, hi int32) {
	if lo >= hi {
		return
	}
	if len(w.path) < maxToken+2 {
		w.path = make([]*state, maxToken+2)
	}
	if len(w.into) < maxToken+2 {
		w.into = make([]int32, maxToken+2)
	}
	path, into := w.path, w.into
	m := w.m
	nodes := t.nodes
	depth := nodes[lo].depth
	path[depth-1], into[depth-1] = s.at, 0
	for i := lo; i < hi; {
		n := &nodes[i]
		from := path[n.depth-1]
		var next *state
		if from.lit != "" { // no states are made for its bytes
			at := into[n.depth-1]
			if from.lit[at] != n.b {
				i = n.skip
				continue
			}
			if at++; int(at) < len(from.lit) {
				if n.token >= 0 {
					w.allow(n.token)
				}
				path[n.depth], into[n.depth] = from, at
				i++
				continue
			}
			next = m.literal(from)
		} else {
			c := m.class[n.b]
			if next = from.next[c].Load(); next == nil {
				next = m.step(from, c)
			}
		}
		if next == m.dead {
			i = n.skip
			continue
		}
		if next.busy || next.final && s.top != w.bottom {
			w.deep(t, config{next, s.top}, i)
			i = n.skip
			continue
		}
		if n.token >= 0 {
			w.allow(n.token)
		}
		path[n.depth], into[n.depth] = next, 0
		i++
	}
}

// deep is walk from node i on, whose state s may return or call: with stacks.
func (w *walker) deep(t *trie, s config, i int32) {
	n := &t.nodes[i]
	depth := int(n.depth) + 1
	set := w.close(append(w.set(depth), s))
	w.sets[depth] = set
	if len(set) > 0 && n.token >= 0 {
		w.allow(n.token)
	}
	w.walkSet(t, set, i+1, n.skip)
}

func (w *walker) set(depth int) []config {
	for len(w.sets) <= depth {
		w.sets = append(w.sets, nil)
	}
	return w.sets[depth][:0]
}

func (w *walker) walkSet(t *trie, set []config, lo, hi int32) {
	if len(set) == 0 || lo >= hi {
		return
	}
	if len(set) == 1 {
		w.walk(t, set[0], lo, hi)
		return
	}
	for i := lo; i < hi; {
		n := &t.nodes[i]
		next := w.read(w.set(int(n.depth)+1), set, n.b)
		w.sets[n.depth+1] = next
		if len(next) > 0 {
			if n.token >= 0 {
				w.allow(n.token)
			}
			if i+1 < n.skip {
				w.walkSet(t, next, i+1, n.skip)
			}
		}
		i = n.skip
	}
}
