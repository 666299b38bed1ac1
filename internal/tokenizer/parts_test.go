package tokenizer_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/tokenizer"
)

// small is a tokenizer.json with a vocabulary of a few characters and pairs of them, and these parts.
func small(parts string) string {
	vocab := map[string]int{}
	for i, piece := range []string{"a", "b", "-", "1", "2", "▁", " ", "ab", "12", "--", "▁a", "b-", "-a", "a1", "A", "<s>", "</s>", "<unk>"} {
		vocab[piece] = i
	}
	text, _ := json.Marshal(vocab)
	return `{"model":{"type":"BPE","unk_token":"<unk>","vocab":` + string(text) +
		`,"merges":["a b","1 2","- -","▁ a","b -","- a","a 1"]},"decoder":{"type":"Fuse"}` + parts + `}`
}

// TestParts: what each normalizer and pre-tokenizer makes of a text, seen by the tokens that can be
// merged.
func TestParts(t *testing.T) {
	f := func(parts, text, want string) {
		t.Helper()
		tok, err := tokenizer.FromJSON([]byte(small(","+parts)), nil)
		if err != nil {
			t.Errorf("%s: %v", parts, err)
			return
		}
		var got []string
		for _, id := range tok.Encode(text, false) {
			got = append(got, tok.Piece(id))
		}
		if have := strings.Join(got, "|"); have != want {
			t.Errorf("%s: %q is %s, want %s", parts, text, have, want)
		}
	}
	norm := func(list ...string) string {
		return `"normalizer":{"type":"Sequence","normalizers":[` + strings.Join(list, ",") + `]}`
	}
	f(`"added_tokens":[{"id":5,"content":""}]`, "▁b", "▁|b")
	f(norm(), "ab", "ab")
	f(norm(), "", "")
	f(norm(`{"type":"Prepend","prepend":"▁"}`), "ab", "▁|ab")
	f(norm(`{"type":"Prepend","prepend":"▁"}`), "", "")
	f(norm(`{"type":"Replace","pattern":{"String":" "},"content":"▁"}`), "b a a", "b|▁a|▁a")
	f(norm(`{"type":"Replace","pattern":{"String":"b"},"content":""}`), "b", "")
	f(norm(`{"type":"Replace","pattern":{"Regex":"[12]+"},"content":"$a"}`), "a12b1", "a|<unk>|ab|<unk>|a")
	f(norm(`{"type":"Replace","pattern":{"Regex":"-{2}"},"content":"b"}`), "a---", "ab|-")

	metaspace := func(more string) string {
		return `"pre_tokenizer":{"type":"Metaspace","replacement":"▁"` + more + `}`
	}
	f(metaspace(``), "a a", "▁a|▁a")
	f(metaspace(`,"prepend_scheme":"always"`), "a a", "▁a|▁a")
	f(metaspace(`,"prepend_scheme":"first"`), "a a", "▁a|▁a")
	f(metaspace(`,"prepend_scheme":"never"`), "a a", "a|▁a")
	f(metaspace(`,"add_prefix_space":false`), "a a", "a|▁a")
	f(metaspace(`,"add_prefix_space":true`), "a a", "▁a|▁a")
	f(metaspace(`,"prepend_scheme":"always","add_prefix_space":false`), "a a", "▁a|▁a")
	f(metaspace(`,"split":false`), "ab a", "▁|ab|▁a")
	f(metaspace(``), "", "")

	digits := func(individual bool) string {
		return fmt.Sprintf(`"pre_tokenizer":{"type":"Digits","individual_digits":%t}`, individual)
	}
	f(digits(true), "12a1", "1|2|a|1")
	f(digits(false), "12a1", "12|a|1")

	split := func(pattern, behavior string, invert bool) string {
		return fmt.Sprintf(`"pre_tokenizer":{"type":"Split","pattern":%s,"behavior":%q,"invert":%t}`, pattern, behavior, invert)
	}
	for pattern := range map[string]bool{`{"String":"-"}`: true, `{"Regex":"-"}`: true} {
		f(split(pattern, "Isolated", false), "ab--a", "ab|-|-|a")
		f(split(pattern, "Removed", false), "ab--a", "ab|a")
		f(split(pattern, "Removed", true), "ab--a", "-|-")
		f(split(pattern, "Contiguous", false), "ab--a", "ab|--|a")
		f(split(pattern, "MergedWithPrevious", false), "b-a", "b-|a")
		f(split(pattern, "MergedWithNext", false), "b-a", "b|-a")
		f(split(pattern, "Isolated", false), "", "")
	}
	f(`"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Digits"},{"type":"Split","pattern":{"String":"-"},"behavior":"Removed"}]}`, "a1-a", "a|1|a")
}

