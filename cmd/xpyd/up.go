package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/internal/supervise"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// upConfig is `xpyd up`: a router and the workers it starts.
type upConfig struct {
	RouterConfig
	Prefill        int             `koanf:"prefill"` // workers of each role
	Decode         int             `koanf:"decode"`
	Model          string          `koanf:"model"`
	Device         string          `koanf:"device"`
	Threads        int             `koanf:"threads"`
	BlockTokens    int             `koanf:"block_tokens"`
	KVMemory       config.AutoSize `koanf:"kv_memory"`  // of each worker
	GPUMemory      float64         `koanf:"gpu_memory"` // part of the GPU's memory for all workers together
	BatchInvariant bool            `koanf:"batch_invariant"`
	DType          string          `koanf:"dtype"`          // auto, bf16 or fp16
	KVCacheDType   string          `koanf:"kv_cache_dtype"` // auto, bf16 or fp8
	Quantization   string          `koanf:"quantization"`   // auto, none or fp8
	UpKV
}

const maxWorkers = 64 // of a role, on one machine

// Validate checks what the router's and the workers' own checks do not.
func (c *upConfig) Validate() error {
	for key, n := range map[string]int{"prefill": c.Prefill, "decode": c.Decode} {
		if n < 1 || n > maxWorkers {
			return &config.KeyError{Key: key, Msg: fmt.Sprintf("%d is not in 1..%d", n, maxWorkers)}
		}
	}
	w := workerDefaults(fleet.Prefill)
	w.Device, w.Threads, w.BlockTokens, w.KVMemory, w.GPUMemory, w.Log = c.Device, c.Threads, c.BlockTokens, c.KVMemory, c.GPUMemory, c.Log
	w.BatchInvariant, w.DType, w.KVCacheDType, w.Quantization = c.BatchInvariant, c.DType, c.KVCacheDType, c.Quantization
	c.set(&w.KV)
	return errors.Join(c.RouterConfig.Validate(), upKey(w.Validate()))
}

// newUp is `xpyd up`: a whole xPyD on this machine.
func newUp() *cobra.Command {
	wdef := workerDefaults(fleet.Prefill)
	def := upConfig{RouterConfig: defaultRouterConfig(), Prefill: 1, Decode: 1, Device: wdef.Device,
		BlockTokens: wdef.BlockTokens, KVMemory: wdef.KVMemory, GPUMemory: wdef.GPUMemory, DType: wdef.DType, KVCacheDType: wdef.KVCacheDType, Quantization: wdef.Quantization, UpKV: upKVOf(&wdef.KV)}
	def.Fleet.Listen = "127.0.0.1:0"
	def.Log.Level = "warn"
	var file string
	var printConfig bool
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start a whole xPyD on this machine: router, prefill and decode workers",
		Long: `Start a router with an embedded NATS server, and prefill and decode workers as
processes of their own, supervised. It prints "ready URL" once a request has
gone through prefill, push and decode, and before it, on standard error, that it
took the CPU where --device auto found no GPU to use. SIGHUP reloads limits and
policy; Ctrl-C drains; a second one stops at once. /dashboard on the admin address
shows the fleet in a browser; the password is what admin-token-ro in --data has, which
only reads, or admin-token.`,
		Example: "  xpyd up\n  xpyd up --prefill 2 --decode 2 --listen 127.0.0.1:9000 --admin 127.0.0.1:9001\n  xpyd up --model hf:HuggingFaceTB/SmolLM2-135M-Instruct\n  curl http://127.0.0.1:8000/v1/completions -d '{\"model\":\"stories260k\",\"prompt\":\"Once upon a time\",\"max_tokens\":100,\"stream\":true}'",
		Args:    cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVar(&file, "config", "", "YAML file: the router's keys, and prefill, decode, model, …")
	f.BoolVar(&printConfig, "print-config", false, "print the configuration in force and exit")
	f.Int("prefill", def.Prefill, "prefill workers")
	f.Int("decode", def.Decode, "decode workers")
	f.String("model", "", "a directory, a .gguf file or hf:OWNER/NAME; default: the embedded stories260k")
	f.String("listen", def.Listen, "public address")
	f.String("admin", def.AdminListen, "admin address")
	f.String("device", def.Device, "auto, cpu or cuda")
	f.Int("threads", 0, "CPU threads of each worker; 0: all cores")
	f.Int("block-tokens", def.BlockTokens, "positions a KV block, 1 to 256; best 16, or a divisor or multiple of it")
	f.String("kv-memory", def.KVMemory.String(), "size of each worker's KV pool; auto: 256MiB on the CPU, what --gpu-memory leaves on a GPU")
	f.Float64("gpu-memory", def.GPUMemory, "part of the GPU's memory that the workers take, divided evenly among those of the start")
	f.Bool("batch-invariant", false, batchInvariantHelp)
	f.String("kv-cache-dtype", def.KVCacheDType, kvCacheDTypeHelp)
	f.String("dtype", def.DType, dtypeHelp)
	f.String("quantization", def.Quantization, quantizationHelp)
	f.Bool("trust-everyone", false, trustHelp)
	f.String("data", def.Data, dataHelp)
	f.String("nats", "", "URL of an external NATS; default: an embedded server")
	f.String("log-level", def.Log.Level, "debug, info, warn or error")
	f.String("log-format", def.Log.Format, "text or json")
	keys := map[string]string{
		"prefill": "prefill", "decode": "decode", "model": "model", "listen": "listen", "admin": "admin_listen",
		"device": "device", "threads": "threads", "block-tokens": "block_tokens", "kv-memory": "kv_memory", "gpu-memory": "gpu_memory",
		"batch-invariant": "batch_invariant", "kv-cache-dtype": "kv_cache_dtype", "quantization": "quantization", "dtype": "dtype",
		"data": "data", "nats": "fleet.url", "trust-everyone": "trust_everyone", "log-level": "log.level", "log-format": "log.format",
	}
	kvFlags(f, keys, "kv_", &wdef.KV)
	load := func(sources config.Sources) (*upConfig, error) {
		cfg := def
		err := config.Load(&cfg, config.Options{File: file, Environ: os.Environ(), EnvAllow: foreignEnv, Flags: f, FlagKeys: keys, Sources: sources})
		return &cfg, err
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		sources := config.Sources{}
		cfg, err := load(sources)
		if err != nil {
			return usageError{err}
		}
		if printConfig {
			return config.Print(cmd.OutOrStdout(), cfg)
		}
		if err := cfg.fits(cfg.Prefill+cfg.Decode, int64(cfg.KVMemory), memfd.Available()); err != nil {
			return wrongSetting(sources, err)
		}
		reload := func() (*upConfig, error) { return load(nil) }
		return wrongSetting(sources, runUp(cmd.Context(), cfg, sources, reload, cmd.OutOrStdout(), cmd.ErrOrStderr()))
	}
	return cmd
}

