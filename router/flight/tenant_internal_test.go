package flight

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/router/apikey"
)

func TestGapOf(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		tpot, itl time.Duration
		want      float64
	}{{0, 0, 0}, {25 * ms, 0, 0.025}, {0, 50 * ms, 0.05}, {25 * ms, 50 * ms, 0.025}, {50 * ms, 25 * ms, 0.025}} {
		if got := gapOf(&apikey.Key{TPOTPromise: c.tpot, ITLPromise: c.itl}); got != c.want {
			t.Errorf("a mean of %v and at most %v: %v s, want %v", c.tpot, c.itl, got, c.want)
		}
	}
}
