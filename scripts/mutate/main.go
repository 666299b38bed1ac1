// Command mutate puts bugs into the tree, one at a time, and runs the tests that should notice:
// the package's own, then its users', whole clusters last. It leaves the tree alone (go test
// -overlay), draws the same bugs for the same seed, and skips mutants that are in its log, so it
// resumes. equivalent.txt lists bugs that no test could notice, with the reason.
//
//	go run ./scripts/mutate -seed 7 -n 200 -log seed7.jsonl
//	go run ./scripts/mutate -seed 7 -n 200 -log seed7.jsonl -again    # its survivors, with today's tests
//	go run ./scripts/mutate -n 20 engine/tier engine/kvcache      # of these packages
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// targets are the folders and files that `make mutate` puts bugs into.
var targets = []string{
	"decode", "engine", "internal/fleet", "engine/kvcache", "internal/openai", "internal/supervise", "engine/tier",
	"internal/tokenizer", "worker", "kernels/cpu/logprobs.go", "kernels/cpu/philox.go", "kernels/cpu/sample.go", "prefill",
	"router", "router/console", "router/flight", "router/h1", "router/limit", "router/pick", "router/sense",
}

type options struct {
	seed              uint64
	n                 int
	log, only         string
	own, again, print bool
	targets           []string
	limit             time.Duration
	dir               string // the module's root
	equivalentFile    string
}

func main() {
	o := options{dir: ".", equivalentFile: "scripts/mutate/equivalent.txt"}
	flag.Uint64Var(&o.seed, "seed", 1, "seed of the draw")
	flag.IntVar(&o.n, "n", 200, "how many mutants")
	flag.StringVar(&o.log, "log", "", "log file, a line per mutant; mutants in it are skipped")
	flag.StringVar(&o.only, "id", "", "only the mutant with this id")
	flag.BoolVar(&o.own, "own", false, "run only the tests of the package itself")
	flag.BoolVar(&o.again, "again", false, "retry mutants of the log that no test noticed")
	flag.BoolVar(&o.print, "print", false, "print the mutants and exit")
	flag.DurationVar(&o.limit, "limit", 4*time.Minute, "for one package's tests; running longer counts as noticed")
	flag.Parse()
	o.targets = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := mutate(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		stop()
		os.Exit(1)
	}
}

// folders groups targets: the folders, and by folder the only files to mutate.
func folders(targets []string) (list []string, only map[string][]string) {
	only = map[string][]string{}
	for _, t := range targets {
		folder := path.Clean(t)
		if strings.HasSuffix(t, ".go") {
			folder = path.Dir(folder)
			only[folder] = append(only[folder], path.Base(t))
		}
		if !slices.Contains(list, folder) {
			list = append(list, folder)
		}
	}
	return list, only
}

func mutate(ctx context.Context, o options, out io.Writer) error {
	dir, err := filepath.Abs(o.dir)
	if err != nil {
		return err
	}
	if len(o.targets) == 0 {
		o.targets = targets
	}
	list, only := folders(o.targets)
	m, err := newModule(dir, list)
	if err != nil {
		return err
	}
	var units []*unit
	for _, folder := range list {
		u, err := m.load(folder, only[folder])
		if err != nil {
			return err
		}
		units = append(units, u)
	}
	f, err := os.Open(filepath.Join(dir, o.equivalentFile))
	if err != nil {
		return err
	}
	defer f.Close()
	equivalents, _, err := readEquivalents(f)
	if err != nil {
		return fmt.Errorf("%s: %w", o.equivalentFile, err)
	}
	drawn := draw(m, units, o.seed, o.n)
	if o.only != "" {
		drawn = nil
		for _, u := range units {
			for _, s := range u.files {
				drawn = append(drawn, slices.DeleteFunc(mutants(m, u, s), func(x *mutant) bool { return x.ID != o.only })...)
			}
		}
	}
	if o.print {
		for _, x := range drawn {
			fmt.Fprintln(out, x)
		}
		return nil
	}
	s, err := newSuite(m)
	if err != nil {
		return err
	}
	r := &runner{options: o, suite: s, equivalents: equivalents, drawn: drawn, out: out, took: map[string]time.Duration{}}
	return r.run(ctx)
}
