package limit_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/router/limit"
)

func gate(inFlight, items int, wait time.Duration) *limit.Gate {
	b := bounds
	b.Items = items
	return limit.NewGate(limit.Limits{InFlight: inFlight, Wait: wait, Bounds: b})
}

func enter(ctx context.Context, g *limit.Gate, it *limit.Item, deadline time.Time) error {
	if g.TryEnter() {
		return nil
	}
	return g.Wait(ctx, it, deadline)
}

func refused(t *testing.T, err error, why limit.Why) *limit.Refusal {
	t.Helper()
	var r *limit.Refusal
	if !errors.As(err, &r) || r.Why != why {
		t.Fatalf("%v, want %s", err, why)
	}
	return r
}

func empty(t *testing.T, g *limit.Gate) {
	t.Helper()
	if run, wait := g.Counts(); run != 0 || wait != 0 {
		t.Errorf("%d run, %d wait", run, wait)
	}
	if n, bytes := g.Waiting(); n != [limit.Classes]int{} || bytes != 0 {
		t.Errorf("%v wait with %d bytes", n, bytes)
	}
}

// TestGateEnds: each way in which a wait ends, and when.
func TestGateEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, ctx, start := gate(1, 2, 10*time.Second), t.Context(), time.Now()
		if !g.TryEnter() || g.TryEnter() {
			t.Fatal("one place")
		}
		after := func(d time.Duration, what string) {
			t.Helper()
			if took := time.Since(start); took != d {
				t.Errorf("%s after %v, want %v", what, took, d)
			}
			start = time.Now()
		}
		refused(t, g.Wait(ctx, &limit.Item{Class: limit.Normal}, time.Time{}), limit.Late)
		after(10*time.Second, "late")
		refused(t, g.Wait(ctx, &limit.Item{Class: limit.Normal}, time.Now().Add(3*time.Second)), limit.Deadline)
		after(3*time.Second, "deadline")
		refused(t, g.Wait(ctx, &limit.Item{Class: limit.Normal}, time.Now().Add(-time.Second)), limit.Deadline)
		after(0, "deadline that has passed")
		gone := errors.New("gone")
		cctx, cancel := context.WithCancelCause(ctx)
		time.AfterFunc(time.Second, func() { cancel(gone) })
		if err := g.Wait(cctx, &limit.Item{Class: limit.Normal}, time.Time{}); err != gone {
			t.Error(err)
		}
		after(time.Second, "the client left")

		errs := make(chan error, 3)
		for range 2 {
			go func() { errs <- g.Wait(ctx, &limit.Item{Tenant: "greedy", Class: limit.Normal}, time.Time{}) }()
		}
		synctest.Wait()
		refused(t, g.Wait(ctx, &limit.Item{Tenant: "greedy", Class: limit.Normal}, time.Time{}), limit.Full)
		go func() { errs <- g.Wait(ctx, &limit.Item{Tenant: "modest", Class: limit.Normal}, time.Time{}) }()
		synctest.Wait()
		refused(t, <-errs, limit.Displaced)
		after(0, "displaced")
		time.Sleep(time.Second)
		g.Leave(start, true)
		g.Leave(<-waited(errs, t), true)
		g.Leave(<-waited(errs, t), true)
		empty(t, g)
		if g.Shed(limit.Normal, limit.Deadline) != 2 || g.Shed(limit.Normal, limit.Full) != 1 || g.Shed(limit.High, limit.Full) != 0 {
			t.Error("counts of what was shed")
		}
	})
}

// waited takes the next result, which must be good, and returns when it came.
func waited(errs chan error, t *testing.T) chan time.Time {
	t.Helper()
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
	c := make(chan time.Time, 1)
	c <- time.Now()
	return c
}

// TestGateKnowsWhatCannotBeMet: once it is measured how long requests take at least and
// how fast the queue is served, requests that cannot be in time are refused at once, and
// Retry-After follows the measured rate.
func TestGateKnowsWhatCannotBeMet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, ctx := gate(1, 100, time.Hour), t.Context()
		var wg sync.WaitGroup
		for range 50 { // one after the other, 2 s each
			wg.Go(func() {
				if err := enter(ctx, g, &limit.Item{Class: limit.Normal, Cost: 10}, time.Time{}); err != nil {
					t.Error(err)
					return
				}
				start := time.Now()
				time.Sleep(2 * time.Second)
				g.Leave(start, true)
			})
		}
		synctest.Wait()
		time.Sleep(20*time.Second + time.Millisecond) // 39 wait: 78 s
		start := time.Now()
		// Nobody was faster than 2 s, so there is no use in waiting any longer.
		refused(t, g.Wait(ctx, &limit.Item{Tenant: "other", Class: limit.Normal, Cost: 10, Weight: 1e-3}, start.Add(2*time.Second)), limit.Deadline)
		if time.Since(start) != 0 {
			t.Errorf("after %v", time.Since(start))
		}
		r := refused(t, g.Wait(ctx, &limit.Item{Class: limit.Normal, Cost: 10}, start.Add(30*time.Second)), limit.Hopeless)
		if time.Since(start) != 0 || r.After < 70*time.Second || r.After > 90*time.Second {
			t.Errorf("refused after %v, to come back in %v", time.Since(start), r.After)
		}
		wg.Wait()
		empty(t, g)
	})
}

