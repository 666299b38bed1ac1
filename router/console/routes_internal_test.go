package console

import "testing"

func TestMatch(t *testing.T) {
	f := func(pattern, path, part string, ok bool) {
		t.Helper()
		if p, is := match(pattern, path); is != ok || ok && p != part {
			t.Errorf("%s, %s: %q %t", pattern, path, p, is)
		}
	}
	f("/a", "/a", "", true)
	f("/a", "/ab", "", false)
	f("/a/{id}", "/a/x", "x", true)
	f("/a/{id}", "/a/", "", false)
	f("/a/{id}", "/a/x/y", "", false)
	f("/a/{id}/drain", "/a/x/drain", "x", true)
	f("/a/{id}/drain", "/a/drain", "", false)
	f("/a/{id}/drain", "/a//drain", "", false)
	f("/a/{…}", "/a/x/y", "x/y", true)
	f("/a{…}", "/a", "", true)
	f("/a{…}", "/b", "", false)
}
