package grammar

import (
	"math/rand/v2"
	"strings"
	"testing"
)

// cfgCase is a grammar with texts that are in it and texts that are not.
type cfgCase struct {
	text            string
	members, others []string
}

func testCFG(t *testing.T, kind Kind, cases []cfgCase) {
	t.Helper()
	v := small("ab", "aa", "((", "))", "1+", "+1", `{"`, `":`, "  ")
	rnd := rand.New(rand.NewPCG(9, 10))
	for _, c := range cases {
		g := compile(t, kind, c.text, v)
		for _, text := range c.members {
			if !matches(g, text) {
				t.Errorf("%s: %q is no member", c.text, text)
			} else if !feed(t, g.Matcher(), v, text, rnd) {
				t.Errorf("%s: %q is not allowed token by token", c.text, text)
			}
		}
		for _, text := range c.others {
			if matches(g, text) {
				t.Errorf("%s: %q is a member", c.text, text)
			}
		}
		if text, whole := walk(t, g, v, rnd, 8); whole && !strings.Contains(c.text, "<") && !matches(g, text) {
			t.Errorf("%s: %q ended and is no member", c.text, text)
		}
	}
}

func TestEBNF(t *testing.T) {
	type L = []string
	testCFG(t, EBNF, []cfgCase{
		{`root ::= "a" | "b"`, L{"a", "b"}, L{"", "ab"}},
		{"# c\nroot ::= x y # d\nx ::= \"a\"*\ny ::= [bc]+", L{"b", "aabcb"}, L{"a", "ba"}},
		{`root ::= "a" root "b" | ""`, L{"", "ab", "aaabbb"}, L{"a", "aab", "ba"}},
		{`root ::= root "a" | "b"`, L{"b", "baaa"}, L{"", "a", "ab"}},
		{`root ::= "b" | "a" root`, L{"b", "aaab"}, L{"", "a", "ba"}},
		{`root ::= root root | "a" | ""`, L{"", "a", "aaaaa"}, L{"b"}},
		{"root ::= expr\nexpr ::= expr \"+\" term | term\nterm ::= term \"*\" f | f\nf ::= \"(\" expr \")\" | [0-9]+",
			L{"1", "1+2*3", "((1))+(2*(3+4))"}, L{"", "1+", "(1", "1)", "()"}},
		{"root ::= a b a\na ::= b | \"x\"\nb ::= \"\" | \"y\" b", L{"", "yy", "xyx"}, L{"xxx", "z"}}, // hidden left recursion
		{"root ::= s \"!\"\ns ::= e s \"a\" | \"b\"\ne ::= \"\"", L{"b!", "baaa!"}, L{"a!", "ab!"}},
		{`root ::= ("a" | "b"){2,3} "c"?`, L{"ab", "abac"}, L{"a", "abab"}},
		{`root ::= "\n\t\"\\\x41\u00e9" [^"\\] .`, L{"\n\t\"\\Aéx日"}, L{"\n\t\"\\Aé\"x"}},
		{"root ::= (\n  \"a\"\n  | \"b\"\n)\nother ::= \"x\"", L{"a", "b"}, L{"x"}},
		{"root ::= \"a\"\n  | \"b\"", L{"a", "b"}, nil},
		{"root ::= dead | \"a\"\ndead ::= \"x\" dead", L{"a"}, L{"x"}},
		{"root-x ::= \"a\"\nroot ::= root-x{3}", L{"aaa"}, L{"aa"}},
		{"root ::= (x?){0,100}\nx ::= \"a\" root | \"b\"", L{"", "ab", "aab", strings.Repeat("b", 100)}, L{"c"}},
	})
}

func TestLark(t *testing.T) {
	type L = []string
	testCFG(t, Lark, []cfgCase{
		{`start: "a" | "b"`, L{"a", "b"}, L{"", "ab"}},
		{"// c\nstart: x y # d\n?x: \"a\"* -> foo\n!y.2: /[bc]+/", L{"b", "aabcb"}, L{"a", "ba"}},
		{"start: \"a\"\n  | \"b\"\n  | (\n \"c\"\n \"d\" )", L{"a", "b", "cd"}, L{"c"}},
		{"start: e\ne: e \"+\" t | t\nt: \"(\" e \")\" | NUM\nNUM: /[0-9]+/", L{"1", "1+(2+34)"}, L{"1+", "(1"}},
		{"start: NUM (\",\" NUM)*\nNUM: DIGIT+\nDIGIT: \"0\"..\"9\"\n%ignore / +/", L{"1", "12 , 3", "1,2", "1 ,2"}, L{" 1", "1 ", "1 2", "1,"}},
		{"start: \"a\"? \"b\"\n%ignore \" \"", L{"ab", "a b", "b", "a  b"}, L{" b", "b ", " ab"}},
		{"start: x*\nx: \"a\"\n%ignore \" \"", L{"", "a", "a a"}, L{" ", " a", "a "}},
		{"%llguidance {\"ignore_once\": true}\nstart: \"a\" \"b\"\n%ignore \" \"", L{"ab", "a b"}, L{"a  b"}},
		{"%llguidance {\"allow_initial_skip\": true}\nstart: \"a\"\n%ignore \" \"", L{"a", "  a"}, L{"a "}},
		{`start: "ab"i "x" ~ 2..3 "y"{2} ["z"]`, L{"aBxxyy", "ABxxxyyz"}, L{"abxyy", "abxxyyzz"}},
		{"start: T \"c\"\nT: /[a-z]*/ & ~/(?s:.*)b(?s:.*)/", L{"c", "aac"}, L{"abc", "ac1"}},
		{"start: f \"!\"\nf[lazy]: /a+b?/", L{"a!"}, L{"aa!", "ab!"}},
		{"start: f \".\"\nf[capture, suffix=\"end\"]: /.*/", L{"xend.", "end."}, L{"xendend.", "x."}},
		{"start: f\nf[lazy]: TEXT \"<fn\"\nTEXT: /(.|\\n)*/", L{"a<fn", "<<fn"}, L{"<fn<fn", "a"}},
		{"start: \"n=\" %json {\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"additionalProperties\":false} \";\"", L{`n={"a": 1};`, `n={};`}, L{`n={"b":1};`}},
		{"start: %json {\"type\":\"array\",\"items\":{}} \"x\"", L{`[[],{"a":[1]}]x`}, L{`[`}},
		{"%import common.INT\n%import common (WS, CNAME -> NAME)\nstart: NAME \"=\" INT\n%ignore WS", L{"a = 1", "_b=22"}, L{"1=a"}},
		{"start: \"a\" /b\\/c/ /[/]x/i", L{"ab/c/X"}, nil},
	})
}