// TestGateFree: a place that came free between a try and the wait for one is taken.
func TestGateFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := gate(1, 10, time.Minute)
		if !g.TryEnter() || g.TryEnter() {
			t.Fatal("one place")
		}
		g.Leave(time.Now(), true)
		start := time.Now()
		if err := g.Wait(t.Context(), &limit.Item{Class: limit.Normal}, time.Time{}); err != nil || time.Since(start) > 0 {
			t.Fatalf("%v after %v", err, time.Since(start))
		}
		g.Leave(time.Now(), true)
		empty(t, g)
	})
}

// TestGateIdle: time in which nobody waits does not count for how fast the queue is
// served.
func TestGateIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, ctx := gate(1, 100, time.Hour), t.Context()
		var wg sync.WaitGroup
		for range 2 {
			for range 20 { // one after the other, 2 s each
				wg.Go(func() {
					if err := enter(ctx, g, &limit.Item{Class: limit.Normal, Cost: 10}, time.Time{}); err != nil {
						t.Error(err)
						return
					}
					start := time.Now()
					time.Sleep(2 * time.Second)
					g.Leave(start, true)
				})
			}
			synctest.Wait()
			time.Sleep(10*time.Second + time.Millisecond) // 14 wait: 28 s
			r := refused(t, g.Wait(ctx, &limit.Item{Class: limit.Normal, Cost: 10}, time.Now().Add(5*time.Second)), limit.Hopeless)
			if r.After < 24*time.Second || r.After > 34*time.Second {
				t.Errorf("to come back in %v", r.After)
			}
			wg.Wait()
			time.Sleep(time.Hour)
		}
		empty(t, g)
	})
}

// TestGateOneWaits: how fast the queue is served is known also where one at a time waits, and who is
// refused while nobody does makes no difference.
func TestGateOneWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, errs := gate(1, 100, time.Hour), make(chan error, 1)
		wait := func() {
			go func() { errs <- g.Wait(t.Context(), &limit.Item{Class: limit.Normal, Cost: 10}, time.Time{}) }()
			synctest.Wait()
		}
		if !g.TryEnter() {
			t.Fatal("no place")
		}
		for range 8 {
			wait()
			time.Sleep(2 * time.Second)
			g.Leave(time.Now(), false)
			<-waited(errs, t)
		}
		late := func() *limit.Refusal {
			return refused(t, g.Wait(t.Context(), &limit.Item{Class: limit.Normal, Cost: 10}, time.Now().Add(-1)), limit.Deadline)
		}
		late()
		time.Sleep(time.Hour)
		wait()
		if r := late(); r.After < time.Second || r.After > 4*time.Second {
			t.Errorf("to come back in %v", r.After)
		}
		g.Leave(time.Now(), false)
		<-waited(errs, t)
		g.Leave(time.Now(), false)
		empty(t, g)
	})
}

// TestGateLastMoment: what happens at the very end of a wait either counts or does not, and no place
// is lost or given twice.
func TestGateLastMoment(t *testing.T) {
	for round := range 200 {
		synctest.Test(t, func(t *testing.T) {
			g, end := gate(1, 1, 10*time.Second), time.Now().Add(10*time.Second)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if !g.TryEnter() {
				t.Fatal("no place")
			}
			first, second := make(chan error, 1), make(chan error, 1)
			wait := func() {
				first <- g.Wait(ctx, &limit.Item{Tenant: "greedy", Class: limit.Low}, time.Time{})
			}
			displace := func() {
				time.Sleep(time.Until(end))
				if round%4 >= 2 {
					cancel()
				}
				second <- g.Wait(t.Context(), &limit.Item{Tenant: "modest", Class: limit.High}, time.Time{})
			}
			both := []func(){wait, displace}
			go both[round%2]()
			synctest.Wait()
			go both[1-round%2]()
			time.Sleep(time.Until(end))
			err := <-first
			var r *limit.Refusal
			if errors.As(err, &r) && r.Why != limit.Late && r.Why != limit.Displaced || r == nil && !errors.Is(err, context.Canceled) {
				t.Errorf("round %d: %v", round, err)
			}
			synctest.Wait()
			g.Leave(time.Now(), true)
			<-waited(second, t)
			g.Leave(time.Now(), true)
			empty(t, g)
		})
	}
}

