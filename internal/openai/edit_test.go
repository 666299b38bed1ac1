package openai_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

func scan(t testing.TB, body string) *openai.Top {
	t.Helper()
	top, err := openai.Scan([]byte(body))
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return &top
}

func TestEdit(t *testing.T) {
	f := func(body string, change func(*openai.Edit), want string) {
		t.Helper()
		e := openai.NewEdit([]byte(body), scan(t, body))
		change(e)
		if got := string(slices.Concat(e.Parts()...)); got != want {
			t.Errorf("%s\n got %s\nwant %s", body, got, want)
		}
	}
	one := func(e *openai.Edit) {
		e.Set(openai.Stream, "false")
		e.Remove(openai.StreamOptions)
		e.Set(openai.MaxTokens, "1")
		e.Replace(openai.MaxCompletionTokens, "1")
		e.Remove(openai.MinTokens)
		e.Add("x", "{}")
	}
	f(`{}`, one, `{"stream":false,"max_tokens":1,"x":{}}`)
	f(`{ "prompt" : "a" , "stream":true, "stream_options":{"include_usage":true},"max_tokens":9, "t":1.50 }`, one,
		`{ "prompt" : "a" , "stream":false, "max_tokens":1, "t":1.50 ,"x":{}}`)
	f(`{"stream_options":{},"min_tokens":3}`, one, `{"stream":false,"max_tokens":1,"x":{}}`)
	f(`{"max_completion_tokens":7,"p":2,"stream_options":1,"min_tokens":3 }`, one,
		`{"max_completion_tokens":1,"p":2,"stream":false,"max_tokens":1,"x":{}}`)
	f(`{"a":1,"stream_options":1, "min_tokens":3 }`, func(e *openai.Edit) { e.Remove(openai.MinTokens); e.Remove(openai.StreamOptions) }, `{"a":1}`)
	f("{\"min_tokens\":3\n}", func(e *openai.Edit) { e.Remove(openai.MinTokens) }, "{\n}")
	f(`{"str\u0065am":true}`, func(e *openai.Edit) { e.Set(openai.Stream, "false") }, `{"str\u0065am":false}`)

	if top := scan(t, `{"stream":true,"stream":false}`); top.Twice != "stream" {
		t.Errorf("twice: %q", top.Twice)
	}
}

func TestScanShapes(t *testing.T) {
	f := func(body string, prompts int, echo, logprobs, prompt bool) {
		t.Helper()
		top := scan(t, body)
		if top.Prompts != prompts || top.Echo != echo || top.Logprobs != logprobs || top.PromptLogprobs != prompt {
			t.Errorf("%s: %d %v %v %v", body, top.Prompts, top.Echo, top.Logprobs, top.PromptLogprobs)
		}
	}
	f(`{"prompt":"x"}`, 1, false, false, false)
	f(`{"prompt":[1,2,3],"echo":true,"logprobs":0}`, 1, true, true, false)
	f(`{"prompt":["a","b"],"echo":false,"logprobs":null,"prompt_logprobs":1}`, 2, false, false, true)
	f(`{"prompt":[[1],[2],[3]],"logprobs":false,"prompt_logprobs":null}`, 3, false, false, false)
	f(`{"prompt":["a","b"],"messages":[{"role":"user","content":"x"}]}`, 1, false, false, false)
}

// TestScanMaxTokens: in a chat max_completion_tokens wins, wherever it stands; elsewhere it means
// nothing. Workers read it so, and a client's tokens are limited and charged by it.
func TestScanMaxTokens(t *testing.T) {
	f := func(body string, want int) {
		t.Helper()
		if top := scan(t, body); top.MaxTokens != want {
			t.Errorf("%s: %d", body, top.MaxTokens)
		}
	}
	f(`{"messages":[{"content":"x"}],"max_completion_tokens":400,"max_tokens":1}`, 400)
	f(`{"max_tokens":1,"max_completion_tokens":400,"messages":[{"content":"x"}]}`, 400)
	f(`{"messages":[{"content":"x"}],"max_tokens":7,"max_completion_tokens":null}`, 7)
	f(`{"prompt":"x","max_tokens":300,"max_completion_tokens":1}`, 300)
	f(`{"prompt":"x","max_completion_tokens":5}`, 0)
}

// TestScanPrompt: which field the prompt is in; the last one counts, null is none.
func TestScanPrompt(t *testing.T) {
	f := func(body, prompt string, messages bool) {
		t.Helper()
		if top := scan(t, body); string(top.Prompt) != prompt || top.Messages != messages {
			t.Errorf("%s: %s, messages %t", body, top.Prompt, top.Messages)
		}
	}
	f(`{"prompt":"x"}`, `"x"`, false)
	f(`{"messages":[{"role":"user","content":"x"}]}`, `[{"role":"user","content":"x"}]`, true)
	f(`{"messages":[{"content":"x"}],"prompt":[1]}`, `[1]`, false)
	f(`{"prompt":[1],"messages":[{"content":"x"}]}`, `[{"content":"x"}]`, true)
	f(`{"model":"m"}`, ``, false)
	f(`{"messages":[{"content":"x"}],"prompt":null}`, ``, true)
	f(`{"prompt":[1],"messages":null}`, ``, false)
}

