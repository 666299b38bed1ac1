package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/router/planner"
)

// sluggish is a device of which few steps make a long time: a step takes 0.5 s, and some for each token.
type sluggish struct{}

const (
	sluggishStep   = 500 * time.Millisecond
	sluggishPrompt = 8 * time.Millisecond // a token
	sluggishAnswer = 60 * time.Millisecond
)

func (sluggish) Step(l steptable.Load) (mean, spread time.Duration) {
	mean = sluggishStep + time.Duration(l.Decodes)*sluggishAnswer
	for _, p := range l.Pieces {
		mean += time.Duration(p.Tokens) * sluggishPrompt
	}
	return mean, mean / 50
}

// world is a random load on a fleet under a planner.
type world struct {
	seed          uint64
	split         Split
	cfg           planner.Config
	start         time.Duration
	shape         string
	peak          float64 // requests a second
	prompt, reply int     // mean tokens
	deaths        []time.Duration
	fails         float64 // the share of starts that come to nothing
	load          Load
}

const (
	busyTime  = 30 * time.Minute // then there is no load
	worldTime = 75 * time.Minute
)

func (w *world) String() string {
	return fmt.Sprintf("seed %d: %v, %s load up to %.2f/s of %d and %d tokens, starts take %v and fail %.1f, deaths %v, budget %d, cool-down %v", w.seed, w.split, w.shape, w.peak,
		w.prompt, w.reply, w.start, w.fails, w.deaths, w.cfg.Budget, w.cfg.CoolDown)
}

// work is how many workers a load of so many requests a second takes at full use, of each role.
func (w *world) work(rate float64) map[planner.Role]float64 {
	prompt, reply := rate*float64(w.prompt)*sluggishPrompt.Seconds(), rate*float64(w.reply)*sluggishAnswer.Seconds()
	if w.split.Whole > 0 {
		return map[planner.Role]float64{planner.Whole: prompt + reply}
	}
	return map[planner.Role]float64{planner.Prefill: prompt, planner.Decode: reply}
}

func newWorld(seed uint64) *world {
	rng := rand.New(rand.NewPCG(seed, 3))
	w := &world{seed: seed, cfg: planner.DefaultConfig(), start: time.Duration(5+rng.IntN(60)) * time.Second,
		shape: []string{"constant", "constant", "steps", "ramp", "bursts"}[rng.IntN(5)], prompt: 100 + rng.IntN(400), reply: 5 + rng.IntN(40)}
	w.cfg.Budget = 3 + rng.IntN(8)
	w.cfg.CoolDown = time.Duration(1+rng.IntN(5)) * time.Minute
	w.cfg.StartTime = time.Duration(rng.IntN(120)) * time.Second // it is not told the truth
	w.split = Split{Whole: 1 + rng.IntN(2)}
	if rng.IntN(2) == 0 {
		w.split = Split{Prefill: 1, Decode: 1 + rng.IntN(2)}
	}
	if rng.IntN(3) == 0 {
		for range 1 + rng.IntN(2) {
			w.deaths = append(w.deaths, time.Duration(rng.Int64N(int64(busyTime))))
		}
	}
	if rng.IntN(4) == 0 {
		w.fails = 0.3
	}
	total := 0.0
	for _, n := range w.work(1) {
		total += n
	}
	most := 0.9 // of what the budget computes
	if w.split.Whole == 0 {
		most = 0.6 // a request waits for the pair that it was sent to, whoever else has come: a queue here takes its time
	}
	w.peak = float64(w.cfg.Budget) * (0.1 + (most-0.1)*rng.Float64()) / total
	rate := func(time.Duration) float64 { return w.peak }
	switch w.shape {
	case "steps":
		var at [6]float64
		for i := range at {
			at[i] = w.peak * rng.Float64()
		}
		rate = func(t time.Duration) float64 { return at[int(t*6/busyTime)] }
	case "ramp":
		rate = func(t time.Duration) float64 { return w.peak * t.Minutes() / busyTime.Minutes() }
	case "bursts":
		rate = func(t time.Duration) float64 {
			if int(t.Minutes())%10 < 3 {
				return w.peak
			}
			return w.peak / 4
		}
	}
	for at := time.Duration(0); ; {
		at += time.Duration(rng.ExpFloat64() / w.peak * float64(time.Second))
		if at >= busyTime {
			break
		}
		if rng.Float64()*w.peak < rate(at) {
			w.load.Requests = append(w.load.Requests, Request{At: at, Prompt: Prompt{tokens: w.prompt/2 + rng.IntN(w.prompt), nth: uint64(at)}, Output: 1 + rng.IntN(2*w.reply)})
		}
	}
	w.load.Until = worldTime
	return w
}

