package flight

import (
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestUnbound: no decode of ours is asked for a bound answer if it does not say that it knows grammars. Other
// engines say nothing of it, and a prefill leaves the first token to decode.
func TestUnbound(t *testing.T) {
	member := func(id, dialect string, role fleet.Role, knows bool) fleet.Member {
		return fleet.Member{Instance: fleet.Instance{ID: id, Dialect: dialect, Role: role, Grammars: knows}}
	}
	now := fleet.NewSnapshot(1, time.Time{}, []fleet.Member{
		member("new-prefill", fleet.Native, fleet.Prefill, true), member("old-prefill", fleet.Native, fleet.Prefill, false),
		member("new-decode", fleet.Native, fleet.Decode, true), member("old-decode", fleet.Native, fleet.Decode, false),
		member("old-both", fleet.Native, "both", false), member("vllm", "vllm-nixl", fleet.Decode, false),
	})
	if got := unbound(now); !slices.Equal(slices.Sorted(slices.Values(got)), []string{"old-both", "old-decode"}) {
		t.Errorf("%q", got)
	}
}
