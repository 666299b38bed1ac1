package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvbench"
	"github.com/xpyd/xpyd/internal/stepbench"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/worker"
)

type benchStep struct {
	out                  string
	maxContext           int
	limit                time.Duration
	heldOut              int
	seed                 uint64
	bandwidth, transport string
	latency              time.Duration
	worker               *pflag.FlagSet // those of the flags that a worker has as settings
}

func newBenchStep() *cobra.Command {
	b := &benchStep{worker: pflag.NewFlagSet("worker", pflag.ContinueOnError)}
	cmd := &cobra.Command{
		Use:   "step",
		Short: "Time a model's steps on this device, for a table from which any step's time follows",
		Long: `Open a model as a worker does and time the steps of its backend: batches that decode, by
batch and context; pieces of prompts, by size and position. The table that --out names has
these times, and any other step's follows from them. Random mixed steps that the table is not
made of are timed too: the report says by how much their predicted times are off.

Steps are timed in rounds until --time is over, or each was timed 200 times. Too little time
leaves out sizes between the others. Run it on an otherwise idle machine.

The table also says how long KV takes to another worker: as measured between two processes of
this host, like xpyd bench kv, or as --kv-bandwidth and --kv-latency say.`,
		Example: `  xpyd bench step --time 5s                                       the built-in model, no table
  xpyd bench step --model hf:Qwen/Qwen3-0.6B --threads 1 --time 5m --out cpu.json
  xpyd bench step --model /models/llama-3-8b --device cuda --max-context 32768 --kv-bandwidth 40GB --kv-latency 200us --out h100.json`,
	}
	def := workerDefaults(fleet.Decode)
	computeFlags(b.worker, &def.Compute, "the pool and the weights take")
	b.worker.Int("tensor-parallel", def.TensorParallel, "ranks of the worker that is timed, with a GPU each; xpyd plan then counts so many GPUs a worker")
	b.worker.Int("blocks", 0, "blocks of the KV pool; 0: from --kv-memory")
	b.worker.Int("max-batch", 0, "sequences a step; 0: a worker's default, 64 on the CPU, 256 on a GPU")
	b.worker.Int("step-tokens", 0, "tokens a step; 0: a worker's default, 512 on the CPU, 8192 on a GPU")
	f := cmd.Flags()
	f.AddFlagSet(b.worker)
	f.StringVar(&b.out, "out", "", "write the table to this file")
	f.IntVar(&b.maxContext, "max-context", 0, "tokens of the longest context; 0: the model's, or what the KV pool has room for")
	f.DurationVar(&b.limit, "time", time.Minute, "how long to measure, about")
	f.IntVar(&b.heldOut, "held-out", 40, "random steps to check the table with")
	f.Uint64Var(&b.seed, "seed", 1, "of the tokens, the blocks and the random steps")
	f.StringVar(&b.bandwidth, "kv-bandwidth", "", "bytes of KV that reach another worker in a second, such as 10GB; default: measured")
	f.DurationVar(&b.latency, "kv-latency", 0, "with --kv-bandwidth: what a transfer takes beyond its bytes")
	f.StringVar(&b.transport, "kv-transport", "auto", "what is measured without --kv-bandwidth: tcp, shm, or auto")
	cmd.RunE = b.run
	return cmd
}

func (b *benchStep) run(cmd *cobra.Command, _ []string) error {
	kv, err := b.parse(cmd.Flags())
	if err != nil {
		return usageError{err}
	}
	cfg, sources := workerDefaults(fleet.Decode), config.Sources{}
	keys := flagKeys(b.worker)
	if err := config.Load(&cfg, config.Options{Environ: os.Environ(), EnvAllow: foreignEnv, Flags: cmd.Flags(), FlagKeys: keys, Sources: sources}); err != nil {
		return usageError{err}
	}
	out, err := createOut(b.out)
	if err != nil {
		return fmt.Errorf("bench step: --out: %w", err)
	}
	r, err := b.measure(cmd.Context(), &cfg, kv, cmd.ErrOrStderr())
	if err != nil {
		out.drop()
		return wrongSetting(sources, fmt.Errorf("bench step: %w", err))
	}
	if err := out.keep(r.Table.Write); err != nil {
		return fmt.Errorf("bench step: --out: %w", err)
	}
	return showSteps(cmd.OutOrStdout(), r)
}

