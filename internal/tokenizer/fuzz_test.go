package tokenizer_test

import (
	"testing"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"github.com/xpyd/xpyd/internal/tokenizer"
)

// FuzzFromJSON reads foreign files: no panic, and what loads must work.
func FuzzFromJSON(f *testing.F) {
	f.Add(read(f, "stories260k.json"), read(f, "stories260k.config.json"))
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]},"decoder":{"type":"ByteLevel"},
		"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":false},{"type":"Split","pattern":{"Regex":"a+|\\s+(?!\\S)"},
		"behavior":"MergedWithNext","invert":true},{"type":"ByteLevel","add_prefix_space":true}]},"normalizer":{"type":"NFC"},
		"added_tokens":[{"id":3,"content":" x","lstrip":true,"rstrip":true,"single_word":true,"normalized":true}]}`), []byte(`{"bos_token":{"content":"a"}}`))
	f.Add([]byte(`{"model":{"vocab":{"▁":0,"a":1,"▁a":2},"merges":["▁ a"]},"decoder":{"type":"Metaspace","replacement":"▁"},
		"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"first"}}`), []byte(`{"chat_template":[{"name":"default","template":"{{ 1 }}"}]}`))
	f.Fuzz(func(t *testing.T, raw, config []byte) {
		tok, err := tokenizer.FromJSON(raw, config)
		if err != nil {
			return
		}
		for _, text := range []string{"", " a ab  x\n12", "a\xff 你"} {
			ids := tok.Encode(text, true)
			for _, id := range ids {
				if id < 0 || int(id) >= tok.VocabSize() {
					t.Fatalf("%q has id %d of %d", text, id, tok.VocabSize())
				}
			}
			if s := tok.Decode(ids, false); !utf8.ValidString(s) {
				t.Fatalf("%q decodes to %q", text, s)
			}
		}
	})
}

// FuzzRoundTrip: byte-level vocabularies lose nothing, apart from normalising.
// (SmolLM2 has no tokens for some control characters, which it drops.)
func FuzzRoundTrip(f *testing.F) {
	for _, s := range []string{"", "Hello, world!", " \r\n\t x", "don't I'LL 1234", "你好 😀 e\u0301", "<|im_start|>user\n<|endoftext|>", "\u0120\u010a\u00ad", "\x00\x7f\u0085"} {
		f.Add(s)
	}
	names := []string{"gpt2", "gpt2.gguf", "qwen3"}
	for _, n := range names {
		load(f, n)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if !utf8.ValidString(s) {
			return
		}
		for _, n := range names {
			tok := load(t, n)
			if n == "qwen3" {
				s = norm.NFC.String(s)
			}
			if got := tok.Decode(tok.Encode(s, false), false); got != s {
				t.Fatalf("%s: %q comes back as %q", n, s, got)
			}
		}
	})
}

func FuzzGGUF(f *testing.F) {
	f.Add("llama", "a", "▁", "▁a", int32(1), float32(-1), "default", "{{ 1 }}")
	f.Add("gpt2", "a", "Ġ", "Ġa", int32(3), float32(0), "llama-bpe", "{% if")
	f.Add("llama", "\xff", "<0x0A>", "", int32(6), float32(0), "", "")
	f.Fuzz(func(t *testing.T, model, a, b, c string, kind int32, score float32, pre, template string) {
		tok, err := tokenizer.FromGGUF(map[string]any{
			"tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre, "tokenizer.chat_template": template,
			"tokenizer.ggml.tokens": []string{a, b, c, a + c, "<unk>"}, "tokenizer.ggml.scores": []float32{score, 0, -1, -2, 0},
			"tokenizer.ggml.token_type": []int32{1, kind, 1, 1, 2}, "tokenizer.ggml.merges": []string{b + " " + a, a + " " + c},
			"tokenizer.ggml.bos_token_id": uint32(kind), "tokenizer.ggml.eos_token_id": uint32(1),
		})
		if err != nil {
			return
		}
		for _, id := range tok.Encode(a+" "+b+c+a, true) {
			if id < 0 || int(id) >= tok.VocabSize() || !utf8.ValidString(tok.Decode([]int32{id, 0}, false)) {
				t.Fatalf("id %d", id)
			}
		}
	})
}
