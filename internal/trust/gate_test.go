package trust_test

import (
	"strconv"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/trust"
)

func ring(t testing.TB, secrets ...trust.Secret) *trust.Ring {
	t.Helper()
	r, err := trust.NewRing(secrets...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestGate(t *testing.T) {
	s, next := fixed(t, one), fixed(t, two)
	r := ring(t, s)
	aud := trust.Member("decode-0", 7)
	g := r.Gate(trust.HTTP, aud)
	accepts := func(want bool, token string) {
		t.Helper()
		if g.Accepts([]byte(token)) != want {
			t.Errorf("accepts %.12s…: %t, want %t", token, !want, want)
		}
	}
	old, fresh := s.Token(trust.HTTP, aud), next.Token(trust.HTTP, aud)
	accepts(true, old)
	accepts(false, fresh)
	accepts(false, "")
	accepts(false, s.Token(trust.HTTP, trust.Member("decode-0", 8))) // another run
	accepts(false, s.Token(trust.Query, aud))                        // another purpose
	if err := r.Set(next, s); err != nil {
		t.Fatal(err)
	}
	accepts(true, old)
	accepts(true, fresh)
	if err := r.Set(next); err != nil {
		t.Fatal(err)
	}
	accepts(false, old)
	accepts(true, fresh)
	if allocs := testing.AllocsPerRun(100, func() { g.Accepts([]byte("x")) }); allocs > 0 {
		t.Errorf("%v allocations a question", allocs)
	}
	if everyone := (*trust.Ring)(nil).Gate(trust.HTTP, aud); !everyone.Accepts(nil) {
		t.Error("who trusts everyone asks for a token")
	}
}

func TestShown(t *testing.T) {
	s, next := fixed(t, one), fixed(t, two)
	r := ring(t, s)
	tokens := trust.NewTokens(r)
	f := func(id string, epoch uint64, secrets string, from *trust.Secret) {
		t.Helper()
		want := ""
		if from != nil {
			want = from.Token(trust.HTTP, trust.Member(id, epoch))
		}
		for range 2 {
			if got := tokens.HTTP(id, epoch, secrets); got != want {
				t.Errorf("%s@%d with %q: %.12s…, want %.12s…", id, epoch, secrets, got, want)
			}
		}
	}
	f("d", 1, "", &s)
	f("d", 2, s.ID(), &s)
	f("p", 1, next.ID(), nil)
	if err := r.Set(next, s); err != nil {
		t.Fatal(err)
	}
	f("d", 2, s.ID(), &s) // it has not the new one yet
	f("d", 1, "", &next)
	f("p", 1, next.ID(), &next)
	if allocs := testing.AllocsPerRun(100, func() { tokens.HTTP("p", 1, "") }); allocs > 0 {
		t.Errorf("%v allocations a token", allocs)
	}
	if got := trust.NewTokens(nil).HTTP("d", 1, s.ID()); got != "" {
		t.Errorf("without a secret %q is shown", got)
	}
}

// TestShownBounded: members come and go, secrets change, and many ask at once.
func TestShownBounded(t *testing.T) {
	s, next := fixed(t, one), fixed(t, two)
	r := ring(t, s)
	tokens, g := trust.NewTokens(r), r.Gate(trust.HTTP, trust.Member("d", 1))
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 2000 {
				tokens.HTTP("d"+strconv.Itoa(w), uint64(i), "")
				if !g.Accepts([]byte(s.Token(trust.HTTP, trust.Member("d", 1)))) {
					t.Error("what both rings accept is refused")
				}
			}
		})
	}
	if err := r.Set(next, s); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if n := tokens.Kept(); n > trust.MaxTokens {
		t.Errorf("%d tokens are kept", n)
	}
	want := next.Token(trust.HTTP, trust.Member("d", 1))
	if got := tokens.HTTP("d", 1, ""); got != want {
		t.Errorf("%.12s… is shown, want %.12s…", got, want)
	}
}