// runUp runs until ctx ends.
func runUp(ctx context.Context, cfg *upConfig, sources config.Sources, load func() (*upConfig, error), stdout, stderr io.Writer) error {
	log, flush := newLogger(stderr, cfg.Log.Level, cfg.Log.Format)
	defer flush()
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	scale := &scaler{}
	front, err := openFront(ctx, &cfg.RouterConfig, log, frontConfig{mounts: scale.mounts(), coming: scale.coming, sources: sources, forget: true})
	if errors.Is(err, context.Canceled) { // stopped while nobody has written into a pipe
		return nil
	}
	if err != nil {
		return err
	}
	lastly(ctx, front.letGo)
	endReloads := front.reloading(&cfg.RouterConfig, func() (*RouterConfig, error) {
		next, err := load()
		return &next.RouterConfig, err
	})
	output := &startOutput{w: stderr, held: map[string][]byte{}}
	sup, err := supervise.New(supervise.Config{
		Env: slices.Concat(childEnv(os.Environ()), cfg.env(), cfg.Fleet.env()), Output: output, Log: log,
		StopOrder: []string{"decode", "prefill"}, // a stream needs its decode, nothing needs its prefill
		Templates: map[string]func(int) supervise.Child{
			"prefill": cfg.child(exe, fleet.Prefill, front),
			"decode":  cfg.child(exe, fleet.Decode, front),
		},
		Doing: doing(front),
	})
	if err != nil {
		endReloads()
		front.close(ctx)
		return err
	}
	scale.set(sup)
	pulseCtx, endPulse := context.WithCancel(context.WithoutCancel(ctx)) // the workers are watched while they drain, too
	pulse := make(chan struct{})
	go func() {
		defer close(pulse)
		forwardPulse(pulseCtx, front.watcher, sup)
	}()
	err = startAll(ctx, cfg, sup, front, stdout, stderr)
	if err == nil {
		output.release()
		<-ctx.Done()
	} else if ctx.Err() != nil {
		err = nil // stopped while starting: no failure
	}
	endReloads()
	stop, cancel := draining(ctx, shutdownTimeout)
	defer cancel()
	// The router first, so that running requests end with their workers still
	// there; then the workers; the fleet's view and NATS last.
	if serr := front.router.Shutdown(stop); serr != nil {
		log.Warn("router did not drain", "error", serr)
	}
	front.router = nil
	front.lifeline.Close() // or it would report the deaths of workers that leave
	front.lifeline = nil
	if serr := sup.Stop(stop); serr != nil {
		log.Warn("workers did not stop", "error", serr)
	}
	endPulse()
	<-pulse
	front.close(stop)
	return err
}

// startAll starts the workers and says ready once a request went through.
func startAll(ctx context.Context, cfg *upConfig, sup *supervise.Supervisor, front *front, stdout, stderr io.Writer) error {
	for role, n := range map[string]int{"prefill": cfg.Prefill, "decode": cfg.Decode} {
		if _, err := sup.Scale(role, n); err != nil {
			return err
		}
	}
	if err := sup.WaitReady(ctx); err != nil {
		var start *supervise.StartError
		if errors.As(err, &start) && start.Status.LastLine != "" { // as its own main put it
			err = startError(&start.Status)
		}
		return err
	}
	if err := waitReady(ctx, front); err != nil {
		return err
	}
	there := front.watcher.Snapshot()
	if cfg.Device == "auto" && slices.ContainsFunc(sup.Status(), func(s supervise.Status) bool { return onCPU(there.Get(s.Name)) }) {
		fmt.Fprintln(stderr, "device auto: on the CPU, as no GPU can be used (--log-level info says why)")
	}
	_, err := fmt.Fprintf(stdout, "ready %s\n", front.url(&cfg.RouterConfig))
	return err
}

