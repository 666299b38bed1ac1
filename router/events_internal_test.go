package router

import (
	"bytes"
	"testing"
)

func FuzzLastEnd(f *testing.F) {
	for _, s := range []string{"", "\n", "\n\n", "a\n\nb", "data: x\n\ndata: y\n", "\n\n\n", "a\nb\n\nc\nd\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, want := lastEnd(b), bytes.LastIndex(b, eventEnd); got != want {
			t.Errorf("%q: %d, want %d", b, got, want)
		}
	})
}