// TestByteTokens: characters that are no tokens are bytes where the file asks for that and has all of
// them.
func TestByteTokens(t *testing.T) {
	for _, c := range []struct {
		asked bool
		bytes int
		want  []int32
	}{{true, 256, []int32{256, 0xc3, 0xa9}}, {false, 256, []int32{256, 257}}, {true, 255, []int32{256, 257}}} {
		vocab := map[string]int{"a": 256, "<unk>": 257}
		for i := range c.bytes {
			vocab[fmt.Sprintf("<0x%02X>", i)] = i
		}
		text, _ := json.Marshal(vocab)
		tok, err := tokenizer.FromJSON(fmt.Appendf(nil, `{"model":{"type":"BPE","unk_token":"<unk>","byte_fallback":%t,"vocab":%s,"merges":[]},"decoder":{"type":"ByteFallback"}}`, c.asked, text), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := tok.Encode("aé", false); !slices.Equal(got, c.want) {
			t.Errorf("asked for %t, %d of them: %v, want %v", c.asked, c.bytes, got, c.want)
		}
	}
}

// TestPartsRefused: what a tokenizer.json may have and is not understood is refused, not left out.
func TestPartsRefused(t *testing.T) {
	nested := `{"type":"Digits"}`
	for range 9 {
		nested = `{"type":"Sequence","pretokenizers":[` + nested + `]}`
	}
	for _, parts := range []string{
		`"normalizer":{"type":"Lowercase"}`, `"normalizer":5`, `"normalizer":{"type":"Prepend","prepend":""}`,
		`"normalizer":{"type":"Replace","pattern":{"String":""},"content":"x"}`, `"normalizer":{"type":"Replace","content":"x"}`,
		`"normalizer":{"type":"Replace","pattern":{"Regex":"("},"content":"x"}`, `"normalizer":{"type":"Replace","pattern":{"Regex":"\\s+(?!\\S)"},"content":"x"}`,
		`"pre_tokenizer":5`, `"pre_tokenizer":{"type":"Metaspace"}`, `"pre_tokenizer":{"type":"Metaspace","replacement":"_"}`,
		`"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"sometimes"}`,
		`"pre_tokenizer":{"type":"Split","pattern":{"String":"-"},"behavior":"Other"}`, `"pre_tokenizer":{"type":"Split","pattern":{"String":""},"behavior":"Isolated"}`,
		`"pre_tokenizer":{"type":"Split","behavior":"Isolated"}`, `"pre_tokenizer":{"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated"}`,
		`"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"ByteLevel"},{"type":"Digits"}]}`, `"pre_tokenizer":` + nested,
		`"post_processor":5`, `"post_processor":{"type":"Other"}`, `"post_processor":{"type":"TemplateProcessing","single":[{"Other":{"id":"A"}},{"Sequence":{"id":"A"}}]}`,
		`"post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A"}},{"Sequence":{"id":"A"}}]}`,
		`"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{"<s>":{"ids":[18]}}}`,
		`"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{"<s>":{"ids":[-1]}}}`,
	} {
		if _, err := tokenizer.FromJSON([]byte(small(","+parts)), nil); err == nil {
			t.Errorf("%s is understood", parts)
		}
	}
	deep := `{"type":"Digits"}`
	for range 8 {
		deep = `{"type":"Sequence","pretokenizers":[` + deep + `]}`
	}
	for _, parts := range []string{`"pre_tokenizer":` + deep, `"normalizer":null,"pre_tokenizer":null,"post_processor":null`, `"post_processor":{"type":"ByteLevel"}`,
		`"post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A"}},{"SpecialToken":{"id":"<s>"}}],"special_tokens":{"<s>":{"ids":[0,17]}}}`} {
		if _, err := tokenizer.FromJSON([]byte(small(","+parts)), nil); err != nil {
			t.Errorf("%s: %v", parts, err)
		}
	}
	for _, config := range []string{`x`, `{"bos_token":5}`, `{"chat_template":5}`, `{"chat_template":[5]}`, `{"eos_token":{"content":5}}`} {
		if _, err := tokenizer.FromJSON([]byte(small("")), []byte(config)); err == nil {
			t.Errorf("the config %s is understood", config)
		}
	}
}

// TestAround: which tokens stand around a text, by the post-processor and the config.
func TestAround(t *testing.T) {
	const template = `,"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}},{"SpecialToken":{"id":"</s>"}}],` +
		`"special_tokens":{"<s>":{"ids":[15]},"</s>":{"ids":[16]}}}`
	f := func(parts, config, want string) {
		t.Helper()
		tok, err := tokenizer.FromJSON([]byte(small(parts)), []byte(config))
		if err != nil {
			t.Errorf("%s: %v", config, err)
			return
		}
		if got := fmt.Sprint(tok.Encode("ab", true)); got != want {
			t.Errorf("%s: %s, want %s", config, got, want)
		}
		if got := fmt.Sprint(tok.Encode("ab", false)); got != "[7]" {
			t.Errorf("%s: %s without special tokens", config, got)
		}
	}
	const llama = `"tokenizer_class":"LlamaTokenizerFast","bos_token":"<s>","eos_token":{"content":"</s>"}`
	f("", "", "[7]")
	f(template, "", "[15 7 16]")
	f(template, `{`+llama+`}`, "[15 7 16]")
	f(template, `{`+llama+`,"add_bos_token":true,"add_eos_token":true}`, "[15 7 16]")
	f(template, `{`+llama+`,"add_bos_token":false,"add_eos_token":false}`, "[7]")
	f("", `{`+llama+`,"add_bos_token":true,"add_eos_token":false}`, "[15 7]")
	f("", `{`+llama+`,"add_eos_token":true}`, "[7 16]")
	f("", strings.Replace(`{`+llama+`,"add_bos_token":true,"add_eos_token":true}`, "LlamaTokenizerFast", "CodeLlamaTokenizer", 1), "[15 7 16]")
	f("", strings.Replace(`{`+llama+`,"add_bos_token":true,"add_eos_token":true}`, "LlamaTokenizerFast", "GPT2Tokenizer", 1), "[7]")
	f("", `{"tokenizer_class":"LlamaTokenizer","add_bos_token":true,"add_eos_token":true,"bos_token":null,"eos_token":"nobody"}`, "[7]")
}

// TestTemplates: which template is taken, and how the last message is continued.
func TestTemplates(t *testing.T) {
	messages := func(list ...string) (out []json.RawMessage) {
		for _, m := range list {
			out = append(out, json.RawMessage(m))
		}
		return out
	}
	const all = `{"chat_template":[{"name":"default","template":"plain{% for m in messages %}[{{ m.content }}]{% endfor %}"},{"name":"tool_use","template":"tools{{ bos_token }}"}],"bos_token":"<s>"}`
	tok, err := tokenizer.FromJSON([]byte(small("")), []byte(all))
	if err != nil {
		t.Fatal(err)
	}
	f := func(tok *tokenizer.Tokenizer, in tokenizer.ChatInput, want string) {
		t.Helper()
		got, err := tok.RenderChat(t.Context(), in)
		if (err == nil) != (want != "") || got != want {
			t.Errorf("%q, %v, want %q", got, err, want)
		}
	}
	user := `{"role":"user","content":"hi"}`
	f(tok, tokenizer.ChatInput{Messages: messages(user)}, "plain[hi]")
	f(tok, tokenizer.ChatInput{Messages: messages(user), Tools: messages(`{"type":"function"}`)}, "tools<s>")
	f(tok, tokenizer.ChatInput{Messages: messages(user, `{"role":"assistant","content":"Hel"}`), ContinueFinalMessage: true}, "plain[hi][Hel")
	f(tok, tokenizer.ChatInput{Messages: messages(user, `{"role":"assistant","content":"Hel "}`), ContinueFinalMessage: true}, "plain[hi][Hel ")
	f(tok, tokenizer.ChatInput{Messages: messages(user, `{"role":"assistant","content":null}`), ContinueFinalMessage: true}, "")
	f(tok, tokenizer.ChatInput{Messages: messages(`{"role":"assistant","content":"XPYD"}`), ContinueFinalMessage: true}, "plain[XPYD")
	with := func(template string) *tokenizer.Tokenizer {
		out, err := tok.WithChatTemplate(template)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	f(with("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"), tokenizer.ChatInput{Messages: messages(`{"role":"assistant","content":"a \n"}`), ContinueFinalMessage: true}, "<a")
	f(with("{% for m in messages %}<{% for p in m.content %}{{ p.text }}|{% endfor %}>{% endfor %}"),
		tokenizer.ChatInput{Messages: messages(`{"role":"assistant","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}`), ContinueFinalMessage: true}, "<a|b")
	f(with("nothing of it"), tokenizer.ChatInput{Messages: messages(user), ContinueFinalMessage: true}, "")
	f(with("{% for c in messages[0].tool_calls %}{{ c.function.arguments }}|{% endfor %}"), // a call that broke off is the text that it was
		tokenizer.ChatInput{Messages: messages(`{"role":"assistant","tool_calls":[{"function":{"arguments":"{\"a\":"}},{"function":{"arguments":"NaN"}},{"function":{"arguments":"1 2"}}]}`)}, `{"a":|NaN|1 2|`)
	f(with("{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"),
		tokenizer.ChatInput{Messages: messages(`{"role":"assistant","content":"","tool_calls":[{"function":{"arguments":""}},{"function":{"name":"x"}},{"function":{"arguments":{"a":1}}},{"function":{"arguments":"[1]"}}]}`)},
		`{}{}{"a": 1}[1]`)
	for _, c := range [][2]string{
		{`[5,null,{"function":"g"},{"x":1},{"function":{"arguments":null,"name":"f"}}]`, `[5, null, {"function": "g"}, {"x": 1}, {"function": {"arguments": {}, "name": "f"}}]`},
		{`"x"`, `"x"`}, {`null`, `null`},
	} {
		f(with("{{ messages[0].tool_calls | tojson }}"), tokenizer.ChatInput{Messages: messages(`{"role":"assistant","content":"","tool_calls":` + c[0] + `}`)}, c[1])
	}
	f(with("{% for m in messages %}<{% for p in m.content %}{{ p.text }}|{% endfor %}>{% endfor %}"),
		tokenizer.ChatInput{Messages: messages(`{"role":"assistant","content":[{"type":"text","text":"a"},{"type":"image"},5]}`), ContinueFinalMessage: true}, "<a")
	if _, err := with("{{ raise_exception('no') }}").RenderChat(t.Context(), tokenizer.ChatInput{Messages: messages(user)}); err == nil {
		t.Error("a template's own error is none")
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := with("{% for i in range(50000) %}{% for j in range(50000) %}{% endfor %}{% endfor %}").RenderChat(gone, tokenizer.ChatInput{Messages: messages(user)}); !errors.Is(err, context.Canceled) {
		t.Errorf("after its context's end: %v", err)
	}
}

// TestGGUFParts: what a GGUF file says of its tokens, or leaves out.
func TestGGUFParts(t *testing.T) {
	meta := func(change map[string]any) map[string]any {
		m := map[string]any{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": []string{"a", "b", "ab", "a", "<s>", "</s>", "<x>", "<unk>"},
			"tokenizer.ggml.token_type": []int32{1, 1, 1, 1, 3, 3, 4, 2}, "tokenizer.ggml.merges": []string{"#version: 0.2", "a b"},
			"tokenizer.ggml.bos_token_id": uint32(4), "tokenizer.ggml.eos_token_id": int64(5)}
		for k, v := range change {
			m["tokenizer."+k] = v
		}
		return m
	}
	f := func(change map[string]any, text string, want, eos []int32) *tokenizer.Tokenizer {
		t.Helper()
		tok, err := tokenizer.FromGGUF(meta(change))
		if err != nil {
			t.Fatalf("%v: %v", change, err)
		}
		if got := tok.Encode(text, true); !slices.Equal(got, want) || !slices.Equal(tok.EOS(), eos) {
			t.Errorf("%v: %q is %v and ends with %v, want %v and %v", change, text, got, tok.EOS(), want, eos)
		}
		return tok
	}
	tok := f(nil, "ab<x>a</s>", []int32{2, 6, 0, 5}, []int32{5})
	for id, special := range []bool{false, false, false, false, true, true, false, true} {
		if tok.IsSpecial(int32(id)) != special {
			t.Errorf("token %d is special: %t", id, !special)
		}
	}
	f(map[string]any{"ggml.add_bos_token": true}, "a", []int32{4, 0}, []int32{5})
	f(map[string]any{"ggml.add_eos_token": true}, "a", []int32{0, 5}, []int32{5})
	f(map[string]any{"ggml.add_bos_token": true, "ggml.bos_token_id": uint32(8)}, "a", []int32{0}, []int32{5})
	f(map[string]any{"ggml.add_bos_token": true, "ggml.bos_token_id": int32(-1)}, "a", []int32{0}, []int32{5})
	f(map[string]any{"ggml.add_bos_token": true, "ggml.bos_token_id": "4"}, "a", []int32{0}, []int32{5})
	f(map[string]any{"ggml.eot_token_id": uint32(6), "ggml.eom_token_id": uint32(5), "ggml.add_eos_token": true}, "a", []int32{0, 5}, []int32{5, 6})
	f(map[string]any{"ggml.eos_token_id": nil, "ggml.add_eos_token": true}, "a", []int32{0}, nil)
	before := f(map[string]any{"ggml.bos_token_id": uint32(5), "ggml.add_bos_token": true}, "a", []int32{5, 0}, []int32{5})
	after := f(map[string]any{"ggml.bos_token_id": uint32(5), "ggml.add_eos_token": true}, "a", []int32{0, 5}, []int32{5})
	if before.Fingerprint() == after.Fingerprint() {
		t.Error("a token before and one after have the same fingerprint")
	}
	render := func(change map[string]any, tools bool, want string) {
		t.Helper()
		tok := f(change, "a", []int32{0}, []int32{5})
		in := tokenizer.ChatInput{Messages: []json.RawMessage{json.RawMessage(`{"role":"user","content":"x"}`)}}
		if tools {
			in.Tools = []json.RawMessage{json.RawMessage(`{"type":"function"}`)}
		}
		if got, err := tok.RenderChat(t.Context(), in); err != nil || got != want {
			t.Errorf("%v: %q, %v, want %q", change, got, err, want)
		}
	}
	both := map[string]any{"chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}", "chat_template.tool_use": "tools", "ggml.unknown_token_id": uint32(7), "chat_templates": "x"}
	render(both, false, "<s></s><unk>")
	render(both, true, "tools")
	// A sentencepiece token may have characters that are no tokens.
	llama := map[string]any{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": []string{"<unk>", "ab", "abc", "▁", "c", "ba", "z\xff"},
		"tokenizer.ggml.scores": []float32{0, -1, -2, -3, -4, -0.5, -9}, "tokenizer.ggml.token_type": []int32{2, 1, 1, 1, 1, 1, 1}, "tokenizer.ggml.add_space_prefix": false}
	small, err := tokenizer.FromGGUF(llama)
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string][]int32{"ab": {1}, "abc": {2}, "abab": {0, 5, 0}, "ab c": {1, 3, 4}, "b": {0}, "a": {0}, "aa": {0}, "": nil} {
		if got := small.Encode(text, false); !slices.Equal(got, want) {
			t.Errorf("%q is %v, want %v", text, got, want)
		}
	}
	if got := small.Piece(6); got != "z\uFFFD" {
		t.Errorf("what is no UTF-8 is %q", got)
	}
	composed := []string{"Ã", "©", "e"} // the bytes of é, and what it begins with if it is two characters
	for pre, want := range map[string][]int32{"qwen2": {0, 1}, "hunyuan": {2}} {
		f(map[string]any{"ggml.pre": pre, "ggml.tokens": composed, "ggml.token_type": []int32{1, 1, 1}, "ggml.bos_token_id": nil, "ggml.eos_token_id": nil}, "e\u0301", want, nil)
	}
	for name, change := range map[string]map[string]any{
		"kind": {"ggml.model": "bert"}, "pre": {"ggml.pre": "nosuch"}, "no merges": {"ggml.merges": nil}, "merges": {"ggml.merges": []string{"a c"}}, "half a merge": {"ggml.merges": []string{"a"}},
		"types": {"ggml.token_type": []int32{1}}, "kind of types": {"ggml.token_type": []int64{1, 1, 1, 1, 1, 1, 1, 1}},
	} {
		tok, err := tokenizer.FromGGUF(meta(change))
		if name == "merges" { // what leads to no token is left out, as in llama.cpp
			if err != nil || !slices.Equal(tok.Encode("ab", false), []int32{0, 1}) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err == nil {
			t.Errorf("%s: it loads", name)
		}
	}
}
