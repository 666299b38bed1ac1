package worker_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/worker"
)

const strictTools = `"tools":[{"type":"function","function":{"name":"on","strict":true,"parameters":{"type":"object","properties":{"lamp":{"enum":["red","blue"]},"n":{"type":"integer","minimum":0,"maximum":99}},"required":["lamp","n"],"additionalProperties":false}}},
	{"type":"function","function":{"name":"off","parameters":{"type":"object","properties":{"lamp":{"enum":["red"]}}}}}]`

// lit reports whether arguments are as strictTools has them of on.
func lit(args string) bool {
	var a struct {
		Lamp string
		N    *int
	}
	d := json.NewDecoder(strings.NewReader(args))
	d.DisallowUnknownFields()
	return d.Decode(&a) == nil && (a.Lamp == "red" || a.Lamp == "blue") && a.N != nil
}

// formatted is a worker whose model begins as a test has it, and whose calls are in some format.
func formatted(t *testing.T, parser string) *improv {
	t.Helper()
	th := &improv{device: &opened{}}
	plain := strings.Replace(hermesTemplate, "{{ tools | tojson }}", "", 1) // which leaves more for the answer
	config := configWith(t, plain)
	th.theater = theater{t: t, Worker: start(t, func(c *worker.Config) { config(c); c.ToolParser, c.ReasoningParser = parser, "qwen3" }, func(d *worker.Deps) {
		d.Backend = func(b kernels.Backend) kernels.Backend {
			th.device.pool = b.(pool)
			return th.device
		}
	})}
	return th
}

// TestStrict: a call of a strict tool has arguments as its schema wants them, wherever the model begins one; text is free, and so
// are calls of other tools.
func TestStrict(t *testing.T) {
	for _, c := range []struct{ parser, begins, content, reasoning string }{
		{"hermes", "So: <tool_call>", "So: ", ""},
		{"hermes", "<think><tool_call> it is.</think><tool_call>", "", "<tool_call> it is."},
		{"qwen3_coder", "So.<tool_call>", "So.", ""},
		{"glm45", "<tool_call>", "", ""},
		{"minimax_m2", "A<minimax:tool_call>", "A", ""},
		{"pythonic", "A [on(", "A ", ""},
		{"llama3_json", `A {"name": "on", "parameters":`, "A ", ""},
		{"json", `A {"name":"on","arguments":`, "A ", ""},
	} {
		th := formatted(t, c.parser)
		whole := 0
		for seed := range 6 {
			for _, stream := range []string{"", `,"stream":true`} {
				body := fmt.Sprintf(`{%s,"max_tokens":330,"temperature":1,"logit_bias":{"2":%d},"seed":%d,%s%s}`, userAsks, 3*seed, seed, strictTools, stream)
				th.begins(body, c.begins)
				got := th.hear(nil, body)
				if got.Reasoning != c.reasoning || !strings.HasPrefix(got.Content, c.content) || len(got.Calls) == 0 && got.Finish != "length" {
					t.Errorf("%s%s: %+v", c.parser, stream, got)
				}
				for i, call := range got.Calls {
					if got.Finish == "length" && i == len(got.Calls)-1 && !json.Valid([]byte(call.Arguments)) { // cut off
						continue
					}
					if whole++; call.Name == "on" && !lit(call.Arguments) || call.Name != "on" && call.Name != "off" {
						t.Errorf("%s%s: %s(%s)", c.parser, stream, call.Name, call.Arguments)
					}
				}
			}
		}
		if whole == 0 {
			t.Errorf("%s: all are cut off", c.parser)
		}
		body := `{` + userAsks + `,"max_tokens":60,` + strictTools + `}`
		th.begins(body, "Just {text} of on and off.")
		if got := th.hear(nil, body); !strings.HasPrefix(got.Content, "Just {text} of on and off.") || len(got.Calls) > 0 {
			t.Errorf("%s: %+v", c.parser, got)
		}
		empty(t, th.Worker)
	}
}

// TestMadeToCallInTags: models whose calls are no JSON are made to call, too.
func TestMadeToCallInTags(t *testing.T) {
	for _, parser := range []string{"qwen3_coder", "glm45", "pythonic", "deepseek_v32"} {
		th := formatted(t, parser)
		whole := 0
		for seed := range 6 {
			for _, stream := range []string{"", `,"stream":true`} {
				body := fmt.Sprintf(`{%s,"max_tokens":330,"temperature":1,"logit_bias":{"2":%d},"seed":%d,%s,"tool_choice":{"type":"function","function":{"name":"on"}}%s}`, userAsks, 3*seed, seed, strictTools, stream)
				th.begins(body, "")
				got := th.hear(nil, body)
				if got.Finish == "length" {
					continue
				}
				if whole++; len(got.Calls) != 1 || got.Calls[0].Name != "on" || !lit(got.Calls[0].Arguments) || got.Content != "" || got.Finish != "stop" {
					t.Errorf("%s%s: %+v", parser, stream, got)
				}
			}
		}
		if whole == 0 {
			t.Errorf("%s: all are cut off", parser)
		}
		empty(t, th.Worker)
	}
}
