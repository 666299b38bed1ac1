package trust_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/trust"
)

// fixed is a secret that does not change between runs.
func fixed(t *testing.T, text string) trust.Secret {
	t.Helper()
	s, err := trust.ParseSecret(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	one = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
	two = "IAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
)

// TestVectors: two builds that derive differently are two fleets.
func TestVectors(t *testing.T) {
	s := fixed(t, one)
	if s.Reveal() != one {
		t.Error("a secret is not what it was read from")
	}
	for got, want := range map[string]string{
		s.ID():                            "3238efab",
		s.Token(trust.HTTP, "decode-0@7"): "3238efab.Wm_d2CqJCHqp8aO_uclNZHIYSc8Y0T3Y",
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestTokens(t *testing.T) {
	s, other := fixed(t, one), fixed(t, two)
	seen := map[string]string{}
	for _, who := range []struct {
		s        trust.Secret
		p        trust.Purpose
		audience string
	}{{s, trust.HTTP, "a@1"}, {s, trust.HTTP, "a@2"}, {s, trust.HTTP, "b@1"}, {s, trust.Scrape, "a@1"}, {s, trust.KV, ""}, {s, trust.Events, ""}, {other, trust.HTTP, "a@1"}} {
		token := who.s.Token(who.p, who.audience)
		if before, again := seen[token]; again {
			t.Errorf("%v and %s have the same token", who, before)
		}
		seen[token] = fmt.Sprint(who)
	}
}

func TestRing(t *testing.T) {
	s, next := fixed(t, one), fixed(t, two)
	r, err := trust.NewRing(s)
	if err != nil {
		t.Fatal(err)
	}
	aud := trust.Member("decode-0", 7)
	old, fresh := []byte(s.Token(trust.HTTP, aud)), []byte(next.Token(trust.HTTP, aud))
	accepts := func(want bool, token []byte) {
		t.Helper()
		if r.Gate(trust.HTTP, aud).Accepts(token) != want {
			t.Errorf("accepts %.12s…: %t, want %t", token, !want, want)
		}
	}
	accepts(true, old)
	accepts(false, fresh)
	accepts(false, nil)
	accepts(false, old[:len(old)-1])
	if err := r.Set(next, s); err != nil {
		t.Fatal(err)
	}
	accepts(true, old)
	accepts(true, fresh)
	if got, ok := r.Shared(s.ID()); !ok || got != s {
		t.Error("with a member that knows the older secret, that one is shared")
	}
	if got, ok := r.Shared(r.IDs()); !ok || got != next {
		t.Error("with a member that knows both, the newer one is shared")
	}
	if _, ok := r.Shared("00000000"); ok {
		t.Error("a stranger shares a secret")
	}
	if err := r.Set(next); err != nil {
		t.Fatal(err)
	}
	accepts(false, old)
	accepts(true, fresh)
	for _, bad := range [][]trust.Secret{nil, {s, s}, {s, next, trust.NewSecret()}} {
		if err := r.Set(bad...); err == nil {
			t.Errorf("%v is taken", bad)
		}
	}
	accepts(true, fresh) // what is refused changes nothing
}

func TestJoin(t *testing.T) {
	good := func(text, url string, n int) {
		t.Helper()
		j, err := trust.ParseJoin(text + "\n")
		if err != nil || j.URL != url || len(j.Secrets) != n || j.Reveal() != text {
			t.Errorf("%q: %q, %d secrets, %v", text, j.URL, len(j.Secrets), err)
		}
	}
	good("nats://u:p@10.0.0.1:4222#"+one, "nats://u:p@10.0.0.1:4222", 1)
	good("nats://a:1,nats://b:2#"+one+"+"+two, "nats://a:1,nats://b:2", 2)
	good("#"+one, "", 1)
	bad := func(text string) {
		t.Helper()
		_, err := trust.ParseJoin(text)
		if err == nil {
			t.Errorf("%q is taken", text)
		} else if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the error shows a password: %v", err)
		}
	}
	bad("")
	bad("nats://u:hunter2@a:1")
	bad("nats://u:hunter2@a:1#")
	bad("nats://u:hunter2@a:1#hunter2")
	bad("nats://u:hunter2@a:1#" + one + "+" + one)
	bad("nats://u:hunter2@a:1#" + one + "+" + two + "+" + one)
	bad("nats://u:hunter2@a:1\nnats://b:1#" + one)
	bad("nats://a:1#" + one[:42] + "9") // bits beyond the last byte
}

// TestNoLeak: whatever prints a secret prints its ID.
func TestNoLeak(t *testing.T) {
	s := fixed(t, one)
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("made", "secret", s, "join", trust.Join{Secrets: []trust.Secret{s}})
	text := log.String() + fmt.Sprintf("%v %+v %#v %s %v", s, s, s, s, []trust.Secret{s})
	for _, leak := range []string{one, fmt.Sprintf("%x", []byte{0, 1, 2, 3, 4}), "0x1f", " 31 30"} {
		if strings.Contains(text, leak) {
			t.Errorf("%q shows in %s", leak, text)
		}
	}
	if !strings.Contains(text, s.ID()) {
		t.Error("the ID does not show")
	}
}

func FuzzParseJoin(f *testing.F) {
	f.Add("nats://u:p@10.0.0.1:4222#" + one)
	f.Add("#" + one + "+" + two)
	f.Fuzz(func(t *testing.T, text string) {
		j, err := trust.ParseJoin(text)
		if err != nil {
			return
		}
		again, err := trust.ParseJoin(j.Reveal())
		if err != nil || again.URL != j.URL || len(again.Secrets) != len(j.Secrets) {
			t.Errorf("%q is read again as %v, %v", j.Reveal(), again, err)
		}
	})
}

// TestRetire: a retired secret is out of force whoever sets it, unless there is no
// other; and comes back when it is not retired any more.
func TestRetire(t *testing.T) {
	one, two := trust.NewSecret(), trust.NewSecret()
	r, err := trust.NewRing(two, one)
	if err != nil {
		t.Fatal(err)
	}
	set := func(secrets ...trust.Secret) {
		t.Helper()
		if err := r.Set(secrets...); err != nil {
			t.Fatal(err)
		}
	}
	f := func(changed, want bool, in ...trust.Secret) {
		t.Helper()
		if changed != want || !slices.Equal(r.Secrets(), in) {
			t.Errorf("changed %t, want %t; %v, want %v", changed, want, r.Secrets(), in)
		}
	}
	f(r.Retire([]string{"decode-0"}), false, two, one)
	f(r.Retire([]string{one.String(), "decode-0"}), true, two)
	set(two, one)
	f(false, false, two)
	f(r.Retire([]string{one.String()}), false, two)
	set(one)
	f(false, false, one)
	set(two, one)
	f(r.Retire(nil), true, two, one)
	f((*trust.Ring)(nil).Retire([]string{one.String()}), false, two, one)
}
