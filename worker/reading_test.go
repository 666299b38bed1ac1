package worker_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/worker"
)

// scripted is a device that draws a given text's bytes behind a prompt of given length, and then the
// end of the answer.
type scripted struct {
	pool
	script atomic.Pointer[script]
}

// pool is what a worker asks of the device under it.
type pool interface {
	kernels.Backend
	kernels.Viewer
	kernels.Sharer
}

type script struct {
	at  int // the prompt's length
	ids []int32
}

func (d *scripted) Step(s *kernels.Step) ([]kernels.Result, error) {
	results, err := d.pool.Step(s)
	sc := d.script.Load()
	if err != nil || sc == nil {
		return results, err
	}
	for i := range s.Seqs {
		for j, sample := range s.Seqs[i].Samples {
			id := int32(2) // </s>
			if n := sample.Position - sc.at; n >= 0 && n < len(sc.ids) {
				id = sc.ids[n]
			}
			results[i].Samples[j].Token = id
			results[i].Samples[j].Self.ID = id
		}
	}
	return results, nil
}

// theater is a worker whose model says what a test has it say.
type theater struct {
	*worker.Worker
	t      *testing.T
	device *scripted
}

// stage starts a theater with a chat template.
func stage(t *testing.T, template string, change func(*worker.Config)) *theater {
	t.Helper()
	dir := talking(t)
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	th := &theater{t: t, device: &scripted{}}
	th.Worker = start(t, func(c *worker.Config) {
		c.Model = dir
		if change != nil {
			change(c)
		}
	}, func(d *worker.Deps) {
		d.Backend = func(b kernels.Backend) kernels.Backend {
			th.device.pool = b.(pool)
			return th.device
		}
	})
	return th
}

// says has the model answer the request of body with text.
func (th *theater) says(body, text string) {
	th.t.Helper()
	resp, b := ask(th.t, th.URL()+"/tokenize", nil, body)
	var n struct{ Count int }
	if err := json.Unmarshal(b, &n); err != nil || resp.StatusCode != 200 {
		th.t.Fatalf("%d %s", resp.StatusCode, b)
	}
	s := &script{at: n.Count}
	for _, c := range []byte(text) {
		s.ids = append(s.ids, 3+int32(c)) // the vocabulary has each byte at 3
	}
	th.device.script.Store(s)
}

// spoken is a choice's message, whole or put together from a stream.
type spoken struct {
	Content, Reasoning string
	null               bool // content is null
	Calls              []spokenCall
	Finish             string
	usage              string
	deltas             int // with calls
}

type spokenCall struct{ ID, Name, Arguments string }

type toolCall struct {
	Index    *int
	ID, Type string
	Function struct{ Name, Arguments *string }
}

type message struct {
	Role             string
	Content          *string
	ReasoningContent *string `json:"reasoning_content"`
	Reasoning        *string
	ToolCalls        []toolCall `json:"tool_calls"`
}

// hear posts a chat and puts its first choice together.
func (th *theater) hear(header map[string]string, body string) (out spoken) {
	th.t.Helper()
	resp, b := ask(th.t, th.URL()+"/v1/chat/completions", header, body)
	if resp.StatusCode != 200 {
		th.t.Fatalf("%s: %d %s", body, resp.StatusCode, b)
	}
	add := func(data string, stream bool) {
		var a struct {
			Choices []struct {
				Index          int
				Message, Delta *message
				FinishReason   *string `json:"finish_reason"`
			}
			Usage json.RawMessage
		}
		if err := json.Unmarshal([]byte(data), &a); err != nil {
			th.t.Fatalf("%v: %s", err, data)
		}
		if a.Usage != nil && string(a.Usage) != "null" {
			out.usage = string(a.Usage)
		}
		for _, c := range a.Choices {
			if c.Index > 0 {
				continue
			}
			m := c.Message
			if stream {
				m = c.Delta
			}
			if m.Content != nil {
				out.Content += *m.Content
			} else if !stream {
				out.null = true
			}
			if m.ReasoningContent != nil {
				if m.Reasoning == nil || *m.Reasoning != *m.ReasoningContent {
					th.t.Errorf("two kinds of reasoning: %s", data)
				}
				out.Reasoning += *m.Reasoning
			}
			for _, call := range m.ToolCalls {
				if stream != (call.Index != nil) {
					th.t.Errorf("an index: %s", data)
				}
				out.deltas++
				if call.ID != "" {
					if call.Type != "function" || call.Function.Name == nil || stream && *call.Index != len(out.Calls) {
						th.t.Errorf("a call's beginning: %s", data)
					}
					out.Calls = append(out.Calls, spokenCall{ID: call.ID, Name: *call.Function.Name})
				} else if call.Function.Name != nil || *call.Index != len(out.Calls)-1 {
					th.t.Errorf("a piece of a call: %s", data)
				}
				out.Calls[len(out.Calls)-1].Arguments += *call.Function.Arguments
			}
			if c.FinishReason != nil {
				out.Finish = *c.FinishReason
			}
		}
	}
	if resp.Header.Get("Content-Type") == "application/json" {
		add(string(b), false)
		return out
	}
	for _, e := range strings.Split(string(b), "\n\n") {
		if data, ok := strings.CutPrefix(e, "data: "); ok && data != "[DONE]" {
			add(data, true)
		}
	}
	return out
}

