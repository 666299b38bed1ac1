package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// peer measures the first token of a prompt whose KV lies in the pool of another worker
// (another process, on another GPU: CUDA IPC; on the CPU: shared memory) beside that of the
// same prompt computed, and compares the tokens. XPYD_KV__PEER_BRING=off and other kv settings
// are passed to the workers. Without -gpus it is a rehearsal on the CPU.
//
//	bench peer -gpus 0,1 -out bench   Llama-3-8B's shape: two minutes, 14 GB in -dir
//
// For a machine without Go: `scripts/cuda-test --pack DIR` here, `DIR/cuda-test peer` there.
type peer struct {
	base
	library string
	gpuList string
	gpus    []string // of the giver and the taker; none: both on the CPU
	model   string   // "8b" is made; else as --model
	tokens  int      // of a prompt
	exact   int      // additional rounds on GPUs with batch_invariant, whose tokens must be equal
	rest    time.Duration
	large   string // folder of the model
}

func (o *peer) flags(f *flag.FlagSet) {
	f.StringVar(&o.library, "library", os.Getenv("XPYD_CUDA_LIB"), "libxpyd_cuda.so; built by scripts/build-cuda if empty")
	f.StringVar(&o.gpuList, "gpus", "", "the giver's GPU and the taker's, such as 0,1; both on the CPU if empty")
	f.StringVar(&o.model, "model", "", "8b: a temporary model of Llama-3-8B's shape with random weights (14 GB), the default on GPUs; else as xpyd's")
	f.IntVar(&o.tokens, "tokens", 0, "of a prompt (8192, on the CPU 400)")
	f.IntVar(&o.exact, "exact", 3, "additional rounds on GPUs, with batch_invariant")
	f.DurationVar(&o.rest, "rest", 400*time.Millisecond, "before each timed request: a GPU that has just worked is slower")
	f.StringVar(&o.large, "dir", os.TempDir(), "a folder for the temporary model")
}

func (o *peer) parts() []part { return []part{{"peer", o.compare}} }

func (o *peer) open(ctx context.Context) (err error) {
	o.gpus = strings.FieldsFunc(o.gpuList, func(r rune) bool { return r == ',' })
	switch len(o.gpus) {
	case 0:
		o.tokens = cmp.Or(o.tokens, 400)
	case 2:
		o.tokens, o.model = cmp.Or(o.tokens, 8192), cmp.Or(o.model, "8b")
		if err := buildForGPU(ctx, o.Bench, &o.library); err != nil {
			return err
		}
	default:
		return fmt.Errorf("%d GPUs: two, or none", len(o.gpus))
	}
	o.XPYD, err = o.Binary(ctx)
	return err
}

func (o *peer) compare(ctx context.Context) error {
	if o.model == "8b" {
		dir, err := os.MkdirTemp(o.large, "xpyd-bench-model")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		began := time.Now()
		if o.model, err = make8B(ctx, dir); err != nil {
			return err
		}
		o.Sayf("a model of random weights: %.1f s", time.Since(began).Seconds())
	}
	list, err := o.measure(ctx)
	if len(o.gpus) > 0 {
		o.Book.On("2 x " + gpuName(ctx))
	}
	return errors.Join(err, o.Add(list...))
}

// make8B writes a model of Llama-3-8B's shape with the embedded model's tokens.
func make8B(ctx context.Context, to string) (string, error) {
	tiny, err := model.Open(ctx, "", model.Options{})
	if err != nil {
		return "", err
	}
	defer tiny.Close()
	c := shape8B(tiny.Config)
	tokens, config, _ := tiny.TokenizerFiles()
	return to, modeltest.WriteHF(to, c, modeltest.HFOptions{Seed: 1, DType: kernels.BF16, Shards: c.Layers,
		Files: map[string][]byte{"tokenizer.json": tokens, "tokenizer_config.json": config}})
}

// shape8B gives a model Llama-3-8B's shape, but for its vocabulary.
func shape8B(c arch.Config) arch.Config {
	c.Layers, c.Hidden, c.Intermediate, c.Heads, c.KVHeads, c.HeadDim = 32, 4096, 14336, 32, 8, 128
	c.MaxPositions, c.RopeTheta, c.TiedHead = 32768, 500000, false
	return c
}

// measure runs all rounds and returns the figures, which it also prints for cuda-test.
func (o *peer) measure(ctx context.Context) ([]figures.Figure, error) {
	all, err := o.series(ctx, o.Rounds, len(o.gpus) == 0)
	if err != nil {
		return nil, err
	}
	note := fmt.Sprintf("in its own pool %.2f ms; the fetch %.2f ms, the engine after it %.2f ms; %s; %d of %d answers as computed, %d as the giver's from its pool; %d tries not counted: the fetch did not come",
		figures.Median(all.pool), figures.Median(all.fetch), figures.Median(all.step), all.path, all.equal, o.Rounds, all.alike, all.missed)
	if len(o.gpus) > 0 && o.exact > 0 {
		if _, err := o.series(ctx, o.exact, true); err != nil {
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
		fig := figures.Figure{Name: f.name + size, Unit: f.unit, Peer: "the same prompt computed",
			Model: fmt.Sprintf("%s, %d tokens of a prompt, workers as they come", model, o.tokens)}.Ratios(f.ours, f.peers)
		fig.Spread += "; " + note
		line, err := json.Marshal(map[string]any{"name": fig.Name, "value": fig.Value, "unit": fig.Unit, "peer": fig.Peer, "peer_value": fig.PeerValue, "runs": fig.Runs, "spread": fig.Spread})
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(os.Stdout, "RESULT %s\n", line)
		list = append(list, fig)
	}
	return list, nil
}