// FuzzEdit: whatever is set, removed and added, the result is valid JSON, has
// what was set, lacks what was removed, and everything else byte for byte.
func FuzzEdit(f *testing.F) {
	for i, s := range seeds {
		f.Add([]byte(s), uint64(i)*0x9e3779b97f4a7c15)
	}
	f.Add([]byte(`{"stream_options":{} , "min_tokens":3,"stream":true }`), uint64(0x2a))
	f.Fuzz(func(t *testing.T, body []byte, choose uint64) {
		top, serr := openai.Scan(body)
		if serr != nil || top.Twice != "" {
			return
		}
		e := openai.NewEdit(body, &top)
		want := map[string]string{}
		var before map[string]json.RawMessage
		if err := json.Unmarshal(body, &before); err != nil {
			t.Fatal(err)
		}
		for k, v := range before {
			want[k] = string(bytes.TrimSpace(v))
		}
		for f := openai.Stream; f <= openai.PrefillDPRank; f++ {
			switch choose >> (2 * f) & 3 {
			case 1:
				e.Set(f, `"new"`)
				want[f.String()] = `"new"`
			case 2:
				e.Remove(f)
				delete(want, f.String())
			}
		}
		if _, taken := before["added"]; !taken && choose>>63 == 1 {
			e.Add("added", "[1]")
			want["added"] = "[1]"
		}
		got := slices.Concat(e.Parts()...)
		var after map[string]json.RawMessage
		if err := json.Unmarshal(got, &after); err != nil {
			t.Fatalf("%q became %q: %v", body, got, err)
		}
		if len(after) != len(want) {
			t.Fatalf("%q became %q: %d members, want %d", body, got, len(after), len(want))
		}
		for k, v := range want {
			if string(bytes.TrimSpace(after[k])) != v {
				t.Fatalf("%q became %q: %s is %s", body, got, k, after[k])
			}
		}
		if joined := bytes.Join(e.Parts(), nil); !bytes.Equal(joined, got) {
			t.Fatalf("Parts %q, Bytes %q", joined, got)
		}
	})
}

func TestMergeUsage(t *testing.T) {
	u := openai.PromptUsage{Prompt: 9, Cached: 4}
	f := func(body, want string) {
		t.Helper()
		if got := string(openai.MergeUsage([]byte(body), u)); got != want {
			t.Errorf("%s\n got %s\nwant %s", body, got, want)
		}
	}
	f(`{"a": 1.0,"usage": {"prompt_tokens":8,"completion_tokens":3, "total_tokens":11,"x":[ ]},"b":2}`,
		`{"a": 1.0,"usage": {"prompt_tokens":9,"completion_tokens":3, "total_tokens":12,"x":[ ],"prompt_tokens_details":{"cached_tokens":4}},"b":2}`)
	f(`{"usage":{"prompt_tokens":8,"completion_tokens":3,"total_tokens":11,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":8}}}`,
		`{"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":4}}}`)
	f(`{"usage":{}}`, `{"usage":{"prompt_tokens":9,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}`)
	f(`{"usage":{"completion_tokens":-1,"prompt_tokens_details":null}}`,
		`{"usage":{"completion_tokens":-1,"prompt_tokens_details":{"cached_tokens":4},"prompt_tokens":9,"total_tokens":9}}`)
	u = openai.PromptUsage{Prompt: 9, Cached: 0}
	f(`{"usage":{"prompt_tokens":1}}`, `{"usage":{"prompt_tokens":9,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}`)
	u = openai.PromptUsage{Prompt: 9, Cached: -1}
	f(`{"usage":{"prompt_tokens_details":{"cached_tokens":4}}}`, `{"usage":{"prompt_tokens_details":null,"prompt_tokens":9,"total_tokens":9}}`)
	f(`{"usage":[]}`, `{"usage":[]}`)
	f(`{"usage":{}`, `{"usage":{}`)
	u = openai.PromptUsage{Prompt: 9, Cached: 4}
	f(`{"usage":null}`, `{"usage":null}`)
	f(`{"choices":[]}`, `{"choices":[]}`)

	run := "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n"
	want := "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"total_tokens\":11,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n"
	for _, form := range []*strings.Replacer{strings.NewReplacer(), strings.NewReplacer("\n", "\r\n", "data: ", "data:")} {
		if got := string(openai.MergeUsageEvents([]byte(form.Replace(run)), u)); got != form.Replace(want) {
			t.Errorf("%q", got)
		}
	}
	for _, run := range []string{"", "data: {\"choices\":[]}\n\n", "data: {\"text\":\"usage\\\":{\"}\n\n", "data: {\"usage\": null}\n\n",
		"usage\":{", "usage\":usage\":{}"} {
		if got := string(openai.MergeUsageEvents([]byte(run), u)); got != run {
			t.Errorf("%q became %q", run, got)
		}
		if openai.HasUsage([]byte(run)) {
			t.Errorf("%q has a usage", run)
		}
	}
	for _, run := range []string{`usage":1,"usage":{}`, `"usage":{`, `"usage":  {`, `"usage":null,"usage": {`} {
		if !openai.HasUsage([]byte(run)) {
			t.Errorf("%q has no usage", run)
		}
	}
	bare := "{\"usage\":{\"prompt_tokens\":1}}\n" // no data
	if got := string(openai.MergeUsageEvents([]byte(bare+run), u)); got != bare+want {
		t.Errorf("%q", got)
	}
	both := "data: {\"usage\":null}\n\n" + run
	if got := string(openai.MergeUsageEvents([]byte(both), u)); !openai.HasUsage([]byte(both)) || got != "data: {\"usage\":null}\n\n"+want {
		t.Errorf("%q", got)
	}
	for body, want := range map[string]openai.PromptUsage{
		`{"usage":{"prompt_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}}`:             {},
		`{"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":-2}}}`:            {Prompt: 7, Cached: -1},
		`{"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":2}}}`:             {Prompt: 7, Cached: 2},
		`{"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}`:                            {Prompt: 7, Cached: -1},
		"data: {\"usage\":null}\n\ndata: {\"usage\":{\"prompt_tokens\":5}}\n\ndata: [DONE]\n\n": {Prompt: 5, Cached: -1},
	} {
		if got, ok, _ := openai.ReadUsage([]byte(body), ""); !ok || got != want {
			t.Errorf("%s: %+v %v", body, got, ok)
		}
	}
	for body, value := range map[string]string{
		`{"usage":null,"id":5}`: "5", `{"usage":{},"id":null}`: "", `{"usage":{"prompt_tokens":-1},"id":"x"}`: `"x"`, `{"usage":{"prompt_tokens":"1"}}`: "",
		`{"id":[1],"usage":3}`: "[1]", `{"usage":{"prompt_tokens":1},"id":2`: "", `[]`: "",
	} {
		if got, ok, v := openai.ReadUsage([]byte(body), "id"); ok || got != (openai.PromptUsage{}) || string(v) != value {
			t.Errorf("%s: %+v, %t, %s", body, got, ok, v)
		}
	}
	if _, ok, v := openai.ReadUsage([]byte(`{"id":{"a":1},"usage":{"prompt_tokens":1}}`), "id"); !ok || string(v) != `{"a":1}` {
		t.Errorf("%t, %s", ok, v)
	}
}

