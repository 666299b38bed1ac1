package main

import (
	"context"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/router/planner"
	"github.com/xpyd/xpyd/worker"
)

// planBench has the twin run two days under the planner, and under what it is compared with.
type planBench struct {
	base
	just   string
	slower float64
	peak   float64
	seed   uint64
	load   []sim.Request
	say    string
}

const (
	days      = 2
	planSpan  = days * 24 * time.Hour
	planStart = time.Minute // of a worker
	planGoal  = 0.97
	planMost  = 16 // workers
	planUntil = planSpan + 15*time.Minute
)

func (b *planBench) flags(f *flag.FlagSet) {
	f.Float64Var(&b.slower, "slower", 60, "steps take so many times as long as an H100's for an 8B model: then two days have fewer steps and requests")
	f.Float64Var(&b.peak, "peak", 1.6, "requests a second at noon, without bursts")
	f.StringVar(&b.just, "just", "", "planner, static, clairvoyant or hpa: run that alone, without figures")
	f.Uint64Var(&b.seed, "seed", 1, "of the load")
}

func (b *planBench) open(context.Context) error {
	b.load = b.days()
	b.say = fmt.Sprintf("two days, %d requests, night 1/5 of noon, bursts of 1.3 to 1.8 times, prompts twice as long on day two; whole workers, steps %g times an H100's with 8B", len(b.load), b.slower)
	return nil
}

func (b *planBench) parts() []part { return []part{{"days", b.compare}} }

// rush is a time with more requests.
type rush struct {
	from, to time.Duration
	times    float64
}

// days draws the load.
func (b *planBench) days() (list []sim.Request) {
	rng := rand.New(rand.NewPCG(b.seed, 7))
	var bursts []rush
	for at := time.Duration(0); at < planSpan; {
		at += time.Duration((0.5 + rng.ExpFloat64()) * float64(2*time.Hour))
		bursts = append(bursts, rush{at, at + time.Duration(5+rng.IntN(11))*time.Minute, 1.3 + 0.5*rng.Float64()})
	}
	most := b.peak * 1.8
	var entries []workload.Entry
	for at := time.Duration(0); ; {
		at += time.Duration(rng.ExpFloat64() / most * float64(time.Second))
		if at >= planSpan {
			return sim.Trace(entries, 1, 0)
		}
		rate := b.peak * (0.6 - 0.4*math.Cos(2*math.Pi*at.Hours()/24))
		for _, u := range bursts {
			if at >= u.from && at < u.to {
				rate *= u.times
			}
		}
		if rng.Float64()*most >= rate {
			continue
		}
		prompt := 700.0
		if at > planSpan/2 {
			prompt *= 2
		}
		entries = append(entries, workload.Entry{At: at, In: 1 + int(min(prompt*math.Exp(0.5*rng.NormFloat64()), 8000)), Out: 1 + min(int(200*rng.ExpFloat64()), 1500)})
	}
}

// slowed takes longer.
type slowed struct {
	sim.Steps
	times float64
}

func (s slowed) Step(l steptable.Load) (mean, spread time.Duration) {
	mean, spread = s.Steps.Step(l)
	return time.Duration(s.times * float64(mean)), time.Duration(s.times * float64(spread))
}

// promise is what requests are to see.
func (b *planBench) promise() *sim.Promise {
	ms := func(n float64) time.Duration { return time.Duration(n * b.slower * float64(time.Millisecond)) }
	return &sim.Promise{SLO: record.SLO{TTFT: ms(1000), TPOT: ms(25)}, Share: planGoal}
}

// ran is what came of two days.
type ran struct {
	name  string
	good  float64
	hours float64
	// Requests that failed, and those whose first token came late.
	failed, late int
	*sim.Scaled
}

func (r *ran) String() string {
	return fmt.Sprintf("%-22s %6.2f %% good, %6.1f worker-hours, at most %2d workers, %d starts; %d failed, %d late first tokens", r.name, 100*r.good, r.hours, r.Most, r.Starts, r.failed, r.late)
}

