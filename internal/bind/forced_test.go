package bind_test

import (
	"strings"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
)

// TestForced: what a guide forces is told, token by token, in grammars and in what surrounds them.
func TestForced(t *testing.T) {
	k := newToy([]string{"<tool_call>", "</tool_call>"}, "no")
	for what, c := range map[string]struct {
		spec *handoff.Guide
		says []string // before
		want string   // forced behind it
	}{
		"a choice":         {&handoff.Guide{Kind: "choice", Text: `["xyz","q"]`}, []string{"x"}, "yz" + end},
		"a free choice":    {&handoff.Guide{Kind: "choice", Text: `["xyz","q"]`}, nil, ""},
		"an object's keys": {&handoff.Guide{Kind: "json_schema", Text: `{"type":"object","properties":{"k":{"enum":[7]}},"required":["k"],"additionalProperties":false}`, Compact: true}, []string{"{"}, `"k":7}` + end},
		"two spellings":    {&handoff.Guide{Kind: "regex", Text: "no"}, nil, ""},
		"a call": {&handoff.Guide{Kind: "calls", Text: `{"format":"hermes","tools":[{"name":"f","parameters":{"type":"object"}}]}`}, nil,
			"<tool_call>\n{\"name\": \"f\", \"arguments\":"},
	} {
		g := guideOf(t, k.binder(""), c.spec)
		k.says(t, g, c.says...)
		var got strings.Builder
		for {
			id, ok := g.(engine.Forcer).Forced()
			if !ok || !g.Accept(id) {
				break
			}
			got.WriteString(k.texts[id])
		}
		if got.String() != c.want {
			t.Errorf("%s: %q is forced, want %q", what, got.String(), c.want)
		}
	}
}
