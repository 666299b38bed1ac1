package responses_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/responses"
)

func options() responses.Options {
	return responses.Options{ID: "resp_0", Most: 1 << 20, Now: func() time.Time { return time.Unix(100, 0) }}
}

func answerTo(t testing.TB, body string, o responses.Options) *responses.Answer {
	t.Helper()
	q, err := responses.Parse([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	return q.Answer(o)
}

// delta is an event of a chat's stream.
func delta(members string) string {
	return `data: {"id":"c","model":"em","choices":[{"index":0,"delta":{` + members + `},"finish_reason":null}]}` + "\n\n"
}

func finish(reason string) string {
	return `data: {"choices":[{"index":0,"delta":{},"finish_reason":"` + reason + `"}]}` + "\n\n"
}

const (
	first = `data: {"id":"c","model":"em","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	usage = `data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"reasoning_tokens":1}}}` + "\n\n"
	done  = "data: [DONE]\n\n"
)

type event struct {
	name string
	data map[string]json.RawMessage
	raw  string
}

// eventsOf reads a stream, and checks what all events have.
func eventsOf(t testing.TB, stream string) (list []event) {
	t.Helper()
	if stream != "" && !strings.HasSuffix(stream, "\n\n") {
		t.Fatalf("half an event: %q", stream)
	}
	for text := range strings.SplitSeq(strings.TrimSuffix(stream, "\n\n"), "\n\n") {
		if text == ":" {
			continue
		}
		name, data, ok := strings.Cut(strings.TrimPrefix(text, "event: "), "\ndata: ")
		e := event{name: name, raw: data}
		if err := json.Unmarshal([]byte(data), &e.data); !ok || err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		if string(e.data["type"]) != `"`+name+`"` || string(e.data["sequence_number"]) != fmt.Sprint(len(list)) {
			t.Fatalf("event %d: %q", len(list), text)
		}
		list = append(list, e)
	}
	return list
}

// brief is a stream's events in a line each: names, and what they add.
func brief(list []event) string {
	var b strings.Builder
	for _, e := range list {
		fmt.Fprintf(&b, "%s", strings.TrimPrefix(e.name, "response."))
		for _, k := range []string{"item_id", "output_index", "content_index", "summary_index", "delta", "text", "refusal", "name", "arguments", "part", "item", "code", "message", "param"} {
			if v, ok := e.data[k]; ok {
				fmt.Fprintf(&b, " %s", v)
			}
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func TestStream(t *testing.T) {
	f := func(ask, stream, want, last string) {
		t.Helper()
		a := answerTo(t, ask, options())
		list := eventsOf(t, string(a.Append(nil, []byte(stream))))
		if got := brief(list); got != want {
			t.Errorf("%s\n got:\n%s\nwant:\n%s", stream, got, want)
		}
		if !a.Over() {
			t.Error("it is not over")
		}
		var end struct{ Response json.RawMessage }
		_ = json.Unmarshal([]byte(list[len(list)-1].raw), &end)
		if got := part(t, end.Response, "status", "incomplete_details", "output", "usage", "error", "model", "completed_at"); got != last {
			t.Errorf("%s\n got %s\nwant %s", stream, got, last)
		}
	}
	const told = `"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":2,"cache_write_tokens":0},"output_tokens":3,"output_tokens_details":{"reasoning_tokens":1},"total_tokens":8}`
	f(`{"input":"a"}`, first+delta(`"content":"He"`)+delta(`"content":"llo \"ä\""`)+finish("stop")+usage+done,
		`created
