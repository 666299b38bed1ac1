package kvevents

import "testing"

// TestCacheSalt: no two pairs of a cache and a client's salt have the same salt, whatever the client sends, and
// without a key's cache a client's stays as it is.
func TestCacheSalt(t *testing.T) {
	seen := map[string][2]string{}
	for _, cache := range []string{"", "a", "b", "a:", "1"} {
		for _, own := range []string{"", "a", "s", keySalt + "a", keySalt, CacheSalt("a", "s"), CacheSalt("b", ""), ":s"} {
			salt, pair := CacheSalt(cache, own), [2]string{cache, own}
			if other, ok := seen[salt]; ok {
				t.Errorf("%q and %q: %s", pair, other, salt)
			}
			seen[salt] = pair
			if open := own == ""; OpenSalt(salt) != open {
				t.Errorf("%q: open %t", pair, !open)
			}
		}
	}
	if got := CacheSalt("", "s"); got != "s" {
		t.Errorf("a client's alone is %q", got)
	}
}