// TestWith: members are set in place or appended, however many, and Member reads them.
func TestWith(t *testing.T) {
	f := func(object, want string, set ...[2]string) {
		t.Helper()
		if got := string(openai.With([]byte(object), set...)); got != want {
			t.Errorf("%s: have %s, want %s", object, got, want)
		}
	}
	f(`{}`, `{"a":1}`, [2]string{"a", "1"})
	f(` { "b" : 2 } `, ` { "b" : 2 ,"a":1} `, [2]string{"a", "1"})
	f(`{"a":0,"b":2,"a":3}`, `{"a":1,"b":2,"a":1}`, [2]string{"a", "1"})
	f(`{"c":0,"a":0}`, `{"c":3,"a":1,"b":2,"d":4}`, [2]string{"a", "1"}, [2]string{"b", "2"}, [2]string{"c", "3"}, [2]string{"d", "4"})
	f(`{"e":0}`, `{"e":5,"a":1,"b":2,"c":3,"d":4}`, [2]string{"a", "1"}, [2]string{"b", "2"}, [2]string{"c", "3"}, [2]string{"d", "4"}, [2]string{"e", "5"})
	f(`{"a":1}`, `{"a":1}`)
	f(`[1]`, `[1]`, [2]string{"a", "1"})
	f(`{"a":1`, `{"a":1`, [2]string{"a", "2"})
	for body, want := range map[string]string{`{"a":1,"b":[2]}`: "[2]", `{"b":null}`: "", `{"b":1,"b":2}`: "2", `{"b":1`: "", `{"b":1}x`: "", `[]`: "", `{"a":{"b":1}}`: ""} {
		if got := openai.Member([]byte(body), "b"); string(got) != want {
			t.Errorf("%s: %s, want %s", body, got, want)
		}
	}
}

// FuzzWith: the result is valid when the object was, and has what was set.
func FuzzWith(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s), "x")
	}
	f.Fuzz(func(t *testing.T, object []byte, key string) {
		got := openai.With(object, [2]string{key, `"v"`})
		// In another object, so that what Member says no to (depth, UTF-8) is left out.
		within := []byte(`{"o":` + string(object) + `}`)
		if !json.Valid(object) || openai.Member(within, "o") == nil || strings.ToValidUTF8(key, "") != key {
			return
		}
		if bytes.TrimSpace(object)[0] == '{' && string(openai.Member(got, key)) != `"v"` {
			t.Fatalf("%q with %q: %q", object, key, got)
		}
	})
}
