package pick_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// lab is a picker whose clock the test turns.
type lab struct {
	t   *testing.T
	p   *pick.Picker
	s   *fleet.Snapshot
	now time.Time
}

func newLab(t *testing.T, s *fleet.Snapshot, edit ...func(*pick.Config)) *lab {
	cfg := pick.DefaultConfig()
	cfg.Policy = pick.RoundRobin
	for _, e := range edit {
		e(&cfg)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	return &lab{t, pick.New(cfg, rand.New(rand.NewPCG(1, 2))), s, time.Unix(1e6, 0)}
}

func (l *lab) try(edit ...func(*pick.Request)) (*pick.Choice, error) {
	req := &pick.Request{Model: "m", Tokens: 100}
	for _, e := range edit {
		e(req)
	}
	return l.p.Pick(pick.View{Snapshot: l.s, Now: l.now}, req)
}

func (l *lab) pick(edit ...func(*pick.Request)) *pick.Choice {
	l.t.Helper()
	c, err := l.try(edit...)
	if err != nil {
		l.t.Fatal(err)
	}
	return c
}

// good ends a choice that went well.
func (l *lab) good(c *pick.Choice) {
	c.DonePrefill()
	c.Answered(time.Millisecond, 2*time.Millisecond)
	c.EndDecode()
}

// bad ends one of which a role failed.
func (l *lab) bad(c *pick.Choice, role fleet.Role) {
	c.Failed(role, pick.Broken, l.now)
	end(c)
}

func (l *lab) state(id string) pick.GuardState { return l.p.Guard(id, 1).State }

func (l *lab) want(states ...any) {
	l.t.Helper()
	for i := 0; i < len(states); i += 2 {
		if got := l.state(states[i].(string)); got != states[i+1] {
			l.t.Errorf("%s is %s, want %s", states[i], got, states[i+1])
		}
	}
}

// open opens the breaker of the only worker of a role.
func (l *lab) open(role fleet.Role) {
	l.t.Helper()
	for range pick.DefaultBreaker().Failures {
		l.bad(l.pick(), role)
	}
}

// TestBreakerLateTrial: a request whose trial failed gives back no other's place to try when it ends
// at last.
func TestBreakerLateTrial(t *testing.T) {
	l := newLab(t, fleetOf(1, 1))
	l.open(fleet.Decode)
	l.now = l.p.Guard("d0", 1).Until.Add(time.Millisecond)
	late := l.pick()
	late.Failed(fleet.Decode, pick.Broken, l.now)
	l.want("d0", pick.Open)
	l.now = l.p.Guard("d0", 1).Until.Add(time.Millisecond)
	next := l.pick()
	l.want("d0", pick.HalfOpen)
	end(late)
	l.want("d0", pick.HalfOpen)
	l.good(next)
	l.want("d0", pick.Closed)
}

// TestBreakerForHours: long times are doubled up to the longest, however often.
func TestBreakerForHours(t *testing.T) {
	l := newLab(t, fleetOf(1, 1), func(c *pick.Config) {
		c.Breaker = pick.Breaker{Failures: 1, Open: 3 * time.Hour, MaxOpen: 24 * time.Hour}
	})
	for n := range 70 {
		l.bad(l.pick(), fleet.Decode)
		want := time.Duration(min(3<<min(n, 10), 24)) * time.Hour
		if d := l.p.Guard("d0", 1).Until.Sub(l.now); d > want || d < want*8/10 {
			t.Fatalf("%d: open for %v, want about %v", n, d, want)
		}
		l.now = l.now.Add(want)
	}
}

// TestBreaker: failures in a row open it, one request tries it when its time is
// over, and its end decides; each time it stays open longer, up to a limit.
func TestBreaker(t *testing.T) {
	l := newLab(t, fleetOf(1, 1))
	for range 4 {
		l.bad(l.pick(), fleet.Decode)
	}
	l.good(l.pick()) // in a row
	for range 4 {
		l.bad(l.pick(), fleet.Decode)
	}
	l.want("d0", pick.Closed)
	l.bad(l.pick(), fleet.Decode)
	l.want("d0", pick.Open, "p0", pick.Closed)

	var shut *pick.Shut
	if _, err := l.try(); !errors.As(err, &shut) || !errors.Is(err, pick.ErrNoPair) {
		t.Fatalf("%v", err)
	}
	if d := shut.Until.Sub(l.now); d < 800*time.Millisecond || d > time.Second {
		t.Errorf("open for %v", d)
	}
	for _, want := range []time.Duration{2, 4, 8, 16, 30, 30} {
		l.now = l.now.Add(31 * time.Second)
		c := l.pick()
		l.want("d0", pick.HalfOpen)
		if _, err := l.try(); !errors.As(err, &shut) || !shut.Until.IsZero() {
			t.Fatalf("a second request tries it: %v", err)
		}
		l.bad(c, fleet.Decode)
		g := l.p.Guard("d0", 1)
		if g.State != pick.Open || g.Until.Sub(l.now) > want*time.Second || g.Until.Sub(l.now) < want*time.Second*8/10 {
			t.Errorf("%s for %v, want about %ds", g.State, g.Until.Sub(l.now), want)
		}
	}
	l.now = l.now.Add(31 * time.Second)
	c := l.pick()
	if _, err := l.try(); !errors.As(err, &shut) {
		t.Fatal(err)
	}
	l.good(c)
	l.want("d0", pick.Closed)
	select {
	case <-shut.Changed:
	default:
		t.Error("who waits is not told")
	}
	l.good(l.pick())
	for range 4 {
		l.bad(l.pick(), fleet.Decode)
	}
	l.want("d0", pick.Closed) // it is in good standing again
}

// TestBreakerStanding: a breaker that opens again soon after it closed stays open twice
// as long; after the longest time without failure it starts over.
func TestBreakerStanding(t *testing.T) {
	l := newLab(t, fleetOf(1, 1))
	most := pick.DefaultBreaker().MaxOpen
	open := func(want time.Duration) {
		t.Helper()
		l.open(fleet.Decode)
		if d := l.p.Guard("d0", 1).Until.Sub(l.now); d > want || d < want*8/10 {
			t.Errorf("open for %v, want about %v", d, want)
		}
		l.now = l.now.Add(want)
		l.good(l.pick()) // and well again
		l.want("d0", pick.Closed)
	}
	open(time.Second)
	open(2 * time.Second)
	l.now = l.now.Add(most)
	open(4 * time.Second) // not longer than that
	l.now = l.now.Add(most + 1)
	open(time.Second)
	l.now = l.now.Add(most - 1)
	open(2 * time.Second)
}

// TestBreakerPair: a pair is admitted as one. If one half refuses, the other half's only
// trial is not used; if it was used for nothing, it is given back.
func TestBreakerPair(t *testing.T) {
	l := newLab(t, fleetOf(1, 1))
	l.open(fleet.Prefill)
	l.want("p0", pick.Open)
	l.now = l.now.Add(2 * time.Second) // p0 may be tried
	c := l.pick()
	l.want("p0", pick.HalfOpen)
	l.bad(c, fleet.Decode) // somebody else's fault: the place is free again
	l.want("p0", pick.Open)
	for range 4 {
		l.bad(l.pick(), fleet.Decode)
	}
	l.want("d0", pick.Open, "p0", pick.Open)
	for range 3 { // d0 refuses: p0's place stays
		if _, err := l.try(); err == nil {
			t.Fatal("a pair with an open half")
		}
		l.want("p0", pick.Open)
	}
	l.now = l.now.Add(2 * time.Second)
	c = l.pick()
	l.want("p0", pick.HalfOpen, "d0", pick.HalfOpen)
	end(c) // its client left
	l.want("p0", pick.Open, "d0", pick.Open)
	c = l.pick()
	c.DonePrefill()
	l.want("p0", pick.Closed, "d0", pick.HalfOpen)
	l.bad(c, fleet.Decode)
	l.want("p0", pick.Closed, "d0", pick.Open)
	if n, e := l.p.Guarded(); n != 1 || e != 0 {
		t.Errorf("%d open, %d ejected", n, e)
	}
}

// TestBreakerSpares: while a breaker is open every policy uses the other workers, in
// fleets of any size. A worker that recovered starts slowly.
func TestBreakerSpares(t *testing.T) {
	for _, policy := range pick.Policies {
		for _, size := range []int{3, 40} {
			l := newLab(t, fleetOf(size, size), func(c *pick.Config) { c.Policy = policy })
			used := func(id string) (n int) {
				for i := range 20 * size {
					c := l.pick(func(r *pick.Request) { r.Session = fmt.Sprint(i) })
					if c.Prefill.ID == id || c.Decode.ID == id {
						n++
					}
					l.good(c)
				}
				return n
			}
			for range 5 {
				c := l.pick(func(r *pick.Request) {
					for i := range size {
						if i != 1 {
							r.Exclude = append(r.Exclude, fmt.Sprintf("d%d", i))
						}
					}
				})
				l.bad(c, fleet.Decode)
			}
			l.want("d1", pick.Open)
			if n := used("d1"); n != 0 {
				t.Errorf("%s, %d: an open breaker let %d through", policy, size, n)
			}
			l.now = l.now.Add(2 * time.Second)
			if n := used("d1"); n == 0 {
				t.Errorf("%s, %d: it is never tried again", policy, size)
			}
			l.want("d1", pick.Closed)
		}
	}
}

// TestBreakerRejoin: a worker that left and comes back is tried at once.
func TestBreakerRejoin(t *testing.T) {
	l := newLab(t, fleetOf(1, 1))
	l.open(fleet.Decode)
	down := member("d0", fleet.Decode, func(m *fleet.Member) { m.State = fleet.Dead })
	up := l.s
	l.s = fleet.NewSnapshot(2, time.Time{}, []fleet.Member{member("p0", fleet.Prefill), down})
	if _, err := l.try(); err == nil {
		t.Fatal("the dead was chosen")
	}
	l.s = fleet.NewSnapshot(3, time.Time{}, up.Members)
	l.good(l.pick())
	l.want("d0", pick.Closed)
}

// TestBreakerOff: without it nothing is kept from a worker.
func TestBreakerOff(t *testing.T) {
	l := newLab(t, fleetOf(1, 1), func(c *pick.Config) { c.Breaker.Failures = 0 })
	for range 100 {
		l.bad(l.pick(), fleet.Decode)
	}
	l.want("d0", pick.Closed)
}

// TestBreakerAlone: an engine that does both phases has one breaker.
func TestBreakerAlone(t *testing.T) {
	alone := member("d0", fleet.Decode, func(m *fleet.Member) { m.Dialect = "openai" })
	l := newLab(t, fleetOf(0, 0, alone))
	l.open(fleet.Decode)
	l.now = l.now.Add(2 * time.Second)
	c := l.pick()
	c.EndPrefill() // as dispatch does, long before the answer
	l.want("d0", pick.HalfOpen)
	c.Answered(0, time.Millisecond)
	l.want("d0", pick.Closed)
	c.EndDecode()
}

// TestBreakerSucceeded: any sign that a worker works closes its breaker.
func TestBreakerSucceeded(t *testing.T) {
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		l := newLab(t, fleetOf(1, 1))
		l.open(role)
		l.now = l.now.Add(2 * time.Second)
		c := l.pick()
		c.Succeeded(role)
		end(c)
		l.want("p0", pick.Closed, "d0", pick.Closed)
	}
}

