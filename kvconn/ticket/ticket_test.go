package ticket_test

import (
	"math"
	"reflect"
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

// TestPeer: the router's header, there and back.
func TestPeer(t *testing.T) {
	p, err := ticket.ParsePeer("decode-1 18446744073709551615 http://10.0.0.1:80 10.0.0.1:9000 4096")
	want := &ticket.Peer{ID: "decode-1", Epoch: math.MaxUint64, URL: "http://10.0.0.1:80", KV: "10.0.0.1:9000", Tokens: 4096}
	if err != nil || !reflect.DeepEqual(p, want) {
		t.Errorf("%+v, %v", p, err)
	}
	for _, s := range []string{"", "a", "a 1 u k", "a 1 u k 1 x", "a -1 u k 1", "a 1 u k 0", "a 1 u k -5", "a 1 u k 99999999", "a 1  k 1", " 1 u k 1", "a 1 u  1",
		"a 1 u\t k 1", "a 1 u k 1\n", "é 1 u k 1", strings.Repeat("a", 513) + " 1 u k 1"} {
		if p, err := ticket.ParsePeer(s); err == nil {
			t.Errorf("%q: %+v", s, p)
		}
	}
}

// FuzzPeer: what parses is in bounds, and reads the same again.
func FuzzPeer(f *testing.F) {
	f.Add("decode-1 7 http://10.0.0.1:80 10.0.0.1:9000 4096")
	f.Add("a 1 u k -1")
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ticket.ParsePeer(s)
		if err != nil {
			return
		}
		again, err := ticket.ParsePeer(p.String())
		if err != nil || *again != *p || p.Validate() != nil {
			t.Errorf("%+v %+v %v", p, again, err)
		}
	})
}
