package messages_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/messages"
	"github.com/xpyd/xpyd/internal/openai"
)

func answerTo(t testing.TB, members string) *messages.Answer {
	t.Helper()
	q, err := messages.Parse([]byte(asked(members)), false)
	if err != nil {
		t.Fatal(err)
	}
	return q.Answer("msg_0")
}

// delta is an event of a chat's stream.
func delta(members string) string {
	return `data: {"id":"c","model":"em","choices":[{"index":0,"delta":{` + members + `},"finish_reason":null}]}` + "\n\n"
}

func finish(reason, stop string) string {
	return `data: {"choices":[{"index":0,"delta":{},"finish_reason":"` + reason + `","stop_reason":` + stop + `}]}` + "\n\n"
}

const (
	first = `data: {"id":"c","model":"em","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	usage = `data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":2}}}` + "\n\n"
	done  = "data: [DONE]\n\n"
)

// eventsOf reads a stream: the data of its events.
func eventsOf(t testing.TB, stream string) (list []string) {
	t.Helper()
	if stream != "" && !strings.HasSuffix(stream, "\n\n") {
		t.Fatalf("half an event: %q", stream)
	}
	for text := range strings.SplitSeq(strings.TrimSuffix(stream, "\n\n"), "\n\n") {
		name, data, ok := strings.Cut(strings.TrimPrefix(text, "event: "), "\ndata: ")
		if !ok || !json.Valid([]byte(data)) || !strings.HasPrefix(data, `{"type":"`+name+`"`) {
			t.Fatalf("%q", text)
		}
		list = append(list, data)
	}
	return list
}

