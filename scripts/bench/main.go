// Command bench makes the figures of bench/results that need no GPU: CPU
// decode against llama2.c's run, and what a pair costs over a single worker.
// Peer and ours run in turn, and a figure is the median of the pairs' ratios.
//
//	go run ./scripts/bench -run /tmp/llama2c/run -run-omp /tmp/llama2c/runomp
//
// run and run-omp are karpathy/llama2.c's run.c built with
// "gcc -Ofast -march=native run.c -lm", the second with "-fopenmp" too.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
)

// bench holds what all figures share.
type bench struct {
	runs        int
	run, runOMP string
	tmp         string
	book        *figures.Book
}

func main() {
	log.SetFlags(0)
	b := &bench{}
	var only, out string
	flag.StringVar(&b.run, "run", "", "llama2.c's run, one thread; without it the decode figures are left out")
	flag.StringVar(&b.runOMP, "run-omp", "", "the same with OpenMP")
	flag.IntVar(&b.runs, "n", 7, "pairs of runs a figure")
	flag.StringVar(&only, "only", "", "only figures whose name contains this")
	flag.StringVar(&out, "out", "bench", "folder for results/ and raw/")
	flag.Parse()
	if err := b.open(out); err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(b.tmp)
	defer b.book.Close()
	for _, step := range []struct {
		name string
		run  func() error
	}{
		{"cpu.decode_ratio.260k", func() error { return b.decode("260k", 1) }},
		{"cpu.decode_ratio.15m", func() error { return b.decode("15m", 1) }},
		{"cpu.decode_ratio.110m", func() error { return b.decode("110m", 1) }},
		{"cpu.two_thread_ratio", func() error { return b.decode("110m", 2) }},
		{"cpu.batch8_ratio", b.batch8},
		{"e2e.ready_s", b.ready},
		{"e2e.ttft_overhead_ms", b.ttft},
	} {
		if !strings.Contains(step.name, only) {
			continue
		}
		if strings.HasPrefix(step.name, "cpu.") && step.name != "cpu.batch8_ratio" && b.run == "" {
			log.Printf("%s: left out, -run is not given", step.name)
			continue
		}
		log.Printf("%s …", step.name)
		if err := step.run(); err != nil {
			log.Fatalf("%s: %v", step.name, err)
		}
	}
}

func (b *bench) open(out string) (err error) {
	if b.tmp, err = os.MkdirTemp("", "xpyd-bench"); err != nil {
		return err
	}
	b.book, err = figures.Open(out, "cpu")
	return err
}

// pairs runs ours and the peer in turn and writes a figure: values are the
// medians, the ratio is the median of the pairs' ratios ours/peer.
func (b *bench) pairs(f figures.Figure, ours, peer func() (float64, error)) error {
	var mine, theirs []float64
	for i := range b.runs + 1 {
		p, err := peer()
		if err != nil {
			return fmt.Errorf("peer: %w", err)
		}
		o, err := ours()
		if err != nil {
			return err
		}
		b.book.Logf("%s run %d: ours %.4f peer %.4f %s ratio %.4f", f.Name, i, o, p, f.Unit, o/p)
		if i == 0 {
			continue // warm-up
		}
		mine, theirs = append(mine, o), append(theirs, p)
	}
	return b.write(f.Ratios(mine, theirs))
}

func (b *bench) write(f figures.Figure) error {
	if f.Command == "" {
		f.Command = "go run ./scripts/bench -only " + f.Name + " -run RUN -run-omp RUN_OMP"
	}
	log.Printf("%s = %.4g %s, peer %.4g (%s), ratio %.3f; %s", f.Name, f.Value, f.Unit, f.PeerValue, f.Peer, f.Ratio, f.Spread)
	return b.book.Add(f)
}
