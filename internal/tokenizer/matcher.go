package tokenizer

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is a token that is found in the text before BPE sees it.
type addedToken struct {
	id             int32
	content        string
	special        bool // part of the fingerprint
	normalized     bool // matched after normalising, its content normalised too
	lstrip, rstrip bool // takes the white space before, after it
	singleWord     bool // matches only between non-word characters
}

// matcher finds added tokens in text, leftmost and longest, with a byte trie.
type matcher struct {
	nodes  []trieNode
	tokens []addedToken
	first  [256]bool
}

type trieNode struct {
	next  map[byte]int32
	token int32 // index in tokens, -1 for none
}

// newMatcher returns a matcher, or nil if there is nothing to match.
func newMatcher(tokens []addedToken) *matcher {
	if len(tokens) == 0 {
		return nil
	}
	m := &matcher{tokens: tokens, nodes: []trieNode{{token: -1}}}
	for i, tok := range tokens {
		at := int32(0)
		for j := range len(tok.content) {
			c := tok.content[j]
			next, ok := m.nodes[at].next[c]
			if !ok {
				next = int32(len(m.nodes))
				m.nodes = append(m.nodes, trieNode{token: -1})
				if m.nodes[at].next == nil {
					m.nodes[at].next = map[byte]int32{}
				}
				m.nodes[at].next[c] = next
			}
			at = next
		}
		m.nodes[at].token = int32(i)
		m.first[tok.content[0]] = true
	}
	return m
}

// each calls f for the parts of text in order: an added token with its id, or
// other text, never empty, with -1.
func (m *matcher) each(text string, f func(part string, id int32)) {
	start := 0
	for i := 0; m != nil && i < len(text); {
		if !m.first[text[i]] {
			i++
			continue
		}
		tok, n := m.match(text[i:])
		if tok == nil {
			i++
			continue
		}
		begin, end := i, i+n
		if tok.singleWord && !between(text, begin, end) {
			i = end
			continue
		}
		if tok.lstrip {
			begin = max(start, len(strings.TrimRightFunc(text[:begin], unicode.IsSpace)))
		}
		if tok.rstrip {
			end = len(text) - len(strings.TrimLeftFunc(text[end:], unicode.IsSpace))
		}
		if start < begin {
			f(text[start:begin], -1)
		}
		f(text[begin:end], tok.id)
		start, i = end, end
	}
	if start < len(text) {
		f(text[start:], -1)
	}
}

// match returns the longest token that s begins with, and its length.
func (m *matcher) match(s string) (*addedToken, int) {
	at, best, n := int32(0), int32(-1), 0
	for i := range len(s) {
		next, ok := m.nodes[at].next[s[i]]
		if !ok {
			break
		}
		at = next
		if m.nodes[at].token >= 0 {
			best, n = m.nodes[at].token, i+1
		}
	}
	if best < 0 {
		return nil, 0
	}
	return &m.tokens[best], n
}

// between reports whether text[begin:end] stands between non-word characters.
func between(text string, begin, end int) bool {
	before, _ := utf8.DecodeLastRuneInString(text[:begin])
	after, _ := utf8.DecodeRuneInString(text[end:])
	return (begin == 0 || !isWord(before)) && (end == len(text) || !isWord(after))
}

func isWord(r rune) bool {
	return unicode.In(r, unicode.L, unicode.M, unicode.Nd, unicode.Pc)
}
