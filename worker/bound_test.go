package worker_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/worker"
)

// opened is a device that draws a given text's bytes behind a prompt of given length, and from there on what
// its model draws.
type opened struct {
	pool
	script atomic.Pointer[script]
}

func (d *opened) Step(s *kernels.Step) ([]kernels.Result, error) {
	results, err := d.pool.Step(s)
	sc := d.script.Load()
	if err != nil || sc == nil {
		return results, err
	}
	for i := range s.Seqs {
		for j, sample := range s.Seqs[i].Samples {
			if n := sample.Position - sc.at; n >= 0 && n < len(sc.ids) {
				results[i].Samples[j].Token = sc.ids[n]
			}
		}
	}
	return results, nil
}

// byteToken is the tiny model's token of a byte.
func byteToken(b byte) int { return int(b) + 3 }

// completed posts a completion and returns its choices' texts and why they ended.
func completed(t *testing.T, url, fields string) (texts, reasons []string) {
	t.Helper()
	resp, b := ask(t, url+"/v1/completions", nil, "{"+fields+"}")
	var a struct {
		Choices []struct {
			Text         string
			FinishReason string `json:"finish_reason"`
		}
	}
	if err := json.Unmarshal(b, &a); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%s: %d %s", fields, resp.StatusCode, b)
	}
	for _, c := range a.Choices {
		texts, reasons = append(texts, c.Text), append(reasons, c.FinishReason)
	}
	return texts, reasons
}

// TestBound: a completion is what its fields say, by whatever name, with whatever else the request asks for.
func TestBound(t *testing.T) {
	w := start(t, nil)
	phone := regexp.MustCompile(`^[0-9]{3}-[0-9]{4}$`)
	const three = `"n":3,"temperature":1.5,"max_tokens":60`
	for fields, ok := range map[string]func(text string) bool{
		`"regex":"[0-9]{3}-[0-9]{4}"`:                                          phone.MatchString,
		`"guided_regex":"[0-9]{3}-[0-9]{4}","min_tokens":40`:                   phone.MatchString,
		`"structured_outputs":{"regex":"[0-9]{3}-[0-9]{4}"},"ignore_eos":true`: phone.MatchString,
		`"guided_choice":["yes","no"],"presence_penalty":1.5`:                  func(s string) bool { return s == "yes" || s == "no" },
		`"structured_outputs":{"choice":["yes","no"]},"top_k":1`:               func(s string) bool { return s == "yes" || s == "no" },
		`"guided_choice":["a b","é 🙂"],"logprobs":3`:                           func(s string) bool { return s == "a b" || s == "é 🙂" },
		`"structured_outputs":{"json":{"type":"array","items":{"enum":[1,2,3]},"maxItems":4},"disable_any_whitespace":true}`: func(s string) bool {
			var list []int
			return json.Unmarshal([]byte(s), &list) == nil && len(list) <= 4
		},
		`"max_tokens":400,"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}}},"logit_bias":{"300":50}`: func(s string) bool {
			var v map[string]bool
			_, has := v["a"]
			return json.Unmarshal([]byte(s), &v) == nil && !has
		},
	} {
		for _, prompt := range []string{`"prompt":"Hello"`, `"prompt":["Hello there","A"]`} {
			texts, reasons := completed(t, w.URL(), prompt+","+three+","+fields)
			if len(texts) != 3*(1+strings.Count(prompt, "[")) {
				t.Errorf("%s: %d choices", fields, len(texts))
			}
			for i, text := range texts {
				if !ok(text) || reasons[i] != "stop" {
					t.Errorf("%s: %q, %s", fields, text, reasons[i])
				}
			}
		}
	}
	text, why := completed(t, w.URL(), `"prompt":"x","max_tokens":5,"regex":"a{20}"`)
	if text[0] != "aaaaa" || why[0] != "length" {
		t.Errorf("cut off: %q, %s", text[0], why[0])
	}
	text, why = completed(t, w.URL(), `"prompt":"x","max_tokens":40,"regex":"a{3}b{20}","stop":["bb"]`)
	if text[0] != "aaa" || why[0] != "stop" {
		t.Errorf("stopped: %q, %s", text[0], why[0])
	}
	text, why = completed(t, w.URL(), fmt.Sprintf(`"prompt":"x","max_tokens":40,"regex":"[ab]{9}","allowed_token_ids":[%d,%d]`, byteToken('b'), byteToken('c')))
	if text[0] != "bbbbbbbbb" || why[0] != "stop" {
		t.Errorf("without an a: %q, %s", text[0], why[0])
	}
	// What cannot begin is refused before anything is computed.
	for _, path := range []string{"", `,"stream":true`} {
		resp, b := ask(t, w.URL()+"/v1/completions", nil, fmt.Sprintf(`{"prompt":"x","regex":"[0-9]+","allowed_token_ids":[%d]%s}`, byteToken('b'), path))
		if resp.StatusCode != 400 || !strings.Contains(string(b), `"code":"unsatisfiable_constraint"`) || !strings.Contains(string(b), `"param":"regex"`) {
			t.Errorf("%d %s", resp.StatusCode, b)
		}
	}
	empty(t, w)
}

