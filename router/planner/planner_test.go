package planner_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router/planner"
)

var began = time.Unix(1_000_000_000, 0).UTC()

const (
	perWorker = 1000.0 // tokens a second that a worker computes; of answers four times as few in a whole one
	baseGap   = 0.02   // seconds
)

// fluid is a fleet as a planner sees it, whose workers compute as by a formula.
type fluid struct {
	*planner.Planner
	now     time.Time
	workers []planner.Worker
	made    int
	took    []planner.Decision
	good    int // percent of requests
}

func newFluid(cfg planner.Config, acts bool, roles ...planner.Role) *fluid {
	f := &fluid{Planner: planner.New(cfg, acts), now: began, good: -1}
	for _, r := range roles {
		f.add(r, planner.Serving)
	}
	return f
}

func (f *fluid) add(r planner.Role, s planner.State) {
	f.workers = append(f.workers, planner.Worker{ID: fmt.Sprintf("%s-%d", r, f.made), Role: r, State: s})
	f.made++
}

func (f *fluid) n(r planner.Role) (n int) {
	for _, w := range f.workers {
		if w.Role == r && w.State != planner.Draining {
			n++
		}
	}
	return n
}

// second lets a second pass with so many requests of 100 tokens and 25 of the answer, and carries out what is decided.
func (f *fluid) second(requests int) []planner.Decision {
	f.now = f.now.Add(time.Second)
	s := planner.Sample{At: f.now, Requests: requests, PromptTokens: 100 * requests, Ended: requests, OutputTokens: 25 * requests}
	load := map[planner.Role]float64{planner.Prefill: float64(100 * requests), planner.Decode: float64(25 * requests), planner.Whole: float64(200 * requests)}
	for i := range f.workers {
		w := &f.workers[i]
		if w.State == planner.Starting {
			w.State = planner.Serving
		}
		rho := min(load[w.Role]/perWorker/float64(max(1, f.n(w.Role))), 0.95)
		w.Running = 0
		if w.Role == planner.Prefill && float64((f.made*7+int(f.now.Unix())*13+i*29)%100) < 100*rho || w.Role != planner.Prefill && rho > 0 {
			w.Running = 1
		}
		if w.Role != planner.Prefill && requests > 0 {
			s.Gaps = 24 * requests
			s.Streaming = time.Duration(float64(s.Gaps) * baseGap / (1 - rho) * float64(time.Second))
		}
	}
	if f.good >= 0 {
		s.Judged, s.Good = 100, f.good
	}
	s.Workers = slices.Clone(f.workers)
	f.Observe(s)
	list := f.Decide(f.now)
	f.took = append(f.took, list...)
	for _, d := range list {
		f.obey(d)
	}
	return list
}

func (f *fluid) obey(d planner.Decision) {
	at := slices.IndexFunc(f.workers, func(w planner.Worker) bool { return w.ID == d.Worker })
	switch d.Kind {
	case planner.Start:
		for range d.N {
			f.add(d.Role, planner.Starting)
		}
	case planner.Stop:
		f.workers = slices.Delete(f.workers, at, at+1)
	default:
		f.workers[at].Role = d.Role
	}
}

func (f *fluid) pass(d time.Duration, requests int) {
	for range int(d.Seconds()) {
		f.second(requests)
	}
}

// TestLearns: what workers compute is learned from how they do, and a fleet follows its load up and down; each
// decision has its reason, and what it predicted came true.
func TestLearns(t *testing.T) {
	f := newFluid(planner.DefaultConfig(), true, planner.Whole)
	f.pass(10*time.Minute, 1) // 0.2 of a worker
	f.pass(30*time.Minute, 3) // 0.6
	if f.n(planner.Whole) != 1 {
		t.Errorf("%d workers for 0.6", f.n(planner.Whole))
	}
	f.pass(30*time.Minute, 12) // 2.4, of which 0.7 to each are 3.4
	if n := f.n(planner.Whole); n != 4 {
		t.Errorf("%d workers for 2.4: %+v", n, f.Status())
	}
	f.pass(30*time.Minute, 2)
	if n := f.n(planner.Whole); n != 1 {
		t.Errorf("%d workers for 0.4: %+v", n, f.Status())
	}
	for _, d := range f.Status().Decisions {
		if d.Reason == "" || d.CameTrue == nil {
			t.Errorf("%+v", d)
		}
	}
	last := f.Status().Decisions[len(f.Status().Decisions)-1]
	if a, b := last.Predicted, last.CameTrue; a.Workers != b.Workers || a.Load < 0.8*b.Load || a.Load > 1.2*b.Load || a.Utilisation > b.Utilisation+0.15 || a.Utilisation < b.Utilisation-0.15 {
		t.Errorf("predicted %+v, came %+v", a, b)
	}
}

