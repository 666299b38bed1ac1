package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
)

type planFlags struct {
	table, trace, input, output string
	workers                     int
	burstiness, share           float64
	maxContext                  int
	slo                         string
	perThousand                 time.Duration
	window                      time.Duration
	seed                        uint64
	json                        string
}

func newPlan() *cobra.Command {
	p := &planFlags{}
	cmd := &cobra.Command{
		Use:   "plan --table FILE --slo TIMES",
		Short: "Compute how much load each split of some workers takes, from a step table",
		Long: `Run a load through fleets that exist only here: the router's choice, the engine's scheduler
and the cache are the running ones, and a step takes the time that a table of xpyd bench step
says. For whole workers and for every split into prefill and decode it looks for the highest
load of which enough requests are good, and prints the fleets, the best first.

The load is a trace's requests at their times, sped up or slowed down, or requests that are
drawn: lengths are distributions as of xpyd bench.

Workers are as xpyd prefill and xpyd decode are without further settings, on the device of the
table, each with the table's KV pool. No request is longer than the table's max_context: of drawn
lengths what does not fit is cut, and a trace's longer requests are left out.`,
		Example: `  xpyd bench step --model /models/llama-3-8b --device cuda --out h100.json
  xpyd plan --table h100.json --workers 4 --slo ttft=2s,tpot=25ms --input normal:2000,500 --output exp:200
  xpyd plan --table h100.json --workers 8 --slo ttft=2s,itl=25ms --ttft-per-1000 125ms --trace conversation_trace.jsonl --max-context 32000 --json plan.json`,
	}
	f := cmd.Flags()
	f.StringVar(&p.table, "table", "", "step table, as xpyd bench step writes it")
	f.IntVar(&p.workers, "workers", 2, "how many workers there are to split")
	f.StringVar(&p.slo, "slo", "", "limits of a good request: ttft=2s,tpot=25ms,itl=50ms (longest gap)")
	f.DurationVar(&p.perThousand, "ttft-per-1000", 0, "added to the limit of ttft for each 1,000 tokens of the prompt")
	f.Float64Var(&p.share, "share", 0.9, "part of the requests that are to be good")
	f.StringVar(&p.trace, "trace", "", "Mooncake (JSON lines) or Azure (CSV) trace")
	f.IntVar(&p.maxContext, "max-context", 0, "of --trace: leave out requests of more tokens than this; 0: than the table says that a worker takes")
	f.StringVar(&p.input, "input", "512", "tokens of a prompt, without --trace")
	f.StringVar(&p.output, "output", "128", "tokens of an answer, without --trace")
	f.Float64Var(&p.burstiness, "burstiness", 1, "without --trace: 1 is Poisson, less comes in bursts (gamma)")
	f.DurationVar(&p.window, "window", 2*time.Minute, "of load, for each try")
	f.Uint64Var(&p.seed, "seed", 1, "of lengths, times and the noise of steps")
	f.StringVar(&p.json, "json", "", "write the result as JSON to this file; - for standard output, instead of the text")
	cmd.RunE = p.run
	return cmd
}

// plan is the result, as JSON.
type plan struct {
	Table  steptable.About `json:"table"`
	Fleets []sim.Goodput   `json:"fleets"`
	// Bound is requests a second that no fleet keeps up: see sim.Bound.
	Bound float64 `json:"bound"`
}

func (p *planFlags) run(cmd *cobra.Command, _ []string) error {
	promise, err := p.promise()
	if err != nil {
		return usageError{err}
	}
	t, err := openTable(p.table)
	if err != nil {
		return usageError{err}
	}
	load, err := p.load(t, cmd.ErrOrStderr())
	if err != nil {
		return usageError{err}
	}
	out, err := createJSON(p.json)
	if err != nil {
		return fmt.Errorf("plan: --json: %w", err)
	}
	cfg := twinOf(t, promise, p.seed)
	began := time.Now()
	fleets, err := sim.Compare(cmd.Context(), cfg, sim.Splits(p.workers), load, promise, p.patience(promise), func(g sim.Goodput) {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: %.3g requests/s, after %d tries\n", g.Fleet, g.Rate, g.Runs)
	})
	if err != nil {
		out.drop()
	}
	if errors.Is(err, context.Canceled) {
		return errors.New("plan: interrupted")
	}
	if err != nil {
		return fmt.Errorf("plan: %w", err)
	}
	result := plan{t.About, fleets, sim.Bound(&cfg.Worker, p.workers, load(1), promise)}
	if p.json == "-" {
		return encodeJSON(cmd.OutOrStdout(), &result)
	}
	if err := out.keep(func(w io.Writer) error { return encodeJSON(w, &result) }); err != nil {
		return fmt.Errorf("plan: --json: %w", err)
	}
	return showPlan(cmd.OutOrStdout(), p, &result, time.Since(began))
}

// promise checks the flags.
func (p *planFlags) promise() (sim.Promise, error) {
	out := sim.Promise{Share: p.share, PerToken: p.perThousand / 1000}
	switch {
	case p.workers < 1 || p.workers > mostWorkers:
		return out, fmt.Errorf("--workers %d: want 1 to %d", p.workers, mostWorkers)
	case !(p.share > 0 && p.share <= 1):
		return out, fmt.Errorf("--share %v: want more than 0 and at most 1", p.share)
	case p.window < time.Second:
		return out, fmt.Errorf("--window %v: want at least 1s", p.window)
	case p.perThousand < 0:
		return out, fmt.Errorf("--ttft-per-1000 %v: want 0 or more", p.perThousand)
	case p.maxContext < 0:
		return out, fmt.Errorf("--max-context %d: want 0 or more", p.maxContext)
	}
	var err error
	if out.SLO, err = parseSLO(p.slo); err != nil {
		return out, err
	}
	if !out.Any() {
		return out, errors.New("--slo is needed, such as ttft=2s,tpot=25ms")
	}
	if out.TTFT == 0 && p.perThousand > 0 {
		return out, errors.New("--ttft-per-1000 adds to the ttft of --slo, which has none")
	}
	return out, nil
}

