package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
)

type planFlags struct {
	table, trace, input, output string
	workers                     string
	least, most                 int // of them
	rate, cost, budget          float64
	burstiness, share           float64
	maxContext                  int
	shed                        bool
	slo                         string
	perThousand                 time.Duration
	window                      time.Duration
	seed                        uint64
	seeds                       int
	json, html                  string
}

func newPlan() *cobra.Command {
	p := &planFlags{}
	cmd := &cobra.Command{
		Use:   "plan --table FILE --slo TIMES",
		Short: "Compute how much load each split of some workers takes, from a step table",
		Long: `Run a load through fleets that exist only here: the router's choice, the engine's scheduler
and the cache are the running ones, and a step takes the time that a table of xpyd bench step
says. For whole workers, for workers that mix (pick.disaggregate: mixed) and for every split into
prefill and decode it looks for the highest
load of which enough requests are good, and prints the fleets, the best first, beside a rate
that no fleet keeps up (by linear programming). The best two are searched again with other seeds,
to say how sure their order is. Then it prints the commands that start the best one.

The load is a trace's requests at their times, sped up or slowed down, or requests that are
drawn: lengths are distributions as of xpyd bench.

How many workers there are is --workers, or what --budget pays at --cost. To ask how many a load
needs, give a range, such as --workers 1-8, and the load's --rate or a --trace: the plan is then
for the fewest of which some fleet keeps the load up as it comes.

Workers are as xpyd prefill and xpyd decode are with the promises of --slo and without further
settings, on the device of the table, each with a device and the table's KV pool of its own. They
are warm: each has served some requests before the load begins. No
request is longer than the table's max_context: of drawn lengths what does not fit is cut, and a
trace's longer requests are left out.

A load is kept up if the fleet would go on so: enough requests of the --window are good, and first
tokens do not come later and later in it. Give a window of several times an answer's length in
time. Memory and time grow with the workers, as each has an engine and a cache, with the requests
of a window, and with the processors, of which each computes a fleet.`,
		Example: `  xpyd bench step --model /models/llama-3-8b --device cuda --out h100.json
  xpyd plan --table h100.json --workers 4 --slo ttft=2s,tpot=25ms --input normal:2000,500 --output exp:200 --html plan.html
  xpyd plan --table h100.json --workers 8 --slo ttft=2s,itl=25ms --ttft-per-1000 125ms --trace conversation_trace.jsonl --max-context 32000 --json plan.json
  xpyd plan --table h100.json --workers 1-8 --rate 20 --cost 2.5 --slo ttft=2s,tpot=25ms --input 1000 --output 200     how many GPUs are needed
  xpyd plan --table h100.json --budget 20 --cost 2.5 --slo ttft=2s,tpot=25ms --input 1000 --output 200                 how much 20 an hour buy`,
	}
	f := cmd.Flags()
	f.StringVar(&p.table, "table", "", "step table, as xpyd bench step writes it")
	f.StringVar(&p.workers, "workers", "2", "how many workers there are to split; A-B: the fewest that the load needs")
	f.Float64Var(&p.cost, "cost", 0, "what a worker costs an hour, in any currency")
	f.Float64Var(&p.budget, "budget", 0, "with --cost and in place of --workers: what all workers may cost an hour")
	f.StringVar(&p.slo, "slo", "", "limits of a good request: ttft=2s,tpot=25ms,itl=50ms (longest gap)")
	f.DurationVar(&p.perThousand, "ttft-per-1000", 0, "added to the limit of ttft for each 1,000 tokens of the prompt")
	f.Float64Var(&p.share, "share", 0.9, "part of the requests that are to be good")
	f.BoolVar(&p.shed, "shed-late", false, "workers refuse prompts that cannot be in time any more (shed_late)")
	f.StringVar(&p.trace, "trace", "", "Mooncake (JSON lines) or Azure (CSV) trace")
	f.IntVar(&p.maxContext, "max-context", 0, "leave out requests of more tokens than this (--trace), or cut them (drawn ones); 0: than the table says that a worker takes")
	f.StringVar(&p.input, "input", "512", "tokens of a prompt, without --trace")
	f.StringVar(&p.output, "output", "128", "tokens of an answer, without --trace")
	f.Float64Var(&p.rate, "rate", 0, "without --trace: requests a second that are to be kept up; default: as many as can be")
	f.Float64Var(&p.burstiness, "burstiness", 1, "without --trace: 1 is Poisson, less comes in bursts (gamma)")
	f.DurationVar(&p.window, "window", 2*time.Minute, "of load, for each try")
	f.Uint64Var(&p.seed, "seed", 1, "of lengths, times and the noise of steps")
	f.IntVar(&p.seeds, "seeds", 5, "with how many seeds the best two fleets are searched; 1: no others")
	f.StringVar(&p.json, "json", "", "write the result as JSON to this file; - for standard output, instead of the text")
	f.StringVar(&p.html, "html", "", "write the result as one HTML page with plots to this file; the plots need further tries")
	cmd.RunE = p.run
	return cmd
}

