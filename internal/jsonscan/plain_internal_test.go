package jsonscan

import (
	"math/rand/v2"
	"testing"
)

func TestPlain(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	pool := []byte("aaaaaaaa\x1f\x20\x21\"#[\\]\x7f\x80\x9f\xa0\xa2\xdc\xff\x00")
	for range 20000 {
		b := make([]byte, r.IntN(40))
		for i := range b {
			b[i] = 'a'
			if r.IntN(12) == 0 {
				b[i] = pool[r.IntN(len(pool))]
			}
		}
		want := 0
		for want < len(b) && b[want] >= 0x20 && b[want] != '"' && b[want] != '\\' {
			want++
		}
		if got := plain(b); got != want {
			t.Fatalf("%q: %d, want %d", b, got, want)
		}
	}
}
