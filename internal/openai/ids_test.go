package openai_test

import (
	"bytes"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestIDs: ids come back from their text, which has no line's end; what is no such text is none.
func TestIDs(t *testing.T) {
	ids := []int32{0, 1, 63, 64, 4095, 4096, 262_143, 262_144, 12_345_678, openai.MaxSentID}
	text := openai.AppendIDs(nil, ids)
	if n := openai.CountIDs(text); n != len(ids) || bytes.ContainsAny(text, "\r\n ") {
		t.Fatalf("%d ids in %q", n, text)
	}
	for i, id := range ids {
		if got := openai.IDAt(text, i); got != id {
			t.Errorf("%d became %d", id, got)
		}
	}
	for _, bad := range []string{"0", "000", "00000", "000/", "p000", "0 00", "00\n0", "\xff000"} {
		if n := openai.CountIDs([]byte(bad)); n != -1 {
			t.Errorf("%q has %d ids", bad, n)
		}
	}
}