func TestStream(t *testing.T) {
	f := func(ask, stream string, want ...string) {
		t.Helper()
		a := answerTo(t, ask)
		a.Prompt(7, 4)
		got := eventsOf(t, string(a.Append(nil, []byte(stream))))
		if strings.Join(got, "\n") != strings.Join(want, "\n") || !a.Over() {
			t.Errorf("%s\n got:\n%s\nwant:\n%s", stream, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	start := func(model string) string {
		return `{"type":"message_start","message":{"id":"msg_0","type":"message","role":"assistant","model":"` + model + `","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":3,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":0}}}`
	}
	const ping, stop = `{"type":"ping"}`, `{"type":"message_stop"}`
	end := func(reason, sequence string) string {
		return `{"type":"message_delta","delta":{"stop_reason":"` + reason + `","stop_sequence":` + sequence + `},"usage":{"input_tokens":3,"cache_creation_input_tokens":0,"cache_read_input_tokens":2,"output_tokens":3}}`
	}
	block := func(i int, kind string) string {
		return fmt.Sprintf(`{"type":"content_block_start","index":%d,"content_block":%s}`, i, kind)
	}
	piece := func(i int, what string) string {
		return fmt.Sprintf(`{"type":"content_block_delta","index":%d,"delta":{%s}}`, i, what)
	}
	over := func(i int) string { return fmt.Sprintf(`{"type":"content_block_stop","index":%d}`, i) }
	const text = `{"type":"text","text":""}`
	f(``, first+delta(`"content":"He"`)+delta(`"content":"llo \"ä\""`)+finish("stop", "null")+usage+done,
		start("em"), ping, block(0, text), piece(0, `"type":"text_delta","text":"He"`), piece(0, `"type":"text_delta","text":"llo \"ä\""`), over(0), end("end_turn", "null"), stop)
	f(`"model":"own","stop_sequences":["\u00e4x"]`, delta(`"content":"b"`)+finish("stop", `"äx"`)+usage+done,
		start("own"), ping, block(0, text), piece(0, `"type":"text_delta","text":"b"`), over(0), end("stop_sequence", `"äx"`), stop)
	f(`"stop_sequences":["x"]`, delta(`"content":"b"`)+finish("stop", `"</s>"`)+usage+done,
		start("em"), ping, block(0, text), piece(0, `"type":"text_delta","text":"b"`), over(0), end("end_turn", "null"), stop)
	f(``, delta(`"reasoning":"th","reasoning_content":"th"`)+delta(`"content":"b"`)+
		delta(`"tool_calls":[{"index":0,"id":"c1","function":{"name":"f","arguments":""}}]`)+delta(`"tool_calls":[{"index":0,"function":{"arguments":"{}"}},{"index":1,"function":{"name":"g","arguments":"{"}}]`)+
		delta(`"tool_calls":[{"index":1,"function":{"arguments":"}"}}]`)+finish("stop", "null")+usage+done,
		start("em"), ping, block(0, `{"type":"thinking","thinking":"","signature":""}`), piece(0, `"type":"thinking_delta","thinking":"th"`), piece(0, `"type":"signature_delta","signature":"unsigned"`), over(0),
		block(1, text), piece(1, `"type":"text_delta","text":"b"`), over(1),
		block(2, `{"type":"tool_use","id":"c1","name":"f","input":{}}`), piece(2, `"type":"input_json_delta","partial_json":"{}"`), over(2),
		block(3, `{"type":"tool_use","id":"toolu_001","name":"g","input":{}}`), piece(3, `"type":"input_json_delta","partial_json":"{"`), piece(3, `"type":"input_json_delta","partial_json":"}"`), over(3),
		end("tool_use", "null"), stop)
	f(``, first+finish("length", "null")+usage+done, start("em"), ping, end("max_tokens", "null"), stop)
	f(``, delta(`"refusal":"no"`)+finish("content_filter", "null")+usage+done,
		start("em"), ping, block(0, text), piece(0, `"type":"text_delta","text":"no"`), over(0), end("refusal", "null"), stop)
	f(``, delta(`"content":"b"`)+`data: {"error":{"message":"it broke","type":"server_error","param":null,"code":"unavailable"}}`+"\n\n"+done,
		start("em"), ping, block(0, text), piece(0, `"type":"text_delta","text":"b"`), `{"type":"error","error":{"type":"overloaded_error","message":"it broke"}}`)
}

func TestWhole(t *testing.T) {
	f := func(ask, body, want string) {
		t.Helper()
		got, err := answerTo(t, ask).Whole(nil, []byte(body))
		if err != nil {
			got = []byte(err.Error())
		} else if !json.Valid(got) {
			t.Errorf("%s: %s", body, got)
		}
		if string(got) != want {
			t.Errorf("%s\n got %s\nwant %s", body, got, want)
		}
	}
	message := func(content, reason, sequence string) string {
		return `{"id":"msg_0","type":"message","role":"assistant","model":"em","content":[` + content + `],"stop_reason":"` + reason + `","stop_sequence":` + sequence +
			`,"usage":{"input_tokens":3,"cache_creation_input_tokens":0,"cache_read_input_tokens":2,"output_tokens":3}}`
	}
	const told = `,"model":"em","usage":{"prompt_tokens":5,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}`
	f(``, `{"choices":[{"message":{"content":"a\"b"},"finish_reason":"stop"}]`+told, message(`{"type":"text","text":"a\"b"}`, "end_turn", "null"))
	f(`"stop_sequences":["x","y"]`, `{"choices":[{"message":{"content":"a"},"finish_reason":"stop","matched_stop":"y"}]`+told, message(`{"type":"text","text":"a"}`, "stop_sequence", `"y"`))
	f(``, `{"choices":[{"message":{"content":null,"reasoning":"r","tool_calls":[{"id":"c1","function":{"name":"f","arguments":"{\"a\": 1}"}},{"id":"c2","function":{"name":"g","arguments":""}},{"id":"c3","function":{"name":"h","arguments":"{\"a"}},{"id":"c4","function":{"name":"i","arguments":"[1]"}}]},"finish_reason":"tool_calls"}]`+told,
		message(`{"type":"thinking","thinking":"r","signature":"unsigned"},{"type":"tool_use","id":"c1","name":"f","input":{"a": 1}},{"type":"tool_use","id":"c2","name":"g","input":{}},`+
			`{"type":"tool_use","id":"c3","name":"h","input":{"INVALID_JSON":"{\"a"}},{"type":"tool_use","id":"c4","name":"i","input":{"INVALID_JSON":"[1]"}}`, "tool_use", "null"))
	f(``, `{"choices":[{"message":{"content":""},"finish_reason":"length"}]`+told, message(``, "max_tokens", "null"))
	f(``, `{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"model":"em","usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2,"created_cache_tokens":4}}}`,
		strings.Replace(message(`{"type":"text","text":"a"}`, "end_turn", "null"), `"cache_creation_input_tokens":0`, `"cache_creation_input_tokens":4`, 1))
	f(``, `{"whole":true}`, "502 the engine's answer is no chat completion")
	f(``, `{"error":{"message":"no","code":"unavailable"}}`, "503 no")
}

func TestFailures(t *testing.T) {
	f := func(stream, part string) {
		t.Helper()
		a := answerTo(t, ``)
		out := a.Append(nil, []byte(stream))
		if !a.Over() {
			out = a.Close(out)
		}
		list := eventsOf(t, string(out))
		last := list[len(list)-1]
		if !strings.HasPrefix(last, `{"type":"error","error":{"type":"api_error",`) || !strings.Contains(last, part) || a.Failed() == nil {
			t.Errorf("%s: %s, %v", stream, last, a.Failed())
		}
		if more := a.Append(nil, []byte(": x\n\n"+delta(`"content":"b"`)+done)); len(more) > 0 || len(a.Close(nil)) > 0 {
			t.Errorf("%s: %s behind the end", stream, more)
		}
	}
	f("data: {\"whole\":true}\n\n", "no chat completion")
	f("", "ended early")
	f(delta(`"content":"a"`), "ended early")
	call := func(index int, name string) string {
		return delta(fmt.Sprintf(`"tool_calls":[{"index":%d,"function":{"name":%q,"arguments":"{}"}}]`, index, name))
	}
	f(call(0, "f")+call(1, "g")+call(0, ""), "a call of a tool that was over")
}

func TestPing(t *testing.T) {
	a := answerTo(t, ``)
	a.Append(nil, []byte(first))
	if got := string(a.Append(nil, []byte(": ping\n\n"))); got != "event: ping\ndata: {\"type\":\"ping\"}\n\n" {
		t.Errorf("%q", got)
	}
	if got := string(a.Append(nil, []byte(": xpyd seam\n\n"+delta(`"content":"a"`)))); strings.Contains(got, "ping") || strings.Contains(got, "seam") {
		t.Errorf("%q", got)
	}
}

// TestRecorded: what OpenAI has sent becomes the same stream however it comes in runs.
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
		want := answerTo(t, ``).Append(nil, body)
		if list := eventsOf(t, string(want)); list[len(list)-1] != `{"type":"message_stop"}` {
			t.Errorf("%s: ends with %s", file, list[len(list)-1])
		}
		a, got := answerTo(t, ``), []byte(nil)
		for run := range strings.SplitAfterSeq(string(body), "\n\n") {
			got = a.Append(got, []byte(run))
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s: event by event it is another stream", file)
		}
	}
}

func TestRefusal(t *testing.T) {
	f := func(e *openai.Error, status int, kind, message string) {
		t.Helper()
		got, body := messages.Refusal(e, `req-"1`)
		want := fmt.Sprintf(`{"type":"error","error":{"type":"%s","message":"%s"},"request_id":"req-\"1"}`, kind, message)
		if got != status || string(body) != want {
			t.Errorf("%v: %d %s, want %d %s", e, got, body, status, want)
		}
	}
	f(openai.BadRequest("max_completion_tokens", "too many"), 400, "invalid_request_error", "max_tokens: too many")
	f(openai.BadRequest("tools", "tools[0] is none"), 400, "invalid_request_error", "tools[0] is none")
	f(openai.BadRequest("", "none"), 400, "invalid_request_error", "none")
	f(openai.Unauthorized("no"), 401, "authentication_error", "no")
	f(&openai.Error{Status: 403, Message: "no"}, 403, "permission_error", "no")
	f(openai.ModelNotFound("x"), 404, "not_found_error", `the model \"x\" does not exist`)
	f(openai.BadRequest("", "no").WithStatus(405, "x"), 405, "invalid_request_error", "no")
	f(openai.TooLarge("no"), 413, "request_too_large", "no")
	f(openai.TooMany("no"), 429, "rate_limit_error", "no")
	f(openai.Internal("no"), 500, "api_error", "no")
	f(openai.Upstream("no"), 502, "api_error", "no")
	f(openai.Unavailable("no"), 529, "overloaded_error", "no")
	f(openai.Deadline("no"), 504, "timeout_error", "no")
	for path, want := range map[string]bool{"/v1/messages": true, "/v1/messages/count_tokens": true, "/v1/messagesx": false, "/v1/models": false} {
		if messages.Owns(path) != want {
			t.Error(path)
		}
	}
}

// FuzzStream: whatever engines send, the client gets whole events, blocks that begin and end in order, and an end, in
// the same bytes however the stream comes in runs.
func FuzzStream(f *testing.F) {
	f.Add([]byte(first+delta(`"content":"a"`)+usage+done), uint8(3))
	f.Add([]byte(delta(`"reasoning":"a"`)+delta(`"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":"{}"}}]`)+finish("length", "null")), uint8(1))
	f.Add([]byte("data: {\"error\":{}}\n\n: x\n\n"), uint8(9))
	f.Fuzz(func(t *testing.T, stream []byte, cut uint8) {
		tell := func(runs [][]byte) string {
			a, out := answerTo(t, ``), []byte(nil)
			for _, run := range runs {
				out = a.Append(out, run)
			}
			if !a.Over() {
				out = a.Close(out)
			}
			list, open, last := eventsOf(t, string(out)), -1, -1
			var kept []string
			for i, e := range list {
				var at struct {
					Type  string
					Index int
				}
				_ = json.Unmarshal([]byte(e), &at)
				switch at.Type {
				case "ping":
					continue
				case "content_block_start":
					if open >= 0 || at.Index != last+1 {
						t.Fatalf("%q: block %d begins in %d", stream, at.Index, open)
					}
					open, last = at.Index, at.Index
				case "content_block_delta", "content_block_stop":
					if at.Index != open {
						t.Fatalf("%q: %s of %d in %d", stream, at.Type, at.Index, open)
					}
					if at.Type == "content_block_stop" {
						open = -1
					}
				case "message_start":
					if i > 0 {
						t.Fatalf("%q begins twice", stream)
					}
				case "message_stop", "error":
					if i != len(list)-1 {
						t.Fatalf("%q goes on behind its end", stream)
					}
				}
				kept = append(kept, e)
			}
			if end := kept[len(kept)-1]; end != `{"type":"message_stop"}` && !strings.HasPrefix(end, `{"type":"error"`) {
				t.Fatalf("%q ends with %s", stream, end)
			}
			return strings.Join(kept, "\n")
		}
		lines, runs := bytes.SplitAfter(stream, []byte("\n")), [][]byte(nil)
		for len(lines) > 0 {
			n := min(int(cut)%4+1, len(lines))
			runs = append(runs, bytes.Join(lines[:n], nil))
			lines = lines[n:]
		}
		if got, want := tell(runs), tell([][]byte{stream}); got != want {
			t.Fatalf("%q in runs of %d lines:\n%s\nat once:\n%s", stream, cut, got, want)
		}
	})
}
