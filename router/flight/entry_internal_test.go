package flight

import (
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestPrompted: only two whole numbers say how long a prompt is, and how much of it was cached.
func TestPrompted(t *testing.T) {
	for header, want := range map[string]openai.PromptUsage{"12 3": {Prompt: 12, Cached: 3}, "": {}, "12": {}, "12 ": {}, "12 -3": {}, "-12 3": {}, "12 3 4": {}, "99999999999 3": {}} {
		a := &attempt{}
		if a.prompted([]byte(header)); a.usage != want || a.counted != (want.Prompt > 0) {
			t.Errorf("%q: %+v, %t", header, a.usage, a.counted)
		}
	}
}

// TestSeamTokens: how many tokens a stream had is known if each event came with a frame.
func TestSeamTokens(t *testing.T) {
	var none *seam
	s := &seam{choices: []sent{{n: 2}, {n: 3}}}
	if none.tokens() != 0 || s.tokens() != 5 {
		t.Errorf("%d tokens", s.tokens())
	}
	if s.lost = true; s.tokens() != 0 {
		t.Error("known though lost")
	}
}
