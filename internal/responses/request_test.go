package responses_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/responses"
)

const hi = `[{"role":"user","content":"hi"}]`

// chatOf is the chat for a request.
func chatOf(body string, turns ...responses.Turn) (string, *openai.Error) {
	q, err := responses.Parse([]byte(body))
	if err != nil {
		return "", err
	}
	b, err := q.Chat(turns, func(id string) ([]byte, *openai.Error) {
		switch id {
		case "msg_1":
			return []byte(`{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"output_text","text":"found"}]}`), nil
		case "again":
			return []byte(`{"type":"item_reference","id":"msg_1"}`), nil
		}
		return nil, openai.BadRequest("input", "no %s", id)
	}, 1<<20)
	return string(b), err
}

func TestChat(t *testing.T) {
	f := func(body, want string) {
		t.Helper()
		got, err := chatOf(body)
		if err != nil || !same(t, got, want) {
			t.Errorf("%s\n got %s %v\nwant %s", body, got, err, want)
			return
		}
		if _, err := openai.Scan([]byte(got)); err != nil {
			t.Errorf("%s: %v", got, err)
		}
	}
	f(`{"model":"m","input":"hi"}`, `{"model":"m","messages":`+hi+`}`)
	f(`{"input":"say \"ä\" \u00e4","instructions":"be\nbrief"}`, `{"messages":[{"role":"system","content":"be\nbrief"},{"role":"user","content":"say \"ä\" ä"}]}`)
	f(`{"input":[{"role":"user","content":"hi"}],"instructions":"","stream":true}`, `{"stream":true,"stream_options":{"include_usage":true},"messages":`+hi+`}`)
	f(`{"input":"hi","max_output_tokens":16,"temperature":0.5,"top_p":0.25,"parallel_tool_calls":false,"user":"u","service_tier":"flex","presence_penalty":1,"frequency_penalty":-1}`,
		`{"max_completion_tokens":16,"temperature":0.5,"top_p":0.25,"parallel_tool_calls":false,"user":"u","service_tier":"flex","presence_penalty":1,"frequency_penalty":-1,"messages":`+hi+`}`)
	f(`{"input":"hi","metadata":{"a":"b"},"store":false,"truncation":"disabled","background":false,"safety_identifier":"s","prompt_cache_key":"k","max_tool_calls":1,"include":[],"stream_options":{"include_obfuscation":false},"conversation":null,"prompt":null,"unknown":[{}]}`,
		`{"messages":`+hi+`}`)
	f(`{"input":"hi","seed":7,"top_k":5,"stop":["x"],"chat_template_kwargs":{"a":1},"priority":1,"cache_salt":"s"}`,
		`{"seed":7,"top_k":5,"stop":["x"],"chat_template_kwargs":{"a":1},"priority":1,"cache_salt":"s","messages":`+hi+`}`)
	f(`{"input":"hi","reasoning":{"effort":"low","summary":"auto"}}`, `{"reasoning_effort":"low","messages":`+hi+`}`)
	f(`{"input":"hi","reasoning":{"effort":null}}`, `{"messages":`+hi+`}`)
	f(`{"input":"hi","include":["message.output_text.logprobs"]}`, `{"logprobs":true,"messages":`+hi+`}`)
	f(`{"input":"hi","top_logprobs":3}`, `{"logprobs":true,"top_logprobs":3,"messages":`+hi+`}`)
	f(`{"input":"hi","top_logprobs":0}`, `{"messages":`+hi+`}`)
	f(`{"input":"hi","text":{"format":{"type":"text"},"verbosity":"low"}}`, `{"messages":`+hi+`}`)
	f(`{"input":"hi","text":{"format":null}}`, `{"messages":`+hi+`}`)
	f(`{"input":"hi","text":{"format":{"type":"json_object"}}}`, `{"response_format":{"type":"json_object"},"messages":`+hi+`}`)
	f(`{"input":"hi","text":{"format":{"type":"json_schema","name":"n","description":"d","schema":{"type":"object"},"strict":true}}}`,
		`{"response_format":{"type":"json_schema","json_schema":{"name":"n","description":"d","schema":{"type":"object"},"strict":true}},"messages":`+hi+`}`)
	f(`{"input":"hi","tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object"},"strict":true},{"type":"function","name":"g","parameters":null}],"tool_choice":"required"}`,
		`{"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"},"strict":true}},{"type":"function","function":{"name":"g"}}],"tool_choice":"required","messages":`+hi+`}`)
	f(`{"input":"hi","tools":[],"tool_choice":{"type":"function","name":"f"}}`, `{"tool_choice":{"type":"function","function":{"name":"f"}},"messages":`+hi+`}`)
	const crm = `{"type":"namespace","name":"crm","description":"d","tools":[{"name":"get","type":"function","parameters":{"type":"object"}},{"type":"function","name":"put","strict":true}]}`
	const crmTools = `{"type":"function","function":{"name":"crm__get","parameters":{"type":"object"}}},{"type":"function","function":{"name":"crm__put","strict":true}}`
	f(`{"input":"hi","tools":[`+crm+`,{"type":"function","name":"f"}]}`, `{"tools":[`+crmTools+`,{"type":"function","function":{"name":"f"}}],"messages":`+hi+`}`)
	f(`{"input":"hi","tools":[{"type":"namespace","name":"n","tools":[]}]}`, `{"messages":`+hi+`}`)
	for _, name := range []string{"get", "crm__get", "g\\u0065t"} {
		f(`{"input":"hi","tool_choice":{"type":"function","name":"`+name+`"},"tools":[`+crm+`]}`,
			`{"tools":[`+crmTools+`],"tool_choice":{"type":"function","function":{"name":"crm__get"}},"messages":`+hi+`}`)
	}
	f(`{"input":"hi","tool_choice":{"type":"function","name":"get"},"tools":[`+crm+`,{"type":"function","name":"get"}]}`,
		`{"tools":[`+crmTools+`,{"type":"function","function":{"name":"get"}}],"tool_choice":{"type":"function","function":{"name":"get"}},"messages":`+hi+`}`)

	messages := func(items, want string) {
		t.Helper()
		f(`{"input":`+items+`}`, `{"messages":`+want+`}`)
	}
	messages(`[{"type":"message","role":"developer","content":"a"},{"role":"system","content":[{"type":"input_text","text":"b"},{"type":"input_text","text":"c"}]},{"role":"user","content":"d"}]`,
		`[{"role":"system","content":"a\nb\nc"},{"role":"user","content":"d"}]`)
	messages(`[{"role":"user","content":"a"},{"type":"function_call","call_id":"c1","name":"get","namespace":"crm","arguments":"{}"},{"type":"function_call","call_id":"c2","name":"get","namespace":null,"arguments":"{}"}]`,
		`[{"role":"user","content":"a"},{"role":"assistant","content":"","tool_calls":[{"type":"function","id":"c1","function":{"name":"crm__get","arguments":"{}"}},{"type":"function","id":"c2","function":{"name":"get","arguments":"{}"}}]}]`)
	messages(`[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image","image_url":"https://h/i.png","detail":"high"},{"type":"input_image","image_url":"data:image/png;base64,AAAA"}]}]`,
		`[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"https://h/i.png","detail":"high"}},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]`)
	messages(`[{"role":"user","content":"a"},{"id":"rs_1","type":"reasoning","summary":[{"type":"summary_text","text":"s"}],"content":[{"type":"reasoning_text","text":"r"}]},`+
		`{"id":"msg_1","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"b","annotations":[],"logprobs":[]}]},`+
		`{"type":"function_call","id":"fc_1","call_id":"c1","name":"f","arguments":"{\"x\":1}","status":"completed"},{"type":"function_call","call_id":"c2","name":"g","arguments":""},`+
		`{"type":"function_call_output","call_id":"c1","output":"one"},{"type":"function_call_output","call_id":"c2","output":[{"type":"input_text","text":"two"}]}]`,
		`[{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"r","tool_calls":[{"type":"function","id":"c1","function":{"name":"f","arguments":"{\"x\":1}"}},`+
			`{"type":"function","id":"c2","function":{"name":"g","arguments":""}}]},{"role":"tool","tool_call_id":"c1","content":"one"},{"role":"tool","tool_call_id":"c2","content":"two"}]`)
	messages(`[{"type":"reasoning","summary":[{"type":"summary_text","text":"s"},{"type":"summary_text","text":"t"}]},{"type":"reasoning","summary":[],"encrypted_content":"x"},{"role":"assistant","content":"b"},{"role":"assistant","content":[{"type":"refusal","refusal":"no"}]}]`,
		`[{"role":"assistant","content":"b","reasoning_content":"s\nt"},{"role":"assistant","content":"no"}]`)
}

