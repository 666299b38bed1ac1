package answer_test

import (
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/tokenizer"
)

// pieces of n bytes.
func pieces(text string, n int) (list []string) {
	for ; len(text) > n; text = text[n:] {
		list = append(list, text[:n])
	}
	return append(list, text)
}

// TestBounds: what never becomes clear is content once there is too much of it, whatever the pieces,
// and a whole answer's long call is given.
func TestBounds(t *testing.T) {
	long := strings.Repeat("y ", 6_000)
	spaces := strings.Repeat(" ", 5_000)
	texts := map[string]vector{
		"member before the name": {format: "hermes", text: `<tool_call>{"x":"` + long + `","name":"f","arguments":{}}</tool_call>`},
		"arguments before it":    {format: "hermes", text: `<tool_call>{"arguments":{"a":"` + long + `"},"name":"f"}</tool_call>`},
		"spaces in a call":       {format: "hermes", text: `<tool_call>` + strings.Repeat(spaces, 3) + `{"name":"f","arguments":{}}</tool_call>`},
		"spaces behind it":       {format: "hermes", text: `<tool_call>{"name":"f","arguments":{}}` + spaces + `</tool_call>`},
		"spaces before it":       {format: "hermes", text: spaces + `<tool_call>{"name":"f","arguments":{}}</tool_call>`},
		"spaces before thought":  {format: "hermes", think: "qwen3", text: spaces + `<think>x</think>` + spaces + "y"},
		"a long name":            {format: "qwen3_coder", text: `<tool_call><function=` + strings.Repeat("n", 300) + `></function></tool_call>`},
		"a long key":             {format: "qwen3_coder", text: `<tool_call><function=f><parameter=` + strings.Repeat("<tool_call>", 50) + `>x</parameter></function></tool_call>`},
		"a long header":          {format: "openai", text: `<|channel|>` + strings.Repeat("<|channel|>x ", 60) + `<|message|>y`},
		"a long name in quotes":  {format: "json", text: `{"name":"` + strings.Repeat("{", 300) + `","arguments":{}}`},
		"deep":                   {format: "json", text: `{"name":"f","arguments":` + strings.Repeat("[", 300)},
		"many":                   {format: "json", text: strings.Repeat(`{"name":"f","arguments":{}}`, 200)},
		"a long text":            {format: "qwen3_coder", text: `<function=f><parameter=a>` + long + `</parameter></function>`},
		"a long list":            {format: "glm45", text: `<tool_call>f<arg_key>a</arg_key><arg_value>["` + long + `"]</arg_value></tool_call>`},
		"a list that is none":    {format: "glm45", text: `<tool_call>f<arg_key>a</arg_key><arg_value>[` + long + `"]</arg_value></tool_call>`},
		"a Python word":          {format: "pythonic", text: `[f(a=` + strings.Repeat("x", 300) + `)]`},
		"a Python name":          {format: "pythonic", text: `[` + strings.Repeat("x", 300) + `()]`},
	}
	for name, v := range texts {
		t.Run(name, func(t *testing.T) {
			for _, whole := range []bool{false, true} {
				want := parse(t, &v, whole, []string{v.text})
				for _, n := range []int{1, 7, 1000} {
					if g := parse(t, &v, whole, pieces(v.text, n)); !reflect.DeepEqual(g, want) {
						t.Errorf("whole %t, in pieces of %d: %.300q\nat once %.300q", whole, n, fmt.Sprint(g), fmt.Sprint(want))
					}
				}
				if n := len(want.Calls); n > answer.MaxCalls {
					t.Errorf("%d calls", n)
				}
			}
		})
	}
	for _, name := range []string{"member before the name", "arguments before it", "spaces in a call"} {
		v := texts[name]
		if g := parse(t, &v, true, []string{v.text}); len(g.Calls) != 1 || g.Content != "" {
			t.Errorf("%s: %.200q", name, fmt.Sprint(g))
		}
		if g := parse(t, &v, false, []string{v.text}); len(g.Calls) != 0 || g.Content != v.text {
			t.Errorf("%s: %.200q", name, fmt.Sprint(g))
		}
	}
	for name, want := range map[string]string{"a long text": `{"a": "` + strings.TrimSpace(long) + `"}`, "a long list": `{"a": ["` + long + `"]}`} {
		v := texts[name]
		if g := parse(t, &v, false, []string{v.text}); len(g.Calls) != 1 || g.Calls[0].Args != want {
			t.Errorf("%s: %.200q", name, fmt.Sprint(g))
		}
	}
}

// TestTokens: every vector cut at the tokens of a real tokenizer.
func TestTokens(t *testing.T) {
	f, err := os.Open(filepath.FromSlash("../tokenizer/testdata/qwen3.json.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.FromJSON(text, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range vectors {
		v := &vectors[i]
		ids := tok.Encode(v.text, false)
		d := tok.NewDetokenizer(false, nil)
		var cut []string
		for _, id := range ids {
			cut = append(cut, d.Push(id))
		}
		if strings.Join(cut, "") != v.text {
			t.Fatalf("%q is %q", v.text, cut)
		}
		for _, whole := range []bool{false, true} {
			if g, want := parse(t, v, whole, cut), parse(t, v, whole, []string{v.text}); !reflect.DeepEqual(g, want) {
				t.Errorf("%s%s/%s: %+q\nwant %+q", v.format, v.think, v.name, g, want)
			}
		}
	}
}

// BenchmarkToken is what a token of some five bytes costs in each kind of format: of content, and of
// calls.
func BenchmarkToken(b *testing.B) {
	body := strings.Repeat("the quick brown fox jumps; ", 40)
	for _, c := range []struct{ name, format, think, text string }{
		{"content", "hermes", "qwen3", body},
		{"reasoning", "hermes", "qwen3", "<think>" + body + "</think>"},
		{"hermes", "hermes", "", `<tool_call>{"name":"f","arguments":{"text":"` + body + `"}}</tool_call>`},
		{"llama3_json", "llama3_json", "", `{"name":"f","parameters":{"text":"` + body + `"}}`},
		{"deepseek_v3", "deepseek_v3", "", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"text\":\"" + body + "\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
		{"qwen3_coder", "qwen3_coder", "", "<tool_call>\n<function=f>\n<parameter=id>\n" + body + "\n</parameter>\n</function>\n</tool_call>"},
		{"pythonic", "pythonic", "", "[f(text='" + body + "')]"},
		{"openai", "openai", "openai_gptoss", `<|channel|>commentary to=functions.f<|message|>{"text":"` + body + `"}<|call|>`},
	} {
		b.Run(c.name, func(b *testing.B) {
			cut := pieces(c.text, 5)
			b.ReportAllocs()
			for b.Loop() {
				p := answer.New(answer.ToolFormat(c.format), answer.ThinkFormat(c.think), answer.Options{})
				for _, piece := range cut {
					p.Feed(piece)
				}
				p.Flush()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(cut)), "ns/token")
		})
	}
}
