package openai_test

import (
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/xpyd/xpyd/internal/openai"
)

var seeds = []string{
	`{"model":"m","prompt":"x","stream":true,"seed":1,"n":2,"stop":["a"],"logit_bias":{"1":2}}`,
	`{"prompt":[1,2],"temperature":0.5,"x":{"y":[null,true,-1e5]},"stream_options":{"include_usage":false}}`,
	`{"messages":[{"role":"user","content":[{"type":"text","text":"a\ud83d\ude00"}]},{"role":"assistant","content":null,"tool_calls":[{"function":{"arguments":"{}"}}]}],"tools":[{"type":"function"}]}`,
	`{"prompt":"\ud800"}`, `{"a":1e999}`, `{"prompt":["a"`, `[]`, "{\"a\":\"\xff\"}", `{"kv_transfer_params":{}}`,
}

// FuzzScan: whatever Scan accepts is a JSON object, and what it reads agrees
// with encoding/json.
func FuzzScan(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		top, err := openai.Scan(body)
		if err != nil {
			if err.Status != 400 || err.Message == "" {
				t.Fatalf("%+v", err)
			}
			return
		}
		if !json.Valid(body) || !utf8.Valid(body) {
			t.Fatalf("accepted %q", body)
		}
		if top.Prompt != nil && !json.Valid(top.Prompt) {
			t.Fatalf("prompt %q", top.Prompt)
		}
		var m map[string]json.RawMessage
		if err := json.Unmarshal(body, &m); err != nil {
			t.Fatal(err)
		}
		if raw, ok := m["model"]; ok && top.Model != "" {
			var want string
			if json.Unmarshal(raw, &want) == nil && want != top.Model {
				t.Fatalf("model %q, want %q", top.Model, want)
			}
		}
	})
}

// FuzzParse: nothing is returned on error; what is returned is in range, and
// what ParseCompletion accepts, Scan accepts.
func FuzzParse(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		c, err := openai.ParseCompletion(body, 100)
		if (c == nil) == (err == nil) {
			t.Fatal("one of result and error")
		}
		if c != nil {
			if c.N < 1 || c.N > 128 || len(c.Prompts) == 0 || c.Temperature < 0 || c.Temperature > 2 || *c.MaxTokens < 0 {
				t.Fatalf("%+v", c)
			}
			for _, p := range c.Prompts {
				for _, id := range p.Tokens {
					if id < 0 || id >= 100 {
						t.Fatalf("token %d", id)
					}
				}
			}
			if _, err := openai.Scan(body); err != nil && err.Param == "" {
				t.Fatalf("Scan refuses what ParseCompletion takes: %v", err)
			}
		}
		chat, err := openai.ParseChat(body, 0)
		if (chat == nil) == (err == nil) {
			t.Fatal("one of result and error")
		}
		if tok, err := openai.ParseTokenize(body, 0); (tok == nil) == (err == nil) {
			t.Fatal("one of result and error")
		}
	})
}

// FuzzAppendString: the output is a JSON string that decodes to the input.
func FuzzAppendString(f *testing.F) {
	f.Add("a\"\\\n\x00\u2028é\xff")
	f.Fuzz(func(t *testing.T, s string) {
		var got string
		if err := json.Unmarshal(openai.AppendString(nil, s), &got); err != nil {
			t.Fatal(err)
		}
		if want := string([]rune(s)); got != want {
			t.Fatalf("%q, want %q", got, want)
		}
	})
}
