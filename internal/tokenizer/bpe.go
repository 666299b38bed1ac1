package tokenizer

import (
	"fmt"
	"hash/maphash"
	"slices"
	"sync/atomic"
	"unicode/utf8"
)

// bpe is a byte-pair-encoding model. A word starts as one symbol a byte
// (byte-level) or a character, and the adjacent pair of lowest rank, leftmost
// first, is merged until no pair has a rank.
type bpe struct {
	byteLevel    bool
	ignoreMerges bool             // a word that is a token as a whole stays one (Llama 3)
	fuseUnk      bool             // neighbouring unknown characters become one unk
	words        map[string]int32 // token bytes (byte-level) or spelling to id
	ascii        [256]int32       // first symbols: of bytes, or of ASCII characters; -1 for none
	bytes        [256]int32       // byte fallback: ids of <0x00>…<0xFF>; -1 for none
	fallback     bool             // bytes is in use
	unk          int32            // -1 for none
	merges       pairTable
	hidden       []string // characters that are no token but begin one: symbol ids after the vocabulary's
	vocabSize    int32

	seed  maphash.Seed
	cache [cacheSlots]atomic.Pointer[cachedWord]
}

// The cache is direct-mapped and holds at most cacheSlots words of at most
// cacheWord bytes: about 1 MB when full.
const (
	cacheSlots = 1 << 13
	cacheWord  = 64
	shortWord  = 64 // symbols up to which scanning beats a heap
)

type cachedWord struct {
	word string
	ids  []int32
}

// pairTable maps a pair of symbols to (rank, merged symbol): open addressing with linear
// probing, at most half full.
type pairTable struct {
	slots []pairSlot
	shift uint
}

type pairSlot struct{ key, val uint64 }

const noPair = ^uint64(0)

func newPairTable(n int) pairTable {
	bits := uint(4)
	for 1<<bits < 2*n {
		bits++
	}
	t := pairTable{slots: make([]pairSlot, 1<<bits), shift: 64 - bits}
	for i := range t.slots {
		t.slots[i].key = noPair
	}
	return t
}

// put adds a pair; a later entry for the same pair replaces it.
func (t *pairTable) put(left, right, merged int32, rank uint32) {
	key := uint64(left)<<32 | uint64(right)
	i := t.find(key)
	t.slots[i] = pairSlot{key, uint64(rank)<<32 | uint64(merged)}
}

// get returns rank<<32 | merged symbol, or noPair.
func (t *pairTable) get(left, right int32) uint64 {
	s := &t.slots[t.find(uint64(left)<<32|uint64(right))]
	if s.key == noPair {
		return noPair
	}
	return s.val
}

func (t *pairTable) find(key uint64) int {
	mask := len(t.slots) - 1
	i := int((key * 0x9e3779b97f4a7c15) >> t.shift)
	for t.slots[i].key != key && t.slots[i].key != noPair {
		i = (i + 1) & mask
	}
	return i
}

// newBPE returns a model without words and merges; ids from vocabSize on are hidden symbols.
func newBPE(vocabSize int) *bpe {
	return &bpe{words: make(map[string]int32, vocabSize), unk: -1, vocabSize: int32(vocabSize), seed: maphash.MakeSeed()}
}

// setMerges fills the merge table: pairs in order of rank, of tokens in vocab. Those of other
// strings can never apply; strict makes them an error.
func (m *bpe) setMerges(pairs [][2]string, vocab map[string]int32, strict bool) error {
	m.merges = newPairTable(len(pairs))
	for rank, p := range pairs {
		left, ok1 := vocab[p[0]]
		right, ok2 := vocab[p[1]]
		merged, ok3 := vocab[p[0]+p[1]]
		if ok1 && ok2 && ok3 {
			m.merges.put(left, right, merged, uint32(rank))
		} else if strict {
			return fmt.Errorf("merge %d of %q and %q: not in the vocabulary", rank, p[0], p[1])
		}
	}
	return nil
}

// encode appends the ids of one word to out, reusing sc.
func (m *bpe) encode(out []int32, word string, sc *scratch) []int32 {
	if m.ignoreMerges {
		if id, ok := m.words[word]; ok {
			return append(out, id)
		}
	}
	if len(word) > cacheWord {
		return m.merge(out, word, sc)
	}
	slot := &m.cache[maphash.String(m.seed, word)%cacheSlots]
	if c := slot.Load(); c != nil && c.word == word {
		return append(out, c.ids...)
	}
	start := len(out)
	out = m.merge(out, word, sc)
	slot.Store(&cachedWord{word: string([]byte(word)), ids: slices.Clone(out[start:])})
	return out
}

func (m *bpe) merge(out []int32, word string, sc *scratch) []int32 {
	sc.syms = m.symbols(sc.syms[:0], word)
	if len(sc.syms) <= shortWord {
		sc.mergeShort(&m.merges)
	} else {
		sc.mergeLong(&m.merges)
	}
	if len(m.hidden) == 0 {
		return append(out, sc.syms...)
	}
	unk := -1
	for _, id := range sc.syms {
		if id >= m.vocabSize {
			out, unk = m.unknown(out, m.hidden[id-m.vocabSize], unk)
		} else {
			out, unk = append(out, id), -1
		}
	}
	return out
}

