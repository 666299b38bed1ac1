package limit

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// TestHeap: whatever comes, changes or leaves, the least is first.
func TestHeap(t *testing.T) {
	for seed := range uint64(50) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		h := heap{less: func(a, b *flow) bool { return a.tag < b.tag }, at: func(f *flow) *int { return &f.serve }}
		for range 400 {
			switch n := len(h.all); {
			case n < 3 || n < 20 && rnd.IntN(2) == 0:
				h.push(&flow{serve: -1, tag: rnd.Float64()})
			case rnd.IntN(2) == 0:
				f := h.all[rnd.IntN(n)]
				f.tag = rnd.Float64()
				h.fix(f)
			default:
				f := h.all[rnd.IntN(n)]
				if h.remove(f); f.serve != -1 || len(h.all) != n-1 {
					t.Fatalf("it stays at %d of %d", f.serve, len(h.all))
				}
			}
			for i, f := range h.all {
				if f.serve != i || i > 0 && h.less(f, h.all[(i-1)/2]) {
					t.Fatalf("at %d of %d is what should be elsewhere", i, len(h.all))
				}
			}
		}
	}
}

// TestLeast: the shortest of what was seen in the last 30 to 60 seconds.
func TestLeast(t *testing.T) {
	var l least
	begin := time.Unix(1e6, 0)
	at := func(s float64) time.Time { return begin.Add(time.Duration(s * float64(time.Second))) }
	for _, c := range []struct {
		at        float64
		add, want int // seconds; 0: only looks, or nothing is known
	}{
		{0, 0, 0}, {0, 9, 9}, {1, 7, 7}, {2, 8, 7}, {3, -1, 7}, {29.9, 0, 7}, // the first window
		{30, 0, 7}, {31, 8, 7}, {32, 6, 6}, {33, 9, 6}, {59.9, 0, 6}, // 7 is of the one before
		{60, 0, 6}, {61, 9, 6}, {90, 0, 9}, {120, 0, 0}, // and is forgotten
		{121, 5, 5}, {149, 0, 5}, {150, 0, 5}, {179, 0, 5}, {180, 0, 0}, // nothing came in the last window
		{181, 4, 4}, {239, 0, 4}, {269, 0, 0}, {270, 3, 3}, {330, 0, 0}, // nor in the last two
		{360, 5, 5}, {361, -2, 5}, // no time at all is none
	} {
		if c.add == -2 {
			l.add(at(c.at), 0)
		} else if c.add != 0 {
			l.add(at(c.at), time.Duration(c.add)*time.Second)
		}
		if got := l.get(at(c.at)); got != time.Duration(c.want)*time.Second {
			t.Errorf("at %v s: %v, want %d s", c.at, got, c.want)
		}
	}
}

// TestDrain: the rate is of the time in which something waits, lately.
func TestDrain(t *testing.T) {
	var d drain
	now := time.Unix(1e6, 0)
	pass := func(s float64) { now = now.Add(time.Duration(s * float64(time.Second))) }
	want := func(rate float64, known bool) {
		t.Helper()
		if got, ok := d.rate(now); ok != known || ok && math.Abs(got/rate-1) > 0.05 {
			t.Errorf("%v tokens a second, %t, want %v", got, ok, rate)
		}
	}
	want(0, false)
	d.waits(now, true)
	for i := range 400 {
		if i == 3 {
			want(0, false) // too little is known
		}
		pass(0.1)
		d.served(now, 10)
	}
	want(100, true)
	d.waits(now, false)
	pass(1000) // nobody waits: nothing is measured
	want(100, true)
	d.waits(now, true)
	for range 400 {
		pass(0.1)
		d.served(now, 50)
	}
	want(500, true)
	pass(100) // it stands still
	if got, ok := d.rate(now); !ok || got > 1 {
		t.Errorf("%v tokens a second after a standstill, %t", got, ok)
	}
	var free drain
	free.waits(now, true)
	for range 8 {
		pass(1)
		free.served(now, 0) // what costs nothing counts as one token
	}
	if got, ok := free.rate(now); !ok || got < 0.9 || got > 1.6 {
		t.Errorf("%v tokens a second, %t", got, ok)
	}
}

// TestRateAtOnce: of what was served in no time there is no rate.
func TestRateAtOnce(t *testing.T) {
	var d drain
	now := time.Unix(1e6, 0)
	d.waits(now, true)
	for range drainLeast {
		if r, ok := d.rate(now); ok {
			t.Errorf("%v tokens a second", r)
		}
		d.served(now, 10)
	}
	if r, ok := d.rate(now); ok {
		t.Errorf("%v tokens a second, at once", r)
	}
	if r, ok := d.rate(now.Add(2 * time.Second)); !ok || r <= 0 || r > 10*drainLeast {
		t.Errorf("%v tokens a second, %t", r, ok)
	}
}