// TestBoundStream: a stream has the tokens of the whole answer.
func TestBoundStream(t *testing.T) {
	w := start(t, nil)
	const fields = `"prompt":"Once","seed":4,"temperature":1,"max_tokens":60,"regex":"([a-z]{2,5} ){4,8}"`
	want, _ := completed(t, w.URL(), fields)
	_, b := ask(t, w.URL()+"/v1/completions", nil, "{"+fields+`,"stream":true}`)
	var text strings.Builder
	for _, e := range strings.Split(string(b), "\n\n") {
		var a struct{ Choices []struct{ Text string } }
		if data, ok := strings.CutPrefix(e, "data: "); ok && data != "[DONE]" {
			if err := json.Unmarshal([]byte(data), &a); err != nil {
				t.Fatal(err)
			}
			text.WriteString(a.Choices[0].Text)
		}
	}
	if text.String() != want[0] || len(want[0]) < 8 {
		t.Errorf("%q, want %q", text.String(), want[0])
	}
}

// TestBoundRefused: what is wrong with what binds the answer is said, with the field and the place.
func TestBoundRefused(t *testing.T) {
	th := stage(t, hermesTemplate, nil)
	f := func(path, body, param, want string) {
		t.Helper()
		resp, b := ask(t, th.URL()+path, nil, body)
		var e struct {
			Error struct{ Message, Param, Type string }
		}
		if json.Unmarshal(b, &e) != nil || resp.StatusCode != 400 || e.Error.Param != param || e.Error.Type != "invalid_request_error" || !strings.Contains(e.Error.Message, want) {
			t.Errorf("%.200s: %d %s", body, resp.StatusCode, b)
		}
	}
	const chats, completions = "/v1/chat/completions", "/v1/completions"
	chat := func(fields string) string { return `{` + userAsks + `,` + fields + `}` }
	f(completions, `{"prompt":"x","regex":"a["}`, "regex", "at offset")
	f(completions, `{"prompt":"x","guided_json":{"type":"array","minItems":"x"}}`, "guided_json", "minItems")
	f(chats, chat(`"response_format":{"type":"json_schema","json_schema":{"schema":{"type":"thing"}}}`), "response_format.json_schema.schema", "type")
	f(chats, chat(`"regex":"a","ebnf":"b"`), "ebnf", "regex and ebnf")
	f(chats, chat(`"tool_choice":"required"`), "tool_choice", "needs tools")
	f(chats, chat(hasTools+`,"tool_choice":"some"`), "tool_choice", "must be")
	f(chats, chat(hasTools+`,"tool_choice":{"type":"function","function":{"name":"h"}}`), "tool_choice", `"h"`)
	f(chats, chat(hasTools+`,"tool_choice":"required","regex":"a"`), "regex", "regex and tool_choice")
	f(chats, chat(`"tools":[{"type":"function","function":{"name":"f g"}}],"tool_choice":"required"`), "tool_choice", `"f g"`)
	f(chats, chat(`"tools":[{"type":"web"}],"tool_choice":"required"`), "tools[0].type", "only function")
	f(chats, chat(`"tools":[{"type":"function","function":{"name":"g"}},{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object","properties":{"a":{"not":{}}}}}}]`), "tools[1].function.parameters", `"not" is not supported`)
	twoTools := `"tools":[{"type":"function","function":{"name":"g"}},{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"not":{}}}}}}]`
	f(chats, chat(twoTools+`,"tool_choice":"required"`), "tools[1].function.parameters", `"not" is not supported`)
	f(chats, chat(twoTools+`,"tool_choice":{"type":"function","function":{"name":"f"}}`), "tools[1].function.parameters", `"not" is not supported`)
	long := strings.Repeat("a", 600<<10)
	f(completions, `{"prompt":"x","regex":"`+long+`"}`, "regex", "limit")
	empty(t, th.Worker)
}

