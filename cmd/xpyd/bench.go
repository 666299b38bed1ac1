package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/loadgen"
	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

// newBench is `xpyd bench`, which loads a server. Other measurements are subcommands, a file each.
func newBench() *cobra.Command {
	b := &benchFlags{}
	var s serveFlags
	cmd := &cobra.Command{
		Use:   "bench --url URL",
		Short: "Put load on an OpenAI-compatible server and report its latency and throughput",
		Long: `Send requests to any OpenAI-compatible server and report TTFT (to the first token),
ITL (between chunks), TPOT (per output token after the first), E2E, throughput, goodput
and errors, as text, JSON and a page of plots.

A closed loop (--concurrency) keeps requests in flight. An open loop (--rate, or --trace)
sends on schedule whatever the server does, and also reports latencies from the scheduled
time. Lists (--rate 1,2,4) run one phase each.

Lengths are distributions of tokens: 512, 100-200 (uniform), normal:512,64,
lognormal:512,0.5 or exp:512. Prompts are made of words that are one token in most
vocabularies; --calibrate measures how many tokens they are for the server.`,
		Example: `  xpyd bench --url http://127.0.0.1:8000 --endpoint completions --input 40     the built-in model: no chat, 512 tokens, of which 40 words are about 144
  xpyd bench --url http://127.0.0.1:8000 --concurrency 32 --requests 1000
  xpyd bench --url http://127.0.0.1:8000 --rate 1,2,4,8 --duration 60s --slo ttft=500ms,tpot=50ms --html report.html
  xpyd bench --url http://127.0.0.1:8000 --rate 20 --burstiness 0.5 --ramp 10s --duration 2m --input normal:2000,500 --output exp:200
  xpyd bench --url http://127.0.0.1:8000 --trace conversation_trace.jsonl --speed 2 --max-context 32768 --json report.json
  xpyd bench --url https://api.example.com --endpoint completions --model m --prompts prompts.jsonl
  xpyd bench multiturn --url http://127.0.0.1:8000 --clients 64 --turns 10`,
	}
	b.register(cmd, "chat")
	s.register(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		phases, err := s.phases(b)
		if err != nil {
			return usageError{err}
		}
		return b.run(cmd, phases, func(text *workload.Text) (loadgen.Source, error) { return s.source(b, text) })
	}
	cmd.AddCommand(newBenchCompare(), newBenchKV(), newBenchKVIO(), newBenchMultiturn(), newBenchStep())
	return cmd
}

// serveFlags are the flags of `bench` itself.
type serveFlags struct {
	concurrency, rate string
	burstiness        string
	inFlight          int
	trace, prompts    string
	speed             float64
	maxContext        int
	blockTokens       int
	promptIDs         string
}

func (s *serveFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.concurrency, "concurrency", "", "closed loop: requests in flight; a list runs a phase each (default 16)")
	f.StringVar(&s.rate, "rate", "", "open loop: requests a second; a list runs a phase each")
	f.StringVar(&s.burstiness, "burstiness", "1", "of --rate: 1 is Poisson, less comes in bursts (gamma), fixed comes evenly")
	f.IntVar(&s.inFlight, "max-in-flight", 16384, "open loop: the most requests at once; more are sent late, which the report shows")
	f.StringVar(&s.trace, "trace", "", "send a trace: Mooncake JSON lines (with its shared prefixes) or Azure CSV; at its\ntimes, unless --rate or --concurrency is given")
	f.Float64Var(&s.speed, "speed", 1, "of --trace: this many times as fast")
	f.IntVar(&s.maxContext, "max-context", 0, "of --trace: leave out requests of more tokens than this")
	f.IntVar(&s.blockTokens, "block-tokens", workload.BlockTokens, blockTokensHelp)
	f.StringVar(&s.prompts, "prompts", "", "JSON lines with prompt, messages or turns, and maybe max_tokens; repeated as needed")
	f.StringVar(&s.promptIDs, "prompt-ids", "", promptIDsHelp)
}

// phases returns the phases that the flags ask for, one for each level.
func (s *serveFlags) phases(b *benchFlags) ([]loadgen.Phase, error) {
	if s.concurrency != "" && s.rate != "" {
		return nil, errors.New("--concurrency is a closed loop and --rate an open one; give one")
	}
	if s.trace != "" && s.prompts != "" {
		return nil, errors.New("--trace and --prompts: give one")
	}
	if !(s.speed > 0) || s.speed > 1e6 {
		return nil, fmt.Errorf("--speed %v: want more than 0", s.speed)
	}
	if err := s.checkTrace(); err != nil {
		return nil, err
	}
	if s.trace != "" && s.rate == "" && s.concurrency == "" {
		return []loadgen.Phase{{Name: "trace", Open: true, Clients: s.inFlight}}, nil
	}
	if b.requests == 0 && b.duration == 0 {
		b.requests = 200
	}
	if s.rate != "" {
		shape := math.Inf(1)
		if s.burstiness != "fixed" {
			var err error
			if shape, err = strconv.ParseFloat(s.burstiness, 64); err != nil {
				return nil, fmt.Errorf("--burstiness %q: want a number, or fixed", s.burstiness)
			}
		}
		rates, err := listOf("rate", s.rate, positive)
		if err != nil {
			return nil, err
		}
		var phases []loadgen.Phase
		for _, r := range rates {
			phases = append(phases, loadgen.Phase{Name: fmt.Sprintf("rate %g", r), Open: true, Clients: s.inFlight,
				Arrival: &arrival.Config{Rate: r, Burstiness: shape, Ramp: b.ramp}})
		}
		return phases, nil
	}
	levels, err := listOf("concurrency", cmp.Or(s.concurrency, "16"), func(text string) (int, error) {
		n, err := positive(text)
		if err == nil && (n != math.Trunc(n) || n > 1e6) {
			err = errors.New("want whole numbers")
		}
		return int(n), err
	})
	if err != nil {
		return nil, err
	}
	var phases []loadgen.Phase
	for _, c := range levels {
		phases = append(phases, loadgen.Phase{Name: fmt.Sprintf("concurrency %d", c), Clients: c})
	}
	return phases, nil
}