// watch checks what must hold of a world at each sample.
type watch struct {
	*testing.T
	*world
	p       *planner.Planner
	history []moment
	stopped map[planner.Role]time.Duration // when a role had its last stop
	turns   map[planner.Role]int           // from stops to starts, once the load is old
	unsaid  time.Duration                  // the last death or failed start
	blocked time.Duration                  // when who drained held the budget last
	last    planner.Sample
	drains  map[string]time.Duration
}

type moment struct {
	at   time.Duration
	need map[planner.Role]int
}

const sampled = 5 * time.Second

func (w *watch) look(s *planner.Sample, list []planner.Decision) {
	now := s.At.Sub(start)
	gpus, serving, starting, draining := len(s.Workers), map[planner.Role]int{}, 0, 0
	was := w.drains
	w.drains = map[string]time.Duration{}
	for _, x := range s.Workers {
		switch x.State {
		case planner.Serving:
			serving[x.Role]++
		case planner.Starting:
			starting++
		default:
			draining++
			w.drains[x.ID] = now
			if since, ok := was[x.ID]; ok {
				w.drains[x.ID] = since
			}
			if d := now - w.drains[x.ID]; d > 30*time.Minute {
				w.Fatalf("%v\n%v: %s has drained for %v: %+v\n%+v", w.world, now, x.ID, d, s.Workers, w.p.Status().Roles)
			}
		}
	}
	for _, d := range list {
		if d.Kind == planner.Start {
			gpus += d.N
		}
		if d.Kind == planner.Stop {
			w.stopped[d.Role] = now
		} else if at, ok := w.stopped[d.Role]; ok && d.Kind == planner.Start && now > 15*time.Minute && now < busyTime && at > 10*time.Minute {
			w.turns[d.Role]++
			delete(w.stopped, d.Role) // starts that follow are the same turn
		}
		if d.Reason == "" || d.Predicted.At.Before(s.At) {
			w.Errorf("%v\n%v: %+v lacks its reason or prediction", w.world, now, d)
		}
	}
	if gpus > w.cfg.Budget {
		w.Fatalf("%v\n%v: %d workers with a budget of %d: %v", w.world, now, gpus, w.cfg.Budget, list)
	}
	m := moment{now, map[planner.Role]int{}}
	all := 0
	for _, r := range w.p.Status().Roles {
		m.need[r.Role] = int(math.Ceil(r.Need))
		all += max(1, m.need[r.Role])
	}
	if all > w.cfg.Budget { // who lacks how much is judged by all together
		m.need = map[planner.Role]int{"": w.cfg.Budget}
	}
	w.history = append(w.history, m)
	w.behind(now, serving, draining, len(s.Workers) == w.cfg.Budget && draining > 0)
	w.last = *s
}