// parse checks the flags. What it returns of KV is nil if that is to be measured.
func (b *benchStep) parse(f *pflag.FlagSet) (*steptable.KV, error) {
	switch {
	case b.limit <= 0 || b.limit > 24*time.Hour:
		return nil, fmt.Errorf("--time %v: want more than 0 and at most 24h", b.limit)
	case b.heldOut < 0 || b.heldOut > 1000:
		return nil, fmt.Errorf("--held-out %d: want 0 to 1000", b.heldOut)
	case b.maxContext < 0:
		return nil, fmt.Errorf("--max-context %d: want 0 or more", b.maxContext)
	case b.latency < 0 || b.latency > time.Minute:
		return nil, fmt.Errorf("--kv-latency %v: want 0 to 1m", b.latency)
	case !slices.Contains(kvbench.Transports, b.transport):
		return nil, fmt.Errorf("--kv-transport %q: want one of %s", b.transport, strings.Join(kvbench.Transports, ", "))
	}
	if b.bandwidth == "" {
		if f.Changed("kv-latency") {
			return nil, errors.New("--kv-latency needs --kv-bandwidth: without it both are measured")
		}
		return nil, nil
	}
	if f.Changed("kv-transport") {
		return nil, errors.New("--kv-transport and --kv-bandwidth exclude each other: the former says what to measure")
	}
	rate, err := config.ParseSize(strings.TrimSuffix(b.bandwidth, "/s"))
	if err != nil || rate < 1 {
		return nil, fmt.Errorf("--kv-bandwidth %q: want bytes a second, such as 10GB", b.bandwidth)
	}
	return &steptable.KV{Bandwidth: float64(rate), Latency: b.latency.Seconds(), How: "as given"}, nil
}

// measure opens the model and times its steps.
func (b *benchStep) measure(ctx context.Context, cfg *worker.Config, kv *steptable.KV, stderr io.Writer) (r *stepbench.Result, err error) {
	log, flush := newLogger(stderr, "warn", "text")
	defer flush()
	w, err := worker.Open(ctx, cfg, log, progress(stderr))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	a, info, layout := w.Backend.Arch(), w.Backend.Info(), w.Backend.Layout()
	steps := stepbench.Config{MaxBatch: w.Engine.MaxRunning, StepTokens: w.Engine.StepTokens, Time: b.limit, HeldOut: b.heldOut, Seed: b.seed, Progress: stderr,
		MaxContext: cmp.Or(b.maxContext, min(a.MaxPositions, w.Backend.Blocks()*layout.BlockTokens))}
	if err := steps.Check(w.Backend); err != nil {
		return nil, usageError{fmt.Errorf("--%w", err)}
	}
	if kv == nil {
		if kv, err = b.moves(ctx, w.Backend, stderr, log); err != nil {
			return nil, fmt.Errorf("measure KV transfers (--kv-bandwidth spares it): %w", err)
		}
	}
	if r, err = stepbench.Measure(ctx, w.Backend, steps); err != nil {
		return nil, err
	}
	t := &r.Table.About
	t.Device, t.Backend, t.Numerics, t.SIMD, t.Threads = info.Device, info.Name, info.Numerics, info.SIMD, info.Threads
	if info.Ranks > 1 {
		t.Ranks = info.Ranks
	}
	t.Model, t.Layout, t.Build, t.Date = w.Model.Name, layout.String(), build(), time.Now().UTC().Format(time.RFC3339)
	t.Command = strings.Join(append([]string{"xpyd"}, os.Args[1:]...), " ")
	t.Shape = steptable.Shape{Type: a.ModelType, Layers: a.Layers, Hidden: a.Hidden, Intermediate: a.Intermediate, Heads: a.Heads, KVHeads: a.KVHeads,
		HeadDim: a.HeadDim, Vocab: a.Vocab}
	kv.BytesPerToken = r.Table.KV.BytesPerToken
	r.Table.KV = *kv
	return r, nil
}