func (p *planFlags) run(cmd *cobra.Command, _ []string) error {
	promise, err := p.check(cmd.Flags().Changed)
	if err != nil {
		return usageError{err}
	}
	t, err := openTable(p.table)
	if err != nil {
		return usageError{err}
	}
	stderr := &lines{to: cmd.ErrOrStderr()}
	load, err := p.load(cmd.Context(), t, stderr)
	if err != nil {
		return p.failed(cmd.Context(), usageError{err})
	}
	asJSON, asPage, err := p.create()
	if err != nil {
		return fmt.Errorf("plan: %w", err)
	}
	began := time.Now()
	limits := promise.SLO
	if promise.PerToken > 0 {
		limits.TTFT = 0 // each prompt has its own
	}
	result := &plan{Table: t.About, HeldOut: t.HeldOut, Noise: t.Spread(), Load: p.described(), Promise: p.slo, Limits: report.NewSLO(limits), Share: p.share, Window: p.window.Seconds(), Price: p.cost,
		Command: strings.Join(command(cmd), " ")}
	if err := p.compute(cmd.Context(), result, t, load, promise, stderr); err != nil {
		asJSON.drop()
		asPage.drop()
		return p.failed(cmd.Context(), fmt.Errorf("plan: %w", err))
	}
	result.Took = time.Since(began).Seconds()
	show := result.writeText
	if p.json == "-" {
		show = result.writeJSON
	}
	return errors.Join(show(cmd.OutOrStdout()), named("plan: --html", asPage.keep(result.writePage)), named("plan: --json", asJSON.keep(result.writeJSON)))
}

// failed is an error, or that the user wanted no more.
func (p *planFlags) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errors.New("plan: interrupted")
	}
	return err
}

