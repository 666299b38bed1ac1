package sim

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router/planner"
)

// slow is a device of which few steps make a long time.
type slow struct{ plain }

// poisson makes requests at random times, at a rate that changes.
func poisson(rng *rand.Rand, until time.Duration, rate func(time.Duration) float64, prompt, output int) (list []Request) {
	const most = 20.0
	for at := time.Duration(0); ; {
		at += time.Duration(rng.ExpFloat64() / most * float64(time.Second))
		if at >= until {
			return list
		}
		if rng.Float64()*most < rate(at) {
			list = append(list, Request{At: at, Prompt: Prompt{tokens: prompt/2 + rng.IntN(prompt), nth: uint64(len(list))}, Output: 1 + rng.IntN(2*output)})
		}
	}
}

// TestScaledFollows: a fleet grows with its load and shrinks after it, and all requests are served.
func TestScaledFollows(t *testing.T) {
	for _, s := range []Split{{Whole: 1}, {Prefill: 1, Decode: 1}} {
		cfg := like(s)
		cfg.Heartbeat = time.Second
		rng := rand.New(rand.NewPCG(1, 1))
		// A prompt takes 500*20 us = 10 ms of a device, alone.
		load := poisson(rng, 40*time.Minute, func(at time.Duration) float64 {
			if at > 10*time.Minute && at < 30*time.Minute {
				return 20
			}
			return 2
		}, 4000, 20)
		pc := planner.DefaultConfig()
		p := planner.New(pc, true)
		most, last := 0, 0
		x, err := RunScaled(t.Context(), cfg, Load{Requests: load, Until: time.Hour}, Scaling{Planner: p, Every: time.Second, Start: 30 * time.Second,
			Look: func(s *planner.Sample, d []planner.Decision) {
				for _, d := range d {
					t.Logf("%v %s %d %s %s: %s, %+v", s.At.Sub(start), d.Kind, d.N, d.Role, d.Worker, d.Reason, d.Predicted)
				}
				most, last = max(most, len(s.Workers)), len(s.Workers)
			}})
		if err != nil {
			t.Fatal(err)
		}
		failed := 0
		for i := range x.Outcomes {
			if x.Outcomes[i].Failed {
				failed++
			}
		}
		t.Logf("%v: %d requests, %d failed, most %d, last %d, %v of workers, %+v", s, len(x.Outcomes), failed, most, last, x.Workers, SpreadOf(x.Outcomes, (*Outcome).TTFT))
		for _, d := range p.Status().Decisions {
			t.Logf("%s %d %s predicted %+v came true %+v", d.Kind, d.N, d.Role, d.Predicted, d.CameTrue)
		}
	}
}
