// Command benchmooncake measures what tiers below the pool are worth to the
// conversations of a Mooncake trace; see scripts/bench-mooncake.
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
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// bench is one call's settings.
type bench struct {
	bin, dir, model, trace string
	requests               int
}

// Sizes: of each worker's pool, and of what is under it.
const (
	poolSize, hostSize, ssdSize = "6MiB", "96MiB", "1GiB"
	blockTokens, maxContext     = 16, 512
)

func main() {
	var b bench
	flag.StringVar(&b.bin, "xpyd", "", "the binary")
	flag.StringVar(&b.dir, "dir", "", "a folder for what runs leave")
	flag.StringVar(&b.trace, "trace", "", "the trace")
	flag.IntVar(&b.requests, "requests", 800, "requests of it")
	rounds := flag.Int("n", 3, "rounds")
	out := flag.String("out", "bench", "where results go")
	flag.Parse()
	if err := b.run(*rounds, *out); err != nil {
		fmt.Fprintln(os.Stderr, "benchmooncake:", err)
		os.Exit(1)
	}
}

// result is what one run comes to.
type result struct {
	ttft, tokens, cached, cpu float64 // ms, prompt and output tokens a second, part of the prompts' tokens, seconds of all processes
}

func (r result) String() string {
	return fmt.Sprintf("TTFT p50 %.1f ms, %.0f tokens/s, processor time %.1f s, %.1f %% of the prompts' tokens cached", r.ttft, r.tokens, r.cpu, 100*r.cached)
}

func (b *bench) run(rounds int, out string) error {
	if err := b.writeModel(); err != nil {
		return err
	}
	book, err := figures.Open(out, "mooncake")
	if err != nil {
		return err
	}
	defer book.Close()
	runs, err := figures.Compare(book, rounds, [2]string{"tiers", "off"}, func(_ int, name string) (result, error) { return b.measure(name) })
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name, unit string
		of         func(result) float64
	}{
		{"ttft_ms", "ms", func(r result) float64 { return r.ttft }},
		{"tokens_s", "tokens/s", func(r result) float64 { return r.tokens }},
		{"cpu_s", "s", func(r result) float64 { return r.cpu }},
		{"cached_pct", "% of prompt tokens", func(r result) float64 { return 100 * r.cached }},
	} {
		fig := figures.Figure{Name: "mooncake." + f.name, Unit: f.unit, Peer: "ours with tiers off", Command: "scripts/bench-mooncake",
			Model: fmt.Sprintf("15M shape with 1 KV head, 512 tokens, random weights; 1P1D, pools of %s, under them %s of host memory and %s of SSD; %d requests of the Mooncake conversation trace, its blocks %d tokens, 4 clients",
				poolSize, hostSize, ssdSize, b.requests, blockTokens)}
		if err := figures.AddRatio(book, fig, runs, f.of); err != nil {
			return err
		}
	}
	return nil
}

// writeModel makes a model that costs something to compute, and has room for
// the trace's prompts. One KV head: 5,000 operations a byte of KV, which is less
// than large models have (8B: 100,000), but not by as much as with six.
func (b *bench) writeModel() error {
	b.model = filepath.Join(b.dir, "model")
	c := modeltest.Stories15M()
	c.Vocab, c.MaxPositions, c.KVHeads = 512, 1024, 1
	files := map[string][]byte{}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		text, err := os.ReadFile(filepath.Join("internal/model/stories260k", name))
		if err != nil {
			return err
		}
		files[name] = text
	}
	return modeltest.WriteHF(b.model, c, modeltest.HFOptions{Seed: 1, DType: kernels.F32, Files: files})
}

// measure runs `xpyd up` and the trace.
func (b *bench) measure(name string) (r result, err error) {
	data := filepath.Join(b.dir, "data")
	defer os.RemoveAll(data)
	args := []string{"up", "--model", b.model, "--threads", "1", "--kv-memory", poolSize, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", data}
	if name == "tiers" {
		args = append(args, "--kv-host-memory", hostSize, "--kv-ssd-dir", filepath.Join(data, "kv"), "--kv-ssd-size", ssdSize)
	}
	up := exec.Command(b.bin, args...)
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
	report := filepath.Join(b.dir, name)
	bench := exec.Command(b.bin, "bench", "multiturn", "--url", url, "--endpoint", "completions", "--trace", b.trace, "--prompt-ids", "3-500", "--block-tokens", fmt.Sprint(blockTokens),
		"--max-context", fmt.Sprint(maxContext), "--requests", fmt.Sprint(b.requests), "--clients", "4", "--ignore-eos", "--json", report+".json", "--html", report+".html")
	bench.Stderr = os.Stderr
	err = bench.Run()
	if e := up.Process.Signal(os.Interrupt); err == nil {
		err = e
	}
	if e := up.Wait(); err == nil {
		err = e
	}
	if err != nil {
		return r, err
	}
	if r, err = read(report + ".json"); err == nil {
		r.cpu = (up.ProcessState.UserTime() + up.ProcessState.SystemTime()).Seconds()
	}
	return r, err
}

func read(path string) (r result, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	var report struct {
		Phases []struct {
			Throughput struct {
				Total float64 `json:"total_tokens_per_s"`
			}
			Tokens struct {
				Input  struct{ Mean float64 }
				Cached float64
			}
			Latency struct {
				TTFT struct{ P50 float64 } `json:"ttft_ms"`
			}
			Requests struct{ Completed, Failed int }
		}
	}
	if err := json.Unmarshal(text, &report); err != nil || len(report.Phases) != 1 {
		return r, fmt.Errorf("the report: %v", err)
	}
	p := report.Phases[0]
	if p.Requests.Failed > 0 || p.Requests.Completed == 0 {
		return r, fmt.Errorf("%+v", p)
	}
	return result{p.Latency.TTFT.P50, p.Throughput.Total, p.Tokens.Cached / (p.Tokens.Input.Mean * float64(p.Requests.Completed)), 0}, nil
}