// named says what failed; nil stays nil.
func named(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// create opens the files of --json and --html, if there are any.
func (p *planFlags) create() (asJSON, asPage *outFile, err error) {
	if asJSON, err = createJSON(p.json); err != nil {
		return nil, nil, fmt.Errorf("--json: %w", err)
	}
	if asPage, err = createOut(p.html); err != nil {
		asJSON.drop()
		return nil, nil, fmt.Errorf("--html: %w", err)
	}
	return asJSON, asPage, nil
}

// curvePoints is into how many parts a curve is divided, up to beyond times the best fleet's goodput.
const (
	curvePoints = 10
	beyond      = 1.25
)

// compute fills in the result.
func (p *planFlags) compute(ctx context.Context, r *plan, t *steptable.Table, load *planLoad, promise sim.Promise, stderr io.Writer) error {
	c := sim.Case{Config: twinOf(t, promise, p.seed, p.shed), Load: load.seeded(p.seed), Span: load.span, Promise: promise, Patience: load.patience(&promise), Probes: []float64{1.1, 1.3, 1.8}, Progress: &sim.Progress{}}
	defer telling(stderr, c.Progress)()
	r.Workers = p.most
	if p.asksHowMany() {
		first := c.Load(1)
		if err := ctx.Err(); err != nil {
			return err
		}
		if len(first) == 0 {
			return usageError{fmt.Errorf("--rate %v: in a --window of %v no request comes: give a longer one", p.rate, p.window)}
		}
		r.Need = &planNeed{From: p.least, To: p.most, Rate: cmp.Or(p.rate, c.Rate(first)), Requests: len(first)}
		n, err := c.Fewest(ctx, p.least, p.most, func(n int, fits []sim.Split) {
			fmt.Fprintf(stderr, "%s: the load is kept up by %s\n", counted(n), splitNames(fits))
		})
		if err != nil {
			return err
		}
		r.Need.Workers, r.Workers = n, cmp.Or(n, p.most)
	}
	found, err := c.Compare(ctx, sim.Splits(r.Workers), func(g *sim.Goodput) {
		fmt.Fprintf(stderr, "%s: %s requests/s, after %d tries\n", g.Fleet, digits(g.Rate), g.Runs)
	})
	if err != nil {
		return err
	}
	if best := found[0].Speed; p.html != "" && best > 0 {
		err := c.Curves(ctx, found, beyond*best, curvePoints, func(g *sim.Goodput) { fmt.Fprintf(stderr, "%s: curve of %d loads\n", g.Fleet, len(g.Curve)) })
		if err != nil {
			return err
		}
	}
	if r.Bound, err = c.Highest(ctx, r.Workers); err != nil {
		return err
	}
	r.Bound = max(r.Bound, found[0].Rate) // which is within the bound of its own requests; they differ a little from those of the highest load
	for _, g := range found {
		r.Fleets = append(r.Fleets, r.planned(g))
	}
	if r.Sure, err = p.repeat(ctx, c, found, load, stderr); err != nil {
		return err
	}
	if best := r.best(); best.Speed > 0 && !r.tooShort() {
		r.Run = runLines(&t.About, best.Split, promise, p.shed)
	}
	return nil
}

// repeat searches the best two fleets with other seeds; nil if that would say nothing.
func (p *planFlags) repeat(ctx context.Context, c sim.Case, found []sim.Goodput, load *planLoad, stderr io.Writer) (*sureness, error) {
	if found = found[:min(2, len(found))]; found[len(found)-1].Speed == 0 {
		found = found[:len(found)-1]
	}
	if p.seeds == 1 || len(found) == 0 || found[0].AtLeast || found[len(found)-1].AtLeast {
		return nil, nil
	}
	cases := make([]sim.Case, p.seeds-1)
	for i := range cases {
		cases[i] = c
		cases[i].Config.Seed = p.seed + uint64(i) + 1
		cases[i].Load = load.seeded(cases[i].Config.Seed)
	}
	again, err := sim.Repeat(ctx, cases, found, func(i int, g *sim.Goodput) {
		fmt.Fprintf(stderr, "%s, seed %d: %s requests/s, after %d tries\n", g.Fleet, cases[i].Config.Seed, digits(g.Rate), g.Runs)
	})
	if err != nil {
		return nil, err
	}
	s := &sureness{Traced: p.trace != ""}
	for i := range found {
		rates := []float64{found[i].Rate}
		for _, g := range again[i] {
			rates = append(rates, g.Rate)
		}
		s.Fleets = append(s.Fleets, newSeeds(found[i].Fleet, rates))
	}
	if len(s.Fleets) == 2 && min(s.Fleets[0].Low, s.Fleets[1].Low) > 0 {
		s.Lead = newLead(s.Fleets[0], s.Fleets[1])
	}
	return s, nil
}

func splitNames(splits []sim.Split) string {
	if len(splits) == 0 {
		return "no fleet"
	}
	list := make([]string, len(splits))
	for i, s := range splits {
		list[i] = s.String()
	}
	return strings.Join(list, ", ")
}
