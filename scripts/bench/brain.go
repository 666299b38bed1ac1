package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/worker"
)

// brain compares, in the twin, the goodput of workers that mix with that of the best fleet of whole workers
// or of workers apart.
type brain struct {
	base
	table, other, azure, mooncake string
	tables                        [2]*steptable.Table
	traces                        map[string][]workload.Entry
	shed                          bool
	first, every                  int           // of the drawn loads
	told                          sync.Mutex    // of what is said and recorded
	slots                         chan struct{} // see slot
}

func (b *brain) flags(f *flag.FlagSet) {
	f.StringVar(&b.table, "table", "", "a step table of an H100")
	f.StringVar(&b.other, "other", "", "a step table of another GPU, for the shaken loads")
	f.StringVar(&b.azure, "azure", "", "the Azure trace of conversations")
	f.StringVar(&b.mooncake, "mooncake", "", "the Mooncake trace of conversations")
	f.IntVar(&b.first, "first", 0, "the first of the drawn loads that is taken")
	f.IntVar(&b.every, "every", 1, "take each so many-th of the drawn loads")
	f.BoolVar(&b.shed, "shed", false, "the fleets that are compared refuse prompts that are late, too")
}

func (b *brain) open(context.Context) (err error) {
	if b.table == "" || b.other == "" || b.azure == "" || b.mooncake == "" {
		return errors.New("-table, -other, -azure and -mooncake are needed")
	}
	for i, path := range []string{b.table, b.other} {
		if b.tables[i], err = steptable.Open(path); err != nil {
			return err
		}
	}
	b.traces = map[string][]workload.Entry{}
	for name, path := range map[string]string{"azure": b.azure, "mooncake": b.mooncake} {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		entries, err := workload.ReadTrace(f)
		f.Close()
		if err != nil {
			return err
		}
		b.traces[name] = workload.Within(entries, longestTraced)
	}
	return nil
}

const (
	longestTraced = 32_000 // tokens of a request
	brainPatience = 30 * time.Second
	brainCloser   = 0.01 // resolution of searches
	drawnWorkers  = 4
	shakenEvery   = 5 // of the drawn loads
)

// contest is a load on some workers, and what came of it.
type contest struct {
	name    string
	of      sim.Case
	workers int

	best, mixed sim.Goodput
	chunk       int
	bound       float64
}

func (c *contest) ratio() float64 { return c.mixed.Rate / c.best.Rate }

// brainPart is contests and the figures that they make.
type brainPart struct {
	name    string
	all     func() []*contest
	figures func([]*contest) []figures.Figure
}

func (b *brain) groups() []brainPart {
	traced := func(name, trace string, window time.Duration, workers ...int) brainPart {
		return brainPart{name, func() (list []*contest) {
			for _, n := range workers {
				p := sim.Promise{Share: 0.9}
				p.TTFT = 2 * time.Second
				if trace == "mooncake" {
					p.PerToken = time.Second / 8000
				}
				if strings.HasSuffix(name, "_gap") {
					p.ITL = 25 * time.Millisecond
				} else {
					p.TPOT = 25 * time.Millisecond
				}
				load := func(speed float64) []sim.Request { return sim.Trace(b.traces[trace], speed, window) }
				list = append(list, b.contest(fmt.Sprintf("%s.%d", name, n), b.tables[0], n, load, p))
			}
			return list
		}, func(list []*contest) (all []figures.Figure) {
			for _, c := range list {
				all = append(all, figures.Figure{Name: "brain.goodput_ratio." + c.name, Unit: "ratio", Value: c.ratio(), Peer: "the best of whole workers and all splits", PeerValue: c.best.Rate, Ratio: c.ratio(), Runs: 1,
					Spread: fmt.Sprintf("%.2f beside %.2f requests/s of %s; bound %.2f", c.mixed.Rate, c.best.Rate, c.best.Fleet, c.bound)})
			}
			return all
		}}
	}
	return []brainPart{
		traced("azure", "azure", 2*time.Minute, 2, 4, 8),
		traced("mooncake", "mooncake", 10*time.Minute, 2, 4, 8),
		traced("mooncake_gap", "mooncake", 10*time.Minute, 4, 8),
		{"drawn", func() (list []*contest) {
			for nth := b.first; nth < drawnLoads; nth += b.every {
				list = append(list, b.drawn(nth, "drawn", b.tables[0]))
			}
			return list
		}, worstAndMedian("brain.worst_ratio", "brain.median_ratio")},
		{"shaken", b.shaken, worstAndMedian("brain.shaken_worst_ratio", "brain.shaken_median_ratio")},
	}
}

