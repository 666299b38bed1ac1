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
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// figure is one line of bench/results/*.jsonl.
type figure struct {
	Name      string  `json:"name"`
	Value     float64 `json:"value"`
	Unit      string  `json:"unit"`
	Peer      string  `json:"peer"`
	PeerValue float64 `json:"peer_value"`
	Ratio     float64 `json:"ratio"`
	Device    string  `json:"device"`
	Model     string  `json:"model"`
	Command   string  `json:"command"`
	Commit    string  `json:"commit"`
	Date      string  `json:"date"`
	Runs      int     `json:"runs"`
	Spread    string  `json:"spread"`
	Raw       string  `json:"raw"`
}

// bench holds what all figures share.
type bench struct {
	runs           int
	run, runOMP    string
	tmp            string
	raw            io.Writer
	rawPath        string
	out            *os.File
	device, commit string
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

func (b *bench) open(out string) error {
	date := time.Now().UTC().Format("2006-01-02")
	b.rawPath = filepath.Join(out, "raw", date+"-cpu.log")
	for _, dir := range []string{filepath.Join(out, "raw"), filepath.Join(out, "results")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	raw, err := os.OpenFile(b.rawPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	b.raw = raw
	if b.out, err = os.OpenFile(filepath.Join(out, "results", "cpu.jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err != nil {
		return err
	}
	if b.tmp, err = os.MkdirTemp("", "xpyd-bench"); err != nil {
		return err
	}
	commit, err := exec.Command("git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		return fmt.Errorf("git rev-parse: %w", err)
	}
	b.commit = strings.TrimSpace(string(commit))
	b.device = cpuName()
	fmt.Fprintf(b.raw, "\n# %s commit %s on %s: %s\n", time.Now().UTC().Format(time.RFC3339), b.commit, b.device, strings.Join(os.Args, " "))
	return nil
}

func cpuName() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown CPU"
	}
	for line := range strings.Lines(string(info)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			flags := "no AVX-512"
			if strings.Contains(string(info), "avx512f") {
				flags = "AVX-512"
			}
			return fmt.Sprintf("%s, %d CPUs, %s", strings.Trim(name, "\t: \n"), strings.Count(string(info), "processor\t"), flags)
		}
	}
	return "unknown CPU"
}

// pairs runs ours and the peer in turn and writes a figure: values are the
// medians, the ratio is the median of the pairs' ratios ours/peer.
func (b *bench) pairs(f figure, ours, peer func() (float64, error)) error {
	var mine, theirs, ratios []float64
	for i := range b.runs + 1 {
		p, err := peer()
		if err != nil {
			return fmt.Errorf("peer: %w", err)
		}
		o, err := ours()
		if err != nil {
			return err
		}
		fmt.Fprintf(b.raw, "%s run %d: ours %.4f peer %.4f %s ratio %.4f\n", f.Name, i, o, p, f.Unit, o/p)
		if i == 0 {
			continue // warm-up
		}
		mine, theirs, ratios = append(mine, o), append(theirs, p), append(ratios, o/p)
	}
	f.Value, f.PeerValue, f.Ratio = median(mine), median(theirs), median(ratios)
	f.Spread = fmt.Sprintf("ours %.4g..%.4g, peer %.4g..%.4g, ratio %.3f..%.3f", slices.Min(mine), slices.Max(mine),
		slices.Min(theirs), slices.Max(theirs), slices.Min(ratios), slices.Max(ratios))
	f.Runs = b.runs
	return b.write(f)
}

func (b *bench) write(f figure) error {
	f.Device, f.Commit, f.Raw = b.device, b.commit, b.rawPath
	f.Date = time.Now().UTC().Format("2006-01-02")
	if f.Command == "" {
		f.Command = "go run ./scripts/bench -only " + f.Name + " -run RUN -run-omp RUN_OMP"
	}
	line, err := json.Marshal(f)
	if err != nil {
		return err
	}
	log.Printf("%s = %.4g %s, peer %.4g (%s), ratio %.3f; %s", f.Name, f.Value, f.Unit, f.PeerValue, f.Peer, f.Ratio, f.Spread)
	_, err = b.out.Write(append(line, '\n'))
	return err
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

func p90(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[len(s)*9/10]
}
