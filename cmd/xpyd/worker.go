package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/logbuf"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/supervise"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/cudaipc"
	"github.com/xpyd/xpyd/kvconn/nccl"
	"github.com/xpyd/xpyd/kvconn/pinned"
	"github.com/xpyd/xpyd/kvconn/shm"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvlayout"
	"github.com/xpyd/xpyd/worker"
)

// newWorker is `xpyd prefill` or `xpyd decode`: one worker process.
func newWorker(role fleet.Role) *cobra.Command {
	cfg := worker.DefaultConfig(role)
	var file string
	var printConfig bool
	cmd := &cobra.Command{
		Use:   fmt.Sprintf("%s (--join-file FILE [--model M] | --config FILE)", role),
		Short: fmt.Sprintf("Run one %s worker", role),
		Long: fmt.Sprintf(`Run one %s worker. It loads the model, joins the fleet on NATS, and answers
HTTP on a port of its own; plain OpenAI requests work there too. The join file is
what `+"`xpyd router` and `xpyd up`"+` keep in their data folder as join-url: it has a
secret, and so does XPYD_JOIN, which takes the same text. A file that changes is
in force without a restart. With "#SECRET" alone in it the worker is in no fleet
and answers those who have the secret, as behind a proxy made for vLLM.`, role),
		Example: fmt.Sprintf("  xpyd %[1]s --join-file /run/user/1000/xpyd/join-url --model hf:Qwen/Qwen3-0.6B\n  xpyd %[1]s --join-file … --kv-host-memory 16GiB --kv-ssd-dir /var/cache/xpyd/%[1]s-0 --kv-ssd-size 200GiB\n  xpyd %[1]s --config configs/samples/%[1]s.yaml\n  xpyd %[1]s --config %[1]s.yaml --print-config", role),
		Args:    cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVar(&file, "config", "", "YAML file; see configs/samples")
	f.BoolVar(&printConfig, "print-config", false, "print the configuration in force and exit")
	f.String("join-file", "", joinFileHelp)
	f.Bool("trust-everyone", false, trustHelp)
	f.String("model", "", "a directory, a .gguf file or hf:OWNER/NAME; default: the embedded stories260k")
	f.String("served-name", "", "what clients call the model")
	f.String("id", "", "name in the fleet; default: the role and a random suffix")
	f.String("listen", cfg.Listen, "HTTP address")
	f.String("kv-listen", cfg.KVListen, "KV connector address")
	f.String("advertise", "", "host that others dial, when it is not the listen host")
	f.String("device", cfg.Device, "auto, cpu or cuda")
	f.Int("threads", 0, "CPU threads; 0: all cores")
	f.Int("block-tokens", cfg.BlockTokens, "positions a KV block, 1 to 256; best 16, or a divisor or multiple of it")
	f.Int("blocks", 0, "blocks of the KV pool; 0: from --kv-memory")
	f.String("kv-memory", cfg.KVMemory.String(), "size of the KV pool; auto: 256MiB on the CPU, what --gpu-memory leaves on a GPU")
	f.Float64("gpu-memory", cfg.GPUMemory, "part of the GPU's memory that this process takes in all")
	f.Bool("batch-invariant", false, batchInvariantHelp)
	f.String("kv-cache-dtype", cfg.KVCacheDType, kvCacheDTypeHelp)
	f.String("dtype", cfg.DType, dtypeHelp)
	f.String("quantization", cfg.Quantization, quantizationHelp)
	f.Bool("drained", false, "start drained: it gets no work before xpyd undrain ID")
	f.String("log-level", cfg.Log.Level, "debug, info, warn or error")
	f.String("log-format", cfg.Log.Format, "text or json")
	keys := map[string]string{
		"drained":   "drained",
		"join-file": "join_file", "trust-everyone": "trust_everyone", "model": "model", "served-name": "served_name", "id": "id", "listen": "listen",
		"kv-listen": "kv_listen", "advertise": "advertise", "device": "device", "threads": "threads",
		"block-tokens": "block_tokens", "blocks": "blocks", "kv-memory": "kv_memory", "gpu-memory": "gpu_memory",
		"batch-invariant": "batch_invariant", "kv-cache-dtype": "kv_cache_dtype", "quantization": "quantization", "dtype": "dtype",
		"log-level": "log.level", "log-format": "log.format",
	}
	kvFlags(f, keys, "kv.", &cfg.KV)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		sources := config.Sources{}
		if err := config.Load(&cfg, config.Options{File: file, Environ: os.Environ(), Flags: f, EnvAllow: foreignEnv, FlagKeys: keys, Sources: sources}); err != nil {
			return usageError{err}
		}
		if printConfig {
			return config.Print(cmd.OutOrStdout(), &cfg)
		}
		joined, err := readJoining(cmd.Context(), cfg.Join, cfg.JoinFile)
		if errors.Is(err, context.Canceled) { // stopped while nobody has written into a pipe
			return nil
		}
		if err != nil {
			return wrongSetting(sources, err)
		}
		if err := answersWhom(&cfg, &joined); err != nil {
			return usageError{err}
		}
		return wrongSetting(sources, runWorker(cmd.Context(), cfg, &joined, cmd.ErrOrStderr()))
	}
	return cmd
}