in_progress
output_item.added 0 {"id":"msg_000","type":"message","status":"in_progress","role":"assistant","content":[]}
content_part.added "msg_000" 0 0 {"type":"output_text","text":"","annotations":[],"logprobs":[]}
output_text.delta "msg_000" 0 0 "He"
output_text.delta "msg_000" 0 0 "llo \"ä\""
output_text.done "msg_000" 0 0 "Hello \"ä\""
content_part.done "msg_000" 0 0 {"type":"output_text","text":"Hello \"ä\"","annotations":[],"logprobs":[]}
output_item.done 0 {"id":"msg_000","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello \"ä\"","annotations":[],"logprobs":[]}]}
completed
`, `"status":"completed" "incomplete_details":null "output":[{"id":"msg_000","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello \"ä\"","annotations":[],"logprobs":[]}]}] `+told+` "error":null "model":"em" "completed_at":100`)
	f(`{"input":"a","model":"own"}`, delta(`"reasoning_content":"th","reasoning":"th"`)+delta(`"reasoning":"ink"`)+
		delta(`"tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":""}}]`)+delta(`"tool_calls":[{"index":0,"function":{"arguments":"{\"a\""}}]`)+
		delta(`"tool_calls":[{"index":0,"function":{"arguments":":1}"}},{"index":1,"id":null,"function":{"name":"g","arguments":"{}"}}]`)+finish("tool_calls")+done,
		`created
