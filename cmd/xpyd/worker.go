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
	"github.com/xpyd/xpyd/internal/supervise"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/worker"
)

func newWorker(role fleet.Role) *cobra.Command {
	def := workerDefaults(role)
	cmd := &cobra.Command{
		Use:   fmt.Sprintf("%s (--join-file FILE [--model M] | --config FILE)", role),
		Short: fmt.Sprintf("Run one %s worker", role),
		Long: fmt.Sprintf(`Run one %s worker. It loads the model, joins the fleet on NATS, and serves HTTP on a
port of its own; plain OpenAI requests work there too. The join file is what `+"`xpyd router`"+`
and `+"`xpyd up`"+` keep in their data folder as join-url. It has a secret, as has XPYD_JOIN, which
takes the same text. Changes of the file take effect without a restart. If it has
"#SECRET" alone, the worker is in no fleet and answers those who have the secret, as
behind a proxy made for vLLM.`, role),
		Example: fmt.Sprintf("  xpyd %[1]s --join-file /run/user/1000/xpyd/join-url --model hf:Qwen/Qwen3-0.6B\n  xpyd %[1]s --join-file … --kv-host-memory 16GiB --kv-ssd-dir /var/cache/xpyd/%[1]s-0 --kv-ssd-size 200GiB\n  xpyd %[1]s --config configs/samples/%[1]s.yaml --join-file /run/user/1000/xpyd/join-url\n  xpyd %[1]s --config %[1]s.yaml --print-config", role),
	}
	f := cmd.Flags()
	f.String("join-file", "", joinFileHelp)
	f.Bool("trust-everyone", false, trustHelp)
	f.Int("tensor-parallel", def.TensorParallel, "ranks among which the model is divided, in this process, each with a GPU of its own, or on the CPU with its share of the threads")
	f.String("id", "", "name in the fleet; default: the role and a random suffix")
	f.String("listen", def.Listen, "HTTP address")
	f.String("kv-listen", def.KVListen, "KV connector address")
	f.String("advertise", "", "host that others dial, when it is not the listen host")
	f.Int("blocks", 0, "blocks of the KV pool; 0: from --kv-memory")
	f.Bool("drained", false, "start drained: no work before xpyd undrain ID")
	computeFlags(f, &def.Compute, "this process takes")
	promiseFlags(f)
	kvFlags(f, &def.KV)
	logFlags(f, &def.Log)
	configured(cmd, "; see configs/samples", &def, func(cmd *cobra.Command, cfg *worker.Config, _ config.Sources, _ func() (*worker.Config, error)) error {
		joined, err := readJoining(cmd.Context(), cfg.Join, cfg.JoinFile)
		if err != nil {
			return err
		}
		if err := answersWhom(cfg, &joined); err != nil {
			return usageError{err}
		}
		return runWorker(cmd.Context(), *cfg, &joined, cmd.ErrOrStderr())
	})
	return cmd
}

// runWorker runs until ctx ends, the parent goes away, or a listener fails.
func runWorker(ctx context.Context, cfg worker.Config, joined *joining, stderr io.Writer) error {
	log, level, flush := newLeveled(stderr, cfg.Log.Level, cfg.Log.Format)
	defer flush()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	gone, err := supervise.ParentGone(ctx)
	if err != nil {
		return err
	}
	creds, err := fleetTLS(cfg.Fleet.TLSCert, cfg.Fleet.TLSKey, cfg.Fleet.TLSCA, log)
	if err != nil {
		return err
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(buildInfo())
	deps := worker.Deps{Log: log, Level: level, Registry: reg, TLS: creds,
		Ways: ways(tcp.New(creds), &cfg.KV), Build: build(), Progress: progress(stderr)}
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
	w, err := worker.Start(ctx, cfg, deps)
	switch {
	case err != nil && ctx.Err() != nil:
		log.Info("stopped while starting", "error", err)
		return nil
	case err != nil:
		return err
	case joined.URL == "":
		log.Info("in no fleet: the join line names no NATS, so no router finds this worker")
	}
	hup := make(chan os.Signal, 1) // SIGHUP must not end a worker's requests
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	endFollow := background(func(ctx context.Context) { // SIGHUP makes it check at once
		joined.follow(ctx, hup, log, func(next trust.Join) error {
			if err := ring.Set(next.Secrets...); err != nil {
				return err
			}
			return w.Rejoin(next.URL)
		})
	})
	var failure error
	drain := cfg.DrainTimeout
	select {
	case <-ctx.Done():
		log.Info("draining", "timeout", drain)
	case <-gone:
		failure, drain = fmt.Errorf("the supervising process is gone"), time.Second
	case failure = <-w.Failed():
		if errors.Is(failure, kernels.ErrHung) { // nothing that runs here can end well
			drain = time.Second
		}
	}
	endFollow()
	// A second after the drain the rest is ended by force.
	stop, done := draining(ctx, drain+time.Second)
	defer done()
	if err := w.Close(stop); err != nil {
		log.Warn("shutdown was not clean", "error", err)
	}
	return failure
}

// fleetTLS reads the files of mutual TLS between members; nil without files.
func fleetTLS(cert, key, ca string, log *slog.Logger) (*trust.TLS, error) {
	t, err := trust.NewTLS(cert, key, ca, log)
	return t, config.Within("fleet", err)
}

// newLogger makes the process's log. Lines about single requests are written in batches, other
// messages are limited per minute. flush writes the rest.
func newLogger(w io.Writer, level, format string) (log *slog.Logger, flush func()) {
	log, _, flush = newLeveled(w, level, format)
	return log, flush
}

// newLeveled is newLogger, of a log whose level can be changed while it runs.
func newLeveled(w io.Writer, level, format string) (log *slog.Logger, l *slog.LevelVar, flush func()) {
	l = &slog.LevelVar{}
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l.Set(slog.LevelInfo) // validated before
	}
	b := logbuf.New(w)
	o := &slog.HandlerOptions{Level: l}
	var h slog.Handler = slog.NewTextHandler(b, o)
	if format == "json" {
		h = slog.NewJSONHandler(b, o)
	}
	limit := logbuf.Limit(logbuf.Handler(h, b, "request"), "request", "audit")
	return slog.New(limit.Handler()), l, func() {
		limit.Close()
		_ = b.Flush() // nobody is left to tell
	}
}
