package cpu

import (
	"sync/atomic"
	"testing"
	"time"
)

// TestTeamPanic: whichever member panics, in any part of a run, the others leave too, run
// panics with the same value, and the team can run again.
func TestTeamPanic(t *testing.T) {
	const size, parts = 4, 3
	team := newTeam(size, 1)
	defer team.close()
	f := func(n, bad, at int) {
		t.Helper()
		done := make(chan any, 1)
		go func() {
			defer func() { done <- recover() }()
			team.run(n, func(member int) {
				for part := range parts {
					if part > 0 {
						team.barrier(&team.seats[member])
					}
					if member == bad && part == at {
						panic("member")
					}
				}
			})
		}()
		select {
		case p := <-done:
			if (p == "member") != (bad < n) {
				t.Errorf("member %d of %d, part %d: %v", bad, n, at, p)
			}
		case <-time.After(time.Minute):
			t.Fatalf("member %d of %d, part %d: run does not end", bad, n, at)
		}
	}
	for range 50 {
		for _, n := range []int{size, 1, 2} {
			for bad := range size {
				for at := range parts {
					f(n, bad, at)
				}
			}
		}
		var sum atomic.Int64
		team.run(size, func(member int) {
			seat := &team.seats[member]
			for lo, hi := team.claim(seat, 100, 7); lo < hi; lo, hi = team.claim(seat, 100, 7) {
				sum.Add(int64(hi - lo))
			}
			team.barrier(&team.seats[member])
			if sum.Load() != 100 {
				t.Errorf("%d of 100 items behind the barrier", sum.Load())
			}
		})
	}
}
