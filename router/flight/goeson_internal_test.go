package flight

import (
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestGoesOn: only a worker that computes the same tokens, and reads the same in them, goes on with a stream.
func TestGoesOn(t *testing.T) {
	by := fleet.Instance{Dialect: fleet.Native, Model: "m", ModelFingerprint: "f", TokenizerFingerprint: "t", Numerics: "n", Parsers: "hermes/qwen3"}
	for name, c := range map[string]struct {
		change func(m *fleet.Instance)
		want   bool
	}{
		"the same":          {func(*fleet.Instance) {}, true},
		"another id":        {func(m *fleet.Instance) { m.ID = "x" }, true},
		"another model":     {func(m *fleet.Instance) { m.Model = "x" }, false},
		"other weights":     {func(m *fleet.Instance) { m.ModelFingerprint = "x" }, false},
		"another tokenizer": {func(m *fleet.Instance) { m.TokenizerFingerprint = "x" }, false},
		"other numerics":    {func(m *fleet.Instance) { m.Numerics = "x" }, false},
		"other parsers":     {func(m *fleet.Instance) { m.Parsers = "none/none" }, false},
		"another engine":    {func(m *fleet.Instance) { m.Dialect = "openai" }, false},
	} {
		m := by
		if c.change(&m); goesOn(&m, &by) != c.want {
			t.Errorf("%s: %t", name, !c.want)
		}
	}
}