const (
	// hermesTemplate shows hermes' marks and a model that thinks if it is told to.
	hermesTemplate = `{% if tools %}{{ tools | tojson }} <tool_call> {% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{% if enable_thinking %}<think>
{% endif %}{% if '</think>' in 'x' %}{% endif %}`
	userAsks = `"messages":[{"role":"user","content":"?"}]`
	hasTools = `"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}},{"type":"function","function":{"name":"g"}}]`
	twoCalls = "Wait.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"é 🙂\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\"}\n</tool_call>"
)

// TestToolCalls: what clients get of a model's calls, whole and streamed.
func TestToolCalls(t *testing.T) {
	th := stage(t, hermesTemplate, nil)
	id := regexp.MustCompile(`^call_[0-9A-Za-z]{24}$`)
	f := func(name, fields, text string, want spoken) {
		t.Helper()
		for _, stream := range []string{"", `,"stream":true,"stream_options":{"include_usage":true}`} {
			body := `{` + userAsks + `,"max_tokens":300,` + fields + stream + `}`
			th.says(strings.Replace(body, stream+"}", "}", 1), text)
			got := th.hear(nil, body)
			ids := map[string]bool{}
			for i := range got.Calls {
				if !id.MatchString(got.Calls[i].ID) || ids[got.Calls[i].ID] {
					t.Errorf("%s%s: id %q", name, stream, got.Calls[i].ID)
				}
				ids[got.Calls[i].ID] = true
				got.Calls[i].ID = ""
			}
			if stream == "" && got.null != (len(want.Calls) > 0 && want.Content == "") {
				t.Errorf("%s: content is null: %t", name, got.null)
			}
			if !strings.Contains(got.usage, want.usage) {
				t.Errorf("%s%s: usage %s, want %s", name, stream, got.usage, want.usage)
			}
			got.usage, got.null, got.deltas = want.usage, false, 0
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s%s:\nhave %+v\nwant %+v", name, stream, got, want)
			}
		}
	}
	both := []spokenCall{{Name: "f", Arguments: `{"a": "é 🙂"}`}, {Name: "g", Arguments: `{}`}}
	f("two calls", hasTools, twoCalls, spoken{Content: "Wait.\n", Calls: both, Finish: "tool_calls"})
	f("no text", hasTools, strings.TrimPrefix(twoCalls, "Wait."), spoken{Calls: both, Finish: "tool_calls"})
	f("auto", hasTools+`,"tool_choice":"auto","parallel_tool_calls":true`, twoCalls, spoken{Content: "Wait.\n", Calls: both, Finish: "tool_calls"})
	f("only one", hasTools+`,"parallel_tool_calls":false`, twoCalls, spoken{Content: "Wait.\n", Calls: both[:1], Finish: "tool_calls"})
	f("none", hasTools+`,"tool_choice":"none"`, twoCalls, spoken{Content: twoCalls, Finish: "stop"})
	f("no tools", `"n":1`, twoCalls, spoken{Content: twoCalls, Finish: "stop"})
	f("text", hasTools, "No tool.", spoken{Content: "No tool.", Finish: "stop"})
	f("not offered", hasTools, `<tool_call>{"name":"h","arguments":{}}</tool_call>`, spoken{Calls: []spokenCall{{Name: "h", Arguments: "{}"}}, Finish: "tool_calls"})
	f("broken", hasTools, `<tool_call>{"name":`, spoken{Content: `<tool_call>{"name":`, Finish: "stop"})
	f("cut off", hasTools+`,"max_tokens":100`, twoCalls, spoken{Content: "Wait.\n\n<tool_call>\n{\"name\": \"g\"", Calls: both[:1], Finish: "length"})
	f("choices and log probabilities", hasTools+`,"n":3,"logprobs":true,"top_logprobs":2,"return_token_ids":true`, twoCalls, spoken{Content: "Wait.\n", Calls: both, Finish: "tool_calls"})
	f("a stop string behind a call", hasTools+`,"stop":["\n<tool_call>\n{\"name\": \"g"]`, twoCalls, spoken{Content: "Wait.\n", Calls: both[:1], Finish: "tool_calls"})
	f("thought", hasTools+`,"chat_template_kwargs":{"enable_thinking":true}`, "Hm.</think>\n"+twoCalls,
		spoken{Reasoning: "Hm.", Content: "\nWait.\n", Calls: both, Finish: "tool_calls", usage: `"completion_tokens_details":{"reasoning_tokens":11}`})
	f("thought unbidden", `"n":1`, "<think>Hm.</think>Yes", spoken{Reasoning: "Hm.", Content: "Yes", Finish: "stop", usage: `"reasoning_tokens":12`})
	f("told not to think", `"reasoning_effort":"none"`, "Yes", spoken{Content: "Yes", Finish: "stop", usage: `"reasoning_tokens":0`})
	f("hidden", `"include_reasoning":false`, "<think>Hm.</think>Yes", spoken{Content: "Yes", Finish: "stop", usage: `"reasoning_tokens":12`})
	empty(t, th.Worker)
}

