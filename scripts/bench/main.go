// Command bench makes the figures of bench/results. Each command measures xpyd beside a
// peer, a limit or an earlier build in alternating rounds, so that whatever disturbs the
// machine disturbs both.
//
//	go run ./scripts/bench                       list the commands
//	go run ./scripts/bench kv -rounds 3          run one; -h lists its flags
//	go run ./scripts/bench kv -out '' -only shm  run a part of one and record nothing
//	go run ./scripts/bench report                print bench/README.md from bench/results
//
// It builds the xpyd under test and installs the programs it compares with, or says what is
// missing. Run it on an otherwise idle machine.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// benchmark is what a command runs. base implements all of it but parts.
type benchmark interface {
	flags(*flag.FlagSet)        // registers its own flags
	pin() error                 // may replace this process, before anything is opened
	open(context.Context) error // prepares what all parts need
	parts() []part
	rounds(context.Context, []part) error // runs the selected parts
	close() error
}

// base has no flags, needs no preparation, and runs its parts one after the other.
type base struct{ *harness.Bench }

func (base) flags(*flag.FlagSet)        {}
func (base) pin() error                 { return nil }
func (base) open(context.Context) error { return nil }
func (base) close() error               { return nil }

func (base) rounds(ctx context.Context, parts []part) error {
	for _, p := range parts {
		log.Printf("== %s", p.name)
		if err := p.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// part is what -only selects.
type part struct {
	name string
	run  func(context.Context) error
}

// command is a benchmark with its defaults.
type command struct {
	name, about string
	book        string // figures go to results/BOOK.jsonl
	out         string // default of -out
	rounds      int    // default of -rounds
	of          func(base) benchmark
}

var commands = []command{
	{"cpu", "decode on the CPU beside llama2.c's run; the cost of separate prefill and decode", "cpu", "bench", 7, func(b base) benchmark { return &cpuBench{base: b} }},
	{"router", "the router beside nginx and other P/D routers: fifteen minutes", "router", "bench", 5, func(b base) benchmark { return &router{base: b} }},
	{"pick", "the router's choice among 4,000 workers beside that among 8", "pick", "bench", 5, func(b base) benchmark { return &pickBench{base: b} }},
	{"builds", "this tree beside an earlier commit: router and CPU decode", "router", "bench", 20, func(b base) benchmark { return &builds{router: &router{base: b}} }},
	{"kv", "xpyd bench kv beside memcpy, NIXL, Mooncake and iperf3: four minutes", "kv", "bench", 7, func(b base) benchmark { return newKV(b) }},
	{"kvio", "the SSD tier beside fio: three minutes", "kvio", "bench", 7, func(b base) benchmark { return &kvioBench{base: b} }},
	{"loadgen", "xpyd bench beside aiperf and other HTTP clients: fifteen minutes", "loadgen", "bench", 5, func(b base) benchmark { return &loadgen{base: b} }},
	{"mooncake", "tiers below the pool, on the conversations of a Mooncake trace", "mooncake", "bench", 3, func(b base) benchmark { return &mooncake{base: b} }},
	{"peer", "the first token from another worker's KV beside a computed one; without -gpus a rehearsal", "hicache", "", 24, func(b base) benchmark { return &peer{base: b} }},
	{"vllm", "a whole worker behind the router beside vLLM on the same GPU: an hour and a half", "vllm", "bench", 2, func(b base) benchmark { return &vllm{base: b} }},
	{"takeover", "a stream's pause when its decode worker is killed or stopped: half an hour", "stream", "bench", 5, func(b base) benchmark { return &takeover{base: b} }},
	{"moves", "how long a drain and a change of role take, and what a moved stream sees; -device cuda: single moves at a long context", "stream", "bench", 3, func(b base) benchmark { return &moves{takeover: takeover{base: b}} }},
	{"idle", "what the router pays for takeovers while nothing goes wrong: two minutes", "stream", "bench", 20, func(b base) benchmark { return &idle{builds: &builds{router: &router{base: b}}} }},
	{"dash", "what an open page of the dashboard costs the router: five minutes", "dash", "bench", 20, func(b base) benchmark {
		return &dash{idle: &idle{builds: &builds{router: &router{base: b}}}}
	}},
	{"upgrade", "requests that fail while `xpyd up` is upgraded under load: five minutes", "stream", "bench", 1, func(b base) benchmark { return &upgrade{base: b} }},
	{"twin", "real fleets beside their twins (internal/sim), under ten loads each: ten minutes a round; -device cuda: on a GPU", "twin", "bench", 3, func(b base) benchmark { return &twinBench{base: b} }},
	{"process", "real processes on a device that only waits, 2P2D, beside their twin: goodput of four loads; fifteen minutes", "process", "bench", 1, func(b base) benchmark { return &processBench{base: b} }},
	{"hour", "how long the twin takes for an hour of a Mooncake trace on 16 workers, and on 1,000", "twin", "bench", 3, func(b base) benchmark { return &twinSpeed{base: b} }},
	{"brain", "workers that mix beside the best of whole workers and all splits, in the twin: minutes on many processors, hours on few", "twin", "bench", 1, func(b base) benchmark { return &brain{base: b} }},
	{"planner", "two days under the planner, in the twin, beside a fixed fleet, a clairvoyant and a rule: ten minutes", "plan", "bench", 1, func(b base) benchmark { return &planBench{base: b} }},
	{"grammar", "internal/grammar beside llguidance, on the schemas of JSONSchemaBench: five minutes", "grammar", "bench", 1, func(b base) benchmark { return &grammarBench{base: b} }},
	{"answers", "a real model's answers to schemas of JSONSchemaBench through `xpyd up`, checked by Python's jsonschema: an hour", "grammar", "bench", 1, func(b base) benchmark { return &answersBench{base: b} }},
	{"parsers", "texts of the tests of SMG's parsers, read by internal/answer: a minute", "parsers", "bench", 1, func(b base) benchmark { return &parsersBench{base: b} }},
	{"spec", "a model's tokens with speculation beside without, for three sets of prompts: five minutes", "spec", "bench", 3, func(b base) benchmark { return &specBench{base: b} }},
	{"turns", "kv.peers on and off in conversations of two turns: two minutes", "turns", "bench", 9, func(b base) benchmark { return &turnsBench{b} }},
}

func main() {
	runtime.LockOSThread() // children die with the thread that started them
	log.SetFlags(log.Ltime)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		log.Fatal(err)
	}
}

func run(ctx context.Context, args []string, say io.Writer) error {
	if len(args) == 0 {
		for _, c := range commands {
			fmt.Fprintf(say, "%-9s %s\n", c.name, c.about)
		}
		fmt.Fprintf(say, "%-9s bench/README.md from bench/results\n", "report")
		return nil
	}
	switch args[0] {
	case "report":
		return writeReport(".", say)
	case "engine": // this program starts itself as a helper
		return serveEngine(args[1], args[2], say)
	case "bare":
		return serveBare(args[1], args[2], args[3])
	case "timed":
		return serveTimed(ctx, args[1:], say)
	}
	c, err := find(args[0])
	if err != nil {
		return err
	}
	return c.run(ctx, args[1:])
}

func find(name string) (*command, error) {
	for i := range commands {
		if commands[i].name == name {
			return &commands[i], nil
		}
	}
	return nil, fmt.Errorf("no command %q; run without arguments for a list", name)
}

// parse reads a command's flags.
func (c *command) parse(args []string) (*harness.Bench, benchmark, error) {
	b := &harness.Bench{}
	m := c.of(base{b})
	f := flag.NewFlagSet(c.name, flag.ContinueOnError)
	var names []string
	for _, p := range m.parts() {
		names = append(names, p.name)
	}
	f.StringVar(&b.XPYD, "xpyd", "", "the binary to measure; built if empty")
	f.StringVar(&b.Out, "out", c.out, "folder of results/ and raw/; '' records nothing")
	f.StringVar(&b.Only, "only", "", "run only parts whose name contains one of these, comma separated: "+strings.Join(names, ", "))
	f.IntVar(&b.Rounds, "rounds", c.rounds, "rounds of each measurement")
	m.flags(f)
	if err := f.Parse(args); err != nil {
		return nil, nil, err
	}
	for word := range strings.SplitSeq(b.Only, ",") {
		if !strings.Contains(strings.Join(names, " "), word) {
			return nil, nil, fmt.Errorf("%s has no part %q, but %s", c.name, word, strings.Join(names, ", "))
		}
	}
	if f.NArg() > 0 || b.Rounds < 1 {
		return nil, nil, fmt.Errorf("%s: %d rounds, stray arguments %q", c.name, b.Rounds, f.Args())
	}
	b.Command = c.line(f)
	return b, m, nil
}

// line is a command that repeats the run elsewhere: without what concerns this machine alone.
func (c *command) line(f *flag.FlagSet) string {
	line := "go run ./scripts/bench " + c.name
	f.Visit(func(f *flag.Flag) {
		switch value := f.Value.String(); {
		case slices.Contains([]string{"xpyd", "out", "venv", "library", "dir", "rows", "budget", "python", "cpuprofile", "reports", "keep"}, f.Name):
		case strings.Contains(value, "/"):
			line += " -" + f.Name + " " + strings.ToUpper(f.Name) // a file on this machine
		default:
			line += " -" + f.Name + " " + value
		}
	})
	return line
}

// run runs the selected parts.
func (c *command) run(ctx context.Context, args []string) (err error) {
	b, m, err := c.parse(args)
	if err != nil {
		return err
	}
	if err := m.pin(); err != nil {
		return err
	}
	if err := b.Open(c.book); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close(), b.Close()) }()
	if err := m.open(ctx); err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	return m.rounds(ctx, slices.DeleteFunc(m.parts(), func(p part) bool { return !b.Wants(p.name) }))
}