func listOf[T any](flag, text string, parse func(string) (T, error)) ([]T, error) {
	var out []T
	for one := range strings.SplitSeq(text, ",") {
		v, err := parse(strings.TrimSpace(one))
		if err != nil {
			return nil, usageError{fmt.Errorf("--%s %q: %w", flag, text, err)}
		}
		out = append(out, v)
	}
	return out, nil
}

func positive(text string) (float64, error) {
	x, err := strconv.ParseFloat(text, 64)
	if err != nil || !(x > 0) || math.IsInf(x, 1) {
		return 0, errors.New("want numbers above 0")
	}
	return x, nil
}

// source returns the requests of all phases.
func (s *serveFlags) source(b *benchFlags, text *workload.Text) (loadgen.Source, error) {
	shape, err := b.shape()
	if err != nil {
		return nil, usageError{err}
	}
	if s.promptIDs != "" {
		if s.prompts != "" {
			return nil, usageError{errors.New("--prompt-ids goes without --prompts")}
		}
		if err := promptIDs(s.promptIDs, b, text); err != nil {
			return nil, err
		}
	}
	switch {
	case s.trace != "":
		b.load.Kind = "trace"
		return s.readTrace(b, text)
	case s.prompts != "":
		b.load.Kind, b.load.File, b.load.Input = "prompts", s.prompts, ""
		return readFile(s.prompts, func(f *os.File) (*workload.Prompts, error) { return workload.ReadPrompts(f, text, shape.Out) })
	}
	b.load.Kind = "synthetic"
	return workload.NewSynthetic(text, shape), nil
}

const (
	blockTokensHelp = "of --trace: tokens of a block id; fewer than 512 shorten all lengths in proportion"
	promptIDsHelp   = "send token ids from LOW-HIGH instead of words (--endpoint completions)"
)

func (s *serveFlags) checkTrace() error {
	if s.blockTokens < 1 || s.blockTokens > workload.BlockTokens {
		return fmt.Errorf("--block-tokens %d: want 1 to %d", s.blockTokens, workload.BlockTokens)
	}
	return nil
}

// readTrace reads the trace, scaled and bounded as the flags say.
func (s *serveFlags) readTrace(b *benchFlags, text *workload.Text) (*workload.Trace, error) {
	b.load.File, b.load.Speed, b.load.Input, b.load.Output = s.trace, s.speed, "", ""
	entries, err := readFile(s.trace, func(f *os.File) ([]workload.Entry, error) { return workload.ReadTrace(f) })
	if err != nil {
		return nil, err
	}
	if s.blockTokens != workload.BlockTokens {
		b.load.BlockTokens = s.blockTokens
		entries = workload.Scale(entries, s.blockTokens)
	}
	if entries = workload.Within(entries, s.maxContext); len(entries) == 0 {
		return nil, fmt.Errorf("trace %s: no request within --max-context", s.trace)
	}
	return workload.NewTrace(text, entries, s.speed, s.blockTokens), nil
}

// promptIDs makes text use token ids LOW-HIGH.
func promptIDs(s string, b *benchFlags, text *workload.Text) error {
	low, high, ok := strings.Cut(s, "-")
	lo, err1 := strconv.ParseUint(low, 10, 31)
	hi, err2 := strconv.ParseUint(high, 10, 31)
	if !ok || err1 != nil || err2 != nil || hi < lo {
		return usageError{fmt.Errorf("--prompt-ids %q: want LOW-HIGH", s)}
	}
	if b.endpoint != "completions" {
		return usageError{errors.New("--prompt-ids goes with --endpoint completions")}
	}
	text.IDs, text.LowID, text.HighID = true, int(lo), int(hi)
	return nil
}

func readFile[T any](path string, read func(*os.File) (T, error)) (T, error) {
	var none T
	f, err := os.Open(path)
	if err != nil {
		return none, err
	}
	defer f.Close()
	v, err := read(f)
	if err != nil {
		return none, fmt.Errorf("%s: %w", path, err)
	}
	return v, nil
}
