package grammar

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// small is a vocabulary of all bytes and some longer tokens, with one end token and two
// special ones.
func small(more ...string) *Vocabulary {
	var tokens [][]byte
	for b := range 256 {
		tokens = append(tokens, []byte{byte(b)})
	}
	for _, m := range more {
		tokens = append(tokens, []byte(m))
	}
	n := int32(len(tokens))
	tokens = append(tokens, nil, nil, nil)
	return NewVocabulary(tokens, []int32{n}).WithSpecial(map[string]int32{"<|a|>": n + 1, "<|b|>": n + 2})
}

var jsonish = []string{
	`":"`, `":[`, `":{"`, `":{}`, `":"",`,
	`{"`, `":`, `": "`, `",`, `", "`, `"}`, `"},{"`, `}]`, `]]`, `[[`, `{}`, `[]`, `, "`, `""`, `"a`, `"ab`, `true`, `false`, `null`,
	`12`, `0.5`, `-1`, `1e5`, "  ", "\n  ", "\n\t", `\n`, `\"`, `\u00`, `é`, "\xc3", "\xa9\"", "ab", "abc", "name", "abcdefghijkl", "日本",
	strings.Repeat("-", 70), strings.Repeat(" ", 70), strings.Repeat(" ", 70) + "\n", strings.Repeat("é", 9) + `",`, strings.Repeat("=", 20), strings.Repeat("x", 40) + "\xc3", `aaaaa"`, `aa\n`, "\x7f",
}

func compile(t testing.TB, k Kind, text string, v *Vocabulary) *Grammar {
	t.Helper()
	g, err := Compile(Spec{Kind: k, Text: text}, v, Limits{})
	if err != nil {
		t.Fatalf("%.200s: %v", text, err)
	}
	return g
}

// feed accepts text, cut at random into tokens of v, and checks each against the mask.
func feed(t testing.TB, m *Matcher, v *Vocabulary, text string, rnd *rand.Rand) bool {
	t.Helper()
	bits := make([]uint32, v.words)
	for len(text) > 0 {
		var fits []int32
		for id, tok := range v.tokens {
			if len(tok) > 0 && len(tok) <= len(text) && string(tok) == text[:len(tok)] {
				fits = append(fits, int32(id))
			}
		}
		token := fits[rnd.IntN(len(fits))]
		m.Mask(bits)
		allowed := bits[token>>5]>>(token&31)&1 != 0
		if m.Accept(token) != allowed {
			t.Fatalf("the mask says %v of %q in front of %q, Accept does not", allowed, v.tokens[token], text)
		}
		if !allowed {
			return false
		}
		text = text[len(v.tokens[token]):]
	}
	return true
}

// matches says whether text is in the language, byte by byte.
func matches(g *Grammar, text string) bool {
	m := g.Matcher()
	for i := range len(text) {
		if !m.Accept(int32(text[i])) {
			return false
		}
	}
	return m.MayEnd()
}

// exact compares the mask with what Accept says of each token.
func exact(t testing.TB, m *Matcher, v *Vocabulary, where string) []int32 {
	t.Helper()
	bits := make([]uint32, v.words)
	m.Mask(bits)
	var allowed []int32
	for id := range v.tokens {
		in := bits[id>>5]>>(id&31)&1 != 0
		if m.Clone().Accept(int32(id)) != in {
			t.Fatalf("behind %q the mask says %v of token %d %q, Accept does not", where, in, id, v.tokens[id])
		}
		if in {
			allowed = append(allowed, int32(id))
		}
	}
	if one, ok := m.Forced(); ok != (len(allowed) == 1) || ok && one != allowed[0] {
		t.Fatalf("behind %q Forced is %d, %v with %d tokens allowed", where, one, ok, len(allowed))
	}
	return allowed
}

// walk takes random allowed tokens until the text ends or is long, then the shortest way out,
// and checks each mask. It returns the text; whole says whether it ended.
func walk(t testing.TB, g *Grammar, v *Vocabulary, rnd *rand.Rand, steps int) (text string, whole bool) {
	t.Helper()
	m := g.Matcher()
	for i := range steps * 4 {
		allowed := exact(t, m, v, text)
		if len(allowed) == 0 {
			t.Fatalf("nothing is allowed behind %q", text)
		}
		token := allowed[rnd.IntN(len(allowed))]
		if i >= steps {
			if end := slices.IndexFunc(allowed, func(id int32) bool { return v.isEnd[id] }); end >= 0 {
				token = allowed[end]
			} else {
				for _, id := range allowed { // what closes something is a good way out
					if b := v.tokens[id]; len(b) == 1 && (b[0] == '"' || b[0] == '}' || b[0] == ']') {
						token = id
					}
				}
			}
		}
		if !m.Accept(token) {
			t.Fatalf("%d is not accepted behind %q", token, text)
		}
		if m.Ended() {
			return text, true
		}
		text += string(v.tokens[token])
	}
	return text, false
}
