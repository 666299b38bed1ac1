package ticket_test

import (
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// FuzzParseLink: what parses is written again in lower case.
func FuzzParseLink(f *testing.F) {
	f.Add(ticket.Link{1, 2, 255}.String())
	f.Add(strings.Repeat("F", 32))
	f.Add(strings.Repeat("g", 32))
	f.Fuzz(func(t *testing.T, s string) {
		if l, err := ticket.ParseLink(s); err == nil && l.String() != strings.ToLower(s) {
			t.Errorf("%q read as %s", s, l)
		}
	})
}

func TestRetryable(t *testing.T) {
	for o, want := range map[ticket.Outcome]bool{ticket.Done: false, ticket.NoSpace: true, ticket.Late: true, ticket.Dead: true,
		ticket.Incompatible: true, ticket.Corrupt: true, ticket.Cancelled: false, ticket.Refused: false, ticket.Invalid: false, ticket.Shed: false} {
		if o.Retryable() != want {
			t.Errorf("%s: retryable %v", o, !want)
		}
	}
}
