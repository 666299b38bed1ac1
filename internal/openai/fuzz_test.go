package openai_test

import (
	"encoding/json"
	"slices"
	"testing"
	"unicode/utf8"

	"github.com/xpyd/xpyd/internal/openai"
)

var seeds = []string{
	`{"model":"m","prompt":"x","stream":true,"seed":1,"n":2,"stop":["a"],"logit_bias":{"1":2}}`,
	`{"prompt":[1,2],"temperature":0.5,"x":{"y":[null,true,-1e5]},"stream_options":{"include_usage":false}}`,
	`{"messages":[{"role":"user","content":[{"type":"text","text":"a\ud83d\ude00"}]},{"role":"assistant","content":null,"tool_calls":[{"function":{"arguments":"{}"}}]}],"tools":[{"type":"function"}]}`,
	`{"messages":[[{"role":"user","content":"a"}],[{"role":"assistant","content":null}]]}`, `{"texts":["a"],"embedding_types":["base64"],"truncate":"START"}`,
	`{"prompt":"\ud800"}`, `{"a":1e999}`, `{"prompt":["a"`, `[]`, "{\"a\":\"\xff\"}", `{"kv_transfer_params":{}}`,
	`{"prompt":["a","b"],"bootstrap_host":["h","h"],"bootstrap_port":[8998,null],"bootstrap_room":[0,9223372036854775807]}`,
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
			checkBootstrap(t, c.Bootstrap)
			if _, err := openai.Scan(body); err != nil && err.Param == "" {
				t.Fatalf("Scan refuses what ParseCompletion takes: %v", err)
			}
		}
		chat, err := openai.ParseChat(body, 0)
		if (chat == nil) == (err == nil) {
			t.Fatal("one of result and error")
		}
		batch, chats, err := openai.ParseChatBatch(body, 0)
		if (batch == nil) == (err == nil) || err == nil && (len(chats) == 0 || len(chats[len(chats)-1]) == 0) {
			t.Fatalf("one of result and error: %d chats, %v", len(chats), err)
		}
		if e, err := openai.ParseCohereEmbed(body); (e == nil) == (err == nil) {
			t.Fatal("one of result and error")
		}
		if e, err := openai.ParseEmbeddings(body, 0); (e == nil) == (err == nil) {
			t.Fatal("one of result and error")
		}
		if tok, err := openai.ParseTokenize(body, 0); (tok == nil) == (err == nil) {
			t.Fatal("one of result and error")
		}
	})
}

// checkBootstrap: what is read of bootstrap fields is in range.
func checkBootstrap(t *testing.T, b *openai.Bootstrap) {
	if b == nil {
		return
	}
	if len(b.Hosts) > 4096 || len(b.Ports) > 4096 || len(b.Rooms) > 4096 || b.Hosts == nil && b.Ports == nil && b.Rooms == nil {
		t.Fatalf("%+v", b)
	}
	for _, h := range b.Hosts {
		if len(h) > 255 {
			t.Fatalf("a host of %d bytes", len(h))
		}
	}
	for _, p := range b.Ports {
		if p < 0 || p > 65535 {
			t.Fatalf("port %d", p)
		}
	}
	for _, r := range b.Rooms {
		if r < 0 {
			t.Fatalf("room %d", r)
		}
	}
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

// FuzzGiven: one of result and error; what is returned is in range.
func FuzzGiven(f *testing.F) {
	for _, s := range append(seeds,
		`{"created":1732550000,"prompt":"0123456789abcdef","choices":[{"ids":[1,2,3]},{"ids":[7],"done":true},{"ids":[]}]}`,
		`{"created":1,"prompt":"0123456789abcdef","choices":[{"ids":null,"x":[{}]},{},null]}`,
		`{"created":1e3,"prompt":"0123456789abcdef","choices":[{"ids":[1.0,2e0]}],"choices":[{}]}`) {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		g, err := openai.ParseGiven(text, 100, 4)
		if (g == nil) == (err == nil) {
			t.Fatal("one of result and error")
		}
		if err != nil {
			if err.Status != 400 || err.Message == "" {
				t.Fatalf("%+v", err)
			}
			return
		}
		if n := len(g.Choices); n < 1 || n > 4 || g.Created < 1 || len(g.Prompt) != 16 || !json.Valid(text) {
			t.Fatalf("%+v", g)
		}
		for _, c := range g.Choices {
			for _, id := range c.IDs {
				if id < 0 || id >= 100 {
					t.Fatalf("token %d", id)
				}
			}
		}
	})
}

// TestParseGiven: what is wrong is refused and named.
func TestParseGiven(t *testing.T) {
	const head = `{"created":5,"prompt":"0123456789abcdef",`
	g, err := openai.ParseGiven([]byte(head+`"choices":[{"ids":[1,99]},{"done":true,"ids":[]},{}],"later":{}}`), 100, 3)
	if err != nil || g.Created != 5 || g.Prompt != "0123456789abcdef" || len(g.Choices) != 3 ||
		!slices.Equal(g.Choices[0].IDs, []int32{1, 99}) || g.Choices[0].Done || !g.Choices[1].Done || g.Choices[2].IDs != nil {
		t.Errorf("%+v %v", g, err)
	}
	for text, param := range map[string]string{
		``: "", `[]`: "", `{`: "", `{} x`: "", "{\"a\":\"\xff\"}": "",
		`{"prompt":"0123456789abcdef","choices":[{}]}`:               "created",
		`{"created":-1,"prompt":"0123456789abcdef","choices":[{}]}`:  "created",
		`{"created":1,"choices":[{}]}`:                               "prompt",
		`{"created":1,"prompt":"0123456789ABCDEF","choices":[{}]}`:   "prompt",
		`{"created":1,"prompt":"0123456789abcdef0","choices":[{}]}`:  "prompt",
		`{"created":1,"prompt":["0123456789abcdef"],"choices":[{}]}`: "prompt",
		head + `"choices":[]}`:                                       "choices",
		head + `"choices":{}}`:                                       "choices",
		head + `"choices":[[]]}`:                                     "choices",
		head + `"choices":[null]}`:                                   "choices",
		head + `"choices":[{},{},{},{}]}`:                            "choices",
		head + `"choices":[{"ids":[100]}]}`:                          "ids",
		head + `"choices":[{"ids":[-1]}]}`:                           "ids",
		head + `"choices":[{"ids":[1.5]}]}`:                          "ids",
		head + `"choices":[{"ids":["1"]}]}`:                          "ids",
		head + `"choices":[{"ids":1}]}`:                              "ids",
		head + `"choices":[{"done":1}]}`:                             "done",
		head + `"choices":[{"ids":[4294967297]}]}`:                   "ids",
	} {
		if g, err := openai.ParseGiven([]byte(text), 100, 3); g != nil || err == nil || err.Status != 400 || err.Param != param {
			t.Errorf("%s: %+v %+v", text, g, err)
		}
	}
}
