package answer_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/answer"
)

// FuzzParser: no text makes a parser panic, hold back more than it may, depend on how the text is cut,
// or, of a whole answer, give a call whose arguments are no JSON. A text without calls comes out as it
// went in.
func FuzzParser(f *testing.F) {
	for i := range vectors {
		v := &vectors[i]
		f.Add(v.format, v.think, v.text, v.tools != "", v.thinking, uint8(3))
	}
	names := map[string]bool{"": true}
	for _, name := range append(answer.ToolNames(), answer.ThinkNames()...) {
		names[name] = true
	}
	f.Fuzz(func(t *testing.T, format, think, text string, tools, thinking bool, cut uint8) {
		if !names[format] || !names[think] || len(text) > 1<<17 {
			return
		}
		v := &vector{format: format, think: think, thinking: thinking}
		if tools {
			v.tools = oneTool
		}
		var pieces []string
		for rest, n := text, int(cut)%7+1; rest != ""; {
			k := min(n, len(rest))
			pieces, rest = append(pieces, rest[:k]), rest[k:]
		}
		for _, whole := range []bool{false, true} {
			g := parse(t, v, whole, []string{text})
			if cuts := parse(t, v, whole, pieces); !reflect.DeepEqual(g, cuts) {
				t.Fatalf("whole %t: %q\nat once   %+q\nin pieces %+q", whole, text, g, cuts)
			}
			for _, c := range g.Calls {
				if whole && format != "openai" && !json.Valid([]byte(c.Args)) {
					t.Fatalf("arguments %q of %q", c.Args, text)
				}
			}
			drops := format == "openai" || format == "cohere" || strings.HasPrefix(format, "deepseek")
			if len(g.Calls) == 0 && think == "" && !drops && g.Content != text {
				t.Fatalf("whole %t: of %q is left %q", whole, text, g.Content)
			}
		}
	})
}