// TestUnbound: a token that may not come, of a device that draws as it likes, ends the request with an error
// of its own.
func TestUnbound(t *testing.T) {
	th := stage(t, hermesTemplate, nil)
	body := `{` + userAsks + `,"regex":"1[a-z]+"}`
	th.says(body, "12")
	resp, b := ask(t, th.URL()+"/v1/chat/completions", nil, body)
	if resp.StatusCode != 400 || !strings.Contains(string(b), `"code":"unsatisfiable_constraint"`) || !strings.Contains(string(b), "token 53 at position") {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
	body = `{` + userAsks + `,"regex":"1[a-z]+","stream":true}`
	if _, b = ask(t, th.URL()+"/v1/chat/completions", nil, body); !strings.Contains(string(b), `"content":"1"`) || !strings.Contains(string(b), `"code":"unsatisfiable_constraint"`) {
		t.Errorf("%s", b)
	}
	empty(t, th.Worker)
}

// TestToolChoiceNeedsAFormat: a model whose calls are not known cannot be made to call.
func TestToolChoiceNeedsAFormat(t *testing.T) {
	for parser, want := range map[string]string{"none": "not known"} {
		dir := talking(t)
		w := start(t, configOf(dir, parser))
		resp, b := ask(t, w.URL()+"/v1/chat/completions", nil, `{`+userAsks+`,`+hasTools+`,"tool_choice":"required"}`)
		if resp.StatusCode != 400 || !strings.Contains(string(b), want) || !strings.Contains(string(b), `"param":"tool_choice"`) {
			t.Errorf("%s: %d %s", parser, resp.StatusCode, b)
		}
	}
}

// TestBoundReasoning: a model thinks as it likes, and what is bound begins behind the mark; without reasoning
// at once. It is text, even where it looks like a call.
func TestBoundReasoning(t *testing.T) {
	th := improvised(t, hermesTemplate)
	f := func(fields, begins, reasoning, content string) {
		t.Helper()
		for _, stream := range []string{"", `,"stream":true`} {
			body := `{` + userAsks + `,"max_tokens":80,"seed":3,` + fields + stream + `}`
			th.begins(body, begins)
			got := th.hear(nil, body)
			if got.Reasoning != reasoning || !regexp.MustCompile("^(?s:"+content+")$").MatchString(got.Content) || got.Finish != "stop" || len(got.Calls) > 0 {
				t.Errorf("%s%s: %+v, want %q and %q", fields, stream, got, reasoning, content)
			}
		}
	}
	f(`"regex":"[0-9]{4}"`, "<think>Hm 12.</think>", "Hm 12.", "[0-9]{4}")
	f(`"regex":"[0-9]{4}"`, "12", "", "12[0-9]{2}")
	f(`"regex":"<[a-z]{3}","chat_template_kwargs":{"enable_thinking":false}`, "<", "", "<[a-z]{3}") // not the beginning of <think>
	f(`"regex":"<[a-z]{3}","reasoning_effort":"none"`, "<", "", "<[a-z]{3}")
	f(`"guided_choice":["<thing","<tool_call>x"]`, "<to", "", "<tool_call>x")
	f(`"regex":"[0-9]{4}","chat_template_kwargs":{"enable_thinking":true}`, "So. <tool_call> is no call</think>", "So. <tool_call> is no call", "[0-9]{4}")
	f(`"regex":"<tool_call>\\{\"name\": \"f\"\\}</tool_call>",`+hasTools, "<tool", "", `<tool_call>\{"name": "f"\}</tool_call>`)
	f(`"response_format":{"type":"json_schema","json_schema":{"schema":{"type":"object","properties":{"name":{"const":"f"}},"required":["name"],"additionalProperties":false}}},`+hasTools, "{", "",
		`\{\s*"name"\s*:\s*"f"\s*\}`)
	empty(t, th.Worker)
}

// TestMadeToCall: a model that must call a tool does, with arguments as the schema wants them, behind its
// reasoning or without.
func TestMadeToCall(t *testing.T) {
	th := improvised(t, strings.Replace(hermesTemplate, "{{ tools | tojson }}", "", 1)) // which leaves more for the answer
	const tools = `"tools":[{"type":"function","function":{"name":"on","parameters":{"type":"object","properties":{"lamp":{"enum":["red","blue"]}},"required":["lamp"],"additionalProperties":false}}},
		{"type":"function","function":{"name":"off"}}]`
	args := map[string][]string{"on": {`{"lamp":"red"}`, `{"lamp":"blue"}`}, "off": {"{}"}}
	f := func(fields, begins, reasoning, name, finish string, most int) {
		t.Helper()
		ended := 0
		for seed := range 8 {
			for _, stream := range []string{"", `,"stream":true`} {
				body := fmt.Sprintf(`{%s,"max_tokens":420,"temperature":1,"logit_bias":{"2":%d},"seed":%d,%s,%s%s}`, userAsks, 4*seed, seed, tools, fields, stream)
				th.begins(body, begins)
				got := th.hear(nil, body)
				if got.Finish == "length" { // cut off
					continue
				}
				ended++
				if n := len(got.Calls); n < 1 || n > most || got.Reasoning != reasoning || got.Content != "" || got.Finish != finish {
					t.Errorf("%s%s: %+v", fields, stream, got)
				}
				for _, c := range got.Calls {
					plain := strings.Map(func(r rune) rune {
						if strings.ContainsRune(" \n\t\r", r) {
							return -1
						}
						return r
					}, c.Arguments)
					if !slices.Contains(args[c.Name], plain) || name != "" && c.Name != name {
						t.Errorf("%s%s: %s(%s)", fields, stream, c.Name, c.Arguments)
					}
				}
			}
		}
		if ended == 0 {
			t.Errorf("%s: all are cut off", fields)
		}
	}
	f(`"tool_choice":"required"`, "", "", "", "tool_calls", 128)
	f(`"tool_choice":"required","parallel_tool_calls":false`, "", "", "", "tool_calls", 1)
	f(`"tool_choice":{"type":"function","function":{"name":"on"}}`, "", "", "on", "stop", 1)
	f(`"tool_choice":{"type":"function","function":{"name":"off"}}`, "<think>Off.</think>", "Off.", "off", "stop", 1)
	f(`"tool_choice":"required","parallel_tool_calls":false,"chat_template_kwargs":{"enable_thinking":true}`, "<tool_call>?</think>", "<tool_call>?", "", "tool_calls", 1)
	empty(t, th.Worker)
}

// improv is a worker whose model begins as a test has it, and goes on as it likes.
type improv struct {
	theater
	device *opened
}

func improvised(t *testing.T, template string) *improv {
	t.Helper()
	th := &improv{device: &opened{}}
	th.theater = theater{t: t, Worker: start(t, configWith(t, template), func(d *worker.Deps) {
		d.Backend = func(b kernels.Backend) kernels.Backend {
			th.device.pool = b.(pool)
			return th.device
		}
	})}
	return th
}

// begins has the model begin the answer to body with text.
func (th *improv) begins(body, text string) {
	th.theater.device = &scripted{}
	th.says(strings.Replace(body, `,"stream":true`, "", 1), text)
	th.device.script.Store(th.theater.device.script.Load())
}

func configOf(dir, parser string) func(*worker.Config) {
	return func(c *worker.Config) { c.Model, c.ToolParser = dir, parser }
}

func configWith(t *testing.T, template string) func(*worker.Config) {
	dir := talking(t)
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	return func(c *worker.Config) { c.Model = dir }
}
