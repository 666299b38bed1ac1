package openai_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// events returns the JSON of each event of an SSE body, and checks [DONE].
func events(t *testing.T, body []byte) []map[string]any {
	t.Helper()
	var out []map[string]any
	done := false
	s := bufio.NewScanner(bytes.NewReader(body))
	for s.Scan() {
		data, ok := strings.CutPrefix(s.Text(), "data: ")
		switch {
		case s.Text() == "":
		case !ok || done:
			t.Fatalf("line %q", s.Text())
		case data == "[DONE]":
			done = true
		default:
			var m map[string]any
			if err := json.Unmarshal([]byte(data), &m); err != nil {
				t.Fatalf("%s: %v", data, err)
			}
			out = append(out, m)
		}
	}
	if !done {
		t.Fatal("no [DONE]")
	}
	return out
}

// shape describes a value by its keys and types; null matches anything, so
// it is left out.
func shape(prefix string, v any, out map[string]string) {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			shape(prefix+"."+k, x, out)
		}
	case []any:
		for _, x := range v {
			shape(prefix+"[]", x, out)
		}
	case nil:
	default:
		out[prefix] = reflect.TypeOf(v).Kind().String()
	}
}

// TestChatStreamsLikeRecorded replays recorded streams through the encoder
// and compares what a client would read: every field that both have, of the
// same type and value.
func TestChatStreamsLikeRecorded(t *testing.T) {
	files, _ := filepath.Glob("testdata/sse/*.sse")
	if len(files) != 4 {
		t.Fatalf("have %v", files)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			body, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			want := events(t, body)
			first := want[0]
			v := &vocab{}
			enc := openai.NewEncoder(openai.Meta{ID: first["id"].(string), Model: first["model"].(string),
				Created: int64(first["created"].(float64)), Chat: true, IncludeUsage: true, Vocab: v})
			var out []byte
			for _, m := range want {
				out = replay(enc, v, out, m)
			}
			got := events(t, openai.AppendDone(out))
			if len(got) != len(want) {
				t.Fatalf("%d events, want %d", len(got), len(want))
			}
			for i := range want {
				a, b := map[string]string{}, map[string]string{}
				shape("", want[i], a)
				shape("", got[i], b)
				for k, kind := range a {
					if k == ".system_fingerprint" || strings.HasPrefix(k, ".usage.completion_tokens_details") {
						continue
					}
					if b[k] != kind {
						t.Errorf("event %d: %s is %q, want %q", i, k, b[k], kind)
					}
				}
				if !reflect.DeepEqual(got[i]["id"], want[i]["id"]) {
					t.Errorf("event %d: id", i)
				}
				if !reflect.DeepEqual(content(got[i]), content(want[i])) {
					t.Errorf("event %d:\n got %v\nwant %v", i, content(got[i]), content(want[i]))
				}
			}
		})
	}
}

// vocab is a vocabulary that grows with what is asked of it.
type vocab struct {
	text  []string
	bytes [][]byte
}

func (v *vocab) TokenText(id int32) string  { return v.text[id] }
func (v *vocab) TokenBytes(id int32) []byte { return v.bytes[id] }

func (v *vocab) add(text string, raw []byte) int32 {
	v.text, v.bytes = append(v.text, text), append(v.bytes, raw)
	return int32(len(v.text) - 1)
}

func replay(enc *openai.Encoder, v *vocab, out []byte, m map[string]any) []byte {
	if u, ok := m["usage"].(map[string]any); ok {
		return enc.AppendUsage(out, openai.Usage{Prompt: int(u["prompt_tokens"].(float64)), Completion: int(u["completion_tokens"].(float64))})
	}
	c := m["choices"].([]any)[0].(map[string]any)
	delta := c["delta"].(map[string]any)
	choice := openai.Choice{Index: int(c["index"].(float64))}
	choice.Text, _ = delta["content"].(string)
	_, choice.Role = delta["role"]
	for _, x := range list(delta["tool_calls"]) {
		x := x.(map[string]any)
		f := x["function"].(map[string]any)
		call := openai.ToolCall{Index: int(x["index"].(float64)), Arguments: f["arguments"].(string)}
		call.ID, _ = x["id"].(string)
		call.Name, _ = f["name"].(string)
		choice.Calls = append(choice.Calls, call)
	}
	choice.Finish, _ = c["finish_reason"].(string)
	if lp, ok := c["logprobs"].(map[string]any); ok {
		choice.Logprobs = []openai.TokenLogprob{}
		for _, x := range lp["content"].([]any) {
			x := x.(map[string]any)
			var raw []byte
			for _, b := range x["bytes"].([]any) {
				raw = append(raw, byte(b.(float64)))
			}
			choice.Logprobs = append(choice.Logprobs, openai.TokenLogprob{
				TopLogprob: openai.TopLogprob{ID: v.add(x["token"].(string), raw), Logprob: float32(x["logprob"].(float64))}})
		}
	}
	return enc.AppendChunk(out, &choice, nil)
}