// TestCoolDown: nobody goes before fewer have been enough for the cool-down, a fleet just found also.
func TestCoolDown(t *testing.T) {
	for _, d := range []time.Duration{10 * time.Second, 30 * time.Second, 5 * time.Minute} {
		cfg := planner.DefaultConfig()
		cfg.CoolDown = d
		f := newFluid(cfg, true, planner.Prefill, planner.Prefill, planner.Prefill, planner.Decode, planner.Decode, planner.Decode)
		first := f.now.Add(time.Second)
		for f.now.Sub(first) < d+time.Minute && len(f.took) == 0 {
			f.second(0)
		}
		if after := f.now.Sub(first); len(f.took) == 0 || after < d {
			t.Errorf("cool-down %v: %d decisions after %v", d, len(f.took), after)
		}
	}
}

// TestNotKnown: before it is known what a worker computes, a reason does not say it.
func TestNotKnown(t *testing.T) {
	f := newFluid(planner.DefaultConfig(), true, planner.Prefill, planner.Decode)
	for range 60 {
		f.now = f.now.Add(time.Second)
		for i := range f.workers {
			f.workers[i].Waiting, f.workers[i].QueuedTokens, f.workers[i].Running = 20, 2000, 1
		}
		f.Observe(planner.Sample{At: f.now, Requests: 50, PromptTokens: 5000, OutputTokens: 10, Ended: 1, Workers: slices.Clone(f.workers)})
		f.took = append(f.took, f.Decide(f.now)...)
	}
	if len(f.took) == 0 {
		t.Fatal("nothing was decided")
	}
	if why := f.took[0].Reason; !strings.Contains(why, "is not known yet") || strings.Contains(why, "00000") {
		t.Errorf("%q", why)
	}
}

// TestFlips: a role that lacks workers gets them of one that has too many.
func TestFlips(t *testing.T) {
	cfg := planner.DefaultConfig()
	cfg.Budget = 4
	f := newFluid(cfg, true, planner.Prefill, planner.Decode, planner.Decode, planner.Decode)
	f.pass(20*time.Minute, 15) // prefill 1.5 of a worker, decode 0.4
	flips := 0
	for _, d := range f.took {
		if d.Kind == planner.Flip && d.From == planner.Decode && d.Role == planner.Prefill {
			flips++
		}
		if d.Kind == planner.Stop && flips == 0 {
			t.Errorf("%+v before a flip", d)
		}
	}
	if flips == 0 || f.n(planner.Prefill) != 3 || f.n(planner.Decode) != 1 {
		t.Errorf("%d flips, %+v", flips, f.workers)
	}
}

// TestBudget: what starts counts from the order on, who drains until it is gone, and a budget that is too small is
// shared by need.
func TestBudget(t *testing.T) {
	cfg := planner.DefaultConfig()
	cfg.Budget = 4
	f := newFluid(cfg, true, planner.Prefill, planner.Decode)
	f.workers = append(f.workers, planner.Worker{ID: "old", Role: planner.Decode, State: planner.Draining})
	for range 1200 {
		f.second(30) // prefill 3, decode 0.75
		if len(f.workers) > 4 {
			t.Fatalf("%+v", f.workers)
		}
	}
	if f.n(planner.Prefill) != 2 || f.n(planner.Decode) != 1 {
		t.Errorf("beside one that drains: %+v", f.workers)
	}
	f.workers = slices.DeleteFunc(f.workers, func(w planner.Worker) bool { return w.ID == "old" })
	f.pass(time.Minute, 30)
	if f.n(planner.Prefill) != 3 || f.n(planner.Decode) != 1 {
		t.Errorf("after it: %+v", f.workers)
	}
	if st := f.Status(); st.Roles[0].Wanted+st.Roles[1].Wanted > 4 {
		t.Errorf("%+v", st)
	}
	f.SetBudget(2)
	f.pass(time.Minute, 30)
	if len(f.workers) != 2 || f.n(planner.Prefill) != 1 {
		t.Errorf("with a budget of 2: %+v", f.workers)
	}
}

