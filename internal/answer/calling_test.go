package answer_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/answer"
)

// TestCalling: calls written as Calling says read as these calls, whole, streamed, and cut anywhere; every format
// has a Calling or a reason.
func TestCalling(t *testing.T) {
	bound := 0
	for _, name := range answer.ToolNames() {
		f := answer.ToolFormat(name)
		c, why := f.Calling()
		if why != "" {
			if c.Begin != nil {
				t.Errorf("%s: %s, but it has a begin", name, why)
			}
			continue
		}
		bound++
		for n := range 3 {
			if n > 0 && !c.Several {
				break
			}
			args := []string{`{"a": 1}`, `{"b":[2,"}"]}`, `{}`}[:n+1]
			text, want := c.Before, []string(nil)
			for i, a := range args {
				if i > 0 {
					text += c.Next
				}
				tool := fmt.Sprintf("get_%d-x", i)
				text += c.Begin(tool)
				if c.Space && i%2 == 0 {
					text += " "
				}
				text += a + c.End + c.Close
				want = append(want, tool+a)
			}
			text += c.After
			for _, whole := range []bool{true, false} {
				for cut := 0; cut <= len(text); cut++ {
					p := answer.New(f, nil, answer.Options{Whole: whole})
					var got []string
					for _, e := range slices.Concat(slices.Clone(p.Feed(text[:cut])), slices.Clone(p.Feed(text[cut:])), p.Flush()) {
						switch e.Kind {
						case answer.Begin:
							got = append(got, e.Text)
						case answer.Arguments:
							got[len(got)-1] += e.Text
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
	}
	if bound < 17 {
		t.Errorf("%d formats have one", bound)
	}
	if _, why := (*answer.Format)(nil).Calling(); why == "" {
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
