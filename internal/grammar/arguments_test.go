package grammar

import (
	"math/rand/v2"
	"strings"
	"testing"
)

func piece(s string) []Piece { return []Piece{{Text: s}} }

// tags is a form like Qwen3-Coder's.
var tags = Form{Open: []Piece{{Text: "\n", May: true}}, End: piece("</function>"), Key: piece("<parameter="), KeyEnd: piece(">"), Close: append(piece("</parameter>"), Piece{Text: "\n", May: true}),
	Pad: "\n", Stops: []string{"</parameter>", "\n<parameter=", "\n</function>"}}

var pythonic = Form{End: piece(")"), Between: piece(", "), KeyEnd: piece("="), Python: true}

// said is a form that says of each value whether it is a string.
var said = Form{End: piece("/"), Key: piece("k:"), KeyEnd: piece("="), StringEnd: piece("~"), Close: piece(";"), Stops: []string{";"}, Entities: []string{"&lt;"}}

// TestArguments: which texts are arguments by a schema, in some forms.
func TestArguments(t *testing.T) {
	v := small(jsonish...)
	f := func(form Form, schema string, members, others []string) {
		t.Helper()
		g := compile(t, Arguments, ArgumentsText(form, schema), v)
		for _, m := range members {
			if !matches(g, m) {
				t.Errorf("%s: %q is not one", schema, m)
			}
		}
		for _, m := range others {
			if matches(g, m) {
				t.Errorf("%s: %q is one", schema, m)
			}
		}
		rnd := rand.New(rand.NewPCG(1, 2))
		for range 3 {
			walk(t, g, v, rnd, 12)
		}
	}
	p := func(list ...string) string {
		var b strings.Builder
		for i := 0; i < len(list); i += 2 {
			b.WriteString("<parameter=" + list[i] + ">\n" + list[i+1] + "\n</parameter>\n")
		}
		return b.String() + "</function>"
	}
	const some = `{"type":"object","properties":{"s":{"type":"string"},"n":{"type":"integer","minimum":1},"o":{"type":"object","properties":{"x":{"type":"string"}}}},"required":["s"],"additionalProperties":false}`
	f(tags, some, []string{p("s", "a"), p("s", ""), p("s", "5", "n", "5"), p("s", "\n a <b> \"</para\n"), p("s", "a", "o", `{"x": "<b>"}`), "\n" + p("s", "x"), strings.ReplaceAll(p("s", "x"), "\n</f", "</f")},
		[]string{p(), p("n", "5"), p("s", "a", "n", "0"), p("s", "a", "n", "x"), p("n", "5", "s", "a"), p("s", "a</parameter>"), p("s", "<parameter=x"), p("s", "a\n</function>"),
			p("s", "a", "o", `{"x": "</parameter>"}`), p("s", "a", "o", `{"</parameter>": 1}`), p("s", "a", "z", "1"), p("s", "a", "o", "{"), "<parameter=s>a</parameter></function>", ""})
	f(tags, `{"type":"object","properties":{"s":{"type":"string","pattern":"^[a-z<]+$","maxLength":3},"e":{"enum":["a b","c",5,null]}},"required":["s"]}`,
		[]string{p("s", "a<c"), p("s", "a", "e", "a b"), p("s", "a", "e", "5"), p("s", "a", "e", "null"), p("s", "a", "more", "x y"), p("s", "a", "more", `{"x`)},
		[]string{p("s", "abcd"), p("s", "A"), p("s", ""), p("s", "a", "e", "6"), p("s", "a", "e", "a"), p("s", "a", "a b", "1"), p("s", "a", "s", "1")})
	f(tags, `{"type":"object","properties":{"m":{"type":["string","null","integer","array"]}}}`,
		[]string{p(), p("m", "x"), p("m", "null"), p("m", "5"), p("m", "5 a"), p("m", "1.5x"), p("m", "true"), p("m", "été"), p("m", `["</p"]`), p("m", "")},
		[]string{p("m", "None"), p("m", " x"), p("m", "x "), p("m", "é\u00a0"), p("m", "1.5"), p("m", "[x"), p("m", `"x"`)})
	f(tags, `{"$ref":"#/$defs/a","$defs":{"a":{"type":"object","properties":{"u":{"$ref":"#/$defs/u"},"t":{"$ref":"#/$defs/t"}},"additionalProperties":{"type":"boolean"}},"u":{"type":"string","minLength":2},
		"t":{"type":"object","properties":{"t":{"$ref":"#/$defs/t"}},"additionalProperties":false}}}`,
		[]string{p(), p("u", "ab"), p("u", "éé"), p("t", `{"t":{"t":{}}}`), p("z", "true")}, []string{p("u", "é"), p("t", `{"u":1}`), p("z", "1")})
	f(tags, `{"anyOf":[{"type":"object","properties":{"a":{}},"required":["a"],"additionalProperties":false},{"type":"object","properties":{"b":{"const":"x"}},"required":["b"],"additionalProperties":false}]}`,
		[]string{p("a", "anything <at> all"), p("b", "x")}, []string{p(), p("a", "1", "b", "x"), p("b", "y"), p("a", "a</parameter>b")})
	f(tags, `{}`, []string{p(), p("a", "1", "b", "x y")}, []string{p("a b", "1")})
	f(tags, `{"type":"object","minProperties":1,"maxProperties":2,"additionalProperties":{"type":"string","minLength":1}}`, []string{p("a", "1"), p("a", "1", "b", "2")}, []string{p(), p("a", ""), p("a", "1", "b", "2", "c", "3")})

	f(pythonic, some, []string{`s="a")`, `s="it's \"x\" \n", n=5)`, `s="", o={"x": "y"})`}, []string{`)`, `s='a')`, `s=a)`, `s="a", n=0)`, `s="a",)`})
	f(pythonic, `{"type":"object","properties":{"b":{"type":["boolean","null"]},"l":{"type":"array","items":{"type":"boolean"}},"any":{}, "no good":{}}}`,
		[]string{`)`, `b=True)`, `b=None, l=[True, False])`, `any=[{"x": None}])`, `other_1=False)`}, []string{`b=true)`, `b=null)`, `any=null)`, `no good=1)`, `o-x=1)`})

	f(said, `{"type":"object","properties":{"s":{"type":["string","integer"]},"a":{},"c":{"const":"&lt;"},"r":{"type":"string","pattern":"^&"}},"additionalProperties":false}`,
		[]string{`k:s~5;/`, `k:s=5;/`, `k:s~ x;/`, `k:a~{;/`, `k:a={"x":"y"};/`, `k:a="x";/`, `k:r~&gt;/`, `k:s~&lt;/`, "/"}, []string{`k:s="x";/`, `k:a={;/`, `k:a="x;";/`, `k:c~&lt;/`, `k:r~&lt;;/`})

	f(Form{Object: true, Stops: []string{"<|"}, End: piece(";")}, `{"type":"object","properties":{"s":{"type":"string"},"o":{"enum":["<|","<"]}}}`,
		[]string{`{"s":"a<b|"};`, `{"o":"<"};`, `{"x":"<"};`, `{};`}, []string{`{"s":"<|"};`, `{"o":"<|"};`, `{"<|":1};`, `{}`})
	f(Form{KeyEnd: piece("="), Stops: []string{""}, Entities: []string{""}}, `{"properties":{"s":{"type":"string"}},"additionalProperties":false}`, []string{"s=anything", ""}, nil)

	for schema, want := range map[string]string{
		`{"type":"object","properties":{"a b":{},"<":{}},"required":["<"]}`: "no text",
		`{"type":"string"}`: "no text",
		`{"type":"object","patternProperties":{"^a":{}}}`: "patternProperties",
		`{"type":"object","properties":{"a":{"not":{}}}}`: "not",
		`{"$ref":"#"}`: "leads back",
		`[]`:           "must be an object",
	} {
		if _, err := Compile(Spec{Kind: Arguments, Text: ArgumentsText(tags, schema)}, v, Limits{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", schema, err, want)
		}
	}
	if _, err := Compile(Spec{Kind: Arguments, Text: ArgumentsText(Form{End: []Piece{{Token: 5}}}, `{}`)}, v, Limits{}); err == nil || !strings.Contains(err.Error(), "special") {
		t.Error(err)
	}
	if _, err := Compile(Spec{Kind: Arguments, Text: `{"form":1}`}, v, Limits{}); err == nil {
		t.Error("no form is one")
	}
}

// TestArgumentsTokens: special tokens are part of marks.
func TestArgumentsTokens(t *testing.T) {
	v := small()
	a, b := v.names["<|a|>"], v.names["<|b|>"]
	form := Form{End: []Piece{{Token: b}, {Text: "!"}}, Key: []Piece{{Text: "<"}, {Token: a}}, KeyEnd: piece("="), Close: []Piece{{Token: b}}, Stops: []string{"<|b|>"}}
	g := compile(t, Arguments, ArgumentsText(form, `{"properties":{"s":{"type":"string"}},"additionalProperties":false}`), v)
	m := g.Matcher()
	for i, id := range []int32{'<', a, 's', '=', 'x', '<', '|', 'b', b, b, '!'} {
		exact(t, m, v, "")
		if !m.Accept(id) {
			t.Fatalf("token %d is not accepted", i)
		}
	}
	if !m.MayEnd() {
		t.Error("it does not end")
	}
}