// TestToolStream: the parts of a call that are streamed, in OpenAI's order.
func TestToolStream(t *testing.T) {
	th := stage(t, hermesTemplate, nil)
	body := `{` + userAsks + `,` + hasTools + `,"stream":true}`
	th.says(strings.Replace(body, `,"stream":true`, "", 1), `<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>`)
	resp, b := ask(t, th.URL()+"/v1/chat/completions", nil, body)
	var deltas []string
	for _, m := range regexp.MustCompile(`"delta":(\{.*?\}),"logprobs":null,"finish_reason":("?\w+"?)`).FindAllSubmatch(b, -1) {
		deltas = append(deltas, regexp.MustCompile(`call_\w{24}`).ReplaceAllString(string(m[1]), "ID")+" "+string(m[2]))
	}
	piece := func(s string) string { return `{"tool_calls":[{"index":0,"function":{"arguments":"` + s + `"}}]} null` }
	want := []string{`{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":"ID","type":"function","function":{"name":"f","arguments":"{"}}]} null`,
		piece(`\"`), piece(`a`), piece(`\"`), piece(`:`), piece(`1`), piece(`}`), `{} "tool_calls"`}
	if resp.StatusCode != 200 || !reflect.DeepEqual(deltas, want) {
		t.Errorf("%d\nhave %s\nwant %s\nof %s", resp.StatusCode, strings.Join(deltas, "\n"), strings.Join(want, "\n"), b)
	}
}

// TestToolChoiceRefused: what would need a grammar is a 400 that says so.
func TestToolChoiceRefused(t *testing.T) {
	th := stage(t, hermesTemplate, nil)
	for _, choice := range []string{`"required"`, `{"type":"function","function":{"name":"f"}}`, `{"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":[]}}`} {
		resp, b := ask(t, th.URL()+"/v1/chat/completions", nil, `{`+userAsks+`,`+hasTools+`,"tool_choice":`+choice+`}`)
		if resp.StatusCode != 400 || !strings.Contains(string(b), "grammar") || !strings.Contains(string(b), `"param":"tool_choice"`) {
			t.Errorf("%s: %d %s", choice, resp.StatusCode, b)
		}
	}
}

// TestParserSettings: the settings win over what the template shows.
func TestParserSettings(t *testing.T) {
	const text = `<think>x</think>[f(a=1)]`
	body := `{` + userAsks + `,` + hasTools + `}`
	for _, c := range []struct {
		tool, think string
		want        spoken
	}{
		{"auto", "auto", spoken{Reasoning: "x", Content: "[f(a=1)]", Finish: "stop"}},
		{"pythonic", "none", spoken{Content: "<think>x</think>", Calls: []spokenCall{{Name: "f", Arguments: `{"a": 1}`}}, Finish: "tool_calls"}},
		{"none", "none", spoken{Content: text, Finish: "stop"}},
		{"none", "deepseek_r1", spoken{Reasoning: "x", Content: "[f(a=1)]", Finish: "stop"}},
	} {
		th := stage(t, hermesTemplate, func(w *worker.Config) { w.ToolParser, w.ReasoningParser = c.tool, c.think })
		th.says(body, text)
		got := th.hear(nil, body)
		for i := range got.Calls {
			got.Calls[i].ID = ""
		}
		got.usage, got.null, got.deltas = "", false, 0
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s, %s: %+v, want %+v", c.tool, c.think, got, c.want)
		}
	}
}

