package tokenizer_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/tokenizer"
)

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	if _, err := tokenizer.Load(dir); err == nil {
		t.Error("an empty directory loads")
	}
	put := func(name string, b []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("tokenizer.json", read(t, "stories260k.json"))
	bare, err := tokenizer.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	put("tokenizer_config.json", read(t, "stories260k.config.json"))
	full, err := tokenizer.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	put("chat_template.jinja", []byte("{{ bos_token }}{{ messages[0].content }}"))
	chat, err := tokenizer.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if bos, ok := bare.BOS(); !ok || bos != 1 || len(bare.EOS()) != 0 {
		t.Errorf("without config: BOS %d %v, EOS %v", bos, ok, bare.EOS())
	}
	if bos, ok := full.BOS(); !ok || bos != 1 || !slices.Equal(full.EOS(), []int32{2}) {
		t.Errorf("BOS %d %v, EOS %v", bos, ok, full.EOS())
	}
	if full.HasChatTemplate() || !chat.HasChatTemplate() {
		t.Error("chat_template.jinja does not count")
	}
	out, err := chat.RenderChat(t.Context(), tokenizer.ChatInput{Messages: []json.RawMessage{json.RawMessage(`{"content":"x"}`)}})
	if err != nil || out != "<s>x" {
		t.Errorf("have %q, %v", out, err)
	}
	if a, b, c := bare.Fingerprint(), full.Fingerprint(), chat.Fingerprint(); a == b || b == c || len(a) != 64 {
		t.Errorf("fingerprints %s %s %s", a, b, c)
	}
	put("chat_template.jinja", []byte("{% if %}"))
	if _, err := tokenizer.Load(dir); err == nil {
		t.Error("a broken template loads")
	}
	put("chat_template.jinja", []byte("{{ 1 }}"))
	for _, name := range []string{"tokenizer_config.json", "chat_template.jinja"} { // is there, and cannot be read
		was, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.Remove(filepath.Join(dir, name)), os.Mkdir(filepath.Join(dir, name), 0o700)); err != nil {
			t.Fatal(err)
		}
		if _, err := tokenizer.Load(dir); err == nil {
			t.Errorf("it loads without %s", name)
		}
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		put(name, was)
	}
	for name, good := range map[string]string{"tokenizer.json": "stories260k.json", "tokenizer_config.json": "stories260k.config.json"} {
		put(name, []byte("{"))
		if tok, err := tokenizer.Load(dir); err == nil || tok != nil {
			t.Errorf("a broken %s loads", name)
		}
		put(name, read(t, good))
	}
}

func TestFingerprint(t *testing.T) {
	raw, config := read(t, "stories260k.json"), read(t, "stories260k.config.json")
	fingerprint := func(raw, config []byte) string {
		tok, err := tokenizer.FromJSON(raw, config)
		if err != nil {
			t.Fatal(err)
		}
		return tok.Fingerprint()
	}
	same := fingerprint(raw, config)
	if fingerprint(raw, config) != same {
		t.Error("two readings differ")
	}
	if fingerprint(append([]byte("  "), raw...), config) != same {
		t.Error("white space counts")
	}
	replace := func(old, new string) []byte {
		if !strings.Contains(string(raw), old) {
			t.Fatalf("no %s", old)
		}
		return []byte(strings.Replace(string(raw), old, new, 1))
	}
	for _, changed := range [][]byte{replace(`"ignore_merges"`, `"x"`)} {
		if fingerprint(changed, config) != same {
			t.Error("what changes nothing counts")
		}
	}
	for _, changed := range [][]byte{replace(`"fuse_unk": true`, `"fuse_unk": false`), replace(`"special": true`, `"special": false`)} {
		if fingerprint(changed, config) == same {
			t.Error("a change does not count")
		}
	}
}

func TestTokens(t *testing.T) {
	gpt2, qwen := load(t, "gpt2"), load(t, "qwen3")
	if n := gpt2.VocabSize(); n != 50257 {
		t.Errorf("VocabSize is %d", n)
	}
	if s := gpt2.Piece(262); s != "Ġthe" || gpt2.TokenText(262) != " the" || string(gpt2.TokenBytes(262)) != " the" {
		t.Errorf("262 is %q, %q, %q", s, gpt2.TokenText(262), gpt2.TokenBytes(262))
	}
	for _, id := range []int32{-1, 50257, 1 << 30} {
		if gpt2.Piece(id) != "" || gpt2.TokenText(id) != "" || gpt2.TokenBytes(id) != nil || gpt2.IsSpecial(id) {
			t.Errorf("id %d exists", id)
		}
	}
	if !qwen.IsSpecial(151645) || qwen.IsSpecial(151657) || !slices.Equal(qwen.EOS(), []int32{151645}) {
		t.Error("special tokens of qwen3 are wrong")
	}
	const text = "a<|im_end|><think>b"
	if got := qwen.Encode(text, false); !slices.Equal(got, []int32{64, 151645, 151667, 65}) {
		t.Errorf("Encode: %v", got)
	}
	if s := qwen.Decode([]int32{64, 151645, 151667, 65}, true); s != "a<think>b" {
		t.Errorf("Decode: %q", s)
	}
	if got, want := gpt2.Encode("a\xffb", false), gpt2.Encode("a�b", false); !slices.Equal(got, want) {
		t.Errorf("bad UTF-8: %v, want %v", got, want)
	}
}

