package limit_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router/limit"
)

// TestBucket: over any time no more is taken than a minute's worth and what
// flowed in since, and Wait is exact.
func TestBucket(t *testing.T) {
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		start := time.Unix(1000, 0)
		now, per := start, int64(600+rnd.IntN(6000))
		b := limit.NewBucket(now, per)
		taken := 0.0
		for range 2000 {
			now = now.Add(time.Duration(rnd.IntN(200)) * time.Millisecond)
			n := float64(1 + rnd.IntN(int(per)/20))
			if wait := b.Wait(now, n); wait > 0 {
				if early := b.Wait(now.Add(wait*99/100-1), n); early == 0 && wait > time.Millisecond {
					t.Fatal("it would have been there earlier")
				}
				now = now.Add(wait + 1)
				if b.Wait(now, n) != 0 {
					t.Fatal("it is not there when it should be")
				}
			}
			b.Add(now, n)
			taken += n
			if most := float64(per) * (1 + now.Sub(start).Minutes()); taken > most+1e-3 {
				t.Fatalf("took %.1f of %.1f", taken, most)
			}
			if lv := b.Level(now); lv.Left < 0 || lv.Left > per || lv.Limit != per || lv.Full < 0 || lv.Full > time.Minute {
				t.Fatalf("%+v", lv)
			}
		}
	}
}

func TestBucketSettles(t *testing.T) {
	now := time.Unix(0, 0)
	b := limit.NewBucket(now, 60)
	b.Add(now, 60)
	b.Add(now, 30) // more was used than taken
	if w := b.Wait(now, 1); w < 31*time.Second-time.Millisecond || w > 31*time.Second+time.Millisecond {
		t.Errorf("%v", w)
	}
	b.Add(now, -200) // never fuller than full
	if lv := b.Level(now); lv.Left != 60 || lv.Full != 0 {
		t.Errorf("%+v", lv)
	}
	b.Add(now, 20)
	b.Set(now, 120)
	if lv := b.Level(now); lv.Left != 100 || lv.Limit != 120 {
		t.Errorf("%+v", lv)
	}
	b.Set(now, 0)
	if b.Wait(now, 1e9) != 0 || b.Level(now) != (limit.Level{}) {
		t.Error("no limit limits")
	}
}

func TestAccount(t *testing.T) {
	now := time.Unix(0, 0)
	a := limit.NewAccount(now, limit.Rates{Requests: 3, Tokens: 600, InFlight: 2})
	f := func(tokens float64, what string, after time.Duration) {
		t.Helper()
		o := a.Take(now, tokens)
		if what == "" {
			if o != nil {
				t.Errorf("%+v", o)
			}
			return
		}
		if o == nil || o.What != what || (o.After-after).Abs() > time.Millisecond {
			t.Errorf("%+v, want %s after %v", o, what, after)
		}
	}
	f(601, limit.OverSize, 0)
	f(500, "", 0)
	f(200, limit.OverTokens, 10*time.Second)
	f(100, "", 0)
	f(0, limit.OverInFlight, 0)
	a.Release(now, -300, 4*time.Second) // it used 300 fewer
	f(0, "", 0)
	f(0, limit.OverInFlight, 2*time.Second) // two at once, 4 s each
	a.Release(now, 0, 14*time.Second)
	f(1, limit.OverRequests, 20*time.Second)
	r, tok := a.Levels(now)
	if r.Left != 0 || r.Limit != 3 || tok.Left != 300 || a.Running() != 1 {
		t.Errorf("%+v %+v %d", r, tok, a.Running())
	}
	a.Set(now, limit.Rates{InFlight: 1})
	f(1, limit.OverInFlight, 5*time.Second) // one at once, 4 s on average, of late a little more
	a.Set(now, limit.Rates{Tokens: 600, InFlight: 9})
	now = now.Add(time.Minute)
	f(600, "", 0) // all that a minute has
	a.Set(now, limit.Rates{})
	f(1e9, "", 0)
	a.Set(now, limit.Rates{Requests: 7}) // a reload
	f(1e9, "", 0)
	for _, left := range []int64{6, 7} {
		if r, _ := a.Levels(now); r.Limit != 7 || r.Left != left {
			t.Errorf("%+v, want %d left", r, left)
		}
		now = now.Add(30 * time.Second)
	}
	if !(limit.Rates{InFlight: 1}).Limits() || (limit.Rates{}).Limits() {
		t.Error("Limits")
	}
}
