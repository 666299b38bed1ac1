package tokenizer_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestPairs runs llama.cpp's 47 texts.
func TestPairs(t *testing.T) {
	texts := strings.Split(string(read(t, "pairs.inp")), "\n__ggml_vocab_test__\n")
	for _, c := range []struct{ vocab, want string }{{"gpt2", "gpt-2.out"}, {"gpt2.gguf", "gpt-2.out"}, {"qwen3", "qwen2.out"}} {
		t.Run(c.vocab, func(t *testing.T) {
			tok := load(t, c.vocab)
			lines := strings.Split(string(read(t, c.want)), "\n")
			if len(lines) != 47 || len(texts) != 47 {
				t.Fatalf("%d lines, %d texts", len(lines), len(texts))
			}
			for i, line := range lines {
				var want []int32
				for f := range strings.FieldsSeq(line) {
					n, err := strconv.Atoi(f)
					if err != nil {
						t.Fatal(err)
					}
					want = append(want, int32(n))
				}
				if got := tok.Encode(texts[i], false); !slices.Equal(got, want) {
					t.Errorf("%q:\nhave %v\nwant %v", texts[i], got, want)
				} else if back := tok.Decode(got, false); back != texts[i] {
					t.Errorf("%q decodes to %q", texts[i], back)
				}
			}
		})
	}
}

func TestStories(t *testing.T) {
	var cases []struct {
		Prompt    string
		PromptIDs []int32 `json:"prompt_ids"`
		IDs       []int32
		Text      string
	}
	if err := json.Unmarshal(read(t, "stories260k.oracle.json"), &cases); err != nil {
		t.Fatal(err)
	}
	for _, vocab := range []string{"stories260k", "stories260k.gguf"} {
		tok := load(t, vocab)
		for _, c := range cases {
			ids := tok.Encode(c.Prompt, true)
			if !slices.Equal(ids, c.PromptIDs) {
				t.Errorf("%s: %q:\nhave %v\nwant %v", vocab, c.Prompt, ids, c.PromptIDs)
			}
			if got := tok.Decode(ids, true); got != c.Prompt {
				t.Errorf("%s: %q decodes to %q", vocab, c.Prompt, got)
			}
			d := tok.NewDetokenizer(true, ids)
			var b strings.Builder
			for _, id := range c.IDs {
				b.WriteString(d.Push(id))
			}
			want := c.Text
			if c.Prompt == "" {
				want = strings.TrimPrefix(want, " ") // nothing before it
			}
			if got := b.String() + d.Flush(); got != want {
				t.Errorf("%s: continued with %q, want %q", vocab, got, want)
			}
		}
	}
}

// TestGoldens compares with Hugging Face tokenizers; see make_goldens.py.
func TestGoldens(t *testing.T) {
	raw := read(t, "encode.jsonl.gz")
	if path := os.Getenv("XPYD_TOKENIZER_GOLDENS"); path != "" { // a larger file, made with the same script
		raw = read(t, path)
	}
	lines := bufio.NewScanner(bytes.NewReader(raw))
	lines.Buffer(nil, 1<<24)
	n, bad := 0, 0
	for lines.Scan() {
		var c struct {
			Tok     string
			Text    string
			IDs     []int32
			Skip    bool
			Decoded *string
		}
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		tok := load(t, c.Tok)
		n++
		if c.Decoded != nil {
			if got := tok.Decode(c.IDs, c.Skip); got != *c.Decoded {
				t.Errorf("%s: %v (skip %v):\nhave %q\nwant %q", c.Tok, c.IDs, c.Skip, got, *c.Decoded)
				bad++
			}
		} else if got := tok.Encode(c.Text, true); !slices.Equal(got, c.IDs) {
			t.Errorf("%s: %q:\nhave %v\nwant %v", c.Tok, c.Text, got, c.IDs)
			bad++
		}
		if bad > 20 {
			t.Fatal("too many")
		}
	}
	t.Logf("%d cases", n)
}