in_progress
output_item.added 0 {"id":"rs_000","type":"reasoning","status":"in_progress","summary":[],"content":[]}
content_part.added "rs_000" 0 0 {"type":"reasoning_text","text":""}
reasoning_text.delta "rs_000" 0 0 "th"
reasoning_text.delta "rs_000" 0 0 "ink"
reasoning_text.done "rs_000" 0 0 "think"
content_part.done "rs_000" 0 0 {"type":"reasoning_text","text":"think"}
output_item.done 0 {"id":"rs_000","type":"reasoning","status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"think"}]}
output_item.added 1 {"id":"fc_001","type":"function_call","status":"in_progress","call_id":"c1","name":"f","arguments":""}
function_call_arguments.delta "fc_001" 1 "{\"a\""
function_call_arguments.delta "fc_001" 1 ":1}"
function_call_arguments.done "fc_001" 1 "f" "{\"a\":1}"
output_item.done 1 {"id":"fc_001","type":"function_call","status":"completed","call_id":"c1","name":"f","arguments":"{\"a\":1}"}
output_item.added 2 {"id":"fc_002","type":"function_call","status":"in_progress","call_id":"call_002","name":"g","arguments":""}
function_call_arguments.delta "fc_002" 2 "{}"
function_call_arguments.done "fc_002" 2 "g" "{}"
output_item.done 2 {"id":"fc_002","type":"function_call","status":"completed","call_id":"call_002","name":"g","arguments":"{}"}
completed
`, `"status":"completed" "incomplete_details":null "output":[{"id":"rs_000","type":"reasoning","status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"think"}]},`+
			`{"id":"fc_001","type":"function_call","status":"completed","call_id":"c1","name":"f","arguments":"{\"a\":1}"},{"id":"fc_002","type":"function_call","status":"completed","call_id":"call_002","name":"g","arguments":"{}"}] `+
			`"usage":null "error":null "model":"own" "completed_at":100`)
	f(`{"input":"a","reasoning":{"summary":"auto"}}`, delta(`"reasoning":"r"`)+delta(`"refusal":"no"`)+delta(`"content":"b"`)+finish("length")+done,
		`created
in_progress
output_item.added 0 {"id":"rs_000","type":"reasoning","status":"in_progress","summary":[],"content":[]}
reasoning_summary_part.added "rs_000" 0 0 {"type":"summary_text","text":""}
reasoning_summary_text.delta "rs_000" 0 0 "r"
reasoning_summary_text.done "rs_000" 0 0 "r"
reasoning_summary_part.done "rs_000" 0 0 {"type":"summary_text","text":"r"}
output_item.done 0 {"id":"rs_000","type":"reasoning","status":"completed","summary":[{"type":"summary_text","text":"r"}],"content":[]}
output_item.added 1 {"id":"msg_001","type":"message","status":"in_progress","role":"assistant","content":[]}
content_part.added "msg_001" 1 0 {"type":"refusal","refusal":""}
refusal.delta "msg_001" 1 0 "no"
refusal.done "msg_001" 1 0 "no"
content_part.done "msg_001" 1 0 {"type":"refusal","refusal":"no"}
content_part.added "msg_001" 1 1 {"type":"output_text","text":"","annotations":[],"logprobs":[]}
output_text.delta "msg_001" 1 1 "b"
output_text.done "msg_001" 1 1 "b"
content_part.done "msg_001" 1 1 {"type":"output_text","text":"b","annotations":[],"logprobs":[]}
output_item.done 1 {"id":"msg_001","type":"message","status":"incomplete","role":"assistant","content":[{"type":"refusal","refusal":"no"},{"type":"output_text","text":"b","annotations":[],"logprobs":[]}]}
incomplete
`, `"status":"incomplete" "incomplete_details":{"reason":"max_output_tokens"} "output":[{"id":"rs_000","type":"reasoning","status":"completed","summary":[{"type":"summary_text","text":"r"}],"content":[]},`+
			`{"id":"msg_001","type":"message","status":"incomplete","role":"assistant","content":[{"type":"refusal","refusal":"no"},{"type":"output_text","text":"b","annotations":[],"logprobs":[]}]}] "usage":null "error":null "model":"em" "completed_at":null`)
	f(`{"input":"a"}`, first+finish("stop")+done,
		`created
in_progress
output_item.added 0 {"id":"msg_000","type":"message","status":"in_progress","role":"assistant","content":[]}
content_part.added "msg_000" 0 0 {"type":"output_text","text":"","annotations":[],"logprobs":[]}
output_text.delta "msg_000" 0 0 ""
output_text.done "msg_000" 0 0 ""
content_part.done "msg_000" 0 0 {"type":"output_text","text":"","annotations":[],"logprobs":[]}
output_item.done 0 {"id":"msg_000","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"","annotations":[],"logprobs":[]}]}
completed
`, `"status":"completed" "incomplete_details":null "output":[{"id":"msg_000","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"","annotations":[],"logprobs":[]}]}] "usage":null "error":null "model":"em" "completed_at":100`)
	f(`{"input":"a"}`, delta(`"content":"b"`)+`data: {"error":{"message":"it broke","type":"server_error","param":"max_tokens","code":"engine_failed"}}`+"\n\n"+done,
		`created
in_progress
output_item.added 0 {"id":"msg_000","type":"message","status":"in_progress","role":"assistant","content":[]}
content_part.added "msg_000" 0 0 {"type":"output_text","text":"","annotations":[],"logprobs":[]}
output_text.delta "msg_000" 0 0 "b"
error "engine_failed" "it broke" "max_output_tokens"
failed
`, `"status":"failed" "incomplete_details":null "output":[{"id":"msg_000","type":"message","status":"incomplete","role":"assistant","content":[{"type":"output_text","text":"b","annotations":[],"logprobs":[]}]}] "usage":null "error":{"code":"server_error","message":"it broke"} "model":"em" "completed_at":null`)
}

// TestNamespace: a call of a namespace's function is told apart from one of another that is called alike, and goes on
// being it in the next request.
func TestNamespace(t *testing.T) {
	const ask = `{"input":"a","tools":[{"type":"function","name":"get"},{"type":"namespace","name":"c\u0072m","description":"d","tools":[{"type":"function","name":"get"}]}]}`
	const calls = `"tool_calls":[{"index":0,"id":"c1","function":{"name":"crm__get","arguments":"{}"}},{"index":1,"id":"c2","function":{"name":"get","arguments":"{}"}},{"index":2,"id":"c3","function":{"name":"crm__put","arguments":"{}"}}]`
	const want = `"output":[{"id":"fc_000","type":"function_call","status":"completed","call_id":"c1","name":"get","namespace":"c\u0072m","arguments":"{}"},` +
		`{"id":"fc_001","type":"function_call","status":"completed","call_id":"c2","name":"get","arguments":"{}"},` +
		`{"id":"fc_002","type":"function_call","status":"completed","call_id":"c3","name":"crm__put","arguments":"{}"}] ` +
		`"tools":[{"type":"function","name":"get","description":null,"parameters":null,"strict":null},` +
		`{"type":"namespace","name":"c\u0072m","description":"d","tools":[{"type":"function","name":"get","description":null,"parameters":null,"strict":null}]}]`
	whole, err := answerTo(t, ask, options()).Whole(nil, []byte(`{"choices":[{"message":{`+calls+`},"finish_reason":"tool_calls"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if got := part(t, whole, "output", "tools"); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
	list := eventsOf(t, string(answerTo(t, ask, options()).Append(nil, []byte(delta(calls)+finish("tool_calls")+done))))
	if got := string(list[2].data["item"]); list[2].name != "response.output_item.added" || !strings.Contains(got, `"name":"get","namespace":"c\u0072m"`) {
		t.Errorf("%s %s", list[2].name, got)
	}
	var end struct{ Response json.RawMessage }
	_ = json.Unmarshal([]byte(list[len(list)-1].raw), &end)
	if got := part(t, end.Response, "output", "tools"); got != want {
		t.Errorf("streamed: got %s\nwant %s", got, want)
	}
}

// part is some members of a response, as written.
func part(t testing.TB, response []byte, names ...string) string {
	t.Helper()
	var all map[string]json.RawMessage
	if err := json.Unmarshal(response, &all); err != nil {
		t.Fatalf("%s: %v", response, err)
	}
	var out []string
	for _, n := range names {
		out = append(out, fmt.Sprintf("%q:%s", n, all[n]))
	}
	return strings.Join(out, " ")
}

func TestLogprobs(t *testing.T) {
	probs := func(tokens ...string) string {
		return `[` + strings.Join(tokens, ",") + `]`
	}
	one := func(content, logprobs string) string {
		return `data: {"choices":[{"delta":{"content":"` + content + `"},"logprobs":{"content":` + logprobs + `}}]}` + "\n\n"
	}
	a := answerTo(t, `{"input":"a","top_logprobs":1}`, options())
	list := eventsOf(t, string(a.Append(nil, []byte(one("", probs())+one("a", probs(`{"token":"a"}`))+one("b", probs(`{"token":"b1"}`, `{"token":"b2"}`))+one("", probs(`{"token":"e"}`))+done))))
	var got []string
	for _, e := range list {
		if v, ok := e.data["logprobs"]; ok {
			got = append(got, string(v))
		}
	}
	if want := `[{"token":"a"}]|[{"token":"b1"},{"token":"b2"}]|[{"token":"a"},{"token":"b1"},{"token":"b2"},{"token":"e"}]`; strings.Join(got, "|") != want {
		t.Errorf("%q", got)
	}
}

// TestFailures: what cannot be a response ends with an error, and Failed says which.
func TestFailures(t *testing.T) {
	f := func(stream, part string, most int) {
		t.Helper()
		o := options()
		if most > 0 {
			o.Most = most
		}
		kept := false
		o.Keep = func([]byte) { kept = true }
		a := answerTo(t, `{"input":"a"}`, o)
		out := a.Append(nil, []byte(stream))
		if !a.Over() {
			out = a.Close(out)
		}
		list := eventsOf(t, string(out))
		n := len(list)
		if n < 2 || list[n-2].name != "error" || list[n-1].name != "response.failed" || !strings.Contains(list[n-2].raw, part) || a.Failed() == nil || kept {
			t.Errorf("%s: %s, %v", stream, out, a.Failed())
		}
		if more := a.Append(nil, []byte(delta(`"content":"b"`)+done)); len(more) > 0 || len(a.Close(nil)) > 0 {
			t.Errorf("%s: %s behind the end", stream, more)
		}
	}
	f("data: {\"whole\":true}\n\n", "no chat completion", 0)
	f("data: {\"cho\n\n", "no chat completion", 0)
	f("", "ended early", 0)
	f(delta(`"content":"a"`), "ended early", 0)
	f(delta(`"content":"`+strings.Repeat("a", 2000)+`"`), "more than 1000 bytes", 1000)
	f(strings.Repeat(delta(`"content":"`+strings.Repeat("a", 100)+`"`), 10), "more than 1000 bytes", 1000)
	call := func(index int) string {
		return delta(fmt.Sprintf(`"tool_calls":[{"index":%d,"id":"c%d","function":{"name":"f","arguments":"{}"}}]`, index, index))
	}
	f(call(0)+call(1)+call(2)+call(3), "more than 1000 bytes", 1000)
	f(call(0)+call(1)+call(0), "a call of a tool that was over", 0)
}

// TestComments: they keep a connection alive, but what a takeover leaves in a stream does not show.
func TestComments(t *testing.T) {
	a := answerTo(t, `{"input":"a"}`, options())
	stream := string(a.Append(nil, []byte(": hello\n\n"+first))) + string(a.Append(nil, []byte(": ping\n\n")))
	if !strings.HasSuffix(stream, "}\n\n:\n\n") {
		t.Errorf("%q", stream)
	}
	if more := a.Append(nil, []byte(": xpyd seam\n\n"+delta(`"content":"a"`))); bytes.Contains(more, []byte("\n:")) || bytes.HasPrefix(more, []byte(":")) {
		t.Errorf("%q", more)
	}
}

func TestWhole(t *testing.T) {
	f := func(body, want string) {
		t.Helper()
		var kept []byte
		o := options()
		o.Keep = func(r []byte) { kept = r }
		got, err := answerTo(t, `{"input":"a"}`, o).Whole(nil, []byte(body))
		if err != nil {
			if err.Error() != want || kept != nil {
				t.Errorf("%s: %v, %s", body, err, kept)
			}
			return
		}
		if p := part(t, got, "status", "output"); p != want || !bytes.Equal(got, kept) {
			t.Errorf("%s\n got %s\nwant %s", body, p, want)
		}
	}
	f(`{"choices":[{"message":{"content":"a","reasoning":"r","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{}"}}]},"finish_reason":"content_filter"}]}`,
		`"status":"incomplete" "output":[{"id":"rs_000","type":"reasoning","status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"r"}]},`+
			`{"id":"msg_001","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"a","annotations":[],"logprobs":[]}]},`+
			`{"id":"fc_002","type":"function_call","status":"incomplete","call_id":"c","name":"f","arguments":"{}"}]`)
	f(`{"whole":true}`, "502 the engine's answer is no chat completion")
	f(`{"error":{"message":"no","type":"invalid_request_error"}}`, "400 no")
	f(`{"choices":[{"message":{"content":"`+strings.Repeat("a", 1<<20)+`"}}]}`, "400 max_output_tokens: the response has more than 1048576 bytes: lower max_output_tokens")
}

// TestCreated: tokens that an engine says it has put into its cache are told.
func TestCreated(t *testing.T) {
	got, err := answerTo(t, `{"input":"a"}`, options()).Whole(nil, []byte(`{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2,"created_cache_tokens":4}}}`))
	const want = `"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":2,"cache_write_tokens":4},"output_tokens":3,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":12}`
	if err != nil || part(t, got, "usage") != want {
		t.Errorf("%v %s", err, got)
	}
}

// TestRecorded: what OpenAI has sent becomes the same stream however it comes in runs, and its last event is the
// response that the whole answer becomes.
func TestRecorded(t *testing.T) {
	files, err := filepath.Glob("../openai/testdata/sse/*.sse")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		body, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		want := answerTo(t, `{"input":"a"}`, options()).Append(nil, body)
		list := eventsOf(t, string(want))
		if last := list[len(list)-1].name; last != "response.completed" && last != "response.incomplete" {
			t.Errorf("%s: ends with %s", file, last)
		}
		text := ""
		for _, e := range list {
			if e.name == "response.output_text.delta" || e.name == "response.function_call_arguments.delta" || e.name == "response.refusal.delta" {
				var s string
				_ = json.Unmarshal(e.data["delta"], &s)
				text += s
			}
		}
		var last struct {
			Response struct {
				Output []struct {
					Arguments string
					Content   []struct{ Text, Refusal string }
				}
			}
		}
		_ = json.Unmarshal([]byte(list[len(list)-1].raw), &last)
		for _, o := range last.Response.Output {
			for _, c := range append(o.Content, struct{ Text, Refusal string }{o.Arguments, ""}) {
				if !strings.HasPrefix(text, c.Text+c.Refusal) {
					t.Fatalf("%s: %q is not what %q begins with", file, text, c.Text+c.Refusal)
				}
				text = text[len(c.Text+c.Refusal):]
			}
		}
		if text != "" {
			t.Errorf("%s: %q was left out", file, text)
		}
		a, got := answerTo(t, `{"input":"a"}`, options()), []byte(nil)
		for run := range strings.SplitAfterSeq(string(body), "\n\n") {
			got = a.Append(got, []byte(run))
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s: event by event it is another stream", file)
		}
	}
}

