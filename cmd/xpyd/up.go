package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpustat"
	"github.com/xpyd/xpyd/internal/handover"
	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/internal/supervise"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/worker"
)

// upConfig is `xpyd up`: a router and the workers it starts.
type upConfig struct {
	RouterConfig
	Prefill        int    `key:"prefill"` // workers of each role
	Decode         int    `key:"decode"`
	TensorParallel ranks  `key:"tensor_parallel"`
	GPUs           string `key:"gpus"` // one for each rank of a worker: "all", a number, or a list; "": all workers share one
	worker.Compute        // for each worker, except gpu_memory, which those on one GPU share
	worker.Promises
	KV worker.KV `key:"kv"` // for each worker, which has its own folder in ssd_dir
}

const maxWorkers = 64 // for each role, on one machine

// Validate checks what the router's and the workers' own checks do not.
func (c *upConfig) Validate() error {
	for key, n := range map[string]int{"prefill": c.Prefill, "decode": c.Decode} {
		if n < 1 || n > maxWorkers {
			return config.Bad(key, "%d is not in 1..%d", n, maxWorkers)
		}
	}
	w := c.workers()
	w.GPUMemory = c.GPUMemory
	errs := []error{c.RouterConfig.Validate(), w.Validate(), c.validGPUs()}
	for _, n := range []int{c.TensorParallel.Prefill, c.TensorParallel.Decode} {
		if w.TensorParallel = n; w.Validate() != nil {
			errs[1] = w.Validate()
		}
	}
	return errors.Join(errs...)
}

// workers returns the settings that its workers share.
func (c *upConfig) workers() worker.Config {
	w := workerDefaults(fleet.Prefill)
	w.TrustEveryone, w.Compute, w.Promises, w.KV, w.Log = c.TrustEveryone, c.Compute, c.Promises, c.KV, c.Log
	w.Fleet.TLSCert, w.Fleet.TLSKey, w.Fleet.TLSCA = c.Fleet.TLSCert, c.Fleet.TLSKey, c.Fleet.TLSCA
	if c.GPUs == "" {
		w.GPUMemory /= float64(c.Prefill + c.Decode)
	}
	return w
}

// environ is each worker's environment: the settings of workers, and this process's other
// variables.
func (c *upConfig) environ(environ []string) ([]string, error) {
	unset, set := workerDefaults(fleet.Prefill), c.workers()
	vars, err := config.Environ(&unset, &set)
	return append(childEnv(environ), vars...), err
}

