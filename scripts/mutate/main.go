// Command mutate puts bugs into the tree, one at a time, and runs the tests that
// should notice: the package's own, then those of whoever uses it, whole clusters
// last. It writes nothing into the tree (go test -overlay), draws the same bugs for
// the same seed, and goes on where it was stopped: a mutant that its log has is not
// tried again. Bugs that no test could notice are listed in equivalent.txt,
// with the reason.
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

// targets are what `make mutate` puts bugs into. A file stands for itself.
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
	equivalents       string // file
}

func main() {
	o := options{dir: ".", equivalents: "scripts/mutate/equivalent.txt"}
	flag.Uint64Var(&o.seed, "seed", 1, "of the draw")
	flag.IntVar(&o.n, "n", 200, "how many mutants")
	flag.StringVar(&o.log, "log", "", "file to append a line a mutant to; those that it has are not tried again")
	flag.StringVar(&o.only, "id", "", "only the mutant with this id")
	flag.BoolVar(&o.own, "own", false, "only run the tests of the package itself")
	flag.BoolVar(&o.again, "again", false, "try those of the log that no test noticed once more")
	flag.BoolVar(&o.print, "print", false, "print the mutants and run nothing")
	flag.DurationVar(&o.limit, "limit", 4*time.Minute, "of one package's tests; what takes longer hangs, and is noticed")
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

// folders sorts targets: which files of which folders.
func folders(targets []string) (list []string, only map[string][]string) {
	only = map[string][]string{}
	for _, t := range targets {
		folder, file := path.Clean(t), ""
		if strings.HasSuffix(t, ".go") {
			folder, file = path.Split(folder)
			folder = path.Clean(folder)
		}
		if !slices.Contains(list, folder) {
			list = append(list, folder)
		}
		if file != "" {
			only[folder] = append(only[folder], file)
		}
	}
	return list, only
}

// prefixed makes go's packages of folders.
func prefixed(folders []string) (list []string) {
	for _, f := range folders {
		list = append(list, "./"+f)
	}
	return list
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
	m, err := newModule(dir, prefixed(list))
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
	f, err := os.Open(filepath.Join(dir, o.equivalents))
	if err != nil {
		return err
	}
	defer f.Close()
	same, _, err := readEquivalents(f)
	if err != nil {
		return fmt.Errorf("%s: %w", o.equivalents, err)
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
	r := &run{options: o, suite: s, same: same, drawn: drawn, out: out, took: map[string]time.Duration{}}
	return r.all(ctx)
}