// TestLost: an order that nobody carries out is given again, not sooner than after a minute; a worker that dies is missed.
func TestLost(t *testing.T) {
	cfg := planner.DefaultConfig()
	cfg.StartTime = time.Second
	cfg.Decode.Min = 2
	f := newFluid(cfg, true, planner.Prefill, planner.Decode, planner.Decode)
	f.second(1)
	f.workers = f.workers[:2] // it has died
	var at []time.Time
	for range 200 {
		for _, d := range f.second(1) {
			if d.Kind != planner.Start || d.Role != planner.Decode || d.N != 1 || !strings.Contains(d.Reason, "2 decode workers are wanted, and 1 are there") {
				t.Fatalf("%+v", d)
			}
			at = append(at, d.At)
			f.workers = f.workers[:len(f.workers)-1] // nothing comes of it
		}
	}
	if len(at) != 4 || at[0] != began.Add(2*time.Second) || at[1].Sub(at[0]) < time.Minute {
		t.Errorf("%v", at)
	}
}

// TestAdvises: without acting it says only what has changed in what it wants.
func TestAdvises(t *testing.T) {
	f := newFluid(planner.DefaultConfig(), false, planner.Whole, planner.Whole, planner.Whole)
	n := 0
	for range 1800 {
		f.now = f.now.Add(time.Second)
		f.Observe(planner.Sample{At: f.now, Workers: f.workers})
		for _, d := range f.Decide(f.now) {
			if n++; d.Kind != planner.Stop || d.N != 2 || d.Wanted != 1 {
				t.Errorf("%+v", d)
			}
		}
	}
	if n != 1 || f.Wanted()[planner.Whole] != 1 {
		t.Errorf("said %d times; %+v", n, f.Wanted())
	}
}

// TestPromises: where promises are broken with all workers there, each gets less, and more again once they are kept.
func TestPromises(t *testing.T) {
	f := newFluid(planner.DefaultConfig(), true, planner.Whole)
	f.pass(5*time.Minute, 1)
	f.pass(20*time.Minute, 7) // 1.4: 2 workers
	f.good = 80
	f.pass(time.Hour, 7)
	low := f.Status().Aim
	if low >= 0.6 || f.n(planner.Whole) < 3 {
		t.Errorf("an aim of %.2f, %d workers: %+v", low, f.n(planner.Whole), f.Status())
	}
	f.good = 100
	f.pass(2*time.Hour, 7)
	if aim := f.Status().Aim; aim <= low || aim > 0.7 {
		t.Errorf("an aim of %.2f, and %.2f when all is well: where it broke is remembered", low, aim)
	}
}

func TestValidate(t *testing.T) {
	bad := func(key string, change func(*planner.Config)) {
		t.Helper()
		c := planner.DefaultConfig()
		change(&c)
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), key+":") {
			t.Errorf("%s: %v", key, err)
		}
	}
	if err := planner.DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	bad("budget", func(c *planner.Config) { c.Budget = 0 })
	bad("budget", func(c *planner.Config) { c.Budget, c.Prefill.Min = 2, 2 })
	bad("prefill", func(c *planner.Config) { c.Prefill.Min = 0 })
	bad("whole", func(c *planner.Config) { c.Whole.Max = 0 })
	bad("utilisation", func(c *planner.Config) { c.Utilisation = 1 })
	bad("goal", func(c *planner.Config) { c.Goal = 1 })
	bad("cool_down", func(c *planner.Config) { c.CoolDown = time.Second })
	bad("start_time", func(c *planner.Config) { c.StartTime = -1 })
}
