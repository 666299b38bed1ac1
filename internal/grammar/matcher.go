package grammar

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
)

// Grammar is a compiled Spec for one Vocabulary. It is safe for many goroutines; what its
// matchers find out they find out for each other, within Limits.Memory.
type Grammar struct {
	v      *Vocabulary
	m      *machine
	root   *state
	bottom *node
	places atomic.Uint64 // ids of nodes and places given out
	limit  int64
	nodes  int64 // bytes of the grammar itself

	mu     sync.Mutex
	masks  map[string]*mask
	stacks map[string]*node
	size   int64

	walkers sync.Pool
}

// mask is a set of tokens, as bits or, if it is small, as a list.
type mask struct {
	count int
	list  []int32
	bits  []uint32
}

// maxShared bounds the stacks that are recognised when they come again.
const maxShared = 1 << 14

// newGrammar makes the state at the beginning within the budget.
func newGrammar(v *Vocabulary, m *machine, root *expr, limit, nodes int64, spent *budget) *Grammar {
	g := &Grammar{
		v: v, m: m, limit: limit, nodes: nodes, bottom: &node{known: true},
		masks: map[string]*mask{}, stacks: map[string]*node{},
	}
	m.spent = spent
	g.root = m.union([]*cont{m.cons(root, m.end)})
	m.spent = nil
	g.walkers.New = func() any {
		return &walker{g: g, v: v, reader: &reader{m: m, bottom: g.bottom, nodes: func() uint64 { return g.places.Add(1) }}}
	}
	return g
}

// Size is about the bytes that g holds now, its Vocabulary aside.
func (g *Grammar) Size() int64 {
	g.m.mu.Lock()
	n := g.m.size
	g.m.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	return n + g.size + g.nodes
}

// Matcher follows one text. It is a function of the Spec, the vocabulary and the tokens
// accepted so far, and one goroutine's. Its memory grows with the nesting of the text only.
type Matcher struct {
	g     *Grammar
	set   []config // all readings of the text; never changed in place
	ended bool
	mask  *mask // of set, once it was asked for
}

// Matcher begins a text.
func (g *Grammar) Matcher() *Matcher {
	w := g.walkers.Get().(*walker)
	defer g.walkers.Put(w)
	return &Matcher{g: g, set: g.settle(w.close([]config{{g.root, g.bottom}}))}
}

// Clone is a matcher of the same text that goes on by itself.
func (m *Matcher) Clone() *Matcher {
	c := *m
	return &c
}

// Ended says whether an end token was accepted. Nothing may come any more.
func (m *Matcher) Ended() bool { return m.ended }

// MayEnd says whether the text so far is whole, so that an end token is allowed.
func (m *Matcher) MayEnd() bool {
	if m.ended {
		return false
	}
	for _, s := range m.set {
		if s.top == m.g.bottom && s.at.final {
			return true
		}
	}
	return false
}

// Accept appends a token to the text. If that is not allowed it returns false and changes
// nothing.
func (m *Matcher) Accept(token int32) bool {
	g := m.g
	if m.ended || token < 0 || int(token) >= len(g.v.tokens) {
		return false
	}
	w := g.walkers.Get().(*walker)
	defer g.walkers.Put(w)
	if set := m.special(w, token); len(set) > 0 {
		m.set, m.mask = set, nil
		return true
	}
	if g.v.isEnd[token] {
		if !m.MayEnd() {
			return false
		}
		m.ended, m.mask = true, nil
		return true
	}
	text := g.v.tokens[token]
	if len(text) == 0 || len(text) > maxToken {
		return false
	}
	set, next := append(w.set(0), m.set...), w.set(1)
	for _, b := range text {
		next = w.read(next, set, b)
		if len(next) == 0 {
			return false
		}
		set, next = next, set
	}
	w.sets[0], w.sets[1] = set, next
	m.set, m.mask = g.settle(set), nil
	return true
}

// special is what the readings become behind a special token that the grammar asks for.
func (m *Matcher) special(w *walker, token int32) []config {
	var set []config
	for _, s := range m.set {
		if len(s.at.tokens) > 0 {
			if t := m.g.m.afterToken(s.at, token); t != m.g.m.dead {
				set = append(set, config{t, s.top})
			}
		}
	}
	if len(set) == 0 {
		return nil
	}
	return m.g.settle(w.close(set))
}

