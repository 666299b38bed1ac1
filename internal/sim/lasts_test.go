package sim

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/router/pick"
)

// TestLasts: without a tight limit of first tokens, a fleet does not keep up what only waits longer and longer, however
// patient the case and however short the window; and it still keeps up nearly all that its device computes.
func TestLasts(t *testing.T) {
	for _, c := range []struct {
		name   string
		window time.Duration
		slo    record.SLO
		least  float64
	}{
		{"gaps alone", 2 * time.Second, record.SLO{TPOT: time.Second}, 85},
		{"gaps alone, longer", 10 * time.Second, record.SLO{TPOT: time.Second}, 90},
		{"a first token some day", 2 * time.Second, record.SLO{TTFT: 1000 * time.Hour}, 85},
		{"a tight one", 10 * time.Second, record.SLO{TTFT: 100 * time.Millisecond}, 95},
	} {
		k := oneByOne() // 100 prompts a second
		bound := Bound(&k.Config.Worker, 1, every(0, 100, 250, 1), k.Promise)
		k.Promise.SLO, k.Patience = c.slo, time.Hour
		k.Span = func([]Request) time.Duration { return c.window }
		k.Load = func(speed float64) []Request {
			return every(time.Duration(float64(time.Second)/speed), int(c.window.Seconds()*speed), 250, 1)
		}
		g, err := k.Search(t.Context(), Split{Whole: 1})
		if most := min(112, bound); err != nil || g.Rate < c.least || g.Rate > most {
			t.Errorf("%s: %.1f requests/s, want %v to %.1f; %v", c.name, g.Rate, c.least, most, err)
		}
		if ok, err := k.Keeps(t.Context(), Split{Whole: 1}, 200); ok || err != nil {
			t.Errorf("%s: twice what it computes is kept up, %v", c.name, err)
		}
	}
}

// TestProbes: a search that looks beyond finds the higher load that does where a lower one does not.
func TestProbes(t *testing.T) {
	c := oneByOne()
	plain := c.Load
	c.Load = func(speed float64) []Request { // all at once between 25 and 70 a second
		list := plain(speed)
		if speed > 25 && speed < 70 {
			for i := range list {
				list[i].At /= 100
			}
		}
		return list
	}
	c.Span = func([]Request) time.Duration { return 2 * time.Second }
	for _, probes := range [][]float64{nil, {1.5, 3}} {
		c.Probes = probes
		g, err := c.Search(t.Context(), Split{Whole: 1})
		if err != nil || (g.Rate > 70) != (probes != nil) {
			t.Errorf("probes at %v: %v requests/s, %v", probes, g.Rate, err)
		}
	}
}

// TestWarmed: to workers that have served others, all requests are alike; those that start do not know how fast their steps are. It is so
// for all fleets, and of the whole ones on any number of processors.
func TestWarmed(t *testing.T) {
	load := Load{Requests: every(10*time.Second, 4, 4000, 20), Until: time.Minute}
	for _, s := range []Split{{Whole: 1}, {Whole: 12}, {Prefill: 1, Decode: 1}, {Mixed: 2}} {
		for _, warm := range []int{0, 4} {
			cfg := s.Of(like(s))
			cfg.Worker.Engine.Promise.TPOT = 20 * time.Millisecond
			cfg.Pick.Policy = pick.KVEvents
			cfg.Warm = warm
			var first []Outcome
			for _, procs := range []int{1, 4} {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
				out := play(t, cfg, load)
				if first != nil && !slices.Equal(first, out) {
					t.Errorf("%v, warm %d: two runs differ", s, warm)
				}
				first = out
			}
			worst, best := first[0].TTFT(), first[0].TTFT()
			for _, o := range first {
				if worst, best = max(worst, o.TTFT()), min(best, o.TTFT()); o.Failed || o.Tokens != 20 {
					t.Errorf("%v: %+v", s, o)
				}
			}
			if alike := worst < best*11/10; warm > 0 && !alike || warm == 0 && s.Whole == 1 && alike {
				t.Errorf("%v, warm %d: first tokens after %v to %v", s, warm, best, worst)
			}
		}
	}
}

// TestInterrupted: whatever a case is about, it ends with its context: before a load is run, while workers are made, between the
// steps of lanes and where an event is due at each.
func TestInterrupted(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	c := oneByOne()
	made := 0
	load := c.Load
	c.Load = func(speed float64) []Request { made++; return load(speed) }
	_, err := c.Compare(over, Splits(50), func(*Goodput) { t.Error("a fleet is through") })
	if !errors.Is(err, context.Canceled) || made > 0 {
		t.Errorf("%v, after %d loads", err, made)
	}
	if _, err := c.Highest(over, 1); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := open(over, like(Split{Whole: 1000}), Load{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for _, s := range []Split{{Whole: 2}, {Prefill: 1, Decode: 1}} {
		for _, warm := range []int{0, 3} {
			ctx, cancel := context.WithCancel(t.Context())
			cfg := like(s)
			cfg.Warm, cfg.Worker.Steps = warm, cancels{cancel}
			r, err := open(ctx, cfg, Load{Requests: every(0, 10, 100, 1<<20), Until: 1000 * time.Hour})
			if err == nil {
				err = r.run(ctx)
			}
			if !errors.Is(err, context.Canceled) || r.clock.now > time.Minute {
				t.Errorf("%v, warm %d: %v, at %v", s, warm, err, r.clock.now)
			}
			cancel()
		}
	}
}

// cancels is a device whose first step cancels a context.
type cancels struct{ cancel func() }

func (c cancels) Step(l steptable.Load) (mean, spread time.Duration) {
	c.cancel()
	return plain{}.Step(l)
}
