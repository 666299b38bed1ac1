// Command benchpeer measures the first token of a prompt whose KV lies in another
// worker's pool beside that of the same prompt computed; see scripts/bench-peer.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
)

// options say what to measure, and on what.
type options struct {
	xpyd, library string
	gpus          []string // of the giver and of the taker; none: both on the CPU
	model         string   // "8b" is made; else as --model
	tokens        int      // of a prompt
	rounds        int      // that count
	exact         int      // more rounds on GPUs with batch_invariant, whose answers must be those computed
	rest          time.Duration
	dir, out      string
}

func main() {
	runtime.LockOSThread() // children die with the thread that started them
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	var o options
	flag.StringVar(&o.xpyd, "xpyd", "", "the binary")
	flag.StringVar(&o.library, "library", os.Getenv("XPYD_CUDA_LIB"), "libxpyd_cuda.so")
	gpus := flag.String("gpus", "", "the giver's GPU and the taker's, such as 0,1; none: both on the CPU")
	flag.StringVar(&o.model, "model", "", "8b: Llama-3-8B's shape, random weights, made for it (14 GB); else as xpyd's")
	flag.IntVar(&o.tokens, "tokens", 8192, "of a prompt")
	flag.IntVar(&o.rounds, "n", 24, "rounds")
	flag.IntVar(&o.exact, "exact", 3, "more rounds on GPUs, with batch_invariant")
	flag.DurationVar(&o.rest, "rest", 400*time.Millisecond, "before each request that is timed: a GPU that has just worked is slower")
	flag.StringVar(&o.dir, "dir", os.TempDir(), "a folder for the model and logs, which are removed")
	flag.StringVar(&o.out, "out", "", "where results go; nowhere if empty")
	flag.Parse()
	o.gpus = strings.FieldsFunc(*gpus, func(r rune) bool { return r == ',' })
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "benchpeer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, say io.Writer) (err error) {
	if len(o.gpus) != 0 && len(o.gpus) != 2 {
		return fmt.Errorf("%d GPUs: two, or none", len(o.gpus))
	}
	for _, path := range []*string{&o.xpyd, &o.library} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp(o.dir, "xpyd-benchpeer-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if o.model == "8b" {
		began := time.Now()
		if o.model, err = makeModel(ctx, dir); err != nil {
			return err
		}
		fmt.Fprintf(say, "a model of random weights: %.1f s\n", time.Since(began).Seconds())
	}
	if o.out == "" {
		_, err := o.measure(ctx, dir, say)
		return err
	}
	book, err := figures.Open(o.out, "hicache")
	if err != nil {
		return err
	}
	defer book.Close()
	var log strings.Builder
	list, err := o.measure(ctx, dir, io.MultiWriter(say, &log))
	book.Logf("%s", strings.TrimSpace(log.String()))
	if len(o.gpus) > 0 {
		book.On(gpuName(ctx))
	}
	for _, f := range list {
		err = errors.Join(err, book.Add(f))
	}
	return err
}

// measure runs all rounds and returns the figures, which it also prints as cuda-test reads them.
func (o *options) measure(ctx context.Context, dir string, say io.Writer) ([]figures.Figure, error) {
	all, err := o.series(ctx, dir, say, o.rounds, len(o.gpus) == 0)
	if err != nil {
		return nil, err
	}
	note := fmt.Sprintf("in its own pool %.2f ms; the fetch %.2f ms, the engine after it %.2f ms; %s; %d of %d answers as computed, %d as the giver's from its pool; %d tries not counted: the fetch did not come",
		figures.Median(all.pool), figures.Median(all.fetch), figures.Median(all.step), all.path, all.equal, o.rounds, all.alike, all.missed)
	if len(o.gpus) > 0 && o.exact > 0 {
		if _, err := o.series(ctx, dir, say, o.exact, true); err != nil {
			return nil, fmt.Errorf("batch_invariant: %w", err)
		}
		note += fmt.Sprintf("; with batch_invariant %d of %d as computed", o.exact, o.exact)
	}
	ratio := make([]float64, len(all.peer))
	for i := range ratio {
		ratio[i] = all.peer[i] / all.computed[i]
	}
	size := "cpu"
	if len(o.gpus) > 0 {
		size = fmt.Sprintf("%dk", o.tokens/1024)
	}
	model := "stories260k"
	if o.model != "" {
		model = "Llama-3-8B shape with 512 tokens to draw from, random bf16 weights"
	}
	var list []figures.Figure
	for _, f := range []struct {
		name, unit  string
		ours, peers []float64
	}{
		{"hicache.peer_ttft_ratio.", "", ratio, slices.Repeat([]float64{1}, len(ratio))},
		{"hicache.peer_ttft_ms.", "ms", all.peer, all.computed},
	} {
		fig := figures.Figure{Name: f.name + size, Unit: f.unit, Peer: "the same prompt computed", Command: "scripts/bench-peer",
			Model: fmt.Sprintf("%s, %d tokens of a prompt, workers as they come", model, o.tokens)}.Ratios(f.ours, f.peers)
		fig.Spread += "; " + note
		line, err := json.Marshal(map[string]any{"name": fig.Name, "value": fig.Value, "unit": fig.Unit, "peer": fig.Peer, "peer_value": fig.PeerValue, "runs": fig.Runs, "spread": fig.Spread})
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(say, "RESULT %s\n", line)
		list = append(list, fig)
	}
	return list, nil
}

// gpuName asks the driver.
func gpuName(ctx context.Context) string {
	raw, err := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=name", "--format=csv,noheader").Output()
	name, _, _ := strings.Cut(string(raw), "\n")
	if err != nil || name == "" {
		name = "GPU"
	}
	return "2 x " + strings.TrimSpace(name)
}