// TestGuardEvents: every change is told, once.
func TestGuardEvents(t *testing.T) {
	l := newLab(t, fleetOf(1, 1))
	if ev, _ := l.p.Events(); len(ev) != 0 {
		t.Errorf("%v", ev)
	}
	_, changed := l.p.Events()
	l.open(fleet.Prefill)
	<-changed
	l.now = l.now.Add(2 * time.Second)
	l.good(l.pick())
	ev, _ := l.p.Events()
	var got []string
	for _, e := range ev {
		got = append(got, fmt.Sprintf("%s %s %s", e.ID, e.Role, e.State))
	}
	if want := "[p0 prefill open p0 prefill half_open p0 prefill closed]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
	if ev, _ := l.p.Events(); len(ev) != 0 {
		t.Errorf("told twice: %v", ev)
	}
}

// TestGuardCost: a request that goes well pays nothing for the guards.
func TestGuardCost(t *testing.T) {
	l := newLab(t, fleetOf(4, 4))
	req, view := &pick.Request{Model: "m", Tokens: 100}, pick.View{Snapshot: l.s, Now: l.now}
	cost := func() float64 {
		return testing.AllocsPerRun(200, func() {
			c, err := l.p.Pick(view, req)
			if err != nil {
				t.Fatal(err)
			}
			l.good(c)
		})
	}
	if n := cost(); n > 2 { // the choice and its view
		t.Errorf("%v allocations", n)
	}
}

