package host

import (
	"testing"
	"time"
)

// TestChoose: copy engines move units out unless they take twice as long, and in unless a kernel is
// a twentieth faster.
func TestChoose(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		took    [2][2]time.Duration
		out, in int
	}{
		{[2][2]time.Duration{{100, 100}, {100, 100}}, 0, 0},
		{[2][2]time.Duration{{105, 101}, {53, 60}}, 0, 0},
		{[2][2]time.Duration{{106, 100}, {60, 60}}, 0, 1},
		{[2][2]time.Duration{{105, 100}, {60, 51}}, 1, 1},
		{[2][2]time.Duration{{105, 101}, {52, 51}}, 1, 0},
		{[2][2]time.Duration{{300, 250}, {200, 124}}, 1, 1},
		{[2][2]time.Duration{{300, 250}, {200, 125}}, 0, 1},
	} {
		if out, in := choose(c.took); out != c.out || in != c.in {
			t.Errorf("%v: %d, %d, want %d, %d", c.took, out, in, c.out, c.in)
		}
	}
}
