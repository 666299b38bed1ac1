package messages_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/messages"
	"github.com/xpyd/xpyd/internal/openai"
)

const hi = `[{"role":"user","content":"hi"}]`

// asked is a request with more members, of which messages may be one.
func asked(members string) string {
	if !strings.Contains(members, `"messages"`) {
		members += `,"messages":` + hi
	}
	return `{"max_tokens":9,` + strings.TrimPrefix(members, ",") + `}`
}

func TestChat(t *testing.T) {
	f := func(members, want string) {
		t.Helper()
		q, err := messages.Parse([]byte(asked(members)), false)
		if err != nil {
			t.Errorf("%s: %v", members, err)
			return
		}
		got := string(q.Chat())
		if want = `{"max_completion_tokens":9,` + want + `}`; !same(t, got, want) {
			t.Errorf("%s\n got %s\nwant %s", members, got, want)
		}
		if _, err := openai.Scan([]byte(got)); err != nil {
			t.Errorf("%s: %v", got, err)
		}
	}
	const said = `"messages":` + hi
	f(``, said)
	f(`"model":"m","temperature":0.5,"top_p":0.25,"top_k":5,"metadata":{"user_id":"u"},"service_tier":"auto","stop_sequences":["a","b"],"unknown":1`,
		`"model":"m","temperature":0.5,"top_p":0.25,"top_k":5,"user":"u","stop":["a","b"],`+said)
	f(`"stream":true,"stop_sequences":[],"tools":[],"mcp_servers":[],"container":null,"metadata":{"user_id":null}`, `"stream":true,"stream_options":{"include_usage":true},`+said)
	f(`"seed":7,"min_p":0.1,"stop":["x"],"priority":1`, `"seed":7,"min_p":0.1,"priority":1,`+said)
	f(`"thinking":{"type":"enabled","budget_tokens":1024}`, `"chat_template_kwargs":{"enable_thinking":true,"thinking":true},`+said)
	f(`"thinking":{"type":"disabled"}`, `"chat_template_kwargs":{"enable_thinking":false,"thinking":false},`+said)
	f(`"thinking":{"type":"adaptive","display":"omitted"}`, said)
	f(`"output_config":{"effort":"high","format":{"type":"json_schema","schema":{"type":"object"}}}`,
		`"reasoning_effort":"high","response_format":{"type":"json_schema","json_schema":{"name":"output","strict":true,"schema":{"type":"object"}}},`+said)
	f(`"tools":[{"name":"f","description":"d","input_schema":{"type":"object"},"cache_control":{"type":"ephemeral"}},{"type":"custom","name":"g","input_schema":{},"strict":true}]`,
		`"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}},{"type":"function","function":{"name":"g","parameters":{},"strict":true}}],`+said)
	f(`"tool_choice":{"type":"auto"}`, `"tool_choice":"auto",`+said)
	f(`"tool_choice":{"type":"any","disable_parallel_tool_use":true}`, `"tool_choice":"required","parallel_tool_calls":false,`+said)
	f(`"tool_choice":{"type":"none"}`, `"tool_choice":"none",`+said)
	f(`"tool_choice":{"type":"tool","name":"f","disable_parallel_tool_use":false}`, `"tool_choice":{"type":"function","function":{"name":"f"}},`+said)
	f(`"system":"be\nbrief"`, `"messages":[{"role":"system","content":"be\nbrief"},{"role":"user","content":"hi"}]`)
	f(`"system":""`, said)
	f(`"system":[{"type":"text","text":"x-anthropic-billing-header: cc_version=1; cch=abc;"},{"type":"text","text":"a","cache_control":{"type":"ephemeral"}},{"type":"text","text":"b"}]`,
		`"messages":[{"role":"system","content":"a\nb"},{"role":"user","content":"hi"}]`)

	talk := func(list, want string) {
		t.Helper()
		f(`"messages":`+list, `"messages":`+want)
	}
	talk(`[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}},{"type":"image","source":{"type":"url","url":"https://h/i"}}]}]`,
		`[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}},{"type":"image_url","image_url":{"url":"https://h/i"}}]}]`)
	talk(`[{"role":"user","content":[{"type":"document","source":{"type":"text","media_type":"text/plain","data":"long"},"title":"t"},{"type":"text","text":"a"}]}]`, `[{"role":"user","content":"long\na"}]`)
	talk(`[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"thinking","thinking":"th","signature":"s"},{"type":"redacted_thinking","data":"x"},{"type":"text","text":"b"},`+
		`{"type":"tool_use","id":"t1","name":"f","input":{"x": "\"1"}},{"type":"tool_use","id":"t2","name":"g","input":{}}]},`+
		`{"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":"one"},{"type":"tool_result","tool_use_id":"t2","is_error":true,"content":[{"type":"text","text":"two"},{"type":"image","source":{"type":"url","url":"https://h/i"}}]},{"type":"text","text":"c"}]}]`,
		`[{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"th","tool_calls":[{"type":"function","id":"t1","function":{"name":"f","arguments":"{\"x\": \"\\\"1\"}"}},`+
			`{"type":"function","id":"t2","function":{"name":"g","arguments":"{}"}}]},{"role":"tool","tool_call_id":"t1","content":"one"},{"role":"tool","tool_call_id":"t2","content":"two"},`+
			`{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://h/i"}},{"type":"text","text":"c"}]}]`)
	talk(`[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t1"}]}]`, `[{"role":"tool","tool_call_id":"t1","content":""}]`)
	talk(`[{"role":"user","content":[]}]`, `[{"role":"user","content":""}]`)
	talk(`[{"role":"user","content":"a"},{"role":"system","content":"s"},{"role":"user","content":"b"}]`, `[{"role":"user","content":"a"},{"role":"system","content":"s"},{"role":"user","content":"b"}]`)
	f(`"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"The answer is ("}]`,
		`"continue_final_message":true,"add_generation_prompt":false,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"The answer is ("}]`)
}

