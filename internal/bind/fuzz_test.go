package bind_test

import (
	"context"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
)

// FuzzGuide: whatever a peer's spec is, a guide of it accepts a token if and only if its mask has it, and stays
// where it does not; and what it forces is all that its mask has.
func FuzzGuide(f *testing.F) {
	k := newToy([]string{"</think>", "<think>", "<tool_call>", "</tool_call>"}, "ab", "</thi", "nk>", `{"`)
	b := k.binder("qwen3")
	for _, kind := range []string{"regex", "choice", "json_object", "json_schema", "ebnf", "lark", "calls"} {
		f.Add(kind, "a|b", "<", byte(1), []byte{0, 1, 2, 3, 40, 50})
	}
	f.Add("regex", "(ab|</think>)*", "", byte(1), []byte{2, 5, 1, 5})
	f.Add("choice", `["ab","<think>x"]`, "", byte(2), []byte{2, 1, 5})
	f.Add("calls", `{"format":"hermes","tools":[{"name":"f","parameters":{"type":"object"}}],"several":true}`, "", byte(1), []byte{2, 1, 3, 8})
	f.Add("may_call", `{"format":"hermes","tools":[{"name":"f","parameters":{"type":"object"}},{"name":"g","free":true}],"several":true}`, "", byte(1), []byte{2, 1, 3, 8})
	f.Add("may_call", `{"format":"json","tools":[{"name":"f"}]}`, "", byte(0), []byte{9, 1, 3, 8})
	f.Add("calls", `{"format":"qwen3_coder","tools":[{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}]}`, "", byte(0), []byte{3, 1, 3, 8})
	f.Fuzz(func(t *testing.T, kind, text, begin string, thinks byte, ids []byte) {
		for _, c := range begin {
			if c < ' ' || c > '~' {
				return // the toy has no tokens for it
			}
		}
		spec := &handoff.Guide{Kind: kind, Text: text, Begin: begin, Thinks: []handoff.Thinks{handoff.ThinksNot, handoff.ThinksMay, handoff.ThinksNow}[thinks%3]}
		g, err := b.Guide(context.Background(), spec)
		if err != nil {
			return
		}
		for _, id := range ids[:min(len(ids), 64)] {
			may := k.allowed(g)
			if only, ok := g.(engine.Forcer).Forced(); ok && !slices.Equal(may, []string{k.texts[only]}) {
				t.Fatalf("%q is forced where %q may come", k.texts[only], may)
			}
			token := int32(id) % int32(len(k.texts))
			if g.Accept(token) != slices.Contains(may, k.texts[token]) {
				t.Fatalf("%q: allowed %t", k.texts[token], slices.Contains(may, k.texts[token]))
			}
			if slices.Contains(may, k.texts[token]) {
				continue
			}
			if again := k.allowed(g); !slices.Equal(may, again) {
				t.Fatalf("%q became %q", may, again)
			}
		}
	})
}