func TestList(t *testing.T) {
	const two = `[{"role":"user","content":"one"},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}]`
	const one, call = `{"id":"msg_1in00","type":"message","status":"completed","role":"user","content":[{"type":"input_text","text":"one"}]}`,
		`{"type":"function_call","call_id":"c","name":"f","arguments":"{}","id":"fc_1in01","status":"completed"}`
	f := func(input string, page responses.Page, want string) {
		t.Helper()
		got, err := responses.List(nil, []byte(input), "resp_1", page)
		if err != nil {
			got = []byte(err.Error())
		}
		if string(got) != want {
			t.Errorf("%s %+v\n got %s\nwant %s", input, page, got, want)
		}
	}
	f(`"one"`, responses.Page{Limit: 5}, `{"object":"list","data":[`+one+`],"first_id":"msg_1in00","last_id":"msg_1in00","has_more":false}`)
	f(two, responses.Page{Limit: 5}, `{"object":"list","data":[`+call+`,`+one+`],"first_id":"fc_1in01","last_id":"msg_1in00","has_more":false}`)
	f(two, responses.Page{Limit: 1, Asc: true}, `{"object":"list","data":[`+one+`],"first_id":"msg_1in00","last_id":"msg_1in00","has_more":true}`)
	f(two, responses.Page{Limit: 1, Asc: true, After: "msg_1in00"}, `{"object":"list","data":[`+call+`],"first_id":"fc_1in01","last_id":"fc_1in01","has_more":false}`)
	f(two, responses.Page{Limit: 1, After: "x"}, `400 after: after names no item of this response`)
	f(`[{"id":"m","role":"assistant","content":"a"}]`, responses.Page{Limit: 1}, `{"object":"list","data":[{"id":"m","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"a","annotations":[],"logprobs":[]}]}],"first_id":"m","last_id":"m","has_more":false}`)
	f(`[{"role":"assistant","content":[{"type":"output_text","text":"a","annotations":[1]},{"type":"refusal","refusal":"b"}]},{"role":"user","content":[{"type":"input_image","image_url":"u"}]}]`,
		responses.Page{Limit: 2, Asc: true}, `{"object":"list","data":[{"role":"assistant","content":[{"type":"output_text","text":"a","annotations":[1],"logprobs":[]},{"type":"refusal","refusal":"b"}],`+
			`"id":"msg_1in00","type":"message","status":"completed"},{"role":"user","content":[{"type":"input_image","image_url":"u","detail":"auto"}],"id":"msg_1in01","type":"message","status":"completed"}],`+
			`"first_id":"msg_1in00","last_id":"msg_1in01","has_more":false}`)
	f(`[]`, responses.Page{Limit: 1}, `{"object":"list","data":[],"first_id":"","last_id":"","has_more":false}`)
}