// symbols appends the first symbols of word.
func (m *bpe) symbols(out []int32, word string) []int32 {
	if m.byteLevel {
		for i := range len(word) {
			if id := m.ascii[word[i]]; id >= 0 {
				out = append(out, id)
			}
		}
		return out
	}
	unk := -1 // where the run of unknown characters at the end of out began
	for i := 0; i < len(word); {
		n := 1
		id := int32(-1)
		if c := word[i]; c < utf8.RuneSelf {
			id = m.ascii[c]
		} else {
			_, n = utf8.DecodeRuneInString(word[i:])
			if v, ok := m.words[word[i:i+n]]; ok {
				id = v
			}
		}
		if id >= 0 {
			out, unk = append(out, id), -1
		} else {
			out, unk = m.unknown(out, word[i:i+n], unk)
		}
		i += n
	}
	return out
}

// unknown appends what stands for a character outside the vocabulary: its bytes, unk, or
// nothing. last is where out ends in an unk, else -1.
func (m *bpe) unknown(out []int32, char string, last int) ([]int32, int) {
	if m.fallback {
		for i := range len(char) {
			out = append(out, m.bytes[char[i]])
		}
		return out, -1
	}
	if m.unk < 0 || m.fuseUnk && last >= 0 {
		return out, last
	}
	return append(out, m.unk), len(out)
}

// scratch is the working memory of merging, reused from word to word.
type scratch struct {
	syms       []int32
	vals       []uint64 // by symbol: pairTable value of the pair it begins
	prev, next []int32
	heap       pairHeap
}

// mergeShort merges syms in place, looking for the best pair by scanning.
func (sc *scratch) mergeShort(t *pairTable) {
	n := len(sc.syms)
	if n < 2 {
		return
	}
	s := sc.syms
	v := slices.Grow(sc.vals[:0], n)[:n]
	sc.vals = v
	for i := range n - 1 {
		v[i] = t.get(s[i], s[i+1])
	}
	v[n-1] = noPair
	for {
		best, at := noPair, -1
		for i, x := range v[:n-1] {
			if x>>32 < best>>32 { // ranks only: a tie goes to the leftmost
				best, at = x, i
			}
		}
		if at < 0 {
			break
		}
		s[at] = int32(uint32(best))
		copy(s[at+1:n], s[at+2:n])
		copy(v[at+1:n], v[at+2:n])
		n--
		v[n-1] = noPair
		if at > 0 {
			v[at-1] = t.get(s[at-1], s[at])
		}
		if at+1 < n {
			v[at] = t.get(s[at], s[at+1])
		}
	}
	sc.syms = s[:n]
}

// mergeLong is mergeShort in O(n log n), with a linked list and a heap; outdated heap
// entries are recognised when popped.
func (sc *scratch) mergeLong(t *pairTable) {
	n := len(sc.syms)
	s := sc.syms
	v := slices.Grow(sc.vals[:0], n)[:n]
	prev, next := slices.Grow(sc.prev[:0], n)[:n], slices.Grow(sc.next[:0], n)[:n]
	h := sc.heap[:0]
	for i := range n {
		prev[i], next[i], v[i] = int32(i)-1, int32(i)+1, noPair
		if i+1 < n {
			v[i] = t.get(s[i], s[i+1])
			h.push(v[i], i)
		}
	}
	for len(h) > 0 {
		rank, at := h.pop()
		if v[at] == noPair || v[at]>>32 != rank {
			continue
		}
		s[at] = int32(uint32(v[at]))
		gone := next[at]
		v[gone] = noPair
		next[at] = next[gone]
		if next[at] < int32(n) {
			prev[next[at]] = int32(at)
			v[at] = t.get(s[at], s[next[at]])
			h.push(v[at], at)
		} else {
			v[at] = noPair
		}
		if p := prev[at]; p >= 0 {
			v[p] = t.get(s[p], s[at])
			h.push(v[p], int(p))
		}
	}
	k := 0
	for i := int32(0); i < int32(n); i = next[i] {
		s[k] = s[i]
		k++
	}
	sc.syms, sc.vals, sc.prev, sc.next, sc.heap = s[:k], v, prev, next, h
}

// pairHeap is a binary min-heap of rank<<32 | position.
type pairHeap []uint64

func (h *pairHeap) push(val uint64, at int) {
	if val == noPair {
		return
	}
	a := append(*h, val&^0xffffffff|uint64(at))
	for i := len(a) - 1; i > 0 && a[i] < a[(i-1)/2]; i = (i - 1) / 2 {
		a[i], a[(i-1)/2] = a[(i-1)/2], a[i]
	}
	*h = a
}

func (h *pairHeap) pop() (rank uint64, at int) {
	a := *h
	top := a[0]
	last := len(a) - 1
	a[0] = a[last]
	a = a[:last]
	for i := 0; ; {
		c := 2*i + 1
		if c >= last {
			break
		}
		if c+1 < last && a[c+1] < a[c] {
			c++
		}
		if a[i] <= a[c] {
			break
		}
		a[i], a[c] = a[c], a[i]
		i = c
	}
	*h = a
	return top >> 32, int(uint32(top))
}

// firstSymbols fills ascii and, where all 256 byte tokens are there and
// fallback is asked for, bytes. It comes after words is complete.
func (m *bpe) firstSymbols(fallback bool) {
	for i := range 256 {
		m.ascii[i], m.bytes[i] = -1, -1
		if m.byteLevel || i < utf8.RuneSelf {
			if id, ok := m.words[string([]byte{byte(i)})]; ok {
				m.ascii[i] = id
			}
		}
	}
	if !fallback {
		return
	}
	m.fallback = true
	for i := range 256 {
		id, ok := m.words[fmt.Sprintf("<0x%02X>", i)]
		if !ok {
			m.fallback = false
			return
		}
		m.bytes[i] = id
	}
}