func TestBadFiles(t *testing.T) {
	const ok = `{"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]},"decoder":{"type":"ByteLevel"},"pre_tokenizer":{"type":"ByteLevel"}}`
	if _, err := tokenizer.FromJSON([]byte(ok), nil); err != nil {
		t.Fatal(err)
	}
	f := func(old, new string) {
		t.Helper()
		if !strings.Contains(ok, old) {
			t.Fatalf("no %s", old)
		}
		if _, err := tokenizer.FromJSON([]byte(strings.Replace(ok, old, new, 1)), nil); err == nil {
			t.Errorf("%s instead of %s loads", new, old)
		}
	}
	for bad, want := range map[string]string{`{"type":7}`: "cannot unmarshal", `null`: "cannot tell how tokens join"} {
		if _, err := tokenizer.FromJSON([]byte(strings.Replace(ok, `{"type":"ByteLevel"}`, bad, 1)), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s as a decoder: %v, want %s", bad, err, want)
		}
	}
	f(`"BPE"`, `"Unigram"`)
	f(`"BPE"`, `"BPE","dropout":0.1`)
	f(`"BPE"`, `"BPE","end_of_word_suffix":"</w>"`)
	f(`{"a":0,"b":1,"ab":2}`, `{}`)
	f(`"ab":2`, `"ab":1`)
	f(`"ab":2`, `"ab":-1`)
	f(`"ab":2`, `"ab":99999999`)
	f(`"ab":2`, `"ab":2.5`)
	f(`"a b"`, `"a"`)
	f(`"a b"`, `"a c"`)
	f(`"a b"`, `["a"]`)
	f(`"a b"`, `"a b",["a","b"]`)
	f(`"a b"`, `["a","b"],5`)
	f(`"a b"`, `["a","b"],["a",""]`)
	f(`"a b"`, `["a","b"],["","b"]`)
	f(`{"type":"ByteLevel"}`, `{"type":"WordPiece"}`)
	f(`{"type":"ByteLevel"}`, `null`)
	f(`"pre_tokenizer":{"type":"ByteLevel"}`, `"pre_tokenizer":{"type":"BertPreTokenizer"}`)
	f(`"pre_tokenizer":`, `"normalizer":{"type":"Lowercase"},"pre_tokenizer":`)
	f(`"pre_tokenizer":`, `"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}}]},"pre_tokenizer":`)
	f(`"pre_tokenizer":`, `"added_tokens":[{"id":-5,"content":"x"}],"pre_tokenizer":`)
	f(`{"model"`, `{"model":{}, "x`)
	f(`"pre_tokenizer":{"type":"ByteLevel"}`, `"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"ByteLevel"},5]}`)
	f(`"pre_tokenizer":{"type":"ByteLevel"}`, `"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Sequence","pretokenizers":[{"type":7}]}]}`)
}

func TestBadGGUF(t *testing.T) {
	f := func(key string, v any) {
		t.Helper()
		meta := tok512Meta(t)
		meta[key] = v
		if _, err := tokenizer.FromGGUF(meta); err == nil {
			t.Errorf("%s = %v loads", key, v)
		}
	}
	f("tokenizer.ggml.model", "bert")
	f("tokenizer.ggml.model", "gpt2") // no merges
	f("tokenizer.ggml.tokens", []string{})
	f("tokenizer.ggml.tokens", "x")
	f("tokenizer.ggml.scores", []float32{1})
	f("tokenizer.ggml.token_type", []int32{1})
	for _, merges := range [][]string{{"ab"}, {"a  b"}} {
		meta := map[string]any{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": []string{"a", "b", "ab"},
			"tokenizer.ggml.token_type": []int32{1, 1, 1}, "tokenizer.ggml.merges": []string{"a b"}}
		if _, err := tokenizer.FromGGUF(meta); err != nil {
			t.Fatal(err)
		}
		meta["tokenizer.ggml.merges"] = merges
		if _, err := tokenizer.FromGGUF(meta); err == nil {
			t.Errorf("merges %q load", merges)
		}
	}
	if _, err := tokenizer.FromGGUF(nil); err == nil {
		t.Error("nothing loads")
	}
	f("tokenizer.ggml.model", 5)
	meta := tok512Meta(t)
	meta["tokenizer.ggml.add_bos_token"] = false
	meta["tokenizer.ggml.add_space_prefix"] = false
	meta["tokenizer.chat_template"] = "{{ bos_token }}{{ eos_token }}"
	meta["tokenizer.ggml.bos_token_id"] = uint32(99999)
	tok, err := tokenizer.FromGGUF(meta)
	if err != nil {
		t.Fatal(err)
	}
	if ids := tok.Encode("Once", true); tok.Decode(ids, false) != "Once" || slices.Contains(ids, 403) {
		t.Errorf("Once is %v", ids)
	}
	if out, err := tok.RenderChat(t.Context(), tokenizer.ChatInput{Messages: []json.RawMessage{json.RawMessage(`{}`)}}); err != nil || out != "</s>" {
		t.Errorf("have %q, %v", out, err)
	}
}