// worstAndMedian makes figures of contests' ratios.
func worstAndMedian(worst, median string) func([]*contest) []figures.Figure {
	return func(list []*contest) []figures.Figure {
		slices.SortFunc(list, func(a, b *contest) int { return cmp.Compare(a.ratio(), b.ratio()) })
		var all []float64
		for _, c := range list {
			all = append(all, c.ratio())
		}
		what := fmt.Sprintf("%.3f..%.3f over %d loads", all[0], all[len(all)-1], len(all))
		fig := func(name string, value float64, more string) figures.Figure {
			return figures.Figure{Name: name, Unit: "ratio", Value: value, Peer: "the best of whole workers and all splits", PeerValue: 1, Ratio: value, Runs: len(all), Spread: what + more}
		}
		return []figures.Figure{fig(worst, all[0], ", "+list[0].name), fig(median, figures.Median(all), "")}
	}
}

func (b *brain) parts() (list []part) {
	for _, g := range b.groups() {
		list = append(list, part{g.name, func(ctx context.Context) error { return b.play(ctx, g) }})
	}
	return list
}

// contest is one on workers like a table's, which are told what is promised.
func (b *brain) contest(name string, t *steptable.Table, workers int, load sim.Requests, p sim.Promise) *contest {
	w := worker.DefaultConfig(fleet.Decode)
	w.MaxBatch, w.StepTokens = t.About.MaxBatch, t.About.StepTokens
	w.TTFTPromise, w.TPOTPromise, w.ITLPromise = p.TTFT, p.TPOT, p.ITL
	cfg := sim.On(t, worker.EngineConfig(&w, true))
	cfg.Pick.Policy = pick.KVEvents
	return &contest{name: name, workers: workers, of: sim.Case{Config: cfg, Load: load, Promise: p, Patience: brainPatience, Resolution: brainCloser}}
}

// drawn is a drawn load's.
func (b *brain) drawn(nth int, name string, t *steptable.Table) *contest {
	p := sim.Promise{Share: 0.9, PerToken: time.Second / 8000}
	p.TTFT, p.TPOT = 2*time.Second, 25*time.Millisecond
	d := drawnLoad(nth)
	return b.contest(fmt.Sprintf("%s %v", name, d), t, drawnWorkers, d.requests, p)
}

// shaken are drawn loads in worlds that the policy was not made for.
func (b *brain) shaken() (list []*contest) {
	worlds := []struct {
		name  string
		table int
		shake func(*sim.Config)
	}{
		{"prompts 15 % slower, decodes faster", 0, func(c *sim.Config) { c.Worker.Steps = shakenSteps{c.Worker.Steps, 1.15, 0.85} }},
		{"prompts 15 % faster, decodes slower", 0, func(c *sim.Config) { c.Worker.Steps = shakenSteps{c.Worker.Steps, 0.85, 1.15} }},
		{"half the bandwidth", 0, func(c *sim.Config) { c.KV.Bandwidth /= 2 }},
		{"answers thought twice as long", 0, func(c *sim.Config) { c.Guess = 2 }},
		{"answers thought half as long", 0, func(c *sim.Config) { c.Guess = 0.5 }},
		{"the other table", 1, func(*sim.Config) {}},
	}
	for nth := 0; nth < drawnLoads; nth += shakenEvery {
		for i := range worlds {
			c := b.drawn((nth+i)%drawnLoads, worlds[i].name+",", b.tables[worlds[i].table])
			worlds[i].shake(&c.of.Config)
			list = append(list, c)
		}
	}
	return list
}

// shakenSteps takes longer or shorter for steps, by what is in them.
type shakenSteps struct {
	sim.Steps
	prompts, decodes float64
}

// Step implements sim.Steps.
func (s shakenSteps) Step(l steptable.Load) (mean, spread time.Duration) {
	mean, spread = s.Steps.Step(l)
	by := s.decodes
	if len(l.Pieces) > 0 {
		alone, _ := s.Steps.Step(steptable.Load{Decodes: l.Decodes, Context: l.Context})
		rest := float64(max(0, mean-alone))
		by = (s.decodes*float64(mean-time.Duration(rest)) + s.prompts*rest) / float64(mean)
	}
	return time.Duration(float64(mean) * by), spread
}