func TestItem(t *testing.T) {
	for id, want := range map[string]string{"msg_ab00": "resp_ab", "msg_abin01": "resp_ab", "msg": "", "": "", "msg_": "", "msg_0": ""} {
		if got := responses.ResponseOf(id); got != want {
			t.Errorf("%s is of %q", id, got)
		}
	}
	turn := responses.Turn{Input: []byte(`"hi"`), Output: []byte(`[{"id":"msg_ab00","a":1},{"id":"fc_ab01"}]`)}
	for id, want := range map[string]string{"msg_ab00": `{"id":"msg_ab00","a":1}`, "fc_ab01": `{"id":"fc_ab01"}`, "msg_ab01": "",
		"msg_abin00": `{"id":"msg_abin00","type":"message","status":"completed","role":"user","content":[{"type":"input_text","text":"hi"}]}`} {
		if got := string(responses.Item(id, turn)); got != want {
			t.Errorf("%s is %s", id, got)
		}
	}
}

func TestOwns(t *testing.T) {
	for path, want := range map[string]bool{"/v1/responses": true, "/v1/responses/resp_1": true, "/v1/responsesx": false, "/v1/chat/completions": false} {
		if responses.Owns(path) != want {
			t.Error(path)
		}
	}
}

// FuzzStream: whatever engines send, the client gets whole events in order, the last of which ends the response, and
// in the same bytes however the stream comes in runs.
func FuzzStream(f *testing.F) {
	f.Add([]byte(first+delta(`"content":"a"`)+usage+done), uint8(3))
	f.Add([]byte(delta(`"reasoning":"a"`)+delta(`"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":"{}"}}]`)+finish("length")), uint8(1))
	f.Add([]byte("data: {\"error\":{}}\n\n: x\n\n"), uint8(9))
	f.Fuzz(func(t *testing.T, stream []byte, cut uint8) {
		o := options()
		o.Most = 4 << 10
		a := answerTo(t, `{"input":"a"}`, o)
		want := a.Append(nil, stream)
		if !a.Over() {
			want = a.Close(want)
		}
		list := eventsOf(t, string(want))
		if last := list[len(list)-1].name; last != "response.completed" && last != "response.incomplete" && last != "response.failed" {
			t.Fatalf("%q ends with %s", stream, last)
		}
		b, got := answerTo(t, `{"input":"a"}`, o), []byte(nil)
		lines := bytes.SplitAfter(stream, []byte("\n"))
		for len(lines) > 0 {
			n := min(int(cut)%4+1, len(lines))
			got = b.Append(got, bytes.Join(lines[:n], nil))
			lines = lines[n:]
		}
		if !b.Over() {
			got = b.Close(got)
		}
		if again := eventsOf(t, string(got)); brief(again) != brief(list) || again[len(again)-1].raw != list[len(list)-1].raw {
			t.Fatalf("%q in runs of %d lines:\n%q\nat once:\n%q", stream, cut, got, want)
		}
	})
}