// settingLine is what a worker's main says of a setting: where it was set, of `up`
// its own flag or environment, the key, and what is wrong with it.
var settingLine = regexp.MustCompile(`^(?:(?:--[a-z-]+|XPYD_[A-Z_]+): )?([a-z_]+(?:\.[a-z_]+)*): (.*)$`)

// startError is why a worker did not start: a *config.KeyError with `up`'s own
// name of the key, where the worker found a setting wrong.
func startError(s *supervise.Status) error {
	said := strings.TrimPrefix(s.LastLine, "xpyd: ")
	if s.Exit != nil && s.Exit.Code == exitUsage {
		if m := settingLine.FindStringSubmatch(said); m != nil {
			return &config.KeyError{Key: strings.Replace(m[1], "kv.", "kv_", 1), Msg: s.Name + ": " + m[2]}
		}
	}
	return fmt.Errorf("%s: %s", s.Name, said)
}

// startOutput passes the children's lines on, but keeps back the newest of
// each until all have started: when a start fails, that line is the error, and
// is printed once.
type startOutput struct {
	mu   sync.Mutex
	w    io.Writer
	held map[string][]byte // by the name that begins a line; nil once released
}

// Write takes one line.
func (o *startOutput) Write(line []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.held == nil {
		return o.w.Write(line)
	}
	name, _, _ := strings.Cut(string(line), " ")
	last := o.held[name]
	o.held[name] = bytes.Clone(line)
	_, err := o.w.Write(last)
	return len(line), err
}

// release lets go of everything.
func (o *startOutput) release() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, line := range o.held {
		_, _ = o.w.Write(line) // nobody is left to tell
	}
	o.held = nil
}

// waitReady polls the router until its probe went through a whole pair.
func waitReady(ctx context.Context, front *front) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !front.router.Ready() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

// child makes the i-th worker of a role. It is ready when the fleet knows it.
func (c *upConfig) child(exe string, role fleet.Role, front *front) func(int) supervise.Child {
	w := front.watcher
	return func(i int) supervise.Child {
		id := fmt.Sprintf("%s-%d", role, i)
		args := []string{string(role), "--id", id, "--device", c.Device, "--threads", strconv.Itoa(c.Threads),
			"--block-tokens", strconv.Itoa(c.BlockTokens), "--kv-memory", c.KVMemory.String(), "--gpu-memory", strconv.FormatFloat(c.GPUMemory/float64(c.Prefill+c.Decode), 'g', 4, 64),
			"--log-level", c.Log.Level, "--log-format", c.Log.Format}
		args = append(args, "--join-file", front.joinFile)
		if c.TrustEveryone {
			args = append(args, "--trust-everyone")
		}
		if c.BatchInvariant {
			args = append(args, "--batch-invariant")
		}
		if c.DType != "auto" {
			args = append(args, "--dtype", c.DType)
		}
		if c.Quantization != "auto" {
			args = append(args, "--quantization", c.Quantization)
		}
		if c.KVCacheDType != "auto" {
			args = append(args, "--kv-cache-dtype", c.KVCacheDType)
		}
		args = append(args, c.UpKV.args(id)...)
		if c.Model != "" {
			args = append(args, "--model", c.Model)
		}
		return supervise.Child{Name: id, Role: string(role), Path: exe, Args: args, Again: again(front, id, args),
			Ready: func(ctx context.Context, pid int) error {
				for s := w.Snapshot(); ; {
					if m := s.Get(id); m != nil && m.PID == pid && m.State == fleet.Live {
						return nil
					}
					var err error
					if s, err = w.Wait(ctx, s.Version); err != nil {
						return err
					}
				}
			}}
	}
}

// childEnv is the parent's environment less its own settings, which a worker
// does not know.
func childEnv(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(kv string) bool {
		return strings.HasPrefix(kv, "XPYD_") && !strings.HasPrefix(kv, cuda.LibraryEnv+"=")
	})
}

// forwardPulse tells the supervisor of the workers' heartbeats, so that it can
// kill one that stopped: a stopped process ignores everything but SIGKILL.
func forwardPulse(ctx context.Context, w *fleet.Watcher, sup *supervise.Supervisor) {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	heard := map[string]time.Time{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		link := w.Snapshot().Link
		for _, s := range sup.Status() {
			m := w.Snapshot().Get(s.Name)
			if m == nil || m.PID != s.PID {
				continue
			}
			// While NATS is away nobody can be heard, and silence means nothing.
			if m.Heard.After(heard[s.Name]) || !link.Up {
				heard[s.Name] = m.Heard
				sup.Heartbeat(s.Name)
			}
		}
	}
}
