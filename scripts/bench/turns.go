// Command benchturns measures what it is worth, and costs, that prefill fetches
// from decode the answer of the turn before; see scripts/bench-turns.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
)

func main() {
	bin := flag.String("xpyd", "", "the binary")
	dir := flag.String("dir", "", "a folder for what runs leave")
	rounds := flag.Int("n", 9, "rounds")
	out := flag.String("out", "bench", "where results go")
	flag.Parse()
	if err := run(*bin, *dir, *rounds, *out); err != nil {
		fmt.Fprintln(os.Stderr, "benchturns:", err)
		os.Exit(1)
	}
}

// result is what one run comes to.
type result struct {
	ttft, cpu, cached float64 // ms, seconds, tokens
}

func (r result) String() string {
	return fmt.Sprintf("TTFT p50 %.2f ms, CPU %.2f s, %.0f tokens cached", r.ttft, r.cpu, r.cached)
}

func run(bin, dir string, rounds int, out string) error {
	book, err := figures.Open(out, "turns")
	if err != nil {
		return err
	}
	defer book.Close()
	runs, err := figures.Compare(book, rounds, [2]string{"kv_peers on", "kv_peers off"}, func(n int, way string) (result, error) {
		mode := strings.TrimPrefix(way, "kv_peers ")
		return measure(bin, filepath.Join(dir, fmt.Sprint(mode, n)), mode)
	})
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name, unit string
		of         func(result) float64
	}{
		{"ttft_ms", "ms", func(r result) float64 { return r.ttft }},
		{"cpu_s", "s", func(r result) float64 { return r.cpu }},
		{"cached_tokens", "tokens", func(r result) float64 { return r.cached }},
	} {
		fig := figures.Figure{Name: "peers.turns_" + f.name, Unit: f.unit, Peer: "ours with --kv-peers off", Command: "scripts/bench-turns",
			Model: "stories260k, 1P1D over shared memory, 2 clients, 300 conversations of 2 turns, 40 tokens asked, 100 answered"}
		if err := figures.AddRatio(book, fig, runs, f.of); err != nil {
			return err
		}
	}
	return nil
}

// measure runs `xpyd up` and the conversations. The processor time is that of
// `up` and the workers, from start to end.
func measure(bin, dir, mode string) (r result, err error) {
	up := exec.Command(bin, "up", "--kv-peers", mode, "--threads", "1", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", dir)
	said, err := up.StdoutPipe()
	if err == nil {
		err = up.Start()
	}
	if err != nil {
		return r, err
	}
	url := ""
	for lines := bufio.NewScanner(said); url == "" && lines.Scan(); {
		url, _ = strings.CutPrefix(lines.Text(), "ready ")
	}
	text, err := exec.Command(bin, "bench", "multiturn", "--url", url, "--endpoint", "completions", "--clients", "2", "--turns", "2", "--conversations", "300",
		"--input", "40", "--output", "100", "--ignore-eos", "--progress", "off", "--json", "-").Output()
	if e := up.Process.Signal(os.Interrupt); err == nil {
		err = e
	}
	if e := up.Wait(); err == nil {
		err = e
	}
	if err != nil {
		return r, err
	}
	var report struct {
		Phases []struct {
			Tokens  struct{ Cached float64 }
			Latency struct {
				TTFT struct{ P50 float64 } `json:"ttft_ms"`
			}
		}
	}
	if err := json.Unmarshal(text, &report); err != nil || len(report.Phases) != 1 {
		return r, fmt.Errorf("the report: %v", err)
	}
	p := report.Phases[0]
	s := up.ProcessState
	return result{p.Latency.TTFT.P50, (s.UserTime() + s.SystemTime()).Seconds(), p.Tokens.Cached}, nil
}
