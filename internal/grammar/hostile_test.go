package grammar

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// hostile are grammars made to be expensive. Each must be refused or compile within the work
// that Limits allow; whether in time is measured by scripts/bench, since tests are not timed.
func hostile() map[string]Spec {
	nest := func(open, close string, n int) string { return strings.Repeat(open, n) + close + "" }
	deepSchema := strings.Repeat(`{"type":"array","items":`, 5000) + `{}` + strings.Repeat(`}`, 5000)
	var doubling strings.Builder // $defs that each refer to the next twice
	doubling.WriteString(`{"$ref":"#/$defs/d0","$defs":{`)
	for i := range 60 {
		fmt.Fprintf(&doubling, `"d%d":{"allOf":[{"$ref":"#/$defs/d%d"},{"anyOf":[{"$ref":"#/$defs/d%d"},{"type":"object","properties":{"p%d":{}}}]}]},`, i, i+1, i+1, i)
	}
	doubling.WriteString(`"d60":{"type":"object"}}}`)
	var anyOfs strings.Builder
	anyOfs.WriteString(`{"allOf":[`)
	for i := range 30 {
		fmt.Fprintf(&anyOfs, `{"anyOf":[{"properties":{"a%d":{"type":"string"}}},{"properties":{"b%d":{"type":"string"}}}]},`, i, i)
	}
	anyOfs.WriteString(`{}]}`)
	var rules strings.Builder
	for i := range 40 {
		fmt.Fprintf(&rules, "r%d ::= r%d r%d\n", i, i+1, i+1)
	}
	words := make([]string, 60_000)
	for i := range words {
		words[i] = fmt.Sprintf("%q", fmt.Sprintf("w%d", i*7919))
	}
	var props, branches, cycle strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&props, `"property %d":{"type":"string"},`, i*7919)
		fmt.Fprintf(&branches, `{"type":"object","properties":{"p%d":{"type":"string"}}},`, i)
	}
	for i := range 300 {
		fmt.Fprintf(&cycle, `"d%d":{"$ref":"#/$defs/d%d"},`, i, (i+1)%300)
	}
	list := func(b *strings.Builder) string { return strings.TrimSuffix(b.String(), ",") }
	padding := `"description":"` + strings.Repeat("x", 400_000) + `",`
	return map[string]Spec{
		"10,000 properties":      {Kind: JSONSchema, Text: `{"type":"object","properties":{` + list(&props) + `}}`},
		"anyOf of 10,000":        {Kind: JSONSchema, Text: `{"anyOf":[` + list(&branches) + `]}`},
		"enum of 400 KB":         {Kind: JSONSchema, Text: `{"enum":["` + strings.Repeat("x", 400_000) + `",1]}`},
		"refs in a ring":         {Kind: JSONSchema, Text: `{"$defs":{` + list(&cycle) + `},"$ref":"#/$defs/d0"}`},
		"padded patterns":        {Kind: JSONSchema, Text: `{` + padding + `"type":"string","allOf":[{"pattern":"(.a.*){9}"},{"pattern":"(.b.*){9}"},{"pattern":"(.c.*){9}"}]}`},
		"pattern names":          {Kind: JSONSchema, Text: `{` + padding + `"type":"object","patternProperties":{"^(a|b)*a(a|b){9}$":{},"^(c|d)*c(c|d){9}$":{},"^(e|f)*e(e|f){9}$":{}}}`},
		"unreachable rules":      {Kind: EBNF, Text: "root ::= \"a\"\n" + rules.String() + "r40 ::= r0 | \"b\""},
		"huge alternation":       {Kind: EBNF, Text: "root ::= " + strings.Repeat(`"ab" | "a" [a-z] | `, 20_000) + `"c"`},
		"huge left recursion":    {Kind: EBNF, Text: "root ::= " + strings.Repeat(`root "a" | root root | `, 15_000) + `"c"`},
		"exact rounds":           {Kind: Regex, Text: `(a|b)*a(a|b){4000}`},
		"nested repetition":      {Kind: Regex, Text: `(a{1000}){1000}`},
		"towers":                 {Kind: Regex, Text: `((((((a{100}){100}){100}){100}){100}){100}){100}`},
		"nullable towers":        {Kind: Regex, Text: `(((((((a?){9}b?){9}c?){9}d?){9}e?){9}f?){9}g?){9}`},
		"subset blow-up":         {Kind: Regex, Text: `(a|b)*a(a|b){200}`},
		"deep groups":            {Kind: Regex, Text: nest("(", "a", 100_000)},
		"quantifiers":            {Kind: Regex, Text: "a" + strings.Repeat("{2}", 100_000)},
		"megabyte":               {Kind: Regex, Text: strings.Repeat("a|b", 350_000)},
		"classes":                {Kind: Regex, Text: strings.Repeat(`[^\p{L}\x{1F600}]`, 5000)},
		"folded":                 {Kind: Regex, Text: `(?i)` + strings.Repeat(`[^a]`, 5000)},
		"nested classes":         {Kind: Regex, Text: strings.Repeat("[", 100_000)},
		"deep schema":            {Kind: JSONSchema, Text: deepSchema},
		"deep brackets":          {Kind: JSONSchema, Text: strings.Repeat("[", 400_000)},
		"doubling refs":          {Kind: JSONSchema, Text: doubling.String()},
		"anyOf product":          {Kind: JSONSchema, Text: anyOfs.String()},
		"ref to itself":          {Kind: JSONSchema, Text: `{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}`},
		"allOf with itself":      {Kind: JSONSchema, Text: `{"allOf":[{"$ref":"#"}]}`},
		"growing recursion":      {Kind: JSONSchema, Text: `{"$defs":{"a":{"type":"object","properties":{"x":{"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/b"}]}}},"b":{"type":"object","properties":{"x":{"allOf":[{"$ref":"#/$defs/b"},{"$ref":"#/$defs/a"}]},"y":{"$ref":"#/$defs/a"}}}},"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/b"}]}`},
		"pattern blow-up":        {Kind: JSONSchema, Text: `{"type":"string","pattern":"(a|b)*a(a|b){18}$","maxLength":1000}`},
		"patterns joined":        {Kind: JSONSchema, Text: `{"type":"string","allOf":[{"pattern":"(.a.*){9}"},{"pattern":"(.b.*){9}"},{"pattern":"(.c.*){9}"},{"pattern":"(.d.*){9}"},{"pattern":"(.e.*){9}"}]}`},
		"long minLength":         {Kind: JSONSchema, Text: `{"type":"string","pattern":"^([a-z]{3}|[0-9]{5})*$","minLength":100000,"maxLength":9999999}`},
		"many properties":        {Kind: JSONSchema, Text: `{"type":"object","minProperties":5000000,"properties":{"a":{}}}`},
		"huge numbers":           {Kind: JSONSchema, Text: `{"type":"number","minimum":1e-399,"maximum":1e399}`},
		"long integers":          {Kind: JSONSchema, Text: `{"type":"integer","minimum":` + strings.Repeat("1", 390) + `,"maximum":` + strings.Repeat("2", 395) + `}`},
		"multiple":               {Kind: JSONSchema, Text: `{"type":"integer","multipleOf":49999,"minimum":3}`},
		"huge enum":              {Kind: JSONSchema, Text: `{"enum":[` + strings.Join(words[:30_000], ",") + `]}`},
		"oneOf of many":          {Kind: JSONSchema, Text: `{"oneOf":[` + strings.TrimSuffix(strings.Repeat(`{"type":"string","pattern":"a.*b"},`, 400), ",") + `]}`},
		"choice of many":         {Kind: Choice, Text: `[` + strings.Join(words[:40_000], ",") + `]`},
		"choice with beginnings": {Kind: Choice, Text: `["` + strings.Repeat("a", 100_000) + `","` + strings.Repeat("a", 100_001) + `"]`},
		"exponential rules":      {Kind: EBNF, Text: rules.String() + "r40 ::= \"a\"\nroot ::= r0"},
		"left recursion":         {Kind: EBNF, Text: "root ::= a\na ::= b\nb ::= c\nc ::= a | root \"x\" | root"},
		"empty loops":            {Kind: EBNF, Text: "root ::= (a* b*)* root*\na ::= \"\"\nb ::= (a | \"\")*"},
		"deep rules":             {Kind: EBNF, Text: "root ::= " + strings.Repeat("(", 100_000)},
		"counted rules":          {Kind: EBNF, Text: `root ::= ((x{1000}){1000}){1000}` + "\nx ::= \"a\" | root"},
		"ambiguous":              {Kind: EBNF, Text: `root ::= root root root | root root | "a" | ""`},
		"lark negations":         {Kind: Lark, Text: "start: A\nA: ~(~(~(/(a|b)*a(a|b){17}/)))"},
		"lark lazy":              {Kind: Lark, Text: "start: a\na[lazy]: /(a|b)*a(a|b){17}/"},
		"lark terminals":         {Kind: Lark, Text: "start: A\nA: B B B B B B B B\nB: C C C C C C C C\nC: D D D D D D D D\nD: E{100}\nE: F{100}\nF: \"a\"{100}"},
		"lark deep":              {Kind: Lark, Text: "start: " + strings.Repeat("~", 100_000)},
		"lark schemas":           {Kind: Lark, Text: "start: " + strings.Repeat(`%json {"type":"object"} `, 10_000)},
	}
}

