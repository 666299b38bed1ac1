package kvbench

import (
	"bytes"
	"testing"
)

func TestSkip(t *testing.T) {
	f := func(n int, want string) {
		t.Helper()
		v := [][]byte{[]byte("ab"), []byte("cde"), []byte("f")}
		if have := string(bytes.Join(skip(v, n), nil)); have != want {
			t.Errorf("skip %d: %q", n, have)
		}
	}
	f(0, "abcdef")
	f(1, "bcdef")
	f(2, "cdef")
	f(4, "ef")
	f(6, "")
}