// content is what clients act on.
func content(m map[string]any) []any {
	out := []any{m["object"], m["created"], m["model"]}
	for _, c := range m["choices"].([]any) {
		c := c.(map[string]any)
		d := c["delta"].(map[string]any)
		text := d["content"]
		if text == "" {
			text = nil // of a chunk that says who speaks
		}
		out = append(out, c["index"], c["finish_reason"], d["role"], text, d["tool_calls"], c["logprobs"])
	}
	return out
}

func list(v any) []any {
	l, _ := v.([]any)
	return l
}

// TestCallsAndReasoning: what an answer has beside its text, whole and in a stream.
func TestCallsAndReasoning(t *testing.T) {
	enc := openai.NewEncoder(openai.Meta{ID: "i", Model: "m", Created: 5, Chat: true})
	calls := []openai.ToolCall{{ID: "call_1", Name: "f", Arguments: `{"a":"\n"}`}, {Index: 1, ID: "call_2", Name: "g\"", Arguments: "{}"}}
	f := func(c openai.Choice, message, delta string) {
		t.Helper()
		if got := string(enc.AppendFull(nil, []openai.Choice{c}, openai.Usage{})); !strings.Contains(got, `"message":{"role":"assistant",`+message+`,"refusal":null}`) {
			t.Errorf("have %s\nwant %s", got, message)
		}
		if got := string(enc.AppendChunk(nil, &c, nil)); !strings.Contains(got, `"delta":{`+delta+`},"logprobs"`) {
			t.Errorf("have %s\nwant %s", got, delta)
		}
	}
	const first = `{"id":"call_1","type":"function","function":{"name":"f","arguments":"{\"a\":\"\\n\"}"}}`
	const second = `{"id":"call_2","type":"function","function":{"name":"g\"","arguments":"{}"}}`
	streamed := `"tool_calls":[{"index":0,` + first[1:] + `,{"index":1,` + second[1:] + `]`
	f(openai.Choice{Calls: calls}, `"content":null,"tool_calls":[`+first+`,`+second+`]`, streamed)
	f(openai.Choice{Calls: calls, Role: true}, `"content":null,"tool_calls":[`+first+`,`+second+`]`, `"role":"assistant","content":null,`+streamed)
	f(openai.Choice{Calls: calls, Text: "x"}, `"content":"x","tool_calls":[`+first+`,`+second+`]`, `"content":"x",`+streamed)
	f(openai.Choice{Reasoning: "r\n"}, `"content":"","reasoning_content":"r\n","reasoning":"r\n"`, `"reasoning_content":"r\n","reasoning":"r\n"`)
	f(openai.Choice{Role: true, NoText: true}, `"content":""`, `"role":"assistant","content":null`)
	f(openai.Choice{Role: true}, `"content":""`, `"role":"assistant","content":"","refusal":null`)
	f(openai.Choice{End: true, Finish: "stop", TokenIDs: []int32{1}}, `"content":""`, ``)
	f(openai.Choice{Reasoning: "r", Text: "x", Calls: calls[1:]}, `"content":"x","reasoning_content":"r","reasoning":"r","tool_calls":[`+second+`]`,
		`"content":"x","reasoning_content":"r","reasoning":"r","tool_calls":[{"index":1,`+second[1:]+`]`)
	if got := string(enc.AppendChunk(nil, &openai.Choice{Calls: []openai.ToolCall{{Index: 3, Arguments: "x"}}}, nil)); !strings.Contains(got, `"delta":{"tool_calls":[{"index":3,"function":{"arguments":"x"}}]}`) {
		t.Errorf("a piece: %s", got)
	}
	usage := func(u openai.Usage, want string) {
		t.Helper()
		if got := string(enc.AppendUsage(nil, u)); !strings.Contains(got, `"prompt_tokens_details":{"cached_tokens":0}`+want+`}`) {
			t.Errorf("have %s, want %s", got, want)
		}
	}
	usage(openai.Usage{Completion: 7, Reasoning: 5, Reasons: true}, `,"completion_tokens_details":{"reasoning_tokens":5}`)
	usage(openai.Usage{Completion: 7, Reasons: true}, `,"completion_tokens_details":{"reasoning_tokens":0}`)
	usage(openai.Usage{Completion: 7}, ``)
}

