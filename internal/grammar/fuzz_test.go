package grammar

import (
	"errors"
	"strings"
	"testing"
)

// fuzz compiles any text as kind, walks a little, and checks that masks and Accept agree.
func fuzz(f *testing.F, kind Kind, seeds ...string) {
	for _, s := range seeds {
		f.Add(s, uint64(2))
	}
	v := small(`":`, `{"`, "ab", "  ", `\u00`)
	f.Fuzz(func(t *testing.T, text string, choice uint64) {
		g, err := Compile(Spec{Kind: kind, Text: text}, v, Limits{States: 20_000, Memory: 8 << 20})
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Reason == "" || strings.HasPrefix(e.Reason, bug) {
				t.Fatalf("%v is no *Error with a reason", err)
			}
			return
		}
		m := g.Matcher()
		bits := make([]uint32, v.words)
		for range 12 {
			m.Mask(bits)
			var allowed []int32
			for id := range v.tokens {
				in := bits[id>>5]>>(id&31)&1 != 0
				if in {
					allowed = append(allowed, int32(id))
				}
				if id%7 == int(choice%7) && m.Clone().Accept(int32(id)) != in {
					t.Fatalf("the mask says %v of %q, Accept does not", in, v.tokens[id])
				}
			}
			if len(allowed) == 0 {
				return // out of bounds, which DESIGN.md tells of
			}
			if !m.Accept(allowed[choice%uint64(len(allowed))]) {
				t.Fatal("what the mask allows is not accepted")
			}
			if m.Ended() {
				return
			}
			choice = choice*6364136223846793005 + 1442695040888963407
		}
		if g.Size() > 64<<20 {
			t.Fatalf("the grammar has %d bytes", g.Size())
		}
	})
}

func FuzzRegex(f *testing.F) {
	fuzz(f, Regex, `^a+(b|[^c-e\d])*?$`, `(?i)\p{Lu}{2,}|\x41\u0042`, `[[:alpha:]\]-]`, `((a?)*)*b{0,3}`)
}

func FuzzChoice(f *testing.F) { fuzz(f, Choice, `["a","ab",""]`, `["\u00e9"]`) }

func FuzzEBNF(f *testing.F) {
	fuzz(f, EBNF, "root ::= \"a\" x | [b-d]{2}\nx ::= root? # c", `root ::= root "a" | ""`, `root ::= <|a|> .`)
}

func FuzzLark(f *testing.F) {
	fuzz(f, Lark, "start: A b\nA: /a+/i & ~\"aa\"\nb: \"x\"~2 [A]\n%ignore \" \"", "start[suffix=\"x\"]: /.*/", "start: %json {\"type\":\"object\"} <|a|>",
		"%import common (INT, WS -> W)\nstart: INT | \"a\"..\"c\"\n%ignore W")
}

func FuzzSchema(f *testing.F) {
	fuzz(f, JSONSchema, `{"type":"object","properties":{"a":{"type":"string","pattern":"^x","maxLength":9}},"required":["a"]}`,
		`{"anyOf":[{"enum":[1,"a",null]},{"$ref":"#/$defs/d"}],"$defs":{"d":{"items":{"$ref":"#"}}}}`,
		`{"oneOf":[{"type":"integer","multipleOf":3,"minimum":-5},{"type":"array","prefixItems":[{}],"maxItems":2}]}`,
		`{"type":"object","patternProperties":{"^a":{}},"minProperties":1,"maxProperties":3,"additionalProperties":false}`,
		`{"type":"number","minimum":0.25,"exclusiveMaximum":17.5,"format":"x"}`)
}

func FuzzArguments(f *testing.F) {
	fuzz(f, Arguments, ArgumentsText(tags, `{"type":"object","properties":{"a":{"type":["string","null"],"pattern":"x"},"b":{"items":{}}},"required":["a"]}`),
		ArgumentsText(pythonic, `{"properties":{"a":{"enum":[true,null,"b"]}},"additionalProperties":false}`), ArgumentsText(said, `{"$ref":"#/$defs/a","$defs":{"a":{"minProperties":1}}}`),
		ArgumentsText(Form{Object: true, Stops: []string{"<|"}}, `{"type":"object","properties":{"a":{"type":"string","maxLength":4}}}`))
}