// moves measures transfers of that KV between two processes, by `bench kv`.
func (b *benchStep) moves(ctx context.Context, backend kernels.Backend, stderr io.Writer, log *slog.Logger) (*steptable.KV, error) {
	rows, ok := backend.Layout().Uniform()
	if !ok {
		return nil, errors.New("the layers' KV differs in shape")
	}
	cfg := kvbench.DefaultConfig()
	cfg.Transport, cfg.Layers, cfg.KVHeads, cfg.BlockTokens, cfg.BlockBytes = b.transport, backend.Arch().Layers, rows.Heads, rows.BlockTokens, rows.BlockBytes()
	one := cfg.Layers * cfg.BlockBytes // a block of all layers
	cfg.Bytes, cfg.LatencyBytes, cfg.LatencyRuns, cfg.Handshakes = max(64<<20/one, 1)*one, one, 100, 0
	cfg.Baselines, cfg.Verify = false, false
	transports, err := benchTransports()
	if err != nil {
		return nil, err
	}
	peer := kvbench.Peer{Transports: transports, Log: log, Progress: stderr}
	stop, err := startBenchSender(ctx, stderr, "error", &peer.Addr)
	if err != nil {
		return nil, fmt.Errorf("sender: %w", err)
	}
	defer stop()
	rep, err := kvbench.Run(ctx, cfg, peer)
	if err != nil {
		return nil, err
	}
	rate := rep.Find(kvbench.RunChecked).GBs.Median * 1e9
	return &steptable.KV{Bandwidth: rate, Latency: max(rep.Latency.P50/1e6-float64(one)/rate, 0),
		How: fmt.Sprintf("measured by %s between two processes, host memory to host memory", rep.Transport)}, nil
}

// disturbed is the spread of a step's runs beyond which they tell more of the machine's other users.
const disturbed = 0.1

// showSteps prints what people want to know of a table.
func showSteps(w io.Writer, r *stepbench.Result) error {
	t := r.Table
	about, ms := &t.About, func(d time.Duration) string { return fmt.Sprintf("%.3g", d.Seconds()*1e3) }
	fmt.Fprintf(w, "%s on %s, %s; %d steps, each timed %d times or more\n\n", about.Model, about.Device, about.Layout, r.Points, r.Runs)
	tab := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprint(tab, "decode, ms by batch")
	contexts := []int{}
	for c := 16; c < about.MaxContext; c *= 8 {
		contexts = append(contexts, c)
	}
	contexts = append(contexts, about.MaxContext)
	for _, c := range contexts {
		fmt.Fprintf(tab, "\tcontext %d", c)
	}
	for n := 1; n <= about.MaxBatch; n *= 4 {
		fmt.Fprintf(tab, "\n%d", n)
		for _, c := range contexts {
			if n*((c+about.BlockTokens-1)/about.BlockTokens) > about.Blocks {
				fmt.Fprint(tab, "\t")
				continue
			}
			d, _ := t.Step(steptable.Load{Decodes: n, Context: n * c})
			fmt.Fprintf(tab, "\t%s", ms(d))
		}
	}
	fmt.Fprint(tab, "\n\nprefill, tokens\tms at the beginning\ttokens/s\tms at the end\n")
	most := min(about.StepTokens, about.MaxContext)
	for n := 16; ; n = min(4*n, most) {
		n = min(n, most)
		first, _ := t.Step(steptable.Load{Pieces: []steptable.Piece{{Tokens: n}}})
		last, _ := t.Step(steptable.Load{Pieces: []steptable.Piece{{Tokens: n, Position: about.MaxContext - n}}})
		fmt.Fprintf(tab, "%d\t%s\t%.0f\t%s\n", n, ms(first), float64(n)/first.Seconds(), ms(last))
		if n == most {
			break
		}
	}
	if err := tab.Flush(); err != nil {
		return err
	}
	if h := t.HeldOut; h.Steps > 0 {
		fmt.Fprintf(w, "\n%d random steps that the table is not made of: off by %.1f %% (median), %.1f %% (p90), %.1f %% at worst; bias %+.1f %%\n",
			h.Steps, 100*h.Median, 100*h.P90, 100*h.Worst, 100*h.Bias)
		if h.Bad() {
			fmt.Fprintf(w, "That is a bad table, which plans nothing: %s\n", remeasure)
		}
	}
	fmt.Fprintf(w, "KV: %d bytes a token, %.2f GB/s, %.0f µs a transfer; %s\n", t.KV.BytesPerToken, t.KV.Bandwidth/1e9, math.Round(t.KV.Latency*1e6), t.KV.How)
	if r.LeftOut > 0 {
		fmt.Fprintf(w, "no time for %d finer steps: a longer --time makes a better table\n", r.LeftOut)
	}
	if spread := t.Spread(); spread > disturbed {
		fmt.Fprintf(w, "runs of the same step differ by %.0f %%: something else uses this machine, which makes a bad table\n", 100*spread)
	}
	return nil
}
