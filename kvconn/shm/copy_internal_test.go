package shm

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// Whatever the length and the alignment, streamCopy is copy.
func TestStreamCopy(t *testing.T) {
	src := make([]byte, 64<<10)
	for i := range src {
		src[i] = byte(rand.Uint32())
	}
	for _, n := range []int{0, 1, 127, 128, 2048, 2049, 2176, 2177, 4096, 5000, 16 << 10, 33333} {
		for _, at := range []int{0, 1, 32, 96} {
			for _, next := range []int{0, 100, n} {
				area := make([]byte, 64<<10)
				dst := area[at : at+n]
				streamCopy(dst, src[3:3+n], area[:next], src[:next])
				if !bytes.Equal(dst, src[3:3+n]) {
					t.Fatalf("%d bytes at %d differ", n, at)
				}
				if at+n < len(area) && area[at+n] != 0 || at > 0 && area[at-1] != 0 {
					t.Fatalf("%d bytes at %d: written outside", n, at)
				}
			}
		}
	}
}
