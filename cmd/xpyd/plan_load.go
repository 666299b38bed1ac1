package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
)

// planLoad is the load of the flags.
type planLoad struct {
	seeded func(seed uint64) sim.Requests
	span   func([]sim.Request) time.Duration
	// Of the longest requests, about.
	prompt, answer int
}

// patience is how long the last requests of a window may take: a first token as long as its limit, or a minute, and an answer as
// long as its gaps may, but neither longer than a router waits.
func (l *planLoad) patience(p *sim.Promise) time.Duration {
	times := func(n int, d time.Duration) time.Duration { // without overflow
		return min(time.Duration(float64(d)/1e3*float64(n)), lastWait/1e3) * 1e3
	}
	first, answer := time.Minute, lastWait
	if p.TTFT > 0 {
		first = min(p.TTFT, lastWait) + times(l.prompt, p.PerToken)
	}
	if gap := cmp.Or(p.TPOT, p.ITL); gap > 0 {
		answer = times(l.answer, gap)
	}
	patience := min(first, lastWait) + answer + time.Second
	if p.E2E > 0 {
		patience = min(patience, p.E2E)
	}
	return patience
}

// load makes the load of the flags, drawn with any seed. It says how many requests do not fit as they are.
// Once the context is over it makes no more requests.
func (p *planFlags) load(ctx context.Context, t *steptable.Table, stderr io.Writer) (*planLoad, error) {
	most, why := room(t, p.maxContext)
	if p.trace != "" {
		return p.traced(ctx, most, why, stderr)
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
	l := &planLoad{span: func([]sim.Request) time.Duration { return p.window }}
	long, rng := 0, rand.New(rand.NewPCG(p.seed, 1))
	for range draws {
		n, m := in.Tokens(rng, 1), out.Tokens(rng, 1)
		if n+m > most {
			long++
		}
		l.prompt, l.answer = min(max(l.prompt, n), most), min(max(l.answer, m), most)
	}
	switch {
	case long == draws:
		return nil, fmt.Errorf("--input %s, --output %s: no request has at most %d tokens, %s; workers refuse longer ones", p.input, p.output, most, why)
	case long > 0:
		fmt.Fprintf(stderr, "--input, --output: %.2g %% of the requests are cut to %d tokens, %s\n", 100*float64(long)/draws, most, why)
	}
	l.seeded = func(seed uint64) sim.Requests {
		return func(speed float64) []sim.Request {
			cfg := arrivals
			cfg.Rate *= speed
			times, rng := arrival.New(cfg, seed), rand.New(rand.NewPCG(seed, 1))
			entries := make([]workload.Entry, 0, int(1.05*min(cfg.Rate*p.window.Seconds(), mostRequests)))
			for at := times.Next(); at < p.window; at = times.Next() {
				if len(entries)%4096 == 0 && ctx.Err() != nil {
					return nil
				}
				e := workload.Entry{At: at, In: min(in.Tokens(rng, 1), most-1), Out: out.Tokens(rng, 1)}
				e.Out = min(e.Out, most-e.In)
				entries = append(entries, e)
			}
			return sim.Trace(entries, 1, p.window)
		}
	}
	return l, nil
}

// traced is the load of --trace. With another seed it begins elsewhere in the trace.
func (p *planFlags) traced(ctx context.Context, most int, why string, stderr io.Writer) (*planLoad, error) {
	f, err := os.Open(p.trace)
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	defer f.Close()
	entries, err := workload.ReadTrace(untilOver{ctx, f})
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
	l := &planLoad{span: func(list []sim.Request) time.Duration {
		if len(list) < len(entries) { // the window has cut them
			return p.window
		}
		return list[len(list)-1].At
	}}
	for _, e := range entries {
		l.prompt, l.answer = max(l.prompt, e.In), max(l.answer, e.Out)
	}
	l.seeded = func(seed uint64) sim.Requests {
		part := int((seed - p.seed) % uint64(p.seeds))
		list := workload.From(entries, part*len(entries)/p.seeds)
		return func(speed float64) []sim.Request { return sim.Trace(list, speed, p.window) }
	}
	return l, nil
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