// patience is how long the last requests of a window may take.
func (p *planFlags) patience(promise sim.Promise) time.Duration {
	return promise.TTFT + max(p.window, time.Minute)
}

// load makes the load of the flags. It says how many requests do not fit as they are.
func (p *planFlags) load(t *steptable.Table, stderr io.Writer) (sim.Requests, error) {
	most, why := room(t, p.maxContext)
	if p.trace != "" {
		return p.traced(most, why, stderr)
	}
	in, err := workload.ParseLengths(p.input, 1)
	if err != nil {
		return nil, fmt.Errorf("--input: %w", err)
	}
	out, err := workload.ParseLengths(p.output, 1)
	if err != nil {
		return nil, fmt.Errorf("--output: %w", err)
	}
	arrivals := arrival.Config{Rate: 1, Burstiness: p.burstiness}
	if err := arrivals.Validate(); err != nil {
		return nil, fmt.Errorf("--burstiness: %w", err)
	}
	const draws = 10000
	long, rng := 0, rand.New(rand.NewPCG(p.seed, 1))
	for range draws {
		if in.Tokens(rng, 1)+out.Tokens(rng, 1) > most {
			long++
		}
	}
	switch {
	case long == draws:
		return nil, fmt.Errorf("--input %s, --output %s: no request has at most %d tokens, %s; workers refuse longer ones", p.input, p.output, most, why)
	case long > 0:
		fmt.Fprintf(stderr, "--input, --output: %.2g %% of the requests are cut to %d tokens, %s\n", 100*float64(long)/draws, most, why)
	}
	return func(speed float64) []sim.Request {
		cfg := arrivals
		cfg.Rate = speed
		times, rng := arrival.New(cfg, p.seed), rand.New(rand.NewPCG(p.seed, 1))
		var entries []workload.Entry
		for at := times.Next(); at < p.window; at = times.Next() {
			e := workload.Entry{At: at, In: min(in.Tokens(rng, 1), most-1), Out: out.Tokens(rng, 1)}
			e.Out = min(e.Out, most-e.In)
			entries = append(entries, e)
		}
		return sim.Trace(entries, 1, p.window)
	}, nil
}

// traced is the load of --trace.
func (p *planFlags) traced(most int, why string, stderr io.Writer) (sim.Requests, error) {
	f, err := os.Open(p.trace)
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	defer f.Close()
	entries, err := workload.ReadTrace(f)
	if err != nil {
		return nil, fmt.Errorf("--trace %s: %w", p.trace, err)
	}
	all := len(entries)
	if entries = workload.Within(entries, most); len(entries) == 0 {
		return nil, fmt.Errorf("--trace %s: no request has at most %d tokens, %s", p.trace, most, why)
	}
	if out := all - len(entries); out > 0 {
		fmt.Fprintf(stderr, "--trace: %.2g %% of the requests are left out, as they have more than %d tokens, %s\n", 100*float64(out)/float64(all), most, why)
	}
	return func(speed float64) []sim.Request { return sim.Trace(entries, speed, p.window) }, nil
}

// showPlan prints what people want to know.
func showPlan(w io.Writer, p *planFlags, r *plan, took time.Duration) error {
	fmt.Fprintf(w, "%s on %s, %d workers; %g %% of requests within %s; computed in %v\n\n", r.Table.Model, r.Table.Device, p.workers, 100*p.share, p.slo, took.Round(time.Second/10))
	tab := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(tab, "fleet\trequests/s\tof the best\tgood\tTTFT p50, p99, ms\tmean gap p50, p99, ms\tlongest gap p50, p99, ms")
	for _, g := range r.Fleets {
		if g.Speed == 0 {
			fmt.Fprintf(tab, "%s\t-\n", g.Fleet)
			continue
		}
		ms := func(s sim.Spread) string { return fmt.Sprintf("%.3g, %.3g", 1e3*s.P50, 1e3*s.P99) }
		rate := fmt.Sprintf("%.3g", g.Rate)
		if g.AtLeast {
			rate = "at least " + rate
		}
		fmt.Fprintf(tab, "%s\t%s\t%.2f\t%.1f %%\t%s\t%s\t%s\n", g.Fleet, rate, g.Rate/r.Fleets[0].Rate, 100*g.Good, ms(g.TTFT), ms(g.Gap), ms(g.Worst))
	}
	if err := tab.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nNo fleet of these workers keeps up %.3g requests/s, whatever it does: so much the devices compute,\n"+
		"by the best mix of steps, where nothing is computed twice. Times to first tokens are not in that.\n", r.Bound)
	best := r.Fleets[0]
	switch {
	case slices.ContainsFunc(r.Fleets, func(g sim.Goodput) bool { return g.AtLeast }):
		fmt.Fprintln(w, "\nThe load is too short to find every limit: give a longer one.")
	case best.Speed == 0:
		fmt.Fprintln(w, "\nNo fleet keeps these limits at any load that was tried.")
	case best.Split.Whole > 0:
		fmt.Fprintf(w, "\nWhole workers take the most.\n")
	default:
		fmt.Fprintf(w, "\nxpyd up --prefill %d --decode %d takes the most.\n", best.Split.Prefill, best.Split.Decode)
	}
	return nil
}