func newUp() *cobra.Command {
	w := workerDefaults(fleet.Prefill)
	def := upConfig{RouterConfig: defaultRouterConfig(), Prefill: 1, Decode: 1, TensorParallel: ranks{1, 1}, Compute: w.Compute, KV: w.KV}
	def.Fleet.Listen = "127.0.0.1:0"
	def.Log.Level = "warn"
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start a whole xPyD on this machine: router, prefill and decode workers",
		Long: `Start a router with an embedded NATS server, and prefill and decode workers as supervised
processes. It prints "ready URL" once a request has gone through prefill, push and decode;
if --device auto found no GPU, it says so on standard error before that. SIGHUP reloads
limits and policy; Ctrl-C drains; a second Ctrl-C stops at once. /dashboard on the admin
address shows the fleet in a browser; sign in with the text of admin-token in --data, or
of admin-token-ro, which only reads.`,
		Example: "  xpyd up\n  xpyd up --upgrade ./xpyd-new          this one takes over from the running one, without an interruption\n  xpyd up --prefill 2 --decode 2 --listen 127.0.0.1:9000 --admin 127.0.0.1:9001\n  xpyd up --gpus all --model hf:Qwen/Qwen3-8B          a worker on every GPU, half of them prefill\n  xpyd up --model hf:HuggingFaceTB/SmolLM2-135M-Instruct\n  curl http://127.0.0.1:8000/v1/completions -d '{\"model\":\"stories260k\",\"prompt\":\"Once upon a time\",\"max_tokens\":100,\"stream\":true}'",
	}
	f := cmd.Flags()
	f.Int("prefill", def.Prefill, "prefill workers; with --gpus by default half of them")
	f.Int("decode", def.Decode, "decode workers; with --gpus by default the rest")
	f.String("gpus", "", gpusHelp)
	f.String("tensor-parallel", def.TensorParallel.String(), "ranks of each worker, with a GPU each, or P:D for prefill and decode workers")
	f.String("listen", def.Listen, "public address")
	f.String("admin", def.AdminListen, "admin address")
	f.Bool("trust-everyone", false, trustHelp)
	f.String("data", def.Data, dataHelp)
	f.String("nats", "", "URL of an external NATS; default: an embedded server")
	computeFlags(f, &def.Compute, "its workers take, divided evenly among the first ones or, with --gpus, among those that share it")
	promiseFlags(f)
	kvFlags(f, &def.KV)
	logFlags(f, &def.Log)
	var upgrade upgradeCommand
	f.StringVar(&upgrade.binary, "upgrade", "", "have the xpyd of this path take over from the running one of --data, without an interruption")
	f.DurationVar(&upgrade.timeout, "upgrade-timeout", upgradeTimeout, "time for its workers to serve; after that the running one goes on")
	place := &handover.Place{}
	configured(cmd, ": the router's keys, and prefill, decode, model, …", &def, func(cmd *cobra.Command, cfg *upConfig, sources config.Sources, load func() (*upConfig, error)) error {
		if cmd.Flags().Changed("upgrade") {
			return upgrade.run(cmd, cfg.Data)
		}
		var placed *placing
		if err := unlessStopped(cmd.Context(), func() (err error) { // a driver can hang
			placed, err = cfg.place(thisMachine(gpustat.Cards), func(key string) bool { return sources[key] != "" })
			return err
		}); err != nil {
			return err
		}
		if err := cfg.fits(memfd.Available()); err != nil {
			return err
		}
		return runUp(cmd.Context(), place, cfg, placed, sources, load, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	heir(cmd, place)
	return cmd
}

// fits checks, before any worker starts, that the available bytes are enough for the host memory of
// all; each worker also checks for itself. Left to them are multiples of pools of unknown size, and
// machines with unknown memory (0 bytes).
func (c *upConfig) fits(available int64) error {
	workers, each := c.Prefill+c.Decode, c.KV.HostMemory.Of(int64(c.KVMemory))
	all := int64(workers) * each
	if available == 0 || all <= available {
		return nil
	}
	return config.Bad("kv.host_memory", "%s for each of %d workers is %s, and this machine has %s to give: take less, or start fewer",
		c.KV.HostMemory, workers, config.Size(all), config.Size(available>>20<<20))
}

// runUp runs until ctx ends, or until another one that took over has ended.
func runUp(ctx context.Context, place *handover.Place, cfg *upConfig, placed *placing, sources config.Sources, load func() (*upConfig, error), stdout, stderr io.Writer) error {
	log, level, flush := newLeveled(stderr, cfg.Log.Level, cfg.Log.Format)
	defer flush()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	from, err := inherit(place)
	if err != nil {
		return err
	}
	gone, err := place.Gone(ctx)
	if err != nil {
		return err
	}
	if from != nil {
		from.counts(cfg)
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	env, err := cfg.environ(os.Environ())
	if err != nil {
		return err
	}
	scale, kept := &scaler{}, &lastRoles{}
	up := newUpgrader(place, from, cfg, log)
	front, err := openFront(ctx, &cfg.RouterConfig, log, frontConfig{level: level, mounts: scale.mounts(), guard: up.mounts, coming: scale.coming, doing: up.doing, hands: scale,
		sources: sources, forget: true, from: from})
	if err != nil {
		return err
	}
	lastly(ctx, front.letGo)
	endReloads := front.reloading(&cfg.RouterConfig, func() (*RouterConfig, error) {
		next, err := load()
		placed.bound(&next.RouterConfig)
		return &next.RouterConfig, err
	})
	output := &startOutput{w: stderr, held: map[string][]byte{}}
	var seats supervise.Seats // nil, not a nil *placing
	if placed != nil {
		seats = placed
	}
	sup, err := supervise.New(supervise.Config{
		Seats: seats, Env: env, Output: output, Log: log,
		StopOrder: []string{"decode", "prefill"}, // a stream needs its decode worker, not its prefill worker
		Templates: map[string]func(int) supervise.Child{
			"prefill": cfg.child(exe, fleet.Prefill, front, kept),
			"decode":  cfg.child(exe, fleet.Decode, front, kept),
		},
		Doing:   useOf(front),
		Taken:   from.has,
		OnDying: front.dying,
	})
	if err != nil {
		endReloads()
		front.close(ctx)
		return err
	}
	scale.stays = func(id string) {
		if m := front.watcher.Snapshot().Get(id); m != nil {
			front.router.Members.Mark(id, m.Epoch, true)
		}
	}
	scale.sup.Store(sup)
	endPulse := background(func(ctx context.Context) { forwardPulse(ctx, front.watcher, sup, kept) }) // also while the workers drain
	limit := shutdownTimeout
	var next *handover.Successor
	err = startAll(ctx, cfg, sup, front, from, stdout, stderr)
	if err == nil {
		output.release()
		up.open(front, sup, from)
		select {
		case <-ctx.Done():
		case <-gone:
			limit = time.Second
		case next = <-up.took:
		}
	} else if output.mute(); ctx.Err() != nil {
		err = nil // stopped while starting
	}
	up.close()
	select {
	case next = <-up.took: // while this process was asked to end
	default:
	}
	if next != nil {
		if place.First() {
			defer passOn(ctx, next)()
		}
		up.leave(ctx, next)
	}
	endReloads()
	stop, done := draining(ctx, limit)
	defer done()
	// The router first, so that running requests can end; then the workers; the view of the fleet
	// and NATS last.
	if serr := front.router.Shutdown(stop); serr != nil {
		log.Warn("router did not drain", "error", serr)
	}
	front.router = nil
	front.lifeline.Close() // or it would report leaving workers as dead
	front.lifeline = nil
	if serr := sup.Stop(stop); serr != nil {
		log.Warn("workers did not stop", "error", serr)
	}
	endPulse()
	front.close(stop)
	if next != nil {
		err = up.retire(next)
	}
	return err
}

// startAll starts the workers and reports ready once a request has gone through.
func startAll(ctx context.Context, cfg *upConfig, sup *supervise.Supervisor, front *front, from *estate, stdout, stderr io.Writer) error {
	if err := from.avoid(ctx, front); err != nil {
		return err
	}
	_, err := sup.Scale(map[string]int{"prefill": cfg.Prefill, "decode": cfg.Decode}, nil)
	if err != nil {
		return err
	}
	if from == nil {
		err = waitReady(ctx, front, sup)
	} else if err = from.serving(ctx, front, sup); err == nil {
		err = from.take(ctx, front, &cfg.RouterConfig)
	}
	if err != nil {
		return err
	}
	there := front.watcher.Snapshot()
	if cfg.Device == "auto" && slices.ContainsFunc(sup.Status(), func(s supervise.Status) bool { return onCPU(there.Get(s.Name)) }) {
		fmt.Fprintln(stderr, "device auto: on the CPU, as no GPU can be used (--log-level info says why)")
	}
	if from != nil {
		fmt.Fprintf(stderr, "xpyd %s has taken over from %s\n", build(), from.Build)
	}
	if _, err = fmt.Fprintf(stdout, "ready %s\n", front.url(&cfg.RouterConfig)); err != nil {
		return err
	}
	if from == nil && slices.ContainsFunc(there.Members, func(m fleet.Member) bool { return len(m.Devices) > 0 }) {
		fmt.Fprint(stderr, cfg.hint(thisMachine(gpustat.Cards)))
	}
	return nil
}

// settingLine matches a worker's error about a setting: where it was set (the flag or variable, by
// `up`), the key, unless the flag says it, and what is wrong with it.
var settingLine = regexp.MustCompile(`^(?:(?:(--[a-z-]+)|XPYD_[A-Z_]+): )?(.*)$`)

// keyed matches a key and what is wrong with its value.
var keyed = regexp.MustCompile(`^([a-z_]+(?:\.[a-z_]+)*): (.*)$`)

// settingOf returns the key that a worker's error about a setting is about, and the rest; "": none.
func settingOf(line string) (key, msg string) {
	m := settingLine.FindStringSubmatch(line)
	if m == nil {
		return "", ""
	}
	if flag := m[1]; flag != "" {
		if key := flagKey(strings.TrimPrefix(flag, "--")); config.SaysKey(flag, key) {
			return key, m[2]
		}
	}
	if m = keyed.FindStringSubmatch(m[2]); m == nil {
		return "", ""
	}
	return m[1], m[2]
}

// startError returns why a worker did not start; a *config.KeyError if the worker found a setting
// wrong.
func startError(s *supervise.Status) error {
	if s.LastLine == "" {
		return &supervise.StartError{Status: *s}
	}
	said := strings.TrimPrefix(s.LastLine, "xpyd: ")
	if s.Exit != nil && s.Exit.Code == exitUsage {
		if key, msg := settingOf(said); key != "" {
			return config.Bad(key, "%s: %s", s.Name, msg)
		}
	}
	return fmt.Errorf("%s: %s", s.Name, said)
}

// startOutput passes the children's lines on, but holds back each one's last line until all have
// started: when a start fails, that line is the error, and must be printed once.
type startOutput struct {
	mu   sync.Mutex
	w    io.Writer
	held map[string][]byte // by the name that begins a line; nil once released
	over bool              // nothing more is printed
}

// Write takes one line.
func (o *startOutput) Write(line []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over {
		return len(line), nil
	}
	if o.held == nil {
		return o.w.Write(line)
	}
	name, _, _ := strings.Cut(string(line), " ")
	last := o.held[name]
	o.held[name] = bytes.Clone(line)
	_, err := o.w.Write(last)
	return len(line), err
}

// mute drops what is held back and all that comes: the start has failed, and a child that starts
// once more would say why again.
func (o *startOutput) mute() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.over = true
}

// release prints everything held back.
func (o *startOutput) release() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, line := range o.held {
		_, _ = o.w.Write(line) // nobody is left to report to
	}
	o.held = nil
}

// waitReady waits until all workers have been ready, and the router's probe has gone through a whole
// pair.
func waitReady(ctx context.Context, front *front, sup *supervise.Supervisor) error {
	if err := sup.WaitReady(ctx); err != nil {
		var start *supervise.StartError
		if errors.As(err, &start) {
			err = startError(&start.Status)
		}
		return err
	}
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

// child describes the i-th worker of a role; settings that it shares are in its environment. It is
// ready when the fleet knows it.
func (c *upConfig) child(exe string, role fleet.Role, front *front, kept *lastRoles) func(int) supervise.Child {
	w, r := front.watcher, front.router
	drained := func(id string) bool { return r.Members.DrainAsked(id) }
	return func(i int) supervise.Child {
		id := fmt.Sprintf("%s-%d", role, i)
		args := []string{string(role), "--id", id, "--join-file", front.joinFile}
		if n := c.TensorParallel.of(role); n != 1 {
			args = append(args, "--tensor-parallel", strconv.Itoa(n))
		}
		if c.KV.SSDDir != "" {
			args = append(args, "--kv-ssd-dir", filepath.Join(c.KV.SSDDir, id))
		}
		return supervise.Child{Name: id, Role: string(role), Path: exe, Args: args, Again: kept.restart(w, drained, id, args),
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

// childEnv is the parent's environment without its own settings, which a worker does not know.
func childEnv(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(kv string) bool {
		return strings.HasPrefix(kv, "XPYD_") && !strings.HasPrefix(kv, cuda.LibraryEnv+"=")
	})
}

// forwardPulse passes the workers' heartbeats to the supervisor, so that it can kill a frozen one:
// a stopped process (SIGSTOP) ignores everything but SIGKILL. It notes their roles in kept.
func forwardPulse(ctx context.Context, w *fleet.Watcher, sup *supervise.Supervisor, kept *lastRoles) {
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
			kept.see(m, s.PID)
			// While NATS is down no heartbeats arrive, and silence means nothing.
			if m.Heard.After(heard[s.Name]) || !link.Up {
				heard[s.Name] = m.Heard
				sup.Heartbeat(s.Name)
			}
		}
	}
}

// useOf returns what a worker of `up` does now: an order may have drained it or changed its role.
func useOf(front *front) func(supervise.Status) (string, supervise.Use) {
	w, r := front.watcher, front.router
	return func(s supervise.Status) (string, supervise.Use) {
		m := w.Snapshot().Get(s.Name)
		if m == nil || s.PID == 0 || m.PID != s.PID || m.State == fleet.Dead || m.State == fleet.Gone {
			if r.Members.DrainAsked(s.Name) {
				return s.Role, supervise.Idle
			}
			return s.Role, supervise.Coming
		}
		switch {
		case m.Draining || r.Members.DrainAsked(m.ID):
			return string(m.Role), supervise.Idle
		case !r.Members.Serves(m):
			return string(m.Role), supervise.Coming
		}
		return string(m.Role), supervise.Working
	}
}
