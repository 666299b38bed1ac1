package grammar

import (
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

func TestRegex(t *testing.T) {
	f := func(pattern string, members, others []string) {
		t.Helper()
		v := small("ab", "abc", "0123", "é")
		g := compile(t, Regex, pattern, v)
		for _, m := range members {
			if !matches(g, m) {
				t.Errorf("%s does not match %q", pattern, m)
			}
		}
		for _, o := range others {
			if matches(g, o) {
				t.Errorf("%s matches %q", pattern, o)
			}
		}
		rnd := rand.New(rand.NewPCG(1, 2))
		for range 3 {
			text, whole := walk(t, g, v, rnd, 12)
			if whole && !matches(g, text) {
				t.Errorf("%s: %q ended but is no member", pattern, text)
			}
		}
	}
	f(`abc`, []string{"abc"}, []string{"ab", "abcd", ""})
	f(`^a|b$`, []string{"a", "b"}, []string{"ab", "xb"})
	f(`^(a|b)*$`, []string{"", "abab"}, []string{"c"})
	f(`[a-c]{2,3}`, []string{"ab", "abc"}, []string{"a", "abca", "ad"})
	f(`(a?){3}b`, []string{"b", "aaab"}, []string{"aaaab"})
	f(`(a*)*`, []string{"", "aaa"}, []string{"b"})
	f(`(a*b?)+c`, []string{"c", "aabc", "abbac"}, []string{"aab"})
	f(`.`, []string{"x", "é", "日", "\U0001f600"}, []string{"\n", "", "xx", "\xff"})
	f(`(?s).`, []string{"\n"}, nil)
	f(`[^é]`, []string{"e", "ê"}, []string{"é"})
	f(`\d{3}-\d{4}`, []string{"555-1234"}, []string{"555-123", "٣٣٣-1234x"})
	f(`\w+\s\S`, []string{"ab c"}, []string{"ab  c "})
	f(`a+?b*?`, []string{"a", "aab"}, []string{"b"})
	f(`(?i)Ab`, []string{"ab", "AB"}, []string{"abc"})
	f(`(?P<year>\d{4})`, []string{"2024"}, []string{"24"})
	f(`[\u0041-C\x44]`, []string{"A", "D"}, []string{"E"})
	f(`[[:alpha:]-]`, []string{"a", "-"}, []string{"1"})
	f(`\p{Lu}`, []string{"A", "É"}, []string{"a"})
	f(`a{0}`, []string{""}, []string{"a"})
	f(`a{,2}`, []string{"", "aa"}, []string{"aaa"})
	f(`x{a}`, []string{"x{a}"}, nil)
	f(`(^a|b)c$`, []string{"ac", "bc"}, []string{"c"})
	f(`.{0,5000}`, []string{strings.Repeat("é", 5000)}, []string{strings.Repeat("é", 5001)})
}

func TestRegexRefused(t *testing.T) {
	v := small()
	for pattern, reason := range map[string]string{
		`(?=a)b`:          "look-around",
		`(?<!a)b`:         "look-around",
		`\bab`:            "word boundaries",
		`(a)\1`:           "references",
		`a**b(`:           "unmatched (",
		`a)`:              "unmatched )",
		`[a`:              "unmatched [",
		`[b-a]`:           "a range",
		`*a`:              "nothing to repeat",
		`a{3,2}`:          "at least 3",
		`a^b`:             "at the ends only",
		`\`:               "at the end",
		`\q`:              "unknown escape",
		`(?m)a`:           "flag",
		`\p{No}x\p{Nope}`: "no property",
		"\xff":            "UTF-8",
	} {
		_, err := Compile(Spec{Kind: Regex, Text: pattern}, v, Limits{})
		if err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: %v, want %q", pattern, err, reason)
		}
	}
}

// TestRegexAgainstRegexp walks random patterns and asks package regexp about the texts.
func TestRegexAgainstRegexp(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	v := small("ab", "ba", "bb", "abc", "cab", "é", "aé", "\xc3", "\xa9b")
	for range 150 {
		pattern := randomPattern(rnd, 4)
		want, err := regexp.Compile(`\A(?:` + pattern + `)\z`)
		if err != nil {
			t.Fatal(err)
		}
		g := compile(t, Regex, pattern, v)
		text, whole := walk(t, g, v, rnd, 8)
		if whole && !want.MatchString(text) {
			t.Fatalf("%s: %q ended, and regexp does not match it", pattern, text)
		}
		for range 30 {
			var text string
			for range rnd.IntN(6) {
				text += []string{"a", "b", "c", "é"}[rnd.IntN(4)]
			}
			if matches(g, text) != want.MatchString(text) {
				t.Fatalf("%s: %q: regexp says %v", pattern, text, want.MatchString(text))
			}
			if want.MatchString(text) && !feed(t, g.Matcher(), v, text, rnd) {
				t.Fatalf("%s: the member %q is not allowed token by token", pattern, text)
			}
		}
	}
}

func randomPattern(rnd *rand.Rand, depth int) string {
	if depth == 0 {
		return []string{"a", "b", "c", "é", ".", "[ab]", "[^a]"}[rnd.IntN(7)]
	}
	a, b := randomPattern(rnd, depth-1), randomPattern(rnd, depth-1)
	switch rnd.IntN(7) {
	case 0:
		return "(?:" + a + "|" + b + ")"
	case 1:
		return "(?:" + a + ")*"
	case 2:
		return "(?:" + a + "){1,3}"
	case 3:
		return "(" + a + ")?" + b
	default:
		return a + b
	}
}