func TestSpecialTokens(t *testing.T) {
	v := small("think", "</")
	a, b := v.names["<|a|>"], v.names["<|b|>"]
	g := compile(t, Lark, "start: <|a|> /[a-z]*/ <|b|> %json {\"type\":\"integer\"}", v)
	m := g.Matcher()
	if allowed := exact(t, m, v, ""); len(allowed) != 1 || allowed[0] != a {
		t.Fatalf("%v may come first", allowed)
	}
	for _, token := range []int32{a, 'x', 'y', b, '4', '2', v.ends[0]} {
		exact(t, m, v, "somewhere")
		if !m.Accept(token) {
			t.Fatalf("%d is not accepted", token)
		}
	}
	if !m.Ended() {
		t.Fatal("the text has not ended")
	}
	m = compile(t, Lark, "start: \"x\" (<["+itoa(a)+"-"+itoa(b)+"]>)+", v).Matcher()
	for _, token := range []int32{'x', a, b} {
		if !m.Accept(token) {
			t.Fatalf("%d is not accepted", token)
		}
	}
	// The end token itself, where the grammar asks for it, does not end the text.
	end := v.ends[0]
	m = compile(t, Lark, "start: <["+itoa(end)+"]> \"x\"", v).Matcher()
	if !m.Accept(end) || m.Ended() || !m.Accept('x') || !m.Accept(end) || !m.Ended() {
		t.Fatal("an end token inside a text")
	}
}

func itoa(n int32) string {
	return string([]byte{byte('0' + n/100), byte('0' + n/10%10), byte('0' + n%10)})
}

func TestCFGRefused(t *testing.T) {
	v := small()
	f := func(kind Kind, text, reason string) {
		t.Helper()
		_, err := Compile(Spec{Kind: kind, Text: text}, v, Limits{})
		if _, ok := err.(*Error); !ok || !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: %v, want %s", text, err, reason)
		}
	}
	f(EBNF, ``, "no rule \"root\"")
	f(EBNF, `root ::= x`, `"x" is not defined`)
	f(EBNF, "root ::= \"a\"\nroot ::= \"b\"", "defined twice")
	f(EBNF, `root ::= "a`, "without an end")
	f(EBNF, `root ::= ("a"`, "missing")
	f(EBNF, `root ::= "a")`, "unmatched")
	f(EBNF, `root ::= [a`, "unmatched [")
	f(EBNF, `root ::= root`, "no text")
	f(EBNF, `root ::= "a"{3,2}`, "at least 3")
	f(EBNF, `root ::= "a"{99999999999}`, "repetition")
	f(EBNF, `root ::= "\q"`, "escape")
	f(EBNF, `root ::= <|nope|>`, "no special token")
	f(EBNF, `root ::= (="a") "a"`, "look-ahead")
	f(EBNF, `root ::= TagDispatch("a")`, "not supported")
	f(EBNF, `"a"`, "must begin with its name")
	f(Lark, `x: "a"`, `no rule "start"`)
	f(Lark, `start: x`, `"x" is not defined`)
	f(Lark, "start: A\nA: \"x\" A", "calls itself")
	f(Lark, "start: A\nA: b\nb: \"x\"", "inside a terminal")
	f(Lark, "start: A\nA: \"x\" & %json {}", "inside a terminal")
	f(Lark, `start: %json {"type":"nope"}`, "no type is named")
	f(Lark, `start: %json {`, "JSON")
	f(Lark, `start: /a/ /(?=b)/`, "look-around")
	f(Lark, `!`, "name is missing")
	f(Lark, `start: x{a}`, "templates")
	f(Lark, `start: @other`, "other grammars")
	f(Lark, "start[max_tokens=3]: \"a\"", "not supported")
	f(Lark, "%import foo.X\nstart: \"a\"", "common")
	f(Lark, "%import common.NOPE\nstart: \"a\"", "NOPE")
	f(Lark, "%declare X\nstart: \"a\"", "%declare")
	f(Lark, `start: "b".."a"`, "a range")
	f(Lark, `start: "a" )`, "unexpected")
	f(Lark, `start: ~`, "nothing behind")
	f(Lark, `start: <[70]>`, "not a special one")
	f(Kind(99), ``, "unknown kind")
}
