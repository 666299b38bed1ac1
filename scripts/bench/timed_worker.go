package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/shm"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/scripts/bench/timed"
	"github.com/xpyd/xpyd/worker"
)

// timedToken is what a timed device draws: text in the tokenizer of stories260k.
const timedToken = 300

// timedWorker is a worker process on a timed device.
type timedWorker struct {
	id, role, join, model, table string
	slow                         float64 // times as long as in the table
	seed                         uint64  // of the noise of steps
}

// argv starts it as a process: this program's own.
func (o *timedWorker) argv(self string) []string {
	return []string{self, "timed", "-id", o.id, "-role", o.role, "-join", o.join, "-model", o.model, "-table", o.table, "-slow", fmt.Sprint(o.slow), "-seed", fmt.Sprint(o.seed)}
}

// timedConfig are the settings of a worker whose device is like a table's, but slower. The times that its
// engine aims at are as much longer.
func timedConfig(role fleet.Role, t *steptable.Table, slow float64) worker.Config {
	cfg := worker.DefaultConfig(role)
	cfg.Device, cfg.Threads = "cpu", 1 // of which the pool is used
	cfg.Blocks, cfg.BlockTokens, cfg.MaxBatch, cfg.StepTokens = t.About.Blocks, t.About.BlockTokens, t.About.MaxBatch, t.About.StepTokens
	for _, d := range []*time.Duration{&cfg.MaxStepTime, &cfg.QueueTime, &cfg.TicketWait, &cfg.ReserveWait} {
		*d = time.Duration(float64(*d) * slow)
	}
	cfg.KV.Peers = "off" // the twin has none
	return cfg
}

// serveTimed serves as a worker until ctx ends, and says when it is up.
func serveTimed(ctx context.Context, args []string, say io.Writer) error {
	var o timedWorker
	f := flag.NewFlagSet("timed", flag.ContinueOnError)
	f.StringVar(&o.id, "id", "", "name in the fleet")
	f.StringVar(&o.role, "role", "", "prefill or decode")
	f.StringVar(&o.join, "join", "", "the join file")
	f.StringVar(&o.model, "model", "", "of timed.Shape")
	f.StringVar(&o.table, "table", "", "a step table")
	f.Float64Var(&o.slow, "slow", 1, "steps take so many times as long")
	f.Uint64Var(&o.seed, "seed", 1, "of the noise of steps")
	if err := f.Parse(args); err != nil {
		return err
	}
	w, d, err := o.start(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintln(say, "up "+w.URL())
	select {
	case <-ctx.Done():
	case err = <-w.Failed():
	}
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if closed := w.Close(closing); err == nil {
		err = closed
	}
	fmt.Fprintf(say, "%s: %v\n", o.id, d.Late())
	return err
}

func (o *timedWorker) start(ctx context.Context) (*worker.Worker, *timed.Device, error) {
	t, err := steptable.Open(o.table)
	if err != nil {
		return nil, nil, err
	}
	text, err := os.ReadFile(o.join)
	if err != nil {
		return nil, nil, err
	}
	line, err := trust.ParseJoin(string(text))
	if err != nil {
		return nil, nil, err
	}
	ring, err := trust.NewRing(line.Secrets...)
	if err != nil {
		return nil, nil, err
	}
	cfg := timedConfig(fleet.Role(o.role), t, o.slow)
	cfg.ID, cfg.Model, cfg.Fleet.URL = o.id, o.model, line.URL
	var d *timed.Device
	timer := sim.Timer{Steps: sim.Slowed{Steps: t, Times: o.slow}, Noise: rand.New(rand.NewPCG(o.seed, 1))}
	w, err := worker.Start(ctx, cfg, worker.Deps{Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})), Registry: prometheus.NewRegistry(),
		Ways: []way.Kind{shm.Way(""), way.Network(tcp.New(nil))}, Build: "timed", Ring: ring, NATS: ring,
		Backend: func(b kernels.Backend) kernels.Backend {
			d = timed.New(b.(timed.Pool), "timed like "+t.About.Device, timer, timedToken)
			return d
		}})
	return w, d, err
}