// play runs two days.
func (b *planBench) play(ctx context.Context, name string, workers int, p sim.Planner, every time.Duration) (*ran, error) {
	w := worker.DefaultConfig(fleet.Decode)
	cfg := sim.DefaultConfig()
	cfg.Whole, cfg.Heartbeat = workers, 5*time.Second
	e := worker.EngineConfig(&w, true)
	promise := b.promise()
	e.MaxStepTime, e.QueueTime = time.Duration(b.slower)*e.MaxStepTime, time.Duration(b.slower)*e.QueueTime
	e.Promise.TTFT, e.Promise.TPOT = promise.TTFT, promise.TPOT
	cfg.Worker = sim.Worker{Engine: e, Blocks: 27000 * 16 / 64, BlockTokens: 64, Layers: 32, Steps: slowed{h100{}, b.slower}, Overlaps: true}
	began := time.Now()
	x, err := sim.RunScaled(ctx, cfg, sim.Load{Requests: b.load, Until: planUntil},
		sim.Scaling{Planner: p, Every: every, Start: planStart, Promise: promise})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	r := &ran{name: name, hours: x.Workers.Hours(), Scaled: x}
	good := 0
	for i := range x.Outcomes {
		switch o := &x.Outcomes[i]; {
		case promise.Kept(o):
			good++
		case o.Failed:
			r.failed++
		case o.TTFT() > promise.TTFT:
			r.late++
		}
	}
	r.good = float64(good) / float64(len(x.Outcomes))
	b.Sayf("%v (computed in %.0f s)", r, time.Since(began).Seconds())
	return r, nil
}

// planned runs two days under the planner, as it is by default but for its budget.
func (b *planBench) planned(ctx context.Context) (*ran, error) {
	cfg := planner.DefaultConfig()
	cfg.Budget = planMost
	p := &logged{Planner: planner.New(cfg, true), say: b.Sayf}
	return b.play(ctx, "planner", 2, p, 5*time.Second)
}

// logged says each two hours what a planner thinks, and each decision with what came true.
type logged struct {
	*planner.Planner
	say  func(string, ...any)
	next time.Time
}

func (l *logged) Decide(now time.Time) []planner.Decision {
	list := l.Planner.Decide(now)
	for _, d := range list {
		l.say("%s: %s %d: %s", d.At.Format("02 15:04:05"), d.Kind, d.N, d.Reason)
	}
	if now.After(l.next) {
		l.next = now.Add(2 * time.Hour)
		s := l.Status()
		for _, r := range s.Roles {
			l.say("%s: aim %.2f, %d of %d workers, needs %.2f, used %.2f, %.0f tokens/s, a worker is given %.0f", now.Format("02 15:04:05"), s.Aim, r.Have, r.Wanted, r.Need, r.Now.Utilisation, r.Now.Load, r.PerWorker)
		}
	}
	return list
}

func (b *planBench) compare(ctx context.Context) error {
	b.Sayf("%s; promised: a first token within %v, a token each %v", b.say, b.promise().TTFT, b.promise().TPOT)
	var static, seer, ours, rule *ran
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(runtime.GOMAXPROCS(0))
	for _, x := range []struct {
		name string
		run  func() error
	}{
		{"planner", func() (err error) { ours, err = b.planned(ctx); return err }},
		{"static", func() (err error) { static, err = b.static(ctx); return err }},
		{"clairvoyant", func() (err error) { seer, err = b.seen(ctx); return err }},
		{"hpa", func() (err error) { rule, err = b.play(ctx, "HPA at 70 %", 2, &hpa{}, 15*time.Second); return err }},
	} {
		if b.just == "" || b.just == x.name {
			all.Go(x.run)
		}
	}
	if err := all.Wait(); err != nil || b.just != "" {
		return err
	}
	b.Sayf("best: %v, %v", static, seer)
	figure := func(name, unit string, value float64, peer string, limit float64) figures.Figure {
		return figures.Figure{Name: "plan." + name, Unit: unit, Value: value, Peer: peer, PeerValue: limit, Ratio: value / limit, Runs: 1, Model: b.say,
			Spread: fmt.Sprintf("seed %d; HPA at 70 %%: %.2f %% good, %.1f h", b.seed, 100*rule.good, rule.hours)}
	}
	return b.Add(figure("slo_pct", "% of requests", 100*ours.good, "limit: 97 %, at least", 97),
		figure("gpu_hours_ratio", "of worker-hours", ours.hours/static.hours, fmt.Sprintf("limit, of %s, which has %.1f h", static.name, static.hours), 0.8),
		figure("over_clairvoyant_ratio", "of worker-hours", ours.hours/seer.hours, fmt.Sprintf("limit, of one who knows the next ten minutes, which has %.1f h", seer.hours), 1.15))
}

// static is the smallest fleet that keeps what is promised and stays as it is.
func (b *planBench) static(ctx context.Context) (*ran, error) {
	return b.least(2, planMost/2, func(n int) (*ran, error) {
		return b.play(ctx, fmt.Sprintf("static, %d workers", n), n, fixed{}, time.Minute)
	})
}