func TestTokenize(t *testing.T) {
	q, err := messages.Parse([]byte(`{"model":"m","messages":`+hi+`,"temperature":1,"stream":true,"tools":[{"name":"f","input_schema":{}}],"thinking":{"type":"disabled"}}`), true)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(q.Tokenize()); !same(t, got, `{"model":"m","tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"chat_template_kwargs":{"enable_thinking":false,"thinking":false},"messages":`+hi+`}`) {
		t.Error(got)
	}
}

func TestRefused(t *testing.T) {
	f := func(body, param, part string) {
		t.Helper()
		if !strings.HasPrefix(body, "{") && body != "" && body != "[]" {
			body = asked(body)
		}
		q, err := messages.Parse([]byte(body), false)
		if err == nil || err.Status != 400 || err.Param != param || !strings.Contains(err.Message, part) {
			t.Errorf("%s: %v %v", body, q, err)
		}
	}
	f(``, "", "not valid JSON")
	f(`[]`, "", "must be a JSON object")
	f(`{"max_tokens":1}`, "messages", "required")
	f(`{"messages":`+hi+`}`, "max_tokens", "required")
	f(`{"messages":`+hi+`,"max_tokens":0}`, "max_tokens", "between 1")
	f(`"messages":[]`, "messages", "must not be empty")
	f(`"messages":{}`, "messages", "list")
	f(`"messages":[null]`, "messages", "messages[0] must be an object")
	f(`"messages":[{"role":"user"}]`, "messages", "messages[0].content is required")
	f(`"messages":[{"role":"user","content":null}]`, "messages", "messages[0].content is required")
	f(`"messages":[{"role":"user","content":3}]`, "messages", "a string or a list of blocks")
	f(`"messages":[{"content":"a"}]`, "messages", "messages[0].role")
	f(`"messages":[{"role":"tool","content":"a"}]`, "messages", `"tool"`)
	f(`"messages":[{"role":"user","content":["a"]}]`, "messages", "messages[0].content[0] must be an object")
	f(`"messages":[{"role":"user","content":[{"type":"text"}]}]`, "messages", "text is required")
	f(`"messages":[{"role":"user","content":[{"type":"tool_use","id":"i","name":"n","input":{}}]}]`, "messages", `"tool_use"`)
	f(`"messages":[{"role":"user","content":[{"type":"search_result"}]}]`, "messages", `"search_result"`)
	f(`"messages":[{"role":"user","content":[{"type":"image"}]}]`, "messages", "source must have")
	f(`"messages":[{"role":"user","content":[{"type":"image","source":{"type":"file","file_id":"f"}}]}]`, "messages", "source must have")
	f(`"messages":[{"role":"user","content":[{"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"AA"}}]}]`, "messages", "a document must be text")
	f(`"messages":[{"role":"user","content":[{"type":"tool_result"}]}]`, "messages", "tool_use_id is required")
	f(`"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":3}]}]`, "messages", "a string or a list of blocks")
	f(`"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"x"}]}]}]`, "messages", `messages[0].content[0].content[0].type is "x"`)
	f(`"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"i","name":"n"}]}]`, "messages", "an object as input")
	f(`"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"i","name":"n","input":[]}]}]`, "messages", "an object as input")
	f(`"messages":[{"role":"assistant","content":[{"type":"image","source":{"type":"url","url":"http://h"}}]}]`, "messages", `"image"`)
	f(`"messages":[{"role":"system","content":[{"type":"image","source":{"type":"url","url":"http://h"}}]}]`, "messages", "only a user's message may have images")
	f(`"system":3`, "system", "a string or a list of text blocks")
	f(`"system":[{"type":"image"}]`, "system", "only text")
	f(`"model":3`, "model", "string")
	f(`"stream":"yes"`, "stream", "boolean")
	f(`"temperature":"warm"`, "temperature", "number")
	f(`"stop_sequences":"a"`, "stop_sequences", "list")
	f(`"stop_sequences":[""]`, "stop_sequences", "not empty")
	f(`"stop_sequences":[null]`, "stop_sequences", "not empty")
	f(`"tools":[{"type":"bash_20250124","name":"bash"}]`, "tools[0].type", `"bash_20250124"`)
	f(`"tools":[{"input_schema":{}}]`, "tools[0].name", "name is required")
	f(`"tools":[{"name":"f"}]`, "tools[0].input_schema", "input_schema is required")
	f(`"tools":[{"name":"f","input_schema":[]}]`, "tools[0].input_schema", "object")
	f(`"tools":[{"name":"f","input_schema":{}},{"name":"f","input_schema":{}}]`, "tools[1].name", `is "f", as is that of tools[0]`)
	f(`"tools":[3]`, "tools", "tools[0] must be an object")
	f(`"tool_choice":"auto"`, "tool_choice", "object")
	f(`"tool_choice":{"type":"some"}`, "tool_choice", `"some"`)
	f(`"tool_choice":{"type":"tool"}`, "tool_choice", "name is required")
	f(`"thinking":{"type":"hard"}`, "thinking", `"hard"`)
	f(`"thinking":{"type":"enabled","budget_tokens":"x"}`, "thinking.budget_tokens", "integer")
	f(`"output_config":{"format":{"type":"text"}}`, "output_config.format", `"text"`)
	f(`"output_config":{"format":{"type":"json_schema"}}`, "output_config.format", "schema is required")
	f(`"mcp_servers":[{"url":"http://h"}]`, "mcp_servers", "not supported")
	f(`"container":"c"`, "container", "not supported")
	f(`"kv_transfer_params":{}`, "kv_transfer_params", "may not set it")
}

