package grammar

import (
	"bytes"
	"maps"
	"slices"
	"unicode/utf8"
)

// trieNode is one byte of the trie of a vocabulary. Nodes are in depth-first order: a node's
// children follow it, up to skip.
type trieNode struct {
	token int32 // that ends here, or -1
	skip  int32 // the first node behind this one's children
	depth uint16
	b     byte
}

// trie is a set of tokens by their bytes. Tokens longer than maxToken bytes are left out.
type trie struct {
	nodes []trieNode
	depth int // of the deepest node, at least 1
}

const maxToken = 4096

// Vocabulary is what a model's tokens spell. It is built once for each model, takes some tens
// of bytes for each byte of a token, and is immutable: all grammars of the model share it.
type Vocabulary struct {
	tokens [][]byte
	ends   []int32
	isEnd  map[int32]bool
	names  map[string]int32
	words  int               // of a mask
	twins  map[int32][]int32 // further tokens with the same bytes

	all   trie
	plain [len(plainCuts)]plainSlice
	runs  [len(runSets)]runSlice
}

// plainSlice parts the tokens for a place where at least cut more characters of a JSON string
// may come. A token's weight is its plain characters, those that mean themselves in a JSON
// string, and the bytes behind these: no fewer characters than it has.
type plainSlice struct {
	cut      int32
	runSlice      // mask: of tokens of at most cut plain characters; tails: of tokens of at most cut in weight
	far      trie // the tokens of tails that begin with more than maxBehind plain characters
	other    trie // all tokens that are not in mask; only of cuts from 8 on
	// Tokens above cut in weight: those of plain characters alone, fewest first; those with a
	// control character behind their plain ones; and the rest.
	long    []longToken
	control trie
	heavy   trie
}

type longToken struct{ chars, id int32 }

// heads are tokens that have the same bytes behind their plain characters: those with the fewest
// plain characters first.
type heads struct {
	ids   []int32
	chars []uint8 // of each, manyChars for as many or more
}

const manyChars = 255

// within is the heads of from to to characters.
func (h *heads) within(from, to uint8) []int32 {
	lo, hi := 0, len(h.ids)
	if from > 0 {
		lo, _ = slices.BinarySearch(h.chars, from)
	}
	if to < manyChars {
		hi, _ = slices.BinarySearch(h.chars, to+1)
	}
	return h.ids[lo:hi]
}

// plainCuts are the cuts. The last has no end.
var plainCuts = [...]int32{1, 2, 4, 8, 16, 32, 64, 1 << 30}

const firstOther = 3 // the first cut that has other

// NewVocabulary takes the bytes of each token by id (nil: a special token, which no grammar
// allows but by name, or where the text may end if it is in ends) and the tokens that end a
// text. It keeps tokens.
func NewVocabulary(tokens [][]byte, ends []int32) *Vocabulary {
	v := &Vocabulary{
		tokens: tokens, isEnd: map[int32]bool{}, twins: map[int32][]int32{},
		words: (len(tokens) + 31) / 32,
	}
	for _, e := range ends {
		if e >= 0 && int(e) < len(tokens) && !v.isEnd[e] {
			v.isEnd[e] = true
			v.ends = append(v.ends, e)
		}
	}
	var ids []int32
	for id, t := range tokens {
		if len(t) > 0 && len(t) <= maxToken && !v.isEnd[int32(id)] {
			ids = append(ids, int32(id))
		}
	}
	slices.SortFunc(ids, func(a, b int32) int {
		if c := bytes.Compare(tokens[a], tokens[b]); c != 0 {
			return c
		}
		return int(a) - int(b)
	})
	distinct := ids[:0]
	for _, id := range ids {
		if n := len(distinct); n > 0 && bytes.Equal(tokens[distinct[n-1]], tokens[id]) {
			v.twins[distinct[n-1]] = append(v.twins[distinct[n-1]], id)
			continue
		}
		distinct = append(distinct, id)
	}
	texts := make([][]byte, len(distinct))
	for i, id := range distinct {
		texts[i] = tokens[id]
	}
	v.all = newTrie(texts, distinct)
	for i, cut := range plainCuts {
		v.plain[i] = v.slice(cut, texts, distinct)
	}
	for i, set := range runSets {
		v.runs[i] = v.runSlice(set, texts, distinct)
	}
	return v
}

// WithSpecial is v with names for special tokens, such as <|im_end|>: a Lark grammar can ask
// for them. It shares the rest with v.
func (v *Vocabulary) WithSpecial(names map[string]int32) *Vocabulary {
	w := *v
	w.names = map[string]int32{}
	for name, id := range names {
		if id >= 0 && int(id) < len(v.tokens) {
			w.names[name] = id
		}
	}
	return &w
}

// Size is the number of token ids. A mask has (Size()+31)/32 words.
func (v *Vocabulary) Size() int { return len(v.tokens) }