// TestGateShares: under load from one greedy tenant another gets what it asks
// for, up to its share, at the delay of one request.
func TestGateShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const places, service = 4, 100 * time.Millisecond
		g := gate(places, 1000, time.Hour)
		ctx, cancel := context.WithCancelCause(t.Context())
		var wg sync.WaitGroup
		var greedy atomic.Int64
		work := func() { time.Sleep(service) }
		for range 1000 {
			wg.Go(func() {
				if enter(ctx, g, &limit.Item{Tenant: "greedy", Class: limit.Normal, Cost: 5000}, time.Time{}) == nil {
					work()
					greedy.Add(1)
					g.Leave(time.Now().Add(-service), true)
				}
			})
		}
		synctest.Wait()
		for range 50 {
			start := time.Now()
			if err := enter(ctx, g, &limit.Item{Tenant: "modest", Class: limit.Normal, Cost: 50}, time.Time{}); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took > service {
				t.Errorf("waited %v behind a greedy tenant", took)
			}
			work()
			g.Leave(time.Now().Add(-service), true)
		}
		cancel(errors.New("enough"))
		wg.Wait()
		if greedy.Load() < 50 {
			t.Errorf("the others' places were used for %d requests", greedy.Load())
		}
		empty(t, g)
	})
}

// TestGateProperty: with everything going on at once no more run than may,
// nobody is forgotten, and all ends at zero.
func TestGateProperty(t *testing.T) {
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			const most = 7
			g := gate(most, 20, 50*time.Millisecond)
			var wg sync.WaitGroup
			var running, served atomic.Int64
			for i := range 40 {
				rnd := rand.New(rand.NewPCG(seed, uint64(i)))
				wg.Go(func() {
					for range 100 {
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rnd.IntN(40))*time.Millisecond)
						it := &limit.Item{Tenant: fmt.Sprint(rnd.IntN(4)), Class: limit.Class(rnd.IntN(limit.Classes)), Cost: float64(rnd.IntN(100)), Bytes: 10}
						if enter(ctx, g, it, time.Now().Add(time.Duration(rnd.IntN(80))*time.Millisecond)) == nil {
							start := time.Now()
							if n := running.Add(1); n > 2*most {
								t.Errorf("%d run", n)
							}
							served.Add(1)
							time.Sleep(time.Duration(rnd.IntN(5)) * time.Millisecond)
							running.Add(-1)
							g.Leave(start, rnd.IntN(2) == 0)
							g.Settle(it, float64(rnd.IntN(100)-50))
						}
						cancel()
					}
				})
			}
			for i := range 20 { // limits come and go
				time.Sleep(3 * time.Millisecond)
				l := g.Limits()
				l.InFlight = most * (1 + i%2)
				g.Set(l)
			}
			wg.Wait()
			empty(t, g)
			if served.Load() < 500 {
				t.Errorf("only %d were served", served.Load())
			}
		})
	}
}

// TestGateRaces is TestGateProperty's little brother on real threads: the fast
// path against the slow one.
func TestGateRaces(t *testing.T) {
	g := gate(2, 1000, time.Minute)
	var wg sync.WaitGroup
	var running atomic.Int64
	for range 8 {
		wg.Go(func() {
			for range 2000 {
				if err := enter(t.Context(), g, &limit.Item{Class: limit.Normal}, time.Time{}); err != nil {
					t.Error(err)
					return
				}
				if n := running.Add(1); n > 2 {
					t.Errorf("%d run", n)
				}
				running.Add(-1)
				g.Leave(time.Time{}, false)
			}
		})
	}
	wg.Wait()
	empty(t, g)
}

func TestGateSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := gate(1, 10, time.Minute)
		g.TryEnter()
		errs := make(chan error, 3)
		for range 3 {
			go func() { errs <- g.Wait(t.Context(), &limit.Item{Class: limit.Low}, time.Time{}) }()
		}
		synctest.Wait()
		l := g.Limits()
		l.InFlight = 3
		g.Set(l)
		waited(errs, t)
		waited(errs, t)
		if run, wait := g.Counts(); run != 3 || wait != 1 {
			t.Errorf("%d, %d", run, wait)
		}
		g.Leave(time.Now(), true)
		waited(errs, t)
		for range 3 {
			g.Leave(time.Now(), true)
		}
		empty(t, g)
	})
}

func TestClassNames(t *testing.T) {
	f := func(s string, want limit.Class, ok bool) {
		t.Helper()
		if c, got := limit.ParseClass(s); c != want || got != ok {
			t.Errorf("%q: %v %v", s, c, got)
		}
	}
	f("high", limit.High, true)
	f("normal", limit.Normal, true)
	f("low", limit.Low, true)
	f("-3", limit.High, true)
	f("0", limit.Normal, true)
	f("7", limit.Low, true)
	f("1", limit.Low, true)
	f("-1", limit.High, true)
	f("", limit.Normal, false)
	f("urgent", limit.Normal, false)
	if limit.High.String() != "high" {
		t.Error(limit.High)
	}
}

func BenchmarkGate(b *testing.B) {
	g := gate(1024, 1024, time.Minute)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if !g.TryEnter() {
				b.Fail()
			}
			g.Leave(time.Time{}, true)
		}
	})
}
