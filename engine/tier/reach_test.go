package tier

import (
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/engine/kvcache"
)

func TestReach(t *testing.T) {
	units := []kvcache.Hash{{1}, {2, 15: 9}}
	got, err := ParseReach(AppendReach(nil, units))
	if err != nil || !slices.Equal(got, units) {
		t.Errorf("%x, %v", got, err)
	}
	if n, err := ParseReached(AppendReached(nil, 2), 2); n != 2 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	one := `"` + strings.Repeat("0f", 16) + `"`
	for _, s := range []string{``, `{}`, `[]`, `{"units":[]}`, `{"units":[1]}`, `{"units":["0f"]}`, `{"units":["` + strings.Repeat("zz", 16) + `"]}`, `{"units":` + one + `}`,
		`{"units":[` + strings.Repeat(one+",", ReachUnits) + one + `]}`, strings.Repeat(" ", 1<<20)} {
		if got, err := ParseReach([]byte(s)); err == nil {
			t.Errorf("%.80s: %x", s, got)
		}
	}
	for _, s := range []string{``, `{}`, `{"units":-1}`, `{"units":3}`, `{"units":"1"}`, `{"units":1.5}`, `{"units":1}{"units":1}`, `{"units":null}`, `{"units":1,"x":"` + strings.Repeat("x", 300) + `"}`, `<html>`} {
		if n, err := ParseReached([]byte(s), 2); err == nil {
			t.Errorf("%.80s: %d", s, n)
		}
	}
}

// FuzzReach: what parses is in bounds, and reads the same again.
func FuzzReach(f *testing.F) {
	f.Add(AppendReach(nil, []kvcache.Hash{{1}, {2}}))
	f.Add([]byte(`{"units":["0f"]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		units, err := ParseReach(b)
		if err != nil {
			return
		}
		again, err := ParseReach(AppendReach(nil, units))
		if err != nil || !slices.Equal(units, again) || len(units) > ReachUnits {
			t.Errorf("%x, %x, %v", units, again, err)
		}
	})
}

// FuzzReached: a peer counts no more than it was asked about.
func FuzzReached(f *testing.F) {
	f.Add([]byte(`{"units":7}`), 9)
	f.Add([]byte(`{"units":-7}`), 9)
	f.Fuzz(func(t *testing.T, b []byte, asked int) {
		if n, err := ParseReached(b, asked); err == nil && (n < 0 || n > asked) {
			t.Errorf("%d of %d", n, asked)
		}
	})
}