// same reports whether two texts are the same JSON.
func same(t *testing.T, a, b string) bool {
	t.Helper()
	var x, y any
	if json.Unmarshal([]byte(a), &x) != nil {
		t.Errorf("not JSON: %s", a)
		return false
	}
	if err := json.Unmarshal([]byte(b), &y); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	p, _ := json.Marshal(x)
	q, _ := json.Marshal(y)
	return string(p) == string(q)
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{asked(``), asked(`"system":[{"type":"text","text":"a"}],"tools":[{"name":"f","input_schema":{}}],"stop_sequences":["x"]`),
		asked(`"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"a"},{"type":"tool_use","id":"i","name":"n","input":{}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"i","content":[{"type":"text","text":"b"}]}]}]`)} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		q, err := messages.Parse(body, false)
		if err != nil {
			if err.Status != 400 {
				t.Fatalf("%v", err)
			}
			if _, said := messages.Refusal(err, "req-1"); !json.Valid(said) {
				t.Fatalf("%s", said)
			}
			return
		}
		for _, b := range [][]byte{q.Chat(), q.Tokenize()} {
			if top, err := openai.Scan(b); err == nil && top.Link != "" || !json.Valid(b) {
				t.Fatalf("%q: %v %s", b, err, top.Link)
			}
		}
		m, err := q.Answer("msg_0").Whole(nil, []byte(`{"choices":[{"message":{"content":"x"}}]}`))
		if err != nil || !json.Valid(m) {
			t.Fatalf("%q %v", m, err)
		}
	})
}