// TestToolCallsGiven: a stream of calls and reasoning goes on elsewhere, behind any of its events, as
// if it had never been cut: ids, pieces and counts too.
func TestToolCallsGiven(t *testing.T) {
	th := stage(t, hermesTemplate, nil)
	const path = "/v1/chat/completions"
	for _, c := range []struct {
		fields, text string
		n            int
	}{
		{hasTools + `,"stream_options":{"include_usage":true}`, twoCalls, 1},
		{hasTools + `,"n":2,"logprobs":true,"stop":["zz","</tool_call>\n<tool_call>\n{\"name\": \"x"],"stream_options":{"include_usage":true,"continuous_usage_stats":true}`, "<think>é</think>" + twoCalls, 2},
		{`"chat_template_kwargs":{"enable_thinking":true},"stream_options":{"include_usage":true}`, "a\n</think>\n\nb", 1},
		// What is held back for more tokens than are kept unsaid.
		{hasTools, `<tool_call>{"arguments":{"a":"` + strings.Repeat("x", 90) + `"},"name":"f"}</tool_call>`, 1},
	} {
		body := `{` + userAsks + `,"max_tokens":200,` + c.fields + `}`
		th.says(regexp.MustCompile(`,"stream_options":\{[^}]*\}`).ReplaceAllString(body, ""), c.text)
		body = strings.TrimSuffix(body, "}") + `,"stream":true}`
		whole := framedStream(t, th.Worker, path, nil, body, "")
		for cut := 1; cut < len(whole); cut++ {
			seen, rest := whole[:cut], whole[cut:]
			if seen[cut-1].index < 0 {
				break
			}
			got := framedStream(t, th.Worker, path, nil, body, given(c.n, seen))
			follows(t, fmt.Sprintf("%s cut at %d", c.text, cut), seen, rest, got)
		}
	}
	// Another request has other ids; the same one has the same.
	ids := map[string]bool{}
	body := `{` + userAsks + `,` + hasTools + `}`
	th.says(body, twoCalls)
	for _, h := range []map[string]string{{"x-request-id": "a", "x-xpyd-seed": "1"}, {"x-request-id": "b", "x-xpyd-seed": "1"}, {"x-request-id": "a", "x-xpyd-seed": "2"}} {
		header := maps.Clone(h)
		for _, call := range th.hear(header, body).Calls {
			ids[call.ID] = true
		}
	}
	if len(ids) != 6 {
		t.Errorf("%d ids of 6 calls", len(ids))
	}
}

// TestToolHistory: an assistant's calls and thoughts, replayed as clients replay them, reach models'
// own templates.
func TestToolHistory(t *testing.T) {
	qwen := struct {
		Template string `json:"chat_template"`
	}{}
	b, err := os.ReadFile(filepath.FromSlash("../internal/tokenizer/testdata/qwen3.config.json"))
	if err == nil {
		err = json.Unmarshal(b, &qwen)
	}
	smol, err2 := os.ReadFile(filepath.FromSlash("../internal/tokenizer/testdata/templates/smollm2.jinja"))
	if err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	const calls = `,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"f","arguments":"{\"a\": 1.0, \"b\": [true]}"}}]`
	for _, c := range []struct{ template, message, want string }{
		{qwen.Template, `{"role":"assistant","content":null` + calls + `}`, "<|im_start|>assistant\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1.0, \"b\": [true]}}\n</tool_call><|im_end|>\n"},
		{qwen.Template, `{"role":"assistant"` + calls + `}`, "<|im_start|>assistant\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1.0, \"b\": [true]}}\n</tool_call><|im_end|>\n"},
		{qwen.Template, `{"role":"assistant","content":"","reasoning":"Hm."` + calls + `}`, "<|im_start|>assistant\n<think>\nHm.\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1.0, \"b\": [true]}}\n</tool_call><|im_end|>\n"},
		{qwen.Template, `{"role":"assistant","content":null,"reasoning_content":"Hm."` + calls + `}`, "<|im_start|>assistant\n<think>\nHm.\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1.0, \"b\": [true]}}\n</tool_call><|im_end|>\n"},
		{string(smol), `{"role":"assistant","content":null` + calls + `}`, "<|im_start|>assistant\n<|im_end|>\n"},
	} {
		th := stage(t, c.template, nil)
		body := `{"messages":[{"role":"user","content":"hi"},` + c.message + `,{"role":"tool","tool_call_id":"call_1","content":"2"}]}`
		resp, b := ask(t, th.URL()+"/tokenize", nil, body)
		var ids struct{ Tokens []int32 }
		if err := json.Unmarshal(b, &ids); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%s: %d %s", c.message, resp.StatusCode, b)
		}
		list, _ := json.Marshal(map[string]any{"tokens": ids.Tokens})
		_, b = ask(t, th.URL()+"/detokenize", nil, string(list))
		var text struct{ Prompt string }
		if err := json.Unmarshal(b, &text); err != nil || !strings.Contains(text.Prompt, c.want) {
			t.Errorf("%s: %q, want %q in it", c.message, text.Prompt, c.want)
		}
	}
}
