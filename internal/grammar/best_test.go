package grammar

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

// TestBest: what leaves nothing out of the language is left out of the states, whichever way
// the numbers are nested.
func TestBest(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	v := small("ab", "ba", "aaa", "bb")
	for _, pattern := range []string{
		`((a?){7}b?){9}`, `(((a{1,4}){1,4}b?){2,5}){1,3}`, `(a|b)*a(a|b){24}`, `((a|b){2,6}){3,7}`, `(a{1,3}b?){5,40}`,
		`((a{2,3}){2,4}|(a{3}b?){1,5}){2,6}`, `(a{5,9}|b){4,20}(a|b){0,30}a{3}`, `((((ab?){0,3}a?){0,4}){2,3}b?){3}`, `(a?b?){20}a{19}`,
	} {
		want := regexp.MustCompile(`\A(?:` + pattern + `)\z`)
		g := compile(t, Regex, pattern, v)
		members := 0
		for i := range 400 {
			n, ones := rnd.IntN(50), rnd.IntN(5)
			text := strings.Map(func(rune) rune {
				if rnd.IntN(5) < ones {
					return 'b'
				}
				return 'a'
			}, strings.Repeat("x", n))
			is := want.MatchString(text)
			if is {
				members++
			}
			if matches(g, text) != is {
				t.Fatalf("%s: regexp says %v of %q", pattern, is, text)
			}
			if i < 40 && is && !feed(t, g.Matcher(), v, text, rnd) {
				t.Fatalf("%s: the member %q is not allowed token by token", pattern, text)
			}
		}
		if members == 0 || members == 400 {
			t.Errorf("%s: %d of 400 texts are members", pattern, members)
		}
	}
}

// TestWays counts what a step has to take on behind texts that can be read in many ways.
func TestWays(t *testing.T) {
	v := small()
	for pattern, most := range map[string]int{
		`(((((((a?){9}b?){9}c?){9}d?){9}e?){9}f?){9}g?){9}`: 400,
		`((((a{1,30}){1,30}){1,30}){1,30}){1,30}`:           80,
		`(.{0,400}a){0,300}`:                                40,
	} {
		g := compile(t, Regex, pattern, v)
		m := g.Matcher()
		for i := range 20 {
			if !m.Accept(int32("aab"[i%3])) && !m.Accept('a') {
				break
			}
			for _, s := range m.set {
				if n := len(s.at.leaves); n > most {
					t.Fatalf("%s: %d leaves behind %d bytes, want at most %d", pattern, n, i+1, most)
				}
			}
		}
	}
}

// TestRounds: a text may be at any number of rounds of a repetition, and none is forgotten.
func TestRounds(t *testing.T) {
	rnd := rand.New(rand.NewPCG(11, 12))
	v := small("ab", "ba", "aaa", "bb")
	for _, pattern := range []string{
		`a*a{400}`, `(a|b)*a(a|b){300}`, `a*a{300,320}b?`, `(a|b)*a(a|b){290,310}`, `(ab|a|b)*(ab|ba|aa){270}`, `(a|b)*(a(a|b){20}|b(a|b){300})`,
		`(a|b)*b?(a{2}|b){150,400}`, `((a|b)*a(a|b){9}){20,30}`, `(a*a{70}b?){3,9}`, `(a|b)*((a|b){3}a){90}`, `(a|b)*a((a|b){30,40}b?){9}`,
	} {
		want := regexp.MustCompile(`\A(?:` + pattern + `)\z`)
		g := compile(t, Regex, pattern, v)
		members := 0
		for range 20 {
			n, ones := 150+rnd.IntN(500), rnd.IntN(5)
			if ones == 4 {
				ones = 0 // of a only
			}
			text := strings.Map(func(rune) rune {
				if rnd.IntN(40) < ones*ones {
					return 'b'
				}
				return 'a'
			}, strings.Repeat("x", n))
			is := want.MatchString(text)
			if is {
				members++
			}
			if matches(g, text) != is {
				t.Fatalf("%s: regexp says %v of %d bytes %q", pattern, is, n, text)
			}
		}
		if members == 0 || members == 20 {
			t.Errorf("%s: %d of 20 texts are members", pattern, members)
		}
	}
}