func keys(m map[string]any) string {
	var ks []string
	for k := range m {
		ks = append(ks, k)
	}
	sort.Strings(ks)
	return strings.Join(ks, " ")
}

func TestFullShapes(t *testing.T) {
	v := &vocab{text: []string{"", "<s>", `a"`, "b", "b", "c"}, bytes: [][]byte{nil, nil, []byte(`a"`), nil, nil, nil}}
	lps := []openai.TokenLogprob{
		{TopLogprob: openai.TopLogprob{ID: 1}, None: true},
		{TopLogprob: openai.TopLogprob{ID: 2, Logprob: -0.5}, Offset: 3,
			Top: []openai.TopLogprob{{ID: 3, Logprob: -0.25}, {ID: 2, Logprob: -0.5}, {ID: 4, Logprob: float32(math.Inf(-1))}, {ID: 5, Logprob: -3}}},
	}
	choices := []openai.Choice{
		{Index: 0, Text: "x\u0000\u2028é", Finish: "stop", StopString: "\n", Logprobs: lps, PromptLogprobs: lps, TokenIDs: []int32{5, 6}, PromptTokenIDs: []int32{1}},
		{Index: 1, Text: "\xff", Finish: "length", StopToken: 1},
	}
	f := func(chat bool, wantTop, wantChoice string) (choice, whole map[string]any) {
		t.Helper()
		enc := openai.NewEncoder(openai.Meta{ID: "i", Model: "m", Created: 5, Chat: chat, ReturnTokenIDs: true, Vocab: v})
		b := enc.AppendFull(nil, choices, openai.Usage{Prompt: 3, Completion: 4, Cached: 2})
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		c := m["choices"].([]any)[0].(map[string]any)
		if keys(m) != wantTop || keys(c) != wantChoice {
			t.Errorf("keys %q, %q", keys(m), keys(c))
		}
		u := m["usage"].(map[string]any)
		if u["total_tokens"] != 7.0 || u["prompt_tokens_details"].(map[string]any)["cached_tokens"] != 2.0 {
			t.Errorf("usage %v", u)
		}
		if c1 := m["choices"].([]any)[1].(map[string]any); c1["stop_reason"] != 0.0 {
			t.Errorf("stop_reason %v", c1["stop_reason"])
		}
		return c, m
	}
	top := "choices created id model object system_fingerprint usage"
	c, _ := f(false, top, "finish_reason index logprobs prompt_logprobs prompt_token_ids stop_reason text token_ids")
	if c["text"] != "x\u0000\u2028é" || c["stop_reason"] != "\n" {
		t.Errorf("text %q, stop_reason %q", c["text"], c["stop_reason"])
	}
	got, _ := json.Marshal(c["logprobs"])
	want := `{"text_offset":[0,3],"token_logprobs":[null,-0.5],"tokens":["\u003cs\u003e","a\""],"top_logprobs":[null,{"a\"":-0.5,"b":-0.25,"c":-3}]}`
	if string(got) != want {
		t.Errorf("logprobs %s", got)
	}
	prompt := func(of map[string]any) {
		t.Helper()
		if got, _ = json.Marshal(of["prompt_logprobs"]); string(got) != want {
			t.Errorf("prompt_logprobs %s", got)
		}
		if got, _ = json.Marshal(of["prompt_token_ids"]); string(got) != "[1]" {
			t.Errorf("prompt_token_ids %s", got)
		}
	}
	want = `[null,{"2":{"decoded_token":"a\"","logprob":-0.5,"rank":2},"3":{"decoded_token":"b","logprob":-0.25,"rank":1},"4":{"decoded_token":"b","logprob":-9999,"rank":3},"5":{"decoded_token":"c","logprob":-3,"rank":4}}]`
	prompt(c)
	c, whole := f(true, "choices created id model object prompt_logprobs prompt_token_ids system_fingerprint usage", "finish_reason index logprobs message stop_reason token_ids")
	prompt(whole)
	if k := keys(c["message"].(map[string]any)); k != "content refusal role" {
		t.Errorf("message keys %q", k)
	}
	entry := c["logprobs"].(map[string]any)["content"].([]any)[1].(map[string]any)
	if k := keys(entry); k != "bytes logprob token top_logprobs" {
		t.Errorf("logprob keys %q", k)
	}
}

