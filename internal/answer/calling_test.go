package answer_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/answer"
)

// written is the arguments {"a": VALUE} as a format has them; value is JSON.
func written(c *answer.Calling, value string) string {
	m := c.Members
	if c.JSON() {
		return `{"a": ` + value + `}`
	}
	end := m.KeyEnd
	if text, ok := strings.CutPrefix(value, `"`); ok && !m.Python {
		if value = strings.TrimSuffix(text, `"`); m.StringEnd != "" {
			end = m.StringEnd
		}
	}
	return strings.ReplaceAll(m.Open+m.Key+"a"+end+m.Pad+value+m.Pad+m.Close, answer.MayBreak, "\n")
}

// TestCalling: calls written as Calling says read as these calls, whole, streamed, and cut anywhere.
func TestCalling(t *testing.T) {
	for _, name := range answer.ToolNames() {
		f := answer.ToolFormat(name)
		for n := range 3 {
			c, why := f.Calling(n > 0)
			if why != "" {
				t.Fatalf("%s: %s", name, why)
			}
			if n > 0 && !c.Several {
				break
			}
			args := []string{"1", `[2,"}"]`, `"x y"`}[:n+1]
			text, want := c.Before, []string(nil)
			for i, a := range args {
				if i > 0 {
					text += c.Next
				}
				tool := fmt.Sprintf("get_%d-x", i)
				if !c.Names(tool) {
					tool = "get.x"
				}
				text += c.Begin(tool)
				if c.Number != nil {
					text += c.Number(i)
				}
				if c.Space && i%2 == 0 {
					text += " "
				}
				text += written(&c, a) + c.End + c.Close
				want = append(want, tool+strings.ReplaceAll(`{"a": `+a+`}`, " ", ""))
			}
			text += c.After
			for _, whole := range []bool{true, false} {
				for cut := 0; cut <= len(text); cut++ {
					p := answer.New(f, nil, answer.Options{Whole: whole, Tools: answer.ReadTools([]json.RawMessage{[]byte(`{"function":{"name":"get_0-x","parameters":{"properties":{"a":{"type":"integer"}}}}}`),
						[]byte(`{"function":{"name":"get_1-x","parameters":{"properties":{"a":{"type":"array"}}}}}`), []byte(`{"function":{"name":"get_2-x","parameters":{"properties":{"a":{"type":"string"}}}}}`), []byte(`{"function":{"name":"get.x"}}`)})})
					var got []string
					for _, e := range slices.Concat(slices.Clone(p.Feed(text[:cut])), slices.Clone(p.Feed(text[cut:])), p.Flush()) {
						switch e.Kind {
						case answer.Begin:
							got = append(got, e.Text)
						case answer.Arguments:
							got[len(got)-1] += strings.ReplaceAll(e.Text, " ", "")
						default:
							t.Errorf("%s: %q has text %q", name, text, e.Text)
						}
					}
					if !slices.Equal(got, want) {
						t.Fatalf("%s, whole %t, cut at %d of %q: %q, want %q", name, whole, cut, text, got, want)
					}
				}
			}
		}
		for _, tr := range f.Triggers() {
			if c, _ := f.Calling(true); tr.Text == c.Mark && tr.Text+tr.Rest("f") != c.Before+c.Begin("f") {
				t.Errorf("%s: %q and %q are not how a call begins", name, tr.Text, tr.Rest("f"))
			}
		}
	}
	if _, why := (*answer.Format)(nil).Calling(true); why == "" {
		t.Error("no format has one")
	}
}

// TestBound: where what follows the reasoning is bound, nothing but its mark ends it.
func TestBound(t *testing.T) {
	for bound, want := range map[bool]string{true: `x <tool_call>{"name":"f"}</tool_call> y`, false: "x "} {
		p := answer.New(answer.ToolFormat("hermes"), answer.ThinkFormat("qwen3"), answer.Options{Thinking: true, Bound: bound})
		var reasoning string
		for _, e := range slices.Concat(slices.Clone(p.Feed(`x <tool_call>{"name":"f"}</tool_call> y</think>z`)), p.Flush()) {
			if e.Kind == answer.Reasoning {
				reasoning += e.Text
			}
		}
		if reasoning != want {
			t.Errorf("bound %t: %q, want %q", bound, reasoning, want)
		}
	}
	for name, want := range map[string][3]string{
		"qwen3":         {"<think>", "</think>", ""},
		"openai_gptoss": {"<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"},
	} {
		f := answer.ThinkFormat(name)
		open, end := f.Around()
		if got := [3]string{open, end, f.Before()}; got != want || f.Opened() {
			t.Errorf("%s: %q", name, got)
		}
	}
	if !answer.ThinkFormat("deepseek_r1").Opened() || (*answer.Think)(nil).Before() != "" {
		t.Error("deepseek_r1 thinks from its first word on")
	}
}
