package prefill

import (
	"errors"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine"
)

// TestEarlyClaimsAreBounded: claims that come before their prompts count as leases, whose number
// is bounded; after the end there are none.
func TestEarlyClaimsAreBounded(t *testing.T) {
	l := newLeases(time.Minute, time.Minute, time.Minute, 2)
	reserve := func(id string, want error) {
		t.Helper()
		if k, err := l.reserve(id); !errors.Is(err, want) || (k == nil) != (want != nil) {
			t.Errorf("%s: %v, %v, want %v", id, k, err, want)
		}
	}
	reserve(EarlyClaim+"a", nil)
	reserve(EarlyClaim+"b", nil)
	reserve(EarlyClaim+"c", ErrTooManyLeases)
	if len(l.byID) != 2 {
		t.Errorf("%d leases", len(l.byID))
	}
	l.remove(l.byID[EarlyClaim+"a"])
	l.byID[EarlyClaim+"b"].err, l.byID[EarlyClaim+"b"].claimed = errors.New("it failed"), false
	reserve(EarlyClaim+"c", nil) // there is room: the one that failed stays, to say why
	if l.byID[EarlyClaim+"b"] == nil {
		t.Error("a failed one was removed for room that there was")
	}
	l.closed = true
	l.remove(l.byID[EarlyClaim+"b"])
	reserve(EarlyClaim+"d", engine.ErrClosed)
}