// wrongSetting makes bad configuration of an error that names a key: of what this
// machine or the model does not allow.
func wrongSetting(sources config.Sources, err error) error {
	var e *config.KeyError
	if !errors.As(err, &e) {
		return err
	}
	return usageError{sources.Locate(e)}
}

// What these settings cost, in a line each.
const (
	batchInvariantHelp = "the same tokens whatever the batch, the chunks or the split; costs a GPU some speed, and is always so on the CPU"

	dtypeHelp        = "auto (fp16 for checkpoints that say torch_dtype float16, else bf16), bf16 or fp16: weights, activations and KV on a GPU. Workers that differ are not paired unless kv.convert allows it"
	quantizationHelp = "auto (as the checkpoint is), none or fp8 (E4M3, a scale a channel, made when loading; half the memory, faster, small errors): the weights of the layers, on a GPU"
	kvCacheDTypeHelp = "auto (as --dtype), bf16 or fp8 (E4M3, a scale a row: half the memory, faster decoding, small errors); a GPU only. Workers that differ are not paired unless kv.convert allows it"
)

// foreignEnv are XPYD_ variables that belong to other commands, or to the CUDA
// library's search.
var foreignEnv = []string{"XPYD_DATA", "XPYD_ADMIN*", "XPYD_NATS_PASSWORD", "XPYD_CUDA_*"}

// linked and staged are the ways between GPUs that do not reach each other's memory.
func linked(base kvconn.Transport, ours, theirs kernels.Linker, l kvlayout.Layout) kvconn.Transport {
	return nccl.New(base, ours, theirs, l, nccl.DefaultRing())
}

func staged(ours, theirs kernels.HostMover, l kvlayout.Layout) (kvconn.Transport, error) {
	return pinned.New(ours, theirs, l, pinned.DefaultRing())
}

