package discover

import (
	"fmt"
	"testing"
	"time"
)

// TestRefusalsAreForgotten: what is full of old ones has room for news, also
// where nobody lists them.
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
