package grammar

import (
	"math/rand/v2"
	"testing"
)

// TestRuns: masks are exact where letters, digits or plain characters may be repeated, however what
// is behind them goes on: with more of the pattern, the string's end, a return from a rule, or as if
// a name had never been one that is told apart.
func TestRuns(t *testing.T) {
	v := small(append(jsonish, "abc1", "A", "Ab9", "Ab9\"", "a-b", "-ab", "a.com", "x@y", "a b", "é1", "1é\"", "ab)", "a>\"", ">)", "://", "//a", "a/", "name\":", "nam", "names\"")...)
	rnd := rand.New(rand.NewPCG(21, 22))
	for _, s := range []Spec{
		{Kind: EBNF, Text: "root ::= \"\\\"\" s \"\\\"\"\ns ::= [^\"\\\\]* | \"<\" s \">\""},
		{Kind: EBNF, Text: "root ::= \"(\" s \")\" [^x]*\ns ::= [^)]* | \"<\" s \">\""},
		{Kind: EBNF, Text: "root ::= s \"\\\"\" s\ns ::= [a-zA-Z0-9]* | \"<\" s \">\""},
		{Kind: EBNF, Text: "root ::= s s \")\"\ns ::= [a-z0-9]+ s? | \"-\" s"},
		{Kind: Regex, Text: `[a-zA-Z0-9_-]+(\.[a-z0-9]+)*`},
		{Kind: Regex, Text: `[A-Z][a-zA-Z0-9]*|[a-z0-9]+-(ab|abc)*`},
		{Kind: JSONSchema, Text: `{"type":"string","pattern":"^[a-zA-Z0-9._-]+$"}`},
		{Kind: JSONSchema, Text: `{"type":"string","format":"email"}`},
		{Kind: JSONSchema, Text: `{"type":"string","format":"uri"}`},
		{Kind: JSONSchema, Text: `{"type":"object","patternProperties":{"^[a-zA-Z0-9-_]+$":{"type":"integer"}}}`},
		{Kind: JSONSchema, Text: `{"type":"object","patternProperties":{"^[a-z0-9]+$":{"enum":["abc","ab"]}},"properties":{"name":{"const":"abcdef"},"names":{"type":"null"}}}`},
		{Kind: JSONSchema, Text: `{"type":"object","properties":{"name":{"type":"string"},"nam":{"type":"integer"}},"required":["abc"]}`},
	} {
		g, err := Compile(s, v, Limits{})
		if err != nil {
			t.Fatalf("%s: %v", s.Text, err)
		}
		for range 25 {
			walk(t, g, v, rnd, 10)
		}
	}
}