func TestErrorShape(t *testing.T) {
	f := func(err *openai.Error, want string) {
		t.Helper()
		if got := string(err.Append(nil)); got != want {
			t.Errorf("got %s", got)
		}
	}
	f(openai.BadRequest("n", "n is %q", `"`), `{"error":{"message":"n is \"\\\"\"","type":"invalid_request_error","param":"n","code":null}}`)
	f(openai.Upstream("gone"), `{"error":{"message":"gone","type":"server_error","param":null,"code":"engine_failed"}}`)
}

func TestErrorMessage(t *testing.T) {
	long := strings.Repeat("é", 150)
	for body, want := range map[string]string{
		`{"error":{"message":"a"}}`:            "a",
		`{"object":"error","message":"b"}`:     "b",
		`{"error":"c"}`:                        `{"error":"c"}`,
		`{"error":"c","message":"e"}`:          "e",
		`{"message":"f`:                        `{"message":"f`,
		`d`:                                    "d",
		``:                                     "",
		`x` + long:                             "x" + long[:198] + "…",
		`{"error":{"message":"` + long + `"}}`: long[:200] + "…",
	} {
		if got := openai.ErrorMessage([]byte(body)); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}

func TestChunkAllocatesNothing(t *testing.T) {
	v := &vocab{text: []string{"a", "b"}, bytes: [][]byte{[]byte("a"), nil}}
	c := openai.Choice{Index: 1, Text: "hello \"world\"\n", TokenIDs: []int32{1, 2}, Logprobs: []openai.TokenLogprob{
		{TopLogprob: openai.TopLogprob{ID: 0, Logprob: -1}, Top: []openai.TopLogprob{{ID: 1, Logprob: -2}}}}}
	usage := openai.Usage{Prompt: 1}
	for _, chat := range []bool{false, true} {
		enc := openai.NewEncoder(openai.Meta{ID: "i", Model: "m", Chat: chat, ReturnTokenIDs: true, Vocab: v})
		buf := make([]byte, 0, 4096)
		if n := testing.AllocsPerRun(100, func() { buf = enc.AppendChunk(buf[:0], &c, &usage) }); n != 0 {
			t.Errorf("chat %v: %v allocations a chunk", chat, n)
		}
	}
}

func TestScanAllocations(t *testing.T) {
	body := []byte(`{"model":"m","prompt":"` + strings.Repeat("word ", 2000) + `","x":[{"a":1,"b":[2,3]},{"c":{}}],"seed":1}`)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := openai.Scan(body); err != nil {
			t.Fatal(err)
		}
	}); n > 4 {
		t.Errorf("%v allocations a scan", n)
	}
}

func BenchmarkScan(b *testing.B) {
	for name, body := range map[string]string{
		"prompt": `{"model":"m","prompt":"` + strings.Repeat("word ", 20000) + `","max_tokens":16,"stream":true}`,
		"short":  `{"model":"m","prompt":"Hello there","max_tokens":16,"stream":true}`,
		"chat":   `{"model":"m","messages":[` + strings.Repeat(`{"role":"user","content":"What is it?"},`, 20) + `{"role":"user","content":"Well?"}],"stream":true}`,
		"ids":    `{"model":"m","prompt":[` + strings.Repeat("1234,", 20000) + `5],"max_tokens":16}`,
	} {
		b.Run(name, func(b *testing.B) {
			body := []byte(body)
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := openai.Scan(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkChunk(b *testing.B) {
	enc := openai.NewEncoder(openai.Meta{ID: "cmpl-0123456789abcdef", Model: "stories260k"})
	c := openai.Choice{Text: " hello"}
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf = enc.AppendChunk(buf[:0], &c, nil)
	}
}