// Mask writes the tokens that may come next: bit i%32 of word i/32 for token i. bits must
// have (Size()+31)/32 words; further ones are cleared.
func (m *Matcher) Mask(bits []uint32) {
	clear(bits)
	if !m.ended {
		m.tokens().write(bits)
	}
}

// write sets bits to k. bits must be clear.
func (k *mask) write(bits []uint32) {
	if k.bits != nil {
		copy(bits, k.bits)
		return
	}
	for _, t := range k.list {
		bits[t>>5] |= 1 << (t & 31)
	}
}

// Forced returns the token that has to come next, if there is only one.
func (m *Matcher) Forced() (token int32, ok bool) {
	if m.ended {
		return 0, false
	}
	k := m.tokens()
	if k.count != 1 {
		return 0, false
	}
	return k.list[0], true
}

// tokens is the mask of the text so far.
func (m *Matcher) tokens() *mask {
	if m.mask != nil {
		return m.mask
	}
	g := m.g
	var buf [128]byte
	key := buf[:0]
	for _, s := range m.set {
		key = binary.LittleEndian.AppendUint64(key, s.at.id)
		key = binary.LittleEndian.AppendUint64(key, s.top.id)
	}
	k := g.cached(string(key))
	if k == nil {
		k = m.compute()
		g.keep(string(key), k)
	}
	m.mask = k
	return k
}

func (g *Grammar) cached(key string) *mask {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.masks[key]
}

func (g *Grammar) keep(key string, k *mask) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.size > g.limit {
		g.masks, g.size = map[string]*mask{}, 0
	}
	g.masks[key] = k
	g.size += int64(len(key)+len(k.bits)*4+len(k.list)*4) + 128
}

// sparse is the most tokens that a mask keeps as a list.
const sparse = 1024

func (m *Matcher) compute() *mask {
	w := m.g.walkers.Get().(*walker)
	defer m.g.walkers.Put(w)
	v := m.g.v
	if len(w.bits) != v.words {
		w.bits = make([]uint32, v.words)
	}
	clear(w.bits)
	w.mask(m.set)
	if m.MayEnd() {
		for _, e := range v.ends {
			w.bits[e>>5] |= 1 << (e & 31)
		}
	}
	return newMask(w.bits)
}

func newMask(set []uint32) *mask {
	k := &mask{}
	for _, word := range set {
		k.count += bits.OnesCount32(word)
	}
	if k.count > sparse {
		k.bits = slices.Clone(set)
		return k
	}
	k.list = make([]int32, 0, k.count)
	for i, word := range set {
		for word != 0 {
			k.list = append(k.list, int32(i*32+bits.TrailingZeros32(word)))
			word &= word - 1
		}
	}
	return k
}

// settle copies set with stacks that were seen before in place of equal ones, so that their
// masks are found again.
func (g *Grammar) settle(set []config) []config {
	if len(set) == 0 {
		return nil
	}
	out := make([]config, 0, len(set))
	var known map[*node]*node
	for _, s := range set {
		if !s.top.known {
			if known == nil {
				known = map[*node]*node{}
			}
			s.top = g.share(s.top, known)
		}
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// share is the shared node that equals n. Nodes on a cycle, which left recursion makes, and
// those above them stay as they are.
func (g *Grammar) share(n *node, known map[*node]*node) *node {
	if n.known {
		return n
	}
	if s, ok := known[n]; ok {
		return s
	}
	known[n] = n // while it is being looked at, and if it is on a cycle
	edges := make([]edge, len(n.edges))
	for i, e := range n.edges {
		p := g.share(e.parent, known)
		if !p.known {
			return n
		}
		edges[i] = edge{e.ret, p}
	}
	key := make([]byte, 0, 16*len(edges))
	for _, e := range edges {
		key = binary.LittleEndian.AppendUint64(key, e.ret.id)
		key = binary.LittleEndian.AppendUint64(key, e.parent.id)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.stacks[string(key)]
	if s == nil {
		if len(g.stacks) >= maxShared {
			g.stacks = map[string]*node{}
		}
		s = &node{id: g.places.Add(1), known: true, depth: n.depth, edges: edges}
		g.stacks[string(key)] = s
	}
	known[n] = s
	return s
}