// TestShutUntil: who has no pair is told when the first worker may be tried, and hears of a change.
func TestShutUntil(t *testing.T) {
	l := newLab(t, fleetOf(1, 3))
	var until []time.Time
	for i := range 3 {
		for range pick.DefaultBreaker().Failures {
			l.bad(l.pick(func(r *pick.Request) {
				r.Exclude = []string{"d0", "d1", "d2"}
				r.Exclude = append(r.Exclude[:i:i], r.Exclude[i+1:]...)
			}), fleet.Decode)
		}
		until = append(until, *l.p.Guard(fmt.Sprint("d", i), 1).Until)
		l.now = l.now.Add(time.Millisecond)
	}
	for first := range until { // of those that are open
		want := slices.MinFunc(until[first:], time.Time.Compare)
		_, err := l.try()
		var shut *pick.Shut
		if !errors.As(err, &shut) || !errors.Is(err, pick.ErrNoPair) || !shut.Until.Equal(want) {
			t.Errorf("%d are being tried: %v, %+v, want %v", first, err, shut, want)
		}
		select {
		case <-shut.Changed:
			t.Error("a change without one")
		default:
		}
		l.now = *l.p.Guard(fmt.Sprint("d", first), 1).Until
		c, err := l.try(func(r *pick.Request) {
			for i := range until {
				if i != first {
					r.Exclude = append(r.Exclude, fmt.Sprint("d", i))
				}
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		l.want(c.Decode.ID, pick.HalfOpen)
		<-shut.Changed
		l.now = time.Unix(1e6, 0).Add(2 * time.Millisecond)
	}
	_, err := l.try()
	var shut *pick.Shut
	if !errors.As(err, &shut) || !shut.Until.IsZero() {
		t.Errorf("all are being tried: %v, %+v", err, shut)
	}
}