// TestBackground: a response in the background begins queued, its events have the numbers that follow, and Keep is told of
// each end, once.
func TestBackground(t *testing.T) {
	f := func(end func(a *responses.Answer) []byte, status, want string) {
		t.Helper()
		var told []string
		o := options()
		o.Background, o.Keep = true, func(response []byte) { told = append(told, string(response)) }
		a := answerTo(t, `{"input":"a","background":true,"stream":true}`, o)
		stream := a.Queue(nil)
		if s := string(a.Snapshot()); responses.Status([]byte(s)) != "queued" || !responses.InBackground([]byte(s)) {
			t.Error(s)
		}
		stream = append(append(stream, a.Start(nil)...), a.Append(nil, []byte(first+delta(`"content":"He"`)+":\n\n"))...)
		stream = append(stream, a.Append(nil, []byte(": ping\n\n"))...)
		if s := a.Snapshot(); responses.Status(s) != "in_progress" || !strings.Contains(string(s), `"text":"He"`) || len(told) != 0 {
			t.Errorf("%s, told %v", s, told)
		}
		stream = append(stream, end(a)...)
		for _, again := range []func([]byte) []byte{a.Cancel, a.Start, func(b []byte) []byte { return a.Fail(b, openai.Upstream("late")) }} {
			if more := again(nil); more != nil {
				t.Errorf("behind the end: %s", more)
			}
		}
		names := ""
		for _, e := range eventsOf(t, string(stream)) {
			names += strings.TrimPrefix(e.name, "response.") + " "
		}
		if names != "created queued in_progress output_item.added content_part.added output_text.delta "+want {
			t.Error(names)
		}
		if !a.Over() || len(told) != 1 || responses.Status([]byte(told[0])) != status || !strings.Contains(told[0], `"text":"He"`) {
			t.Errorf("%s: %v", status, told)
		}
	}
	f(func(a *responses.Answer) []byte { return a.Append(nil, []byte(finish("stop")+done)) }, "completed", "output_text.done content_part.done output_item.done completed ")
	f(func(a *responses.Answer) []byte { return a.Append(nil, []byte(finish("length")+done)) }, "incomplete", "output_text.done content_part.done output_item.done incomplete ")
	f(func(a *responses.Answer) []byte { return a.Close(nil) }, "failed", "error failed ")
	f(func(a *responses.Answer) []byte { return a.Fail(nil, openai.Unavailable("it ends")) }, "failed", "error failed ")
	f(func(a *responses.Answer) []byte { return a.Cancel(nil) }, "cancelled", "error ")

	if s := responses.Lost([]byte(`{"id":"resp_1","status":"queued","error":null,"output":[]}`)); responses.Status(s) != "failed" || !strings.Contains(string(s), `"code":"server_error"`) {
		t.Errorf("%s", s)
	}
}
