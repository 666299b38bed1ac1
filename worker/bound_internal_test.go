package worker

import (
	"testing"

	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/internal/answer"
)

// TestThinks: what binds an answer begins behind the reasoning, unless the request wants none and the model marks where it begins.
func TestThinks(t *testing.T) {
	f := func(format string, direct bool, options answer.Options, want handoff.Thinks) {
		t.Helper()
		r := reading{think: answer.ThinkFormat(format), direct: direct, options: options}
		if got := r.thinks(); got != want {
			t.Errorf("%s, direct %v, %+v: %q, want %q", format, direct, options, got, want)
		}
	}
	f("none", false, answer.Options{}, handoff.ThinksNot)
	f("qwen3", false, answer.Options{}, handoff.ThinksMay)
	f("qwen3", true, answer.Options{}, handoff.ThinksNot)
	f("qwen3", true, answer.Options{Thinking: true}, handoff.ThinksNow)
	f("qwen3", true, answer.Options{Thought: true}, handoff.ThinksNot)
	f("deepseek_r1", true, answer.Options{}, handoff.ThinksNow)
	f("openai_gptoss", true, answer.Options{}, handoff.ThinksMay)
}