// chunks are what steps are bounded by, to find the best for the fleets that are compared.
var chunks = []int{2048, 1024, 512}

// rounds plays all parts side by side.
func (b *brain) rounds(ctx context.Context, parts []part) error {
	b.slots = make(chan struct{}, runtime.GOMAXPROCS(0))
	all, ctx := errgroup.WithContext(ctx)
	for _, p := range parts {
		all.Go(func() error { return p.run(ctx) })
	}
	return all.Wait()
}

// play holds all contests of a part.
func (b *brain) play(ctx context.Context, g brainPart) error {
	list := g.all()
	all, ctx := errgroup.WithContext(ctx)
	for _, c := range list {
		all.Go(func() error {
			if err := b.hold(ctx, c); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			b.told.Lock()
			defer b.told.Unlock()
			b.Sayf("%s: mixed %.2f/s, %s of chunk %d %.2f/s: %.3f; bound %.2f", c.name, c.mixed.Rate, c.best.Fleet, c.chunk, c.best.Rate, c.ratio(), c.bound)
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	b.told.Lock()
	defer b.told.Unlock()
	return b.Add(g.figures(list)...)
}

// slot has as many searches run as there are processors.
func (b *brain) slot(ctx context.Context, search func() error) error {
	select {
	case b.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-b.slots }()
	return search()
}

// hold finds the best fleet that does not mix, and what mixing does.
func (b *brain) hold(ctx context.Context, c *contest) error {
	if err := b.slot(ctx, func() (err error) {
		c.best, err = b.plain(c, 0).Search(ctx, sim.Split{Whole: c.workers})
		return err
	}); err != nil {
		return err
	}
	all, inner := errgroup.WithContext(ctx)
	all.Go(func() error {
		return b.slot(inner, func() (err error) {
			k := c.of
			k.Config.Worker.Engine.ShedLate = true
			if c.bound, err = k.Highest(inner, c.workers); err != nil {
				return err
			}
			c.mixed, err = k.SearchNear(inner, sim.Split{Mixed: c.workers}, cmp.Or(c.best.Speed, 1))
			return err
		})
	})
	var splits []sim.Split
	for _, s := range sim.Splits(c.workers) {
		if s.Prefill > 0 {
			splits = append(splits, s)
		}
	}
	found := make([]sim.Goodput, max(len(splits), len(chunks)))
	for i, s := range splits {
		all.Go(func() error {
			return b.slot(inner, func() (err error) { found[i], err = better(inner, b.plain(c, 0), s, &c.best); return err })
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	for _, g := range found {
		if g.Rate > c.best.Rate {
			c.best = g
		}
	}
	if c.best.Rate == 0 {
		return errors.New("no fleet does")
	}
	clear(found)
	all, inner = errgroup.WithContext(ctx)
	for i, chunk := range chunks {
		all.Go(func() error {
			return b.slot(inner, func() (err error) {
				found[i], err = better(inner, b.plain(c, chunk), c.best.Split, &c.best)
				return err
			})
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	for i, g := range found {
		if g.Rate > c.best.Rate {
			c.best, c.chunk = g, chunks[i]
		}
	}
	return nil
}

// plain is the case of fleets that do not mix, of steps of at most so many tokens; 0: as workers are.
func (b *brain) plain(c *contest, chunk int) *sim.Case {
	k := c.of
	if chunk > 0 {
		k.Config.Worker.Engine.StepTokens, k.Config.Worker.Engine.PrefillTokens = chunk, chunk
	}
	k.Config.Worker.Engine.ShedLate = b.shed
	return &k
}

// better searches a fleet's goodput if it is above another's; else it returns nothing.
func better(ctx context.Context, k *sim.Case, s sim.Split, than *sim.Goodput) (sim.Goodput, error) {
	if than.Speed == 0 {
		return k.Search(ctx, s)
	}
	above := than.Speed * (1 + brainCloser)
	if ok, err := k.Keeps(ctx, s, above); err != nil || !ok {
		return sim.Goodput{}, err
	}
	return k.SearchNear(ctx, s, above)
}
