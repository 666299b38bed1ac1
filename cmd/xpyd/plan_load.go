package main

import (
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
)

// load makes the load of the flags, drawn with any seed. It says how many requests do not fit as they are.
func (p *planFlags) load(t *steptable.Table, stderr io.Writer) (func(seed uint64) sim.Requests, error) {
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
	arrivals := arrival.Config{Rate: cmp.Or(p.rate, 1), Burstiness: p.burstiness}
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
	return func(seed uint64) sim.Requests {
		return func(speed float64) []sim.Request {
			cfg := arrivals
			cfg.Rate *= speed
			times, rng := arrival.New(cfg, seed), rand.New(rand.NewPCG(seed, 1))
			var entries []workload.Entry
			for at := times.Next(); at < p.window; at = times.Next() {
				e := workload.Entry{At: at, In: min(in.Tokens(rng, 1), most-1), Out: out.Tokens(rng, 1)}
				e.Out = min(e.Out, most-e.In)
				entries = append(entries, e)
			}
			return sim.Trace(entries, 1, p.window)
		}
	}, nil
}

// traced is the load of --trace. With another seed it begins elsewhere in the trace.
func (p *planFlags) traced(most int, why string, stderr io.Writer) (func(seed uint64) sim.Requests, error) {
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
	return func(seed uint64) sim.Requests {
		part := int((seed - p.seed) % uint64(p.seeds))
		list := workload.From(entries, part*len(entries)/p.seeds)
		return func(speed float64) []sim.Request { return sim.Trace(list, speed, p.window) }
	}, nil
}

// described says what the load is.
func (p *planFlags) described() string {
	if p.trace != "" {
		return fmt.Sprintf("the requests of %s at its times", filepath.Base(p.trace))
	}
	how := "Poisson"
	if p.burstiness != 1 {
		how = fmt.Sprintf("gamma arrivals of burstiness %v", p.burstiness)
	}
	return fmt.Sprintf("prompts of %s tokens, answers of %s, %s", p.input, p.output, how)
}
