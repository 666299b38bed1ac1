package sim

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/router/pick"
)

const (
	perStep  = 5 * time.Millisecond
	perToken = 20 * time.Microsecond
)

// plain is a device on which a step takes perStep, and perToken for each token of a prompt.
type plain struct{ spread time.Duration }

func (p plain) Step(l steptable.Load) (mean, spread time.Duration) {
	mean = perStep
	for _, piece := range l.Pieces {
		mean += time.Duration(piece.Tokens) * perToken
	}
	return mean, p.spread
}

// like is a fleet of plain devices.
func like(s Split) Config {
	cfg := DefaultConfig()
	cfg.Whole, cfg.Prefill, cfg.Decode = s.Whole, s.Prefill, s.Decode
	cfg.Worker = Worker{Engine: engine.DefaultConfig(), Blocks: 2000, BlockTokens: 16, Layers: 8, Steps: plain{}}
	cfg.KV = Link{Bytes: 1000, Bandwidth: 1e9, Latency: time.Millisecond}
	return cfg
}

// every makes n requests, one each so often.
func every(d time.Duration, n, prompt, output int) []Request {
	var list []Request
	for i := range n {
		list = append(list, Request{At: time.Duration(i) * d, Prompt: Prompt{tokens: prompt, nth: uint64(i)}, Output: output})
	}
	return list
}