// TestHostile compiles each hostile grammar and reads a text of it, if it compiles.
func TestHostile(t *testing.T) {
	v := small("aa", "aaaa", "ab", "ba", strings.Repeat("a", 100), strings.Repeat("ab", 60))
	for name, s := range hostile() {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			g, err := Compile(s, v, Limits{Bytes: 2 << 20})
			runtime.ReadMemStats(&after)
			if made := (after.TotalAlloc - before.TotalAlloc) >> 20; made > 400 {
				t.Errorf("compiling took %d MiB", made)
			}
			var e *Error
			if err != nil {
				if !errors.As(err, &e) {
					t.Fatalf("%v is no *Error", err)
				}
				return
			}
			m := g.Matcher()
			bits := make([]uint32, v.words)
			for range 8 {
				m.Mask(bits)
				if !m.Accept('a') && !m.Accept('"') && !m.Accept('{') && !m.Accept('w') {
					break
				}
			}
			if size := g.Size(); size > 200<<20 {
				t.Errorf("the grammar has %d bytes", size)
			}
		})
	}
}

func TestLimits(t *testing.T) {
	v := small()
	f := func(s Spec, l Limits, reason string) {
		t.Helper()
		_, err := Compile(s, v, l)
		if err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%.40q: %v, want %s", s.Text, err, reason)
		}
	}
	f(Spec{Kind: Regex, Text: strings.Repeat("a", 101)}, Limits{Bytes: 100}, "101 bytes")
	f(Spec{Kind: Regex, Text: strings.Repeat(`[^\pL]`, 10)}, Limits{States: 1}, "too large")
	f(Spec{Kind: JSONSchema, Text: `{"type":"string","pattern":"(a|b)*a(a|b){18}$","maxLength":1000}`}, Limits{}, "too large")
}

// TestMemory keeps a grammar whose states never come again within its bound.
func TestMemory(t *testing.T) {
	v := small()
	g, err := Compile(Spec{Kind: Regex, Text: `(a|b)*a(a|b){200}`}, v, Limits{Memory: 2 << 20})
	if err != nil {
		t.Fatal(err)
	}
	m := g.Matcher()
	bits := make([]uint32, v.words)
	for i := range 20_000 {
		m.Mask(bits)
		if !m.Accept(int32("ab"[(i*i/7+i)%2])) {
			t.Fatal("a member's beginning is not accepted")
		}
	}
	if size := g.Size(); size > 4<<20 {
		t.Errorf("the grammar has %d bytes", size)
	}
}