// behind checks that what was needed one start ago, and ever since, is there but for one worker.
func (w *watch) behind(now time.Duration, serving map[planner.Role]int, draining int, blocked bool) {
	lag := w.start + 20*time.Second + 2*sampled
	if blocked {
		w.blocked = now
	}
	if draining > 0 || w.blocked > 0 && now < w.blocked+lag || now < lag || w.unsaid > 0 && now < w.unsaid+lag+2*time.Minute {
		return
	}
	for r := range w.history[len(w.history)-1].need {
		least := mostNeed
		for i := len(w.history) - 1; i >= 0 && w.history[i].at >= now-lag; i-- {
			n, ok := w.history[i].need[r]
			if !ok {
				n = 0
			}
			least = min(least, n)
		}
		have := serving[r]
		if r == "" {
			for _, n := range serving {
				have += n
			}
		}
		if have < min(least, w.cfg.Budget)-1 {
			w.Fatalf("%v\n%v: %d %q workers serve, %d have been needed for %v; %+v", w.world, now, have, r, least, lag, w.p.Status())
		}
	}
}

const mostNeed = 1 << 20

// holds checks the properties of a planner in a world.
func holds(t *testing.T, seed uint64) (turns int, constant bool) {
	w := newWorld(seed)
	cfg := like(w.split)
	cfg.Heartbeat, cfg.Seed = 2*time.Second, seed
	cfg.Worker.Steps, cfg.Worker.Layers = sluggish{}, 2
	cfg.Worker.Engine.MaxStepTime = 0
	rng := rand.New(rand.NewPCG(seed, 4))
	p := planner.New(w.cfg, true)
	look := &watch{T: t, world: w, p: p, stopped: map[planner.Role]time.Duration{}, turns: map[planner.Role]int{}}
	s := Scaling{Planner: p, Every: sampled, Start: w.start, Deaths: w.deaths, Look: look.look}
	for _, at := range w.deaths {
		look.unsaid = max(look.unsaid, at)
	}
	if w.fails > 0 {
		s.Fails = func(int) bool { return rng.Float64() < w.fails }
		look.unsaid = worldTime
	}
	x, err := RunScaled(t.Context(), cfg, w.load, s)
	if err != nil {
		t.Fatal(err)
	}
	if len(w.deaths) == 0 { // else the last of its role may have been it
		for i := range x.Outcomes {
			if o := &x.Outcomes[i]; o.Failed || o.Tokens != w.load.Requests[i].Output {
				t.Fatalf("%v\nrequest %d: %+v", w, i, o)
			}
		}
	}
	least := len(look.work(1))
	if n := len(look.last.Workers); n != least {
		t.Fatalf("%v\nafter %v without load there are %d workers: %+v\n%+v", w, worldTime-busyTime, n, look.last.Workers, p.Status())
	}
	constant = w.shape == "constant" && len(w.deaths) == 0 && w.fails == 0
	for _, n := range look.turns {
		turns = max(turns, n)
	}
	if constant && turns > 2 { // few requests are never constant: one world in a hundred has two
		for _, d := range p.Status().Decisions {
			t.Logf("%v %s %d %s: %s", d.At.Sub(start), d.Kind, d.N, d.Role, d.Reason)
		}
		t.Errorf("%v\n%d starts after stops under a constant load", w, turns)
	}
	return turns, constant
}

// TestPlannerHolds: of random loads, fleets and faults. XPYD_PLANNER says how many, XPYD_PLANNER_SEED where to begin.
func TestPlannerHolds(t *testing.T) {
	n, from := 40, 1
	for name, to := range map[string]*int{"XPYD_PLANNER": &n, "XPYD_PLANNER_SEED": &from} {
		if text := os.Getenv(name); text != "" {
			var err error
			if *to, err = strconv.Atoi(text); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	turned, constants := 0, 0
	for i := range n {
		turns, constant := holds(t, uint64(from+i))
		if constant {
			constants++
			turned += turns
		}
	}
	t.Logf("%d worlds, %d of constant load, in which %d times a start followed a stop", n, constants, turned)
}

// FuzzPlanner does so as long as one likes.
func FuzzPlanner(f *testing.F) {
	f.Add(uint64(1))
	f.Fuzz(func(t *testing.T, seed uint64) { holds(t, seed) })
}
