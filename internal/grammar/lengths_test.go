package grammar

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
)

// TestLengths: masks are those of reading each token byte by byte where strings have bounds of their
// lengths, with and without patterns, in any order with other things, and however few characters
// are left.
func TestLengths(t *testing.T) {
	more := append([]string(nil), jsonish...)
	for _, n := range []int{1, 2, 3, 7, 8, 9, 15, 16, 17, 18, 31, 33} {
		for _, tail := range []string{`"`, `",`, `"}`, `\`, `\"`, `\n"`, `\u00`, "\xe6", "\xf0\x9f", "é\xc3", "\n", `"]`} {
			more = append(more, strings.Repeat("ab", n)[:n]+tail)
		}
	}
	more = append(more, `a"`, "日本\"", "日\xe6", `é\`, `"}`, `":"ab`, `":"ab"`, `": "ab`, `"abc",`)
	v := small(more...)
	rnd := rand.New(rand.NewPCG(23, 24))
	bound := func() int { return []int{0, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 18, 20, 33, 40, 64, 70}[rnd.IntN(17)] }
	patterns := []string{"^[a-z]+$", "a", "^a", "b$", "^.{2,}$", "^[^a]", `^(ab)*$`, `^[a-zA-Z0-9]{2,20}$`, `^.*$`, `^\S+$`, `^(.{3,9})?$`}
	str := func() string {
		words := []string{`"type":"string"`}
		lo := bound()
		if rnd.IntN(4) > 0 {
			words = append(words, fmt.Sprintf(`"minLength":%d`, lo))
		}
		if rnd.IntN(2) > 0 {
			words = append(words, fmt.Sprintf(`"maxLength":%d`, lo+bound()))
		}
		if rnd.IntN(3) == 0 {
			words = append(words, `"pattern":`+strconv.Quote(patterns[rnd.IntN(len(patterns))]))
		}
		return "{" + strings.Join(words, ",") + "}"
	}
	compiled := 0
	for range 50 {
		schema := str()
		switch rnd.IntN(5) {
		case 0:
			schema = `{"type":"array","items":` + schema + `}`
		case 1:
			schema = `{"type":"object","properties":{"name":` + schema + `},"additionalProperties":` + str() + `}`
		case 2:
			schema = `{"anyOf":[` + schema + `,` + str() + `,{"enum":["ab","abc"]}]}`
		case 3:
			schema = `{"$defs":{"s":{"anyOf":[` + schema + `,{"type":"array","items":{"$ref":"#/$defs/s"}}]}},"$ref":"#/$defs/s"}`
		}
		g, err := Compile(Spec{Kind: JSONSchema, Text: schema}, v, Limits{})
		if err != nil {
			continue // no string is so short and matches
		}
		compiled++
		for range 2 {
			walk(t, g, v, rnd, 8)
		}
	}
	if compiled < 35 {
		t.Errorf("%d of 50 schemas compile", compiled)
	}
	// A repetition of plain characters with something behind it that reads them as well, that a rule
	// can end at, or that begins a rule.
	plain := `[^"\\\x00-\x1f\x7f]`
	more = append(more, `a~"`, `~"`, `ab"z`, `ab"`, `a""z`, `abab"z`)
	v = small(more...)
	for _, s := range []Spec{
		{Kind: Regex, Text: plain + `+~"`},
		{Kind: Regex, Text: plain + `{3,}(~"|é)`},
		{Kind: Regex, Text: plain + `{3,40}"*`},
		{Kind: Regex, Text: `[a-z0-9]*"x|~` + plain + `{0,8}"x`},
		{Kind: EBNF, Text: "root ::= " + plain + "* v\nv ::= \"\\\"\" v \"z\" | \"\\\"\" \"z\""},
		{Kind: EBNF, Text: "root ::= " + plain + "+ v\nv ::= \"\\\"\" v \"z\" | \"\\\"\" \"z\""},
		{Kind: EBNF, Text: "root ::= " + plain + "{3,20} v\nv ::= \"\\\"\" v \"z\" | \"\\\"\" \"z\""},
		{Kind: EBNF, Text: "root ::= v \"\\\"\" v\nv ::= \"<\" v \">\" | " + plain + "{2,}"},
	} {
		g, err := Compile(s, v, Limits{})
		if err != nil {
			t.Fatalf("%s: %v", s.Text, err)
		}
		for range 4 {
			walk(t, g, v, rnd, 8)
		}
	}
}
