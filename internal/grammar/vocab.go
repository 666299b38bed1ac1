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
	plain slices256
}

// slices256 are the tokens of plain JSON characters, those that mean themselves in a JSON
// string, and the rest.
type slices256 struct {
	masks [len(plainCuts)][]uint32 // tokens of at most plainCuts[i] plain characters and nothing else
	other [len(plainCuts)]trie     // all other tokens, for each of them
	tails trie                     // what is left of tokens behind their plain characters; token is an index of heads
	heads [][]int32                // tokens by tail
}

// plainCuts are the lengths in characters by which plain tokens are cut. The last has no end.
var plainCuts = [...]int32{8, 16, 32, 1 << 30}

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
	v.cut(texts, distinct)
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

func (v *Vocabulary) cut(texts [][]byte, ids []int32) {
	for i := range v.plain.masks {
		v.plain.masks[i] = make([]uint32, v.words)
	}
	var other [len(plainCuts)]struct {
		texts [][]byte
		ids   []int32
	}
	byTail := map[string][]int32{}
	for i, text := range texts {
		size, chars := plainPrefix(text)
		for c, most := range plainCuts {
			if size == len(text) && chars <= most {
				v.set(v.plain.masks[c], ids[i])
			} else {
				other[c].texts = append(other[c].texts, text)
				other[c].ids = append(other[c].ids, ids[i])
			}
		}
		if size < len(text) {
			tail := string(text[size:])
			byTail[tail] = append(byTail[tail], ids[i])
		}
	}
	for c, o := range other {
		v.plain.other[c] = newTrie(o.texts, o.ids)
	}
	tails := slices.Sorted(maps.Keys(byTail))
	texts, ids = make([][]byte, len(tails)), make([]int32, len(tails))
	v.plain.heads = make([][]int32, len(tails))
	for i, tail := range tails {
		texts[i], ids[i] = []byte(tail), int32(i)
		for _, id := range byTail[tail] {
			v.plain.heads[i] = append(append(v.plain.heads[i], id), v.twins[id]...)
		}
	}
	v.plain.tails = newTrie(texts, ids)
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
