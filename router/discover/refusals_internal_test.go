package discover

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// TestRefusalsAreForgotten: old refusals make room for new ones, even if nobody lists
// them.
func TestRefusalsAreForgotten(t *testing.T) {
	now := time.Unix(1000, 0)
	r := refusals{while: time.Minute}
	note := func(name string) bool { return r.note(Refusal{From: fromZMQ, Name: name, Reason: "no", At: now}) }
	for i := range maxRefusals {
		if !note(fmt.Sprint(i)) {
			t.Fatalf("%d is no news", i)
		}
	}
	if note("0") || note("x") || len(r.list) != maxRefusals {
		t.Error("news beyond the bound")
	}
	now = now.Add(time.Minute + time.Second)
	if !note("x") || note("x") || len(r.list) != 1 {
		t.Errorf("%d are kept", len(r.list))
	}
}

// TestRefusalsAreBounded: whatever engines say, refusals take a bounded amount of memory.
func TestRefusalsAreBounded(t *testing.T) {
	r := refusals{while: time.Minute}
	for n := range 2 * maxRefusals {
		r.note(Refusal{From: fromZMQ, Name: fmt.Sprint(n), Reason: "x" + strings.Repeat("ä", 4<<10), At: time.Unix(1000, 0)})
	}
	all := r.all(time.Unix(1000, 0))
	for _, f := range all {
		if len(f.Reason) > 256 || !utf8.ValidString(f.Reason) {
			t.Fatalf("a reason of %d bytes: %q", len(f.Reason), f.Reason)
		}
	}
	if len(all) != maxRefusals {
		t.Errorf("%d are kept", len(all))
	}
}
