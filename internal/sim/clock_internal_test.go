package sim

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestClock: events run by time, those of the same time as they were made, also where they make others.
func TestClock(t *testing.T) {
	type ran struct {
		at  time.Duration
		nth int
	}
	var c clock
	var got []ran
	r, made := rand.New(rand.NewPCG(1, 1)), 0
	var add func()
	add = func() {
		made++
		nth, d := made, time.Duration(r.IntN(9)-1)
		at := c.now + max(d, 0)
		c.after(d, func() {
			if c.now != at {
				t.Errorf("event %d of %d ran at %d", nth, at, c.now)
			}
			got = append(got, ran{at, nth})
			if made < 1000 {
				add()
				add()
			}
		})
	}
	add()
	for c.next() {
	}
	if len(got) != made || made < 1000 || !slices.IsSortedFunc(got, func(a, b ran) int {
		if a.at != b.at {
			return int(a.at - b.at)
		}
		return a.nth - b.nth
	}) {
		t.Errorf("%d of %d events, or out of order", len(got), made)
	}
}