// TestLongCounts: of numbers of rounds without end only the text bounds what there is to know.
func TestLongCounts(t *testing.T) {
	g := compile(t, Regex, `(a|b)*a(a|b){20000}`, small())
	m := g.Matcher()
	var text []byte
	for i := range 30_000 {
		if n := len(text); m.MayEnd() != (n > 20_000 && text[n-20_001] == 'a') {
			t.Fatalf("behind %d bytes MayEnd is %v", n, m.MayEnd())
		}
		c := "ab"[i*i%7%2]
		if !m.Accept(int32(c)) {
			t.Fatalf("%c is refused behind %d bytes", c, i)
		}
		text = append(text, c)
	}
}

// TestBeyondWays: a text that can be read in more ways than are followed can go on and end all
// the same, in the language, and which ways are left out depends on the text alone.
func TestBeyondWays(t *testing.T) {
	v := small()
	var pattern strings.Builder
	for i := range maxWays + 50 {
		fmt.Fprintf(&pattern, "|([ab]c){%d}!%d;", i+2, i+2)
	}
	for _, before := range []string{"", strings.Repeat("bcac", 20)} {
		g := compile(t, Regex, pattern.String()[1:], v)
		m := g.Matcher()
		for i := 0; i < len(before) && m.Accept(int32(before[i])); i++ { // numbers conts in another order
		}
		m = g.Matcher()
		n := 0
		for m.Accept('a') && m.Accept('c') {
			n++
		}
		var end []byte
		for !m.Ended() {
			token, ok := m.Forced()
			if !ok || !m.Accept(token) {
				t.Fatalf("behind %d rounds and %q not one token may come", n, end)
			}
			end = append(end, v.tokens[token]...)
		}
		if want := fmt.Sprintf("!%d;", n); string(end) != want || n < maxWays || n >= maxWays+50 {
			t.Errorf("%d rounds end in %q, want %q", n, end, want)
		}
	}
}

// TestLongTexts: a long text has no claim to more work on automata.
func TestLongTexts(t *testing.T) {
	text := `{"description":"` + strings.Repeat("x", 400_000) + `","type":"string","pattern":"(a|b)*a(a|b){18}$","maxLength":1000}`
	_, err := Compile(Spec{Kind: JSONSchema, Text: text}, small(), Limits{})
	if err == nil || !strings.Contains(err.Error(), "its patterns take more work") {
		t.Error(err)
	}
}

// TestCounted: what a mask allows is accepted along long texts of nested counts.
func TestCounted(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	v := small("ab", "x\n", "yes.", "\n\n")
	for kind, list := range map[Kind][]string{
		Regex: {`.{1,1000}.{1,1000}`, `(.{1,300}){3}`, `([^"]{1,300}){3}`, `(.{0,100}\n?){0,100}`, `(.{1,500}){1,5}`, `([^\n]{0,200}\n?){1,20}`, `(.{1,100}[.!?]? ?){1,10}`},
		EBNF:  {"root ::= line{1,20}\nline ::= [^\\n]{0,120} \"\\n\"?"},
	} {
		for _, text := range list {
			g := compile(t, kind, text, v)
			m, bits := g.Matcher(), make([]uint32, (v.Size()+31)/32)
			for n := range 500 {
				m.Mask(bits)
				var may []int32
				for id := range int32(v.Size()) {
					if bits[id>>5]>>(id&31)&1 != 0 {
						may = append(may, id)
					}
				}
				if len(may) == 0 {
					t.Fatalf("%s: nothing may come behind %d tokens", text, n)
				}
				id := may[rnd.IntN(len(may))]
				if !m.Accept(id) {
					t.Fatalf("%s: token %d is allowed and refused, behind %d", text, id, n)
				}
				if m.Ended() {
					break
				}
			}
		}
	}
}