// runWorker runs until ctx ends, the parent goes away, or a listener fails.
func runWorker(ctx context.Context, cfg worker.Config, joined *joining, stderr io.Writer) error {
	log, flush := newLogger(stderr, cfg.Log.Level, cfg.Log.Format)
	defer flush()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	gone, err := supervise.ParentGone(ctx)
	if err != nil {
		return err
	}
	tcfg := tcp.DefaultConfig()
	if tcfg.TLS, err = fleetTLS(cfg.Fleet.TLSCert, cfg.Fleet.TLSKey, cfg.Fleet.TLSCA, log); err != nil {
		return err
	}
	transport, err := tcp.New(tcfg)
	if err != nil {
		return err
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(buildInfo())
	deps := worker.Deps{Log: log, Registry: reg, TLS: tcfg.TLS,
		Transport: transport, Device: cudaipc.New, Linked: linked, Pinned: staged, Build: build(), Progress: progress(stderr)}
	ring, err := joined.ring()
	if err != nil {
		return err
	}
	cfg.Fleet.URL, deps.NATS, deps.Ring = joined.URL, ring, ring
	if cfg.TrustEveryone {
		deps.Ring = nil
		log.Warn("trust_everyone: " + trustMeans)
	}
	if joined.open {
		log.Warn("everybody on this machine can read the fleet's secret: run `chmod 600 " + joined.file + "`")
	}
	if local, err := shm.New(); err != nil {
		deps.NoLocal = err
	} else {
		deps.Local = local
	}
	w, err := worker.Start(ctx, cfg, deps)
	if err != nil && ctx.Err() != nil {
		log.Info("stopped while starting", "error", err)
		return nil
	}
	if err != nil {
		return err
	}
	if joined.URL == "" {
		log.Info("in no fleet: no router finds this worker, as its join line names no NATS")
	}
	hup := make(chan os.Signal, 1) // SIGHUP must not end a worker's requests
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	endFollow := followJoin(w, joined, ring, hup, log)
	var failure error
	drain := cfg.DrainTimeout
	select {
	case <-ctx.Done():
		log.Info("draining", "timeout", drain)
	case <-gone:
		failure, drain = fmt.Errorf("the supervising process is gone"), time.Second
	case failure = <-w.Failed():
	}
	endFollow()
	// One second more than the drain: what is left then is ended by force.
	stop, done := draining(ctx, drain+time.Second)
	defer done()
	if err := w.Close(stop); err != nil {
		log.Warn("shutdown was not clean", "error", err)
	}
	return failure
}

// fleetTLS reads the files of mutual TLS between members; nil without them.
func fleetTLS(cert, key, ca string, log *slog.Logger) (*trust.TLS, error) {
	t, err := trust.NewTLS(cert, key, ca, log)
	if wrong := (*trust.TLSError)(nil); errors.As(err, &wrong) {
		err = &config.KeyError{Key: "fleet." + wrong.Key, Msg: wrong.Error()}
	}
	return t, err
}

// followJoin has the worker's join file in force as it is, until end is called. On
// SIGHUP it looks at once; there is nothing else to reload.
func followJoin(w *worker.Worker, joined *joining, ring *trust.Ring, hup <-chan os.Signal, log *slog.Logger) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		joined.follow(ctx, hup, log, func(next trust.Join) error {
			if err := ring.Set(next.Secrets...); err != nil {
				return err
			}
			return w.Rejoin(next.URL)
		})
	}()
	return func() {
		cancel()
		<-done
	}
}

// newLogger makes the process's log. Lines of single requests are written in
// batches, and of any other message only so many a minute; flush writes the last.
func newLogger(w io.Writer, level, format string) (log *slog.Logger, flush func()) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l = slog.LevelInfo // validated before
	}
	b := logbuf.New(w)
	o := &slog.HandlerOptions{Level: l}
	var h slog.Handler = slog.NewTextHandler(b, o)
	if format == "json" {
		h = slog.NewJSONHandler(b, o)
	}
	limit := logbuf.Limit(logbuf.Handler(h, b, "request"), "request", "audit")
	return slog.New(limit.Handler()), func() {
		limit.Close()
		_ = b.Flush() // nobody is left to tell
	}
}

// progress shows long work, at most a line a second; short work is not shown.
func progress(w io.Writer) func(model.Progress) {
	last := time.Now()
	return func(p model.Progress) {
		if now := time.Now(); now.Sub(last) >= time.Second {
			last = now
			fmt.Fprintf(w, "%s %s: %d of %d MiB (%d%%)\n", p.Phase, p.What, p.Done>>20, p.Total>>20, 100*p.Done/max(p.Total, 1))
		}
	}
}
