package level

import (
	"testing"

	"github.com/xpyd/xpyd/engine/kvcache"
)

func FuzzHeader(f *testing.F) {
	b := make([]byte, HeaderSize)
	h := Header{Key: kvcache.Hash{1, 2}, Payload: 4096, Segment: 3, Slot: 4, Pos: 16}
	h.Encode(b)
	f.Add(b)
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHeader(b)
		if err != nil {
			return
		}
		c := make([]byte, HeaderSize)
		h.Encode(c)
		if g, err := ParseHeader(c); err != nil || g != h {
			t.Fatalf("%+v became %+v: %v", h, g, err)
		}
	})
}
