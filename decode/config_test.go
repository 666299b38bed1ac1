package decode_test

import (
	"testing"

	"github.com/xpyd/xpyd/decode"
)

// TestDefaultQuarantine: a quarter of the pool may be in quarantine, and a block of the smallest one.
func TestDefaultQuarantine(t *testing.T) {
	for blocks, want := range map[int]int{1: 1, 3: 1, 8: 2, 1000: 250} {
		if got := decode.DefaultConfig(blocks).MaxQuarantined; got != want {
			t.Errorf("%d of %d blocks, want %d", got, blocks, want)
		}
	}
}