// play runs a load to its end, and checks that nothing is held then.
func play(t *testing.T, cfg Config, load Load) []Outcome {
	t.Helper()
	if load.Until == 0 {
		load.Until = time.Hour
	}
	r, err := open(t.Context(), cfg, load)
	if err == nil {
		err = r.run(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.open == 0 {
		for r.clock.next() { // what was released is free at the next turn
		}
		for _, w := range r.workers {
			if s := w.cache.Stats(); s.Held > 0 || w.cache.Check() != nil {
				t.Errorf("%s: %+v, %v", w.member.ID, s, w.cache.Check())
			}
			if l := r.picker.Loads(w.member.ID, 1); l != (pick.Loads{}) || len(w.calls)+len(w.claims) > 0 {
				t.Errorf("%s holds %+v, %d calls, %d claims", w.member.ID, l, len(w.calls), len(w.claims))
			}
		}
	}
	return r.out
}

// TestIdle: time in which nothing happens costs nothing.
func TestIdle(t *testing.T) {
	for _, cfg := range []Config{like(Split{Whole: 1}), like(Split{Prefill: 1, Decode: 1})} {
		r, err := open(t.Context(), cfg, Load{Requests: every(30*24*time.Hour, 3, 100, 10), Until: 365 * 24 * time.Hour})
		if err == nil {
			err = r.run(t.Context())
		}
		if n := r.snapshot.Version; err != nil || r.out[2].Tokens != 10 || n > 20 {
			t.Errorf("%v, %+v, after %d heartbeats", err, r.out[2], n)
		}
	}
}

// TestOne: the times of a request that is alone follow from its steps.
func TestOne(t *testing.T) {
	const prompt, output = 100, 5
	step := perStep + prompt*perToken
	one := Load{Requests: every(0, 1, prompt, output)}
	whole := like(Split{Whole: 1})
	o := play(t, whole, one)[0]
	if want := whole.Front + step + whole.Back; o.TTFT() != want || o.Gap() != perStep || o.Longest != perStep || o.Tokens != output || o.Failed {
		t.Errorf("whole: %+v, want a first token after %v", o, want)
	}
	whole.Worker.Host = time.Millisecond
	if o := play(t, whole, one)[0]; o.Gap() != perStep+time.Millisecond {
		t.Errorf("with a host that takes 1 ms: gaps of %v", o.Gap())
	}
	apart := like(Split{Prefill: 1, Decode: 1})
	o = play(t, apart, one)[0]
	// The ticket, the step, during which all layers but the last one go, that one, a message.
	layer := prompt * 1000 * time.Second / 1e9 / 8
	if want := apart.Front + 2*apart.KV.Latency + step + layer + apart.Back; o.TTFT() != want || o.Gap() != perStep || o.Failed {
		t.Errorf("apart: %+v, want a first token after %v, a layer takes %v", o, want, layer)
	}
	apart.KV.Bandwidth = 0
	if got, want := play(t, apart, one)[0].TTFT(), apart.Front+2*apart.KV.Latency+step+apart.Back; got != want {
		t.Errorf("apart by a link of any speed: %v, want %v", got, want)
	}
	apart.KV.Bandwidth = 1e6
	o = play(t, apart, one)[0]
	if want := apart.Front + 2*apart.KV.Latency + prompt*1000*time.Second/1e6 + apart.Back; o.TTFT() != want {
		t.Errorf("apart by a slow link: %v, want %v", o.TTFT(), want)
	}
}

// TestPrefix: what a worker has of a prompt is neither computed nor sent again, and the router
// knows who has it.
func TestPrefix(t *testing.T) {
	for _, s := range []Split{{Whole: 3}, {Prefill: 2, Decode: 2}} {
		for _, policy := range []string{pick.Prefix, pick.KVEvents} {
			requests := every(time.Second, 6, 1000, 3)
			for i := range requests {
				requests[i].Prompt.blocks = []uint64{1, 2}
			}
			cfg := like(s)
			cfg.Pick.Policy = policy
			out := play(t, cfg, Load{Requests: requests})
			for i, o := range out[1:] {
				if first := out[0].TTFT(); o.TTFT() > first-900*perToken {
					t.Errorf("%v, %s: request %d took %v, the first %v", s, policy, i+1, o.TTFT(), first)
				}
			}
		}
	}
}

// TestRepeats: a run depends on its seed alone.
func TestRepeats(t *testing.T) {
	for _, s := range []Split{{Whole: 3}, {Prefill: 1, Decode: 2}} {
		for _, overlaps := range []bool{false, true} {
			cfg := like(s)
			cfg.Worker.Steps, cfg.Worker.Overlaps = plain{spread: time.Millisecond}, overlaps
			load := Load{Requests: every(3*time.Millisecond, 120, 200, 20)}
			first, again := play(t, cfg, load), play(t, cfg, load)
			if !reflect.DeepEqual(first, again) {
				t.Errorf("%v, overlaps %t: two runs differ", s, overlaps)
			}
			cfg.Seed++
			if other := play(t, cfg, load); reflect.DeepEqual(first, other) {
				t.Errorf("%v, overlaps %t: another seed changes nothing", s, overlaps)
			}
			for i, o := range first {
				if o.Failed || o.Tokens != 20 || o.TTFT() <= 0 {
					t.Errorf("%v: request %d: %+v", s, i, o)
				}
			}
		}
	}
}

// TestJitter: requests that are sent together come to their worker one by one, and one that nobody meets waits
// for Jitter in the mean.
func TestJitter(t *testing.T) {
	cfg := like(Split{Whole: 1})
	cfg.Jitter = 2 * time.Millisecond
	together := true
	for out, i := play(t, cfg, Load{Requests: every(0, 8, 10, 5)}), 1; i < 8; i++ {
		together = together && out[i].First == out[0].First
	}
	if together {
		t.Error("requests come together")
	}
	const n = 2000
	load := Load{Requests: every(time.Second, n, 10, 1), Until: time.Hour}
	sum := time.Duration(0)
	later := play(t, cfg, load)
	cfg.Jitter = 0
	for i, o := range play(t, cfg, load) {
		if later[i].TTFT() < o.TTFT() {
			t.Fatalf("request %d came before it was sent", i)
		}
		sum += later[i].TTFT() - o.TTFT()
	}
	if mean := sum / n; mean < 1900*time.Microsecond || mean > 2100*time.Microsecond {
		t.Errorf("%v in the mean, want 2 ms", mean)
	}
}

// TestShort: where blocks are short, sequences are preempted and claims wait, and all are answered.
func TestShort(t *testing.T) {
	for _, s := range []Split{{Whole: 1}, {Prefill: 1, Decode: 1}} {
		cfg := like(s)
		cfg.Worker.Blocks = 60
		for i, o := range play(t, cfg, Load{Requests: every(time.Millisecond, 60, 100, 100)}) {
			if o.Failed || o.Tokens != 100 {
				t.Errorf("%v: request %d: %+v", s, i, o)
			}
		}
	}
}

// TestClosed: so many requests are in flight, and no more.
func TestClosed(t *testing.T) {
	cfg := like(Split{Whole: 1})
	out := play(t, cfg, Load{Requests: every(0, 100, 50, 10), Closed: 4})
	for i, o := range out {
		inFlight := 0
		for _, p := range out {
			if p.At <= o.At && o.At < p.Last-cfg.Back {
				inFlight++
			}
		}
		if inFlight > 4 || o.Failed {
			t.Errorf("request %d at %v: %d in flight", i, o.At, inFlight)
		}
	}
}

// TestWarm: a load begins when the requests before it have ended, one after the other.
func TestWarm(t *testing.T) {
	for _, closed := range []int{0, 3} {
		back := DefaultConfig().Back // the client sees an end later
		load := Load{Requests: append(every(0, 4, 100, 10), every(100*time.Millisecond, 9, 100, 10)...), Warm: 4, Closed: closed}
		out := play(t, like(Split{Whole: 1}), load)
		for i := 1; i < 4; i++ {
			if out[i].At < out[i-1].Last-back {
				t.Errorf("closed %d: request %d before the load is sent at %v, the one before it ends at %v", closed, i, out[i].At, out[i-1].Last)
			}
		}
		if began := out[4].At; began < out[3].Last-back || began > out[3].Last+time.Millisecond {
			t.Errorf("closed %d: the load begins at %v, what is before it ends at %v", closed, began, out[3].Last)
		}
		if got, want := out[5].At-out[4].At, 100*time.Millisecond; closed == 0 && got != want || closed > 0 && got != 0 {
			t.Errorf("closed %d: the second request is sent %v after the first", closed, got)
		}
	}
}

// TestCut: what has not ended when a run does has failed, and a run ends with its context.
func TestCut(t *testing.T) {
	cfg := like(Split{Whole: 1})
	out := play(t, cfg, Load{Requests: every(time.Second, 3, 50, 100), Until: 1200 * time.Millisecond})
	if out[0].Failed || !out[1].Failed || !out[2].Failed || out[1].Tokens == 0 || out[2].Tokens != 0 {
		t.Errorf("%+v", out)
	}
	ended := 0
	out = play(t, cfg, Load{Requests: every(100*time.Millisecond, 3, 50, 100), Ended: func(o *Outcome) bool { ended++; return false }})
	if ended != 1 || out[0].Failed || !out[1].Failed {
		t.Errorf("%d ended: %+v", ended, out)
	}
	if _, err := Run(t.Context(), like(Split{Prefill: 2}), Load{}); err == nil {
		t.Error("a fleet without decode runs")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, cfg, Load{Requests: every(0, 300, 50, 100), Until: time.Hour}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestSearch: a worker that computes one prompt after the other, 10 ms each, takes nearly 100 a second.
func TestSearch(t *testing.T) {
	cfg := like(Split{Whole: 1})
	cfg.Worker.Engine.MaxRunning = 1
	load := func(speed float64) []Request {
		return every(time.Duration(float64(time.Second)/speed), int(2*speed), 250, 1)
	}
	for _, share := range []float64{1, 0.9} {
		p := Promise{SLO: record.SLO{TTFT: 100 * time.Millisecond}, Share: share}
		g, err := (&Case{Config: cfg, Load: load, Promise: p, Patience: time.Minute}).Search(t.Context(), Split{Whole: 1})
		if err != nil || g.Rate < 95 || g.Rate > 112 || g.Good < share || g.TTFT.P99 > 0.2 {
			t.Errorf("%+v, %v", g, err)
		}
	}
	p := Promise{SLO: record.SLO{TTFT: time.Millisecond}, Share: 0.9}
	if g, err := (&Case{Config: cfg, Load: load, Promise: p, Patience: time.Minute}).Search(t.Context(), Split{Whole: 1}); err != nil || g.Speed != 0 {
		t.Errorf("a promise that nobody keeps: %+v, %v", g, err)
	}
	told := 0
	p.TTFT = 100 * time.Millisecond
	list, err := (&Case{Config: cfg, Load: load, Promise: p, Patience: time.Minute}).Compare(t.Context(), Splits(2), func(*Goodput) { told++ })
	if err != nil || told != 3 || len(list) != 3 || list[0].Rate < list[1].Rate || list[0].Fleet != "2 whole" || list[1].Fleet != "2 mixed" || list[2].Fleet != "1P1D" {
		t.Errorf("%d, %+v, %v", told, list, err)
	}
}

// TestKept: what each limit means.
func TestKept(t *testing.T) {
	o := Outcome{At: time.Second, First: 3 * time.Second, Last: 7 * time.Second, Prompt: 100, Tokens: 5, Longest: 2 * time.Second}
	for _, c := range []struct {
		p    Promise
		kept bool
	}{
		{Promise{}, true},
		{Promise{SLO: record.SLO{TTFT: 2 * time.Second}}, true},
		{Promise{SLO: record.SLO{TTFT: time.Second}}, false},
		{Promise{SLO: record.SLO{TTFT: time.Second}, PerToken: 10 * time.Millisecond}, true},
		{Promise{SLO: record.SLO{TPOT: time.Second}}, true},
		{Promise{SLO: record.SLO{TPOT: 999 * time.Millisecond}}, false},
		{Promise{SLO: record.SLO{ITL: 2 * time.Second}}, true},
		{Promise{SLO: record.SLO{ITL: time.Second}}, false},
		{Promise{SLO: record.SLO{E2E: 6 * time.Second}}, true},
		{Promise{SLO: record.SLO{E2E: 5 * time.Second}}, false},
	} {
		if got := c.p.Kept(&o); got != c.kept {
			t.Errorf("%+v: %t", c.p, got)
		}
	}
	if o.Failed = true; new(Promise).Kept(&o) {
		t.Error("one that failed is good")
	}
}

// TestTrace: a trace's requests come at their times, sped up, and share what the trace says.
func TestTrace(t *testing.T) {
	entries := []workload.Entry{{In: 600, Out: 1, Blocks: []uint64{7, 8}}, {At: time.Second, In: 1100, Out: 2, Blocks: []uint64{7, 9, 10}},
		{At: 2 * time.Second, In: 600, Out: 3}, {At: 3 * time.Second, In: 600, Out: 4}}
	load := Trace(entries, 2, 1500*time.Millisecond)
	if len(load) != 3 || load[1].At != 500*time.Millisecond || load[2].Output != 3 || load[1].Prompt.Tokens() != 1100 {
		t.Fatalf("%+v", load)
	}
	a, b, c := load[0].Prompt.IDs(), load[1].Prompt.IDs(), load[2].Prompt.IDs()
	if len(a) != 600 || len(b) != 1100 || !slices.Equal(a[:512], b[:512]) || a[512] == b[512] || slices.Equal(a, c) {
		t.Error("the wrong prompts begin alike")
	}
	for _, id := range b {
		if id < 0 || id >= vocab {
			t.Fatal(id)
		}
	}
	if all := Trace(entries, 1, 0); len(all) != 4 || slices.Equal(all[2].Prompt.IDs(), all[3].Prompt.IDs()) {
		t.Error("prompts without blocks are the same")
	}
}
