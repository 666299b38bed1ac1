package engine

import (
	"testing"
	"time"
)

// TestBudget: a step's prefill tokens fit the step, the target by the measured rate,
// and beside whatever decodes; a few are let through however slow it is.
func TestBudget(t *testing.T) {
	for _, c := range []struct {
		rate    float64
		total   int
		target  time.Duration
		decodes int
		want    int
	}{
		{0, 500, 0, 10, 490},
		{0, 1000, 0, 10, 7*tile - 10}, // whole tiles
		{0, wholeTiles, 0, 0, wholeTiles},
		{0, wholeTiles - 1, 0, 0, wholeTiles - 1},
		{0, 500, time.Second, 10, firstChunk - 10}, // not measured
		{0, 500, 1, 10, firstChunk - 10},
		{1000, 500, 100 * time.Millisecond, 10, 90},
		{1000, 500, time.Second, 10, 490},
		{1000, 500, 1, 10, leastChunk},
		{1000, 8, 1, 0, 8},
		{1000, 500, 100 * time.Millisecond, 90, leastChunk},
		{1e300, 500, time.Hour, 0, 500},
	} {
		p := pacer{rate: c.rate}
		if got := p.budget(c.total, c.target, c.decodes); got != c.want {
			t.Errorf("%+v: %d tokens", c, got)
		}
	}
}