// TestReference: an item that was given before is as if it was there.
func TestReference(t *testing.T) {
	for _, item := range []string{`{"type":"item_reference","id":"msg_1"}`, `{"id":"msg_1"}`} {
		got, err := chatOf(`{"input":[{"role":"user","content":"a"},` + item + `,{"role":"user","content":"b"}]}`)
		if err != nil || !same(t, got, `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"found"},{"role":"user","content":"b"}]}`) {
			t.Errorf("%s: %s %v", item, got, err)
		}
	}
}

// TestLarge: a text that is referred to many times makes no chat that is larger than it may be.
func TestLarge(t *testing.T) {
	q, err := responses.Parse([]byte(`{"input":[` + strings.Repeat(`{"type":"item_reference","id":"a"},`, 1000) + `{"role":"user","content":"b"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	asked, text := 0, []byte(`{"role":"assistant","content":"`+strings.Repeat("a", 1000)+`"}`)
	got, err := q.Chat(nil, func(string) ([]byte, *openai.Error) { asked++; return text, nil }, 10_000)
	if err == nil || err.Status != 413 || asked > 11 {
		t.Errorf("%d bytes, %v, after %d items", len(got), err, asked)
	}
	turns := make([]responses.Turn, 1000)
	for i := range turns {
		turns[i] = responses.Turn{Input: []byte(`"` + strings.Repeat("a", 1000) + `"`), Output: []byte("[]")}
	}
	if got, err = q.Chat(turns, nil, 10_000); err == nil || err.Status != 413 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// TestTurns: what went before comes first, without its instructions.
func TestTurns(t *testing.T) {
	turns := []responses.Turn{
		{Input: []byte(`"one"`), Output: []byte(`[{"type":"message","role":"assistant","content":[{"type":"output_text","text":"1"}]}]`)},
		{Input: []byte(`[{"role":"user","content":"two"}]`), Output: []byte(`[{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}]`)},
	}
	const want = `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"one"},{"role":"assistant","content":"1"},{"role":"user","content":"two"},` +
		`{"role":"assistant","content":"","tool_calls":[{"type":"function","id":"c","function":{"name":"f","arguments":"{}"}}]}%s]}`
	got, err := chatOf(`{"instructions":"s","previous_response_id":"resp_1","input":[{"type":"function_call_output","call_id":"c","output":"x"}]}`, turns...)
	if err != nil || !same(t, got, strings.Replace(want, "%s", `,{"role":"tool","tool_call_id":"c","content":"x"}`, 1)) {
		t.Errorf("%s %v", got, err)
	}
	for _, list := range []string{``, `{}`, `3`, `[{"type":"function_call"}]`} {
		if got, err = chatOf(`{"input":"a","previous_response_id":"resp_1"}`, responses.Turn{Input: []byte(`"a"`), Output: []byte(list)}); err == nil || err.Status != 400 {
			t.Errorf("%q: %s %v", list, got, err)
		}
	}
	if got, err = chatOf(`{"instructions":"s","previous_response_id":"resp_1"}`, turns...); err != nil || !same(t, got, strings.Replace(want, "%s", "", 1)) {
		t.Errorf("%s %v", got, err)
	}
}

func TestRefused(t *testing.T) {
	f := func(body, param, part string) {
		t.Helper()
		got, err := chatOf(body)
		if err == nil || err.Status != 400 || err.Param != param || !strings.Contains(err.Message, part) {
			t.Errorf("%s: %s %v", body, got, err)
		}
	}
	f(``, "", "not valid JSON")
	f(`[]`, "", "must be a JSON object")
	f(`{"input":"\ud800"}`, "", "")
	f(`{}`, "input", "required")
	f(`{"input":null}`, "input", "required")
	f(`{"input":[]}`, "input", "must not be empty")
	f(`{"input":[{"role":"system","content":"a"}]}`, "input", "must not be empty")
	f(`{"input":3}`, "input", "a string or a list of items")
	f(`{"input":[3]}`, "input", "input[0] must be an object")
	f(`{"input":[null]}`, "input", "input[0] must be an object")
	f(`{"input":[{"role":"user"}]}`, "input", "input[0].content is required")
	f(`{"input":[{"role":"tool","content":"a"}]}`, "input", "input[0].role")
	f(`{"input":[{"role":"user","content":"a"},{"role":"user","content":[{"type":"input_audio"}]}]}`, "input", `input[1].content[0].type is "input_audio"`)
	f(`{"input":[{"role":"user","content":[{"type":"input_file","file_id":"f"}]}]}`, "input", `"input_file"`)
	f(`{"input":[{"role":"user","content":[{"type":"input_image","file_id":"f"}]}]}`, "input", "image_url is required")
	f(`{"input":[{"role":"user","content":[{"type":"input_text"}]}]}`, "input", "text is required")
	f(`{"input":[{"role":"assistant","content":[{"type":"input_image","image_url":"http://h"}]}]}`, "input", "only a user's message may have images")
	f(`{"input":[{"role":"user","content":{"a":1}}]}`, "input", "must be a string or a list of parts")
	f(`{"input":[{"type":"item_reference","id":"x"}]}`, "input", `no x`)
	f(`{"input":[{"type":"item_reference"}]}`, "input", `input[0].id is required`)
	f(`{"input":[{"type":"item_reference","id":"again"}]}`, "input", `refers to another`)
	f(`{"input":[{"type":"web_search_call"}]}`, "input", `"web_search_call"`)
	f(`{"input":[{"type":"function_call","name":"f","arguments":"{}"}]}`, "input", "call_id, name and arguments")
	f(`{"input":[{"type":"function_call_output","call_id":"c"}]}`, "input", "call_id and output")
	f(`{"input":"a","model":3}`, "model", "string")
	f(`{"input":"a","instructions":[]}`, "instructions", "string")
	f(`{"input":"a","max_output_tokens":0}`, "max_output_tokens", "between 1")
	f(`{"input":"a","max_output_tokens":1.5}`, "max_output_tokens", "integer")
	f(`{"input":"a","temperature":"x"}`, "temperature", "number")
	f(`{"input":"a","stream":1}`, "stream", "boolean")
	f(`{"input":"a","store":"no"}`, "store", "boolean")
	f(`{"input":"a","parallel_tool_calls":"no"}`, "parallel_tool_calls", "boolean")
	f(`{"input":"a","background":true,"store":false}`, "background", "background can only be used when `store` is true")
	f(`{"input":"a","conversation":"c"}`, "conversation", "not supported")
	f(`{"input":"a","prompt":{"id":"p"}}`, "prompt", "not supported")
	f(`{"input":"a","truncation":"auto"}`, "truncation", "not supported")
	f(`{"input":"a","include":["x"]}`, "include", `"x"`)
	f(`{"input":"a","metadata":{"a":1}}`, "metadata", "string")
	f(`{"input":"a","metadata":{"a":"`+strings.Repeat("x", 513)+`"}}`, "metadata", "512")
	f(`{"input":"a","metadata":{`+strings.Repeat(`"k":"v",`, 16)+`"l":"v"}}`, "metadata", "16")
	f(`{"input":"a","reasoning":"high"}`, "reasoning", "object")
	f(`{"input":"a","reasoning":{"effort":1}}`, "reasoning.effort", "string")
	f(`{"input":"a","text":{"format":{"type":"xml"}}}`, "text.format", `"xml"`)
	f(`{"input":"a","text":{"format":{"type":"json_schema","name":"n"}}}`, "text.format", "schema is required")
	f(`{"input":"a","tools":[{"type":"web_search"}]}`, "tools[0].type", `tools[0].type is "web_search"`)
	f(`{"input":"a","tools":[{"type":"function"}]}`, "tools[0].name", "name is required")
	f(`{"input":"a","tools":[{"type":"function","name":"f","parameters":[]}]}`, "tools[0].parameters", "object")
	f(`{"input":"a","tools":[{"type":"function","name":"f","strict":1}]}`, "tools[0].strict", "boolean")
	f(`{"input":"a","tools":[{"type":"function","name":7}]}`, "tools[0].name", "string")
	f(`{"input":"a","tools":[{"type":"function","name":"f"},{"type":"function","name":"f"}]}`, "tools[1].name", `is "f", as is that of tools[0]`)
	f(`{"input":"a","tools":[{"type":"namespace","tools":[]}]}`, "tools[0].name", "name is required")
	f(`{"input":"a","tools":[{"type":"namespace","name":"n"}]}`, "tools[0].tools", "tools is required")
	f(`{"input":"a","tools":[{"type":"namespace","name":"n","tools":[{"type":"custom","name":"c"}]}]}`, "tools[0].tools[0].type", `"custom"`)
	f(`{"input":"a","tools":[{"type":"namespace","name":"n","tools":[{"type":"namespace","name":"m","tools":[]}]}]}`, "tools[0].tools[0].type", `"namespace"`)
	f(`{"input":"a","tools":[{"type":"namespace","name":"n","tools":[{"type":"function"}]}]}`, "tools[0].tools[0].name", "name is required")
	f(`{"input":"a","tools":[{"type":"namespace","name":"n","tools":[3]}]}`, "tools", "tools[0].tools[0] must be an object")
	f(`{"input":"a","tools":[{"type":"function","name":"n__f"},{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]}]}`,
		"tools[1].tools[0].name", `is "n__f", as is that of tools[0]`)
	f(`{"input":"a","tools":[{"type":"namespace","name":"m","tools":[{"type":"function","name":"f"}]},{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]}],"tool_choice":{"type":"function","name":"f"}}`,
		"tool_choice", "name one of m__f, n__f")
	f(`{"input":"a","tools":[null]}`, "tools", "tools[0] must be an object")
	f(`{"input":"a","tools":{}}`, "tools", "list")
	f(`{"input":"a","tool_choice":"some"}`, "tool_choice", "none, auto, required")
	f(`{"input":"a","tool_choice":{"type":"allowed_tools","tools":[]}}`, "tool_choice", `"allowed_tools"`)
	f(`{"input":"a","tool_choice":{"type":"function"}}`, "tool_choice", "name is required")
	f(`{"input":"a","tool_choice":3}`, "tool_choice", "object")
	f(`{"input":"a","kv_transfer_params":{}}`, "kv_transfer_params", "may not set it")
	f(`{"input":"a","bootstrap_room":1}`, "bootstrap_room", "may not set it")
}

// fields are those of OpenAI's specification of 2026 (CreateResponse, and what it is made of), and what
// becomes of each: it is served, it is passed on, the answer repeats it, or it is refused.
var fields = map[string]string{
	"background": "served", "context_management": "skipped", "conversation": "refused", "include": "served", "input": "served", "instructions": "served",
	"max_output_tokens": "passed", "max_tool_calls": "repeated", "metadata": "repeated", "model": "passed", "moderation": "refused", "parallel_tool_calls": "passed",
	"previous_response_id": "served", "prompt": "refused", "prompt_cache_key": "repeated", "prompt_cache_options": "skipped", "prompt_cache_retention": "skipped",
	"reasoning": "passed", "safety_identifier": "repeated", "service_tier": "passed", "store": "served", "stream": "passed", "stream_options": "skipped",
	"temperature": "passed", "text": "passed", "tool_choice": "passed", "tools": "passed", "top_logprobs": "passed", "top_p": "passed", "truncation": "served", "user": "passed",
}

// values are such that a field has an effect.
var values = map[string]string{
	"background": `true`, "context_management": `[{"type":"x"}]`, "conversation": `"c"`, "include": `["message.output_text.logprobs"]`, "input": `"other"`, "instructions": `"be brief"`,
	"max_output_tokens": `99`, "max_tool_calls": `98`, "metadata": `{"ke":"va"}`, "model": `"mm"`, "moderation": `{}`, "parallel_tool_calls": `false`,
	"previous_response_id": `"resp_x"`, "prompt": `{"id":"p"}`, "prompt_cache_key": `"kk"`, "prompt_cache_options": `{}`, "prompt_cache_retention": `"24h"`,
	"reasoning": `{"effort":"high"}`, "safety_identifier": `"ss"`, "service_tier": `"flex"`, "store": `false`, "stream": `true`, "stream_options": `{}`,
	"temperature": `0.125`, "text": `{"format":{"type":"json_object"}}`, "tool_choice": `"none"`, "tools": `[{"type":"function","name":"ff"}]`, "top_logprobs": `3`,
	"top_p": `0.25`, "truncation": `"disabled"`, "user": `"uu"`,
}

// TestFields: every field of the specification does what is said of it.
func TestFields(t *testing.T) {
	plain, _ := chatOf(`{"input":"a"}`)
	before := responseOf(t, `{"input":"a"}`)
	for name, does := range fields {
		body := `{"input":"a",` + `"` + name + `":` + values[name] + `}`
		got, err := chatOf(body)
		if does == "refused" {
			if err == nil || err.Param != name {
				t.Errorf("%s: %s %v", name, got, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if changed := got != plain; changed != (does == "passed" || does == "served" && (name == "input" || name == "instructions" || name == "include")) {
			t.Errorf("%s is %s: %s", name, does, got)
		}
		if does == "repeated" || does == "passed" && name != "stream" && name != "model" {
			if after := responseOf(t, body); string(after[name]) == string(before[name]) {
				t.Errorf("%s: the response says %s", name, after[name])
			}
		}
	}
}

func responseOf(t *testing.T, body string) map[string]json.RawMessage {
	t.Helper()
	q, err := responses.Parse([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	b, err := q.Answer(options()).Whole(nil, []byte(`{"choices":[{"message":{"content":"x"}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	var out map[string]json.RawMessage
	if err := json.Unmarshal(b, &out); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return out
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
	for _, seed := range []string{`{"input":"a"}`, `{"input":"a","tools":[{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]}],"tool_choice":{"type":"function","name":"f"}}`, `{"input":[{"role":"user","content":[{"type":"input_text","text":"a"}]}],"tools":[{"type":"function","name":"f"}]}`,
		`{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"x"},{"type":"reasoning","summary":[{"text":"a"}]}],"text":{"format":{"type":"json_schema","schema":{}}},"reasoning":{"effort":"low"}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		q, err := responses.Parse(body)
		if err != nil {
			if err.Status != 400 {
				t.Fatalf("%v", err)
			}
			return
		}
		b, err := q.Chat([]responses.Turn{{Input: []byte(`"a"`), Output: []byte("[]")}}, func(string) ([]byte, *openai.Error) { return body, nil }, 1<<20)
		if err != nil {
			if err.Status != 400 && err.Status != 413 {
				t.Fatalf("%v", err)
			}
			return
		}
		if top, err := openai.Scan(b); err == nil && top.Link != "" || !json.Valid(b) {
			t.Fatalf("%q: %v %s", b, err, top.Link)
		}
		response, err := q.Answer(options()).Whole(nil, []byte(`{"choices":[{"message":{"content":"x"}}]}`))
		if err != nil || !json.Valid(response) {
			t.Fatalf("%q %v", response, err)
		}
		if q.Input != nil {
			list, err := responses.List(nil, q.Input, "resp_1", responses.Page{Limit: 3})
			if err != nil || !json.Valid(list) {
				t.Fatalf("%q %v", list, err)
			}
		}
	})
}
