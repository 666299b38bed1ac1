package flight

import (
	"testing"
	"time"
)

// TestBudgetBucket: the bucket starts full, gains a part of a token per request and a
// trickle over time, and never exceeds the burst.
func TestBudgetBucket(t *testing.T) {
	now := time.Unix(1000, 0)
	b := newBudget(0.25, 2, 1)
	spent := func(want int) {
		t.Helper()
		n := 0
		for b.spend(now) {
			n++
		}
		if n != want {
			t.Errorf("%d tokens, want %d", n, want)
		}
	}
	spent(2)
	for range 7 {
		b.earn()
	}
	spent(1)
	b.earn() // with the three quarters that were left
	spent(1)
	now = now.Add(900 * time.Millisecond)
	spent(0)
	now = now.Add(time.Hour)
	spent(2)
	for range 100 {
		b.earn()
	}
	spent(2)

	b = newBudget(0, 0, 0)
	now = now.Add(time.Hour)
	b.earn()
	spent(0)
	b = newBudget(0, 0, 0.5) // the trickle alone saves up one
	spent(0)
	now = now.Add(time.Hour)
	spent(1)
	now = now.Add(2 * time.Second)
	spent(1)
}

// TestBudgetTrickle: the trickle does not depend on how often the budget is asked.
func TestBudgetTrickle(t *testing.T) {
	for _, every := range []time.Duration{100 * time.Microsecond, 1500 * time.Microsecond, 50 * time.Millisecond} {
		b, now, n := newBudget(0, 0, 1), time.Unix(1000, 0), 0
		for range 10 * time.Second / every {
			if b.spend(now) {
				n++
			}
			now = now.Add(every)
		}
		if n < 9 || n > 10 {
			t.Errorf("asked every %v: %d in 10 s", every, n)
		}
	}
}

// TestBudgetCost: a request pays one load for it.
func TestBudgetCost(t *testing.T) {
	b := newBudget(0.2, 256, 1)
	if n := testing.AllocsPerRun(100, b.earn); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestBackoff(t *testing.T) {
	for n, most := range map[int]time.Duration{1: backoffFirst, 2: 2 * backoffFirst, 3: 4 * backoffFirst, 30: backoffMost} {
		for range 100 {
			if d := backoff(n); d < most/2 || d > most {
				t.Errorf("retry %d waits %v, not %v to %v", n, d, most/2, most)
			}
		}
	}
}

// TestQuantile: 95 % of the latest, once there are enough.
func TestQuantile(t *testing.T) {
	var q quantile
	for i := range 31 {
		q.add(time.Duration(i) * time.Millisecond)
	}
	if d := q.get(); d != 0 {
		t.Errorf("%v of few", d)
	}
	for i := range 1000 {
		q.add(time.Duration(i%100) * time.Millisecond)
	}
	if d := q.get(); d < 93*time.Millisecond || d > 97*time.Millisecond {
		t.Errorf("%v", d)
	}
}
