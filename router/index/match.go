package index

import (
	"math/rand/v2"
	"sync"

	"github.com/xpyd/xpyd/internal/kvevents"
)

// Query is a prompt.
type Query struct {
	Model, LoRA, Salt string
	Tokens            []uint32
}

// Held is how much of a prompt a source holds, from its beginning without a gap.
type Held struct {
	Key  Key
	Role Role
	// Tokens counts the prompt's tokens by the fastest tier that has them.
	Tokens [kvevents.Tiers]int
}

// Total is the length of the prefix held, in tokens.
func (h *Held) Total() int {
	n := 0
	for _, t := range h.Tokens {
		n += t
	}
	return n
}

// Bounds of what Match collects.
const (
	perRole  = 8   // candidates of each role
	examined = 256 // holders looked at for them, at one prefix
)

// scratch is what one Match needs.
type scratch struct {
	names []uint64 // of the prompt's prefixes
	words []uint64 // their holders; with a set's sum for its number
	found []candidate
	count [4]int // by role
}

// candidate is a holder of the prefix that match looks at.
type candidate struct {
	src   *Source
	role  Role
	tiers uint64 // of that prefix
	held  [kvevents.Tiers]int
}

var pool = sync.Pool{New: func() any { return &scratch{} }}

// Match returns the sources with the longest prefixes of the prompt, up to 8 of each role, in no
// order.
func (x *Index) Match(q *Query) []Held {
	sc := pool.Get().(*scratch)
	defer func() {
		clear(sc.found) // keeps no source alive
		pool.Put(sc)
	}()
	var out []Held
	for _, grain := range *x.sizes.Load() {
		x.match(q, grain, sc)
		for i := range sc.found {
			if c := &sc.found[i]; c.held != [kvevents.Tiers]int{} {
				out = append(out, Held{Key: c.src.key, Role: c.role, Tokens: c.held})
			}
		}
	}
	return out
}

// match looks at the prefixes at multiples of a grain: forward to the longest that anybody has, and
// back from there for who has it.
func (x *Index) match(q *Query, grain int, sc *scratch) {
	sc.names, sc.words, sc.found, sc.count = sc.names[:0], sc.words[:0], sc.found[:0], [4]int{}
	name := x.root(q.Model, q.LoRA)
	if q.Salt != "" {
		name = x.salted(name, kvevents.SaltExtra(q.Salt))
	}
	for at := 0; at+grain <= len(q.Tokens); at += grain {
		for _, t := range q.Tokens[at : at+grain] {
			name = x.next(name, t)
		}
		word := x.holders(name)
		if word == 0 {
			break
		}
		sc.names, sc.words = append(sc.names, name), append(sc.words, word)
	}
	sources := *x.byID.Load()
	run := 0 // tokens of prefixes that all have the same holders
	for i := len(sc.words) - 1; i >= 0; i-- {
		run += grain
		if i > 0 && sc.words[i-1] == sc.words[i] {
			continue
		}
		x.visit(sc, i, sources)
		for j := range sc.found {
			sc.found[j].add(run)
		}
		run = 0
	}
}

// holders reads a prefix's word, and notes that it was asked for. Equal holders have equal words: a
// set's has its sum.
func (x *Index) holders(name uint64) uint64 {
	sh := x.shard(name)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.nodes.n == 0 {
		return 0
	}
	at, ok := sh.nodes.find(name)
	if !ok {
		return 0
	}
	v := sh.nodes.slots[at].val
	if v&refBit == 0 {
		sh.nodes.slots[at].val = v | refBit
	}
	if v&manyBit != 0 {
		return sh.sets[uint32(v)].sum | manyBit
	}
	return v &^ refBit
}

// visit sees which candidates hold a prefix, and which others do.
func (x *Index) visit(sc *scratch, i int, sources []*Source) {
	word := sc.words[i]
	if word&manyBit != 0 {
		sh := x.shard(sc.names[i])
		sh.mu.Lock()
		defer sh.mu.Unlock()
		now, _ := sh.nodes.get(sc.names[i])
		if now&manyBit != 0 {
			sc.visit(&sh.sets[uint32(now)], sources)
			return
		}
		word = now // it has changed meanwhile
	}
	for j := range sc.found {
		sc.found[j].tiers = tiersIn(word, sc.found[j].src.id)
	}
	for _, h := range [2]uint64{word & holderMask, word >> holderBits & holderMask} {
		if h != 0 {
			sc.add(uint32(h>>3)-1, h&7, sources)
		}
	}
}

func (sc *scratch) visit(s *set, sources []*Source) {
	for j := range sc.found {
		sc.found[j].tiers = s.tiers(sc.found[j].src.id)
	}
	if sc.full() || len(s.w) == 0 {
		return
	}
	looked := 0
	s.each(rand.IntN(len(s.w)), func(id uint32, tiers uint64) bool {
		sc.add(id, tiers, sources)
		looked++
		return looked < examined && !sc.full()
	})
}

// add counts tokens that all come before those counted so far: if the candidate does not have them,
// the others are of no use.
func (c *candidate) add(tokens int) {
	switch {
	case c.tiers == 0:
		c.held = [kvevents.Tiers]int{}
	case c.tiers&1 != 0:
		c.held[kvevents.GPU] += tokens
	case c.tiers&2 != 0:
		c.held[kvevents.Host] += tokens
	default:
		c.held[kvevents.Disk] += tokens
	}
}

func (sc *scratch) full() bool { return sc.count[Prefill] >= perRole && sc.count[Decode] >= perRole }

// add makes a holder a candidate unless it is one, or its role has enough.
func (sc *scratch) add(id uint32, tiers uint64, sources []*Source) {
	if int(id) >= len(sources) || sources[id] == nil {
		return
	}
	src := sources[id]
	role := Role(src.role.Load())
	need := role&Prefill != 0 && sc.count[Prefill] < perRole || role&Decode != 0 && sc.count[Decode] < perRole
	if !need {
		return
	}
	for i := range sc.found {
		if sc.found[i].src == src {
			return
		}
	}
	for r := Prefill; r <= Decode; r <<= 1 {
		if role&r != 0 {
			sc.count[r]++
		}
	}
	sc.found = append(sc.found, candidate{src: src, role: role, tiers: tiers})
}
