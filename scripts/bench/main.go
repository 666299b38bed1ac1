// Command bench makes the figures of bench/results: each of its commands measures xpyd
// beside a peer, a limit or an earlier build of itself, in turn, so that what disturbs the
// machine disturbs both.
//
//	go run ./scripts/bench                       lists the commands
//	go run ./scripts/bench kv -rounds 3          one of them; -h lists its flags
//	go run ./scripts/bench kv -out '' -only shm  a look at a part of it, nothing is kept
//	go run ./scripts/bench report                bench/README.md from bench/results
//
// It builds the xpyd that it measures, and installs the programs that it compares with, or
// says what is missing. A machine with nothing else to do, please.
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

// A benchmark is what a command runs.
type benchmark interface {
	flags(*flag.FlagSet)        // its own
	open(context.Context) error // what all of its parts need
	parts() []part
}

// part is what -only chooses among.
type part struct {
	name string
	run  func(context.Context) error
}

// command is a benchmark as it is called.
type command struct {
	name, about string
	book        string // its figures go to results/BOOK.jsonl
	out         string // where, if nothing else is said
	rounds      int
	of          func(*harness.Bench) benchmark
}

var commands = []command{
	{"cpu", "decode on the CPU beside llama2.c's run; what prefill and decode apart cost", "cpu", "bench", 7, func(b *harness.Bench) benchmark { return &cpuBench{Bench: b} }},
	{"router", "the router beside nginx and other P/D routers: fifteen minutes", "router", "bench", 5, newRouter},
	{"pick", "the router's choice among 4,000 workers beside that among 8", "pick", "bench", 5, func(b *harness.Bench) benchmark { return &pickBench{Bench: b} }},
	{"builds", "this tree beside an earlier commit: router and CPU decode", "router", "bench", 20, func(b *harness.Bench) benchmark { return &builds{router: *newRouter(b).(*router)} }},
	{"kv", "xpyd bench kv beside memcpy, NIXL, Mooncake and iperf3: four minutes", "kv", "bench", 7, newKV},
	{"kvio", "the SSD tier beside fio: three minutes", "kvio", "bench", 7, func(b *harness.Bench) benchmark { return &kvioBench{Bench: b} }},
	{"loadgen", "xpyd bench beside aiperf and other HTTP clients: fifteen minutes", "loadgen", "bench", 5, func(b *harness.Bench) benchmark { return &loadgen{Bench: b} }},
	{"mooncake", "tiers below the pool, on the conversations of a Mooncake trace", "mooncake", "bench", 3, func(b *harness.Bench) benchmark { return &mooncake{Bench: b} }},
	{"peer", "the first token over another worker's KV beside a computed one; a rehearsal, without -gpus", "hicache", "", 24, func(b *harness.Bench) benchmark { return &peer{Bench: b} }},
	{"turns", "kv.peers on and off in conversations of two turns: two minutes", "turns", "bench", 9, func(b *harness.Bench) benchmark { return &turnsBench{Bench: b} }},
}

func newRouter(b *harness.Bench) benchmark { return &router{Bench: b, done: map[string]bool{}} }

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
	case "engine": // the helpers that this program starts of itself
		return serveEngine(args[1], args[2], say)
	case "bare":
		return serveBare(args[1], args[2], args[3])
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
	return nil, fmt.Errorf("no command %q; without one they are listed", name)
}

// parse reads a command's flags.
func (c *command) parse(args []string) (*harness.Bench, benchmark, error) {
	b := &harness.Bench{}
	m := c.of(b)
	f := flag.NewFlagSet(c.name, flag.ContinueOnError)
	var only []string
	for _, p := range m.parts() {
		only = append(only, p.name)
	}
	f.StringVar(&b.XPYD, "xpyd", "", "the binary to measure; it is built, if none is given")
	f.StringVar(&b.Out, "out", c.out, "folder of results/ and raw/; '' keeps nothing")
	f.StringVar(&b.Only, "only", "", "only parts whose name contains one of these, comma separated: "+strings.Join(only, ", "))
	f.IntVar(&b.Rounds, "rounds", c.rounds, "rounds of each measurement")
	m.flags(f)
	if err := f.Parse(args); err != nil {
		return nil, nil, err
	}
	for _, word := range strings.Split(b.Only, ",") {
		if !strings.Contains(strings.Join(only, " "), word) {
			return nil, nil, fmt.Errorf("%s has no part %q, but %s", c.name, word, strings.Join(only, ", "))
		}
	}
	if f.NArg() > 0 || b.Rounds < 1 {
		return nil, nil, fmt.Errorf("%s: %d rounds, and %q is no flag", c.name, b.Rounds, f.Args())
	}
	b.Command = c.line(f)
	return b, m, nil
}

// line is the command that repeats a call: without what is only this machine's.
func (c *command) line(f *flag.FlagSet) string {
	line := "go run ./scripts/bench " + c.name
	f.Visit(func(f *flag.Flag) {
		switch value := f.Value.String(); {
		case slices.Contains([]string{"xpyd", "out", "venv", "library", "dir", "cpuprofile", "reports"}, f.Name):
		case strings.Contains(value, "/"):
			line += " -" + f.Name + " " + strings.ToUpper(f.Name) // a file of this machine's
		default:
			line += " -" + f.Name + " " + value
		}
	})
	return line
}

// run runs the parts that are wanted.
func (c *command) run(ctx context.Context, args []string) (err error) {
	b, m, err := c.parse(args)
	if err != nil {
		return err
	}
	if p, ok := m.(interface{ pin() error }); ok {
		if err := p.pin(); err != nil {
			return err
		}
	}
	if err := b.Open(c.book); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	if closer, ok := m.(interface{ close() error }); ok {
		defer func() { err = errors.Join(err, closer.close()) }()
	}
	if err := m.open(ctx); err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	if m, ok := m.(interface{ rounds(context.Context) error }); ok { // its parts take turns
		return m.rounds(ctx)
	}
	for _, p := range m.parts() {
		if !b.Wants(p.name) {
			continue
		}
		log.Printf("== %s", p.name)
		if err := p.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}