// seen is the clairvoyant with the fewest workers that keeps it, by steps of 8 % of what the load takes at full use.
func (b *planBench) seen(ctx context.Context) (*ran, error) {
	return b.least(0, 7, func(i int) (*ran, error) {
		times := 0.8 + 0.08*float64(i)
		s := b.clairvoyant(times)
		return b.play(ctx, fmt.Sprintf("clairvoyant, %.2f", times), s.at(0), s, 10*time.Second)
	})
}

// least looks for the smallest number in a range that keeps what is promised, by bisection.
func (b *planBench) least(from, to int, run func(int) (*ran, error)) (best *ran, err error) {
	for from < to {
		n := (from + to) / 2
		r, err := run(n)
		switch {
		case err != nil:
			return nil, err
		case r.good >= planGoal:
			best, to = r, n
		default:
			from = n + 1
		}
	}
	if best == nil {
		return run(from)
	}
	return best, nil
}

// fixed changes nothing.
type fixed struct{}

func (fixed) Observe(planner.Sample)              {}
func (fixed) Decide(time.Time) []planner.Decision { return nil }

// toward is what turns a fleet of whole workers into one of n.
func toward(s *planner.Sample, n int) (list []planner.Decision) {
	var here []*planner.Worker
	for i := range s.Workers {
		if w := &s.Workers[i]; w.State != planner.Draining {
			here = append(here, w)
		}
	}
	if more := n - len(here); more > 0 {
		return []planner.Decision{{Kind: planner.Start, Role: planner.Whole, N: more}}
	}
	slices.SortStableFunc(here, func(a, b *planner.Worker) int { return a.Running + a.Waiting - b.Running - b.Waiting })
	for _, w := range here[:len(here)-n] {
		list = append(list, planner.Decision{Kind: planner.Stop, Role: planner.Whole, Worker: w.ID})
	}
	return list
}

// hpa is Kubernetes' rule for a utilisation of 70 %: what is used is the part of the workers' time in which
// they have something to do, as GPUs say it.
type hpa struct {
	sample planner.Sample
	asked  [20]int // of the last five minutes
	n      int
}

func (h *hpa) Observe(s planner.Sample) { h.sample = s }

func (h *hpa) Decide(time.Time) []planner.Decision {
	serving, busy, here := 0, 0, 0
	for _, w := range h.sample.Workers {
		if w.State != planner.Draining {
			here++
		}
		if w.State == planner.Serving {
			serving++
			if w.Running+w.Waiting > 0 {
				busy++
			}
		}
	}
	want := here
	if ratio := float64(busy) / float64(max(1, serving)) / 0.7; math.Abs(ratio-1) > 0.1 {
		want = int(math.Ceil(ratio * float64(serving)))
	}
	want = min(max(want, 1), planMost)
	h.asked[h.n%len(h.asked)] = want
	h.n++
	if want < here {
		want = min(here, slices.Max(h.asked[:]))
	}
	return toward(&h.sample, want)
}

// seer knows how many workers each interval takes.
type seer struct {
	need   []float64
	sample planner.Sample
	began  time.Time
}

const interval = 10 * time.Minute

// clairvoyant has so many times the workers that the load takes at full use.
func (b *planBench) clairvoyant(more float64) *seer {
	s := &seer{need: make([]float64, int(planUntil/interval)+2)}
	cost := func(in, out int) float64 { // of a device's time, among 32 others
		prompt, _ := h100{}.Step(steptable.Load{Pieces: []steptable.Piece{{Tokens: 8 * in}}})
		one, _ := h100{}.Step(steptable.Load{Decodes: 32, Context: 32 * (in + out/2)})
		none, _ := h100{}.Step(steptable.Load{})
		return b.slower * (prompt.Seconds()/8 + float64(out)*(one-none).Seconds()/32)
	}
	for i := range b.load {
		q := &b.load[i]
		s.need[int(q.At/interval)] += more * cost(q.Prompt.Tokens(), q.Output) / interval.Seconds()
	}
	return s
}

func (s *seer) at(i int) int { return min(max(1, int(math.Ceil(s.need[i]))), planMost) }

func (s *seer) Observe(x planner.Sample) {
	if s.sample = x; s.began.IsZero() {
		s.began = x.At
	}
}

// Decide has workers ready when an interval begins.
func (s *seer) Decide(now time.Time) []planner.Decision {
	at := now.Sub(s.began)
	return toward(&s.sample, max(s.at(int(at/interval)), s.at(int((at+planStart+15*time.Second)/interval))))
}
