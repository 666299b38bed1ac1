package cuda

import (
	"strings"
	"testing"
)

// The pool takes what its part of the device leaves, whatever others hold; what
// does not fit is refused with the numbers.
func TestPoolBlocks(t *testing.T) {
	const gib = 1 << 30
	m := Memory{Total: 80 * gib, Weights: 15 * gib, Scratch: gib, Block: 2 << 20, Device: "a GPU"}
	f := func(free int64, part float64, asked, want int, wantErr ...string) {
		t.Helper()
		got, err := poolBlocks(m, free, part, asked)
		if got != want || (err != nil) != (len(wantErr) > 0) {
			t.Errorf("free %d, part %v, asked %d: %d %v, want %d", free, part, asked, got, err, want)
		}
		for _, w := range wantErr {
			if err != nil && !strings.Contains(err.Error(), w) {
				t.Errorf("%q is not in %q", w, err)
			}
		}
	}
	f(62*gib, 0.9, 0, (72-17)*gib/(2<<20))
	f(62*gib, 0.45, 0, (36-17)*gib/(2<<20)) // two workers of one GPU
	f(30*gib, 0.45, 0, (36-17)*gib/(2<<20)) // the other one's pool changes nothing
	f(62*gib, 0.2, 0, 0, "20% of a GPU's 81920 MiB is 16384 MiB", "weights take 15360", "scratch for steps 1024", "2048 KiB")
	f(40*gib, 0.9, 0, 0, "28160 blocks needs 56320 MiB", "40704 of a GPU's 81920 MiB are free")
	f(62*gib, 0.9, 1000, 1000)
	f(1*gib, 0.9, 1000, 0, "1000 blocks needs 2000 MiB")
	m.Block = 1 << 10
	f(62*gib, 0.9, 0, MaxBlocks)
}
