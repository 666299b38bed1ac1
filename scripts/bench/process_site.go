package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/scripts/bench/harness"
	"github.com/xpyd/xpyd/scripts/bench/timed"
)

// processFleet is the fleet that is measured.
var processFleet = sim.Split{Prefill: 2, Decode: 2}

// warming are served before each load, by the twin too: engines then know how fast steps are.
var warming = repeated(warm, 1000, 20)

// writeTimedModel writes a model whose device computes nothing.
func writeTimedModel(dir string, positions int) (err error) {
	files := map[string][]byte{}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if files[name], err = os.ReadFile(filepath.Join("internal/model/stories260k", name)); err != nil {
			return err
		}
	}
	return modeltest.WriteHF(dir, timed.Shape(512, positions), modeltest.HFOptions{Seed: 1, DType: kernels.F32, Files: files})
}

// Lengths of prompts and answers, in tokens, of the loads that are not of a trace.
const (
	shortIn, shortOut = "300-900", "exp:60"
	ownIn, sharedOut  = "800-1600", "exp:60" // behind a prefix of so many blocks, one of so many
	prefixBlocks      = 4
	prefixes          = 12
)

// load makes one. Those of no trace come at random, once a second.
func (b *processBench) load(name string) (*processLoad, error) {
	l := &processLoad{name: name, slow: 4, window: b.window}
	switch at := slices.Index([]string{"azure", "mooncake"}, name); {
	case at >= 0:
		files := strings.Split(b.traces, ",")
		if len(files) != 2 {
			return nil, fmt.Errorf("-traces %q: want two files", b.traces)
		}
		if name == "mooncake" { // few and long
			l.slow = 2
		}
		return l, l.read(files[at], b.steps.About.MaxContext/2)
	case name == "short":
		l.random(shortIn, shortOut, 0)
	default:
		l.random(ownIn, sharedOut, prefixBlocks)
	}
	return l, nil
}

// read takes a trace's requests of at most so many tokens, at their times.
func (l *processLoad) read(path string, most int) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	all, err := workload.ReadTrace(f)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	l.entries = slices.DeleteFunc(all, func(e workload.Entry) bool { return e.In+e.Out > most })
	return nil
}

// random makes requests that come once a second, at random. blocks are those that a prompt shares with others.
func (l *processLoad) random(in, out string, blocks int) {
	const most, longest = 1 << 14, 1000
	ins, _ := workload.ParseLengths(in, 1) // these are right
	outs, _ := workload.ParseLengths(out, 1)
	times, rng := arrival.New(arrival.Config{Rate: 1, Burstiness: 1}, 1), rand.New(rand.NewPCG(1, 1))
	own := uint64(prefixes * blocks) // the next block that no other prompt has
	for range most {
		e := workload.Entry{At: times.Next(), In: ins.Tokens(rng, 1), Out: min(outs.Tokens(rng, 2), longest)}
		if blocks > 0 {
			of := rng.Uint64N(prefixes) * uint64(blocks)
			for k := range uint64(blocks) {
				e.Blocks = append(e.Blocks, of+k)
			}
			e.In += blocks * workload.BlockTokens
			for len(e.Blocks)*workload.BlockTokens < e.In {
				e.Blocks = append(e.Blocks, own)
				own++
			}
		}
		l.entries = append(l.entries, e)
	}
}

// processSite is a router and its workers, each a process.
type processSite struct {
	fleetAt
	b     *processBench
	url   string
	slow  float64
	procs []*harness.Process
}

// start starts a fleet whose steps take so many times as long. stop also ends one that did not start.
func (b *processBench) start(ctx context.Context, slow float64) (*processSite, error) {
	f := &processSite{b: b, slow: slow}
	data, config := filepath.Join(b.Dir, "data"), filepath.Join(b.Dir, "router.yaml")
	yaml := "fleet: {listen: \"127.0.0.1:0\"}\nlimits: {max_in_flight: 20000}\n"
	if err := errors.Join(os.RemoveAll(data), os.WriteFile(config, []byte(yaml), 0o600)); err != nil {
		return f, err
	}
	var err error
	f.url, err = f.saying(ctx, "listening ", harness.Spec{Name: "router", Env: plainEnv(),
		Argv: []string{b.XPYD, "router", "--config", config, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", data}})
	if err != nil {
		return f, err
	}
	if err := harness.Until(ctx, patience, func() error { return f.read(data) }, f.procs...); err != nil {
		return f, err
	}
	var ids []string
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		for i := range map[fleet.Role]int{fleet.Prefill: processFleet.Prefill, fleet.Decode: processFleet.Decode}[role] {
			b.began++
			w := timedWorker{id: fmt.Sprintf("%s-%d", role, i), role: string(role), join: filepath.Join(data, "join-url"), model: b.model, table: b.table, slow: slow, seed: b.began}
			if _, err := f.saying(ctx, "up ", harness.Spec{Name: w.id, Env: plainEnv(), Argv: w.argv(b.self)}); err != nil {
				return f, err
			}
			ids = append(ids, w.id)
		}
	}
	for _, id := range ids {
		if err := harness.Until(ctx, patience, func() error { return f.serves(ctx, id) }, f.procs...); err != nil {
			return f, err
		}
	}
	return f, nil
}

func (f *processSite) saying(ctx context.Context, prefix string, s harness.Spec) (rest string, err error) {
	p, rest, _, err := f.b.Saying(ctx, prefix, s)
	if err == nil {
		f.procs = append(f.procs, p)
	}
	return rest, err
}

// stop ends the processes, the router last, and logs what workers say of their steps.
func (f *processSite) stop() (err error) {
	for _, p := range slices.Backward(f.procs) {
		err = errors.Join(err, p.Stop())
	}
	for line := range strings.Lines(harness.Logs(f.procs...)) {
		if strings.Contains(line, " steps, heard of ") {
			f.b.Sayf("%s", strings.TrimSpace(line))
		}
	}
	return err
}

// cpu is what the processes have computed.
func (f *processSite) cpu() (sum time.Duration) {
	for _, p := range f.procs {
		sum += p.CPU()
	}
	return sum
}

// send sends a load, judged by a promise if there is one.
func (f *processSite) send(ctx context.Context, l twinLoad, promise *sim.Promise) (*report.Phase, error) {
	b := f.b
	argv := sending(b.XPYD, f.url, b.sent)
	b.sent++
	if promise != nil {
		argv = append(argv, "--slo", fmt.Sprintf("ttft=%v,tpot=%v", promise.TTFT, promise.TPOT))
	}
	if l.closed > 0 {
		e := l.entries[0]
		argv = append(argv, "--concurrency", strconv.Itoa(l.closed), "--requests", strconv.Itoa(len(l.entries)), "--input", strconv.Itoa(e.In), "--output", strconv.Itoa(e.Out))
	} else {
		file := filepath.Join(b.Dir, "load.jsonl")
		if err := writeTrace(file, l.entries); err != nil {
			return nil, err
		}
		argv = append(argv, "--trace", file)
	}
	return benched(ctx, b.Bench, b.window+2*patience, argv...)
}