// newTrie builds the trie of texts, which are sorted, distinct and not empty.
func newTrie(texts [][]byte, ids []int32) trie {
	t := trie{depth: 1}
	var path []int32 // nodes from the root to the last one
	for i, text := range texts {
		keep := 0
		if i > 0 {
			prev := texts[i-1]
			for keep < len(prev) && keep < len(text) && prev[keep] == text[keep] {
				keep++
			}
		}
		for _, n := range path[keep:] {
			t.nodes[n].skip = int32(len(t.nodes))
		}
		path = path[:keep]
		for d := keep; d < len(text); d++ {
			path = append(path, int32(len(t.nodes)))
			t.nodes = append(t.nodes, trieNode{token: -1, b: text[d], depth: uint16(d + 1)})
		}
		t.nodes[len(t.nodes)-1].token = ids[i]
		t.depth = max(t.depth, len(text))
	}
	for _, n := range path {
		t.nodes[n].skip = int32(len(t.nodes))
	}
	t.nodes = slices.Clip(t.nodes)
	return t
}

// plainChar is a character that means itself in a JSON string.
func plainChar(r rune, size int) bool {
	return r >= 0x20 && r != '"' && r != '\\' && r != 0x7f && (r != utf8.RuneError || size > 1)
}

// plainPrefix is the bytes and the characters of the plain characters that text begins with.
func plainPrefix(text []byte) (size int, chars int32) {
	for size < len(text) {
		r, n := utf8.DecodeRune(text[size:])
		if !plainChar(r, n) {
			break
		}
		size += n
		chars++
	}
	return size, chars
}

type tokenList struct {
	texts [][]byte
	ids   []int32
}

func (l *tokenList) add(text []byte, id int32) {
	l.texts, l.ids = append(l.texts, text), append(l.ids, id)
}

// slice makes the plain slice of a cut.
func (v *Vocabulary) slice(cut int32, texts [][]byte, ids []int32) plainSlice {
	p := plainSlice{cut: cut, runSlice: runSlice{mask: make([]uint32, v.words)}}
	var other, heavy, control, far tokenList
	byTail := map[string]*heads{}
	for i, text := range texts {
		size, chars := plainPrefix(text)
		whole := size == len(text)
		if whole && chars <= cut {
			v.set(p.mask, ids[i])
		} else {
			other.add(text, ids[i])
		}
		if chars+int32(len(text)-size) > cut {
			switch {
			case whole:
				p.long = append(p.long, longToken{chars, ids[i]})
			case text[size] < 0x20 || text[size] == 0x7f:
				control.add(text, ids[i])
			default:
				heavy.add(text, ids[i])
			}
			continue
		}
		if whole {
			continue
		}
		if chars > maxBehind {
			far.add(text, ids[i])
		}
		v.addTail(byTail, text[size:], chars, ids[i])
	}
	slices.SortFunc(p.long, func(a, b longToken) int { return int(a.chars - b.chars) })
	p.heavy, p.control = newTrie(heavy.texts, heavy.ids), newTrie(control.texts, control.ids)
	p.far = newTrie(far.texts, far.ids)
	if cut >= plainCuts[firstOther] {
		p.other = newTrie(other.texts, other.ids)
	}
	p.tails, p.heads = newTails(byTail)
	return p
}

// addTail files a token by its tail, which is what is behind its first characters.
func (v *Vocabulary) addTail(byTail map[string]*heads, tail []byte, chars int32, id int32) {
	h := byTail[string(tail)]
	if h == nil {
		h = &heads{}
		byTail[string(tail)] = h
	}
	h.ids = append(append(h.ids, id), v.twins[id]...)
	for len(h.chars) < len(h.ids) {
		h.chars = append(h.chars, uint8(min(chars, manyChars)))
	}
}

// newTails is the trie of tails, with an index of the heads for a token.
func newTails(byTail map[string]*heads) (trie, []heads) {
	tails := slices.Sorted(maps.Keys(byTail))
	texts, ids, list := make([][]byte, len(tails)), make([]int32, len(tails)), make([]heads, len(tails))
	for i, tail := range tails {
		texts[i], ids[i] = []byte(tail), int32(i)
		list[i] = byTail[tail].sorted()
	}
	return newTrie(texts, ids), list
}

// sorted is h by characters.
func (h *heads) sorted() heads {
	order := make([]int, len(h.ids))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return int(h.chars[a]) - int(h.chars[b]) })
	s := heads{ids: make([]int32, len(order)), chars: make([]uint8, len(order))}
	for i, at := range order {
		s.ids[i], s.chars[i] = h.ids[at], h.chars[at]
	}
	return s
}

// set allows token and those that spell the same.
func (v *Vocabulary) set(bits []uint32, token int32) {
	bits[token>>5] |= 1 << (token & 31)
	if len(v.twins) > 0 {
		for _, t := range v.twins[token] {
			bits[t>>5] |= 1 << (t & 31)
		}
	}
}
