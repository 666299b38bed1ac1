package sim

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kvlayout"
)

// Worker is what all workers of a fleet are.
type Worker struct {
	Engine      engine.Config
	Blocks      int // of KV
	BlockTokens int
	Layers      int
	Steps       Steps
	// Overlaps: the device takes a step while one runs, as a GPU does. Else the host plans the
	// next when one has ended, which takes Host.
	Overlaps bool
	Host     time.Duration
}

// worker is an engine with its cache, on a device that computes nothing.
type worker struct {
	clock  *clock
	engine *engine.Driven
	cache  *kvcache.Cache
	device *device
	host   time.Duration
	member fleet.Member

	idle   bool     // nothing to do until poked
	calls  []*call  // that have not ended
	claims []*claim // decode's, first come first served
	link   link     // of what it sends

	gone  bool    // it has died, or has left
	alone bool    // its clock is its own; see lanes
	heard []heard // while it was alone
}

// call is a request at one worker.
type call struct {
	handle *engine.Handle
	token  func() // for each
	done   func(ok bool)
	lost   func() // its worker has died
}

func newWorker(c *clock, id string, role fleet.Role, cfg *Worker, noise *rand.Rand) (*worker, error) {
	w := &worker{clock: c, host: cfg.Host, idle: true}
	layout := kvlayout.Plain(cfg.Layers, 1, 2, cfg.BlockTokens, kvlayout.BF16)
	w.device = &device{clock: c, timer: Timer{Steps: cfg.Steps, Noise: noise}, blocks: cfg.Blocks, layout: layout,
		shape: arch.Config{Layers: cfg.Layers, Vocab: vocab, MaxPositions: cfg.Blocks * cfg.BlockTokens}}
	w.member = fleet.Member{State: fleet.Live, Instance: fleet.Instance{ID: id, Epoch: 1, Role: role, Dialect: fleet.Native, Model: modelName, ModelFingerprint: "sim",
		Layout: layout.Form(), Blocks: cfg.Blocks, MaxBatch: cfg.Engine.MaxRunning, KVEvents: "sim:1", Gap: cfg.Engine.Gap().Seconds()}}
	var err error
	if w.cache, err = kvcache.New(kvcache.Config{Blocks: cfg.Blocks, BlockTokens: cfg.BlockTokens, Fingerprint: "sim"}); err != nil {
		return nil, err
	}
	quiet, reg := slog.New(slog.DiscardHandler), prometheus.NewRegistry()
	if cfg.Overlaps {
		w.engine, err = engine.NewDriven(cfg.Engine, timed{w.device}, 2, w.cache, quiet, reg, c.time)
	} else {
		w.engine, err = engine.NewDriven(cfg.Engine, w.device, 1, w.cache, quiet, reg, c.time)
	}
	return w, err
}

const (
	modelName = "sim"
	vocab     = 1 << 24
)

// ask is a request that only its length ends.
func ask(prompt []int32) *engine.Request {
	return &engine.Request{ID: "r", Prompt: prompt, IgnoreEOS: true, Sampling: engine.Sampling{TopP: 1}, Logprobs: -1, PromptLogprobs: -1}
}

// submit gives the engine a request.
func (w *worker) submit(r *engine.Request, c *call) error {
	h, err := w.engine.Submit(context.Background(), r)
	if err != nil {
		return err
	}
	c.handle = h
	w.calls = append(w.calls, c)
	w.poke()
	return nil
}

// poke has an engine that sleeps look again.
func (w *worker) poke() {
	if w.idle {
		w.idle = false
		w.clock.after(0, func() { w.turn(false) }) // who pokes may be in the midst of something
	}
}

func (w *worker) turn(lingered bool) {
	if w.gone { // nobody drives a dead one
		return
	}
	wait, linger := w.engine.Turn(lingered)
	w.collect()
	switch wait {
	case engine.Landing:
		w.device.landed(w.land)
	case engine.Linger:
		w.clock.after(linger, func() { w.turn(true) })
	case engine.Idle:
		w.idle = true
	}
}

// land handles the end of a step.
func (w *worker) land() {
	if w.gone {
		return
	}
	w.engine.Settle()
	w.collect()
	if w.host == 0 {
		w.turn(false)
		return
	}
	w.clock.after(w.host, func() { w.turn(false) })
}

// collect hands out what requests have got, and looks whether the freed blocks do for a claim.
func (w *worker) collect() {
	calls := w.calls
	w.calls = w.calls[:0:0]
	kept := calls[:0]
	for _, c := range calls {
		if !w.read(c) {
			kept = append(kept, c)
		}
	}
	w.calls = append(kept, w.calls...) // those that came meanwhile
	w.reserve()
}

// read reports whether the call has ended.
func (w *worker) read(c *call) bool {
	for {
		events, err := w.engine.Events(c.handle)
		for range events {
			c.token()
		}
		if err != nil {
			c.done(errors.Is(err, io.EOF))
			return true
		}
		if len(events) == 0 {
			return false
		}
	}
}

// beat is what a heartbeat says.
func (w *worker) beat() {
	s := w.engine.Stats()
	w.member.Load = fleet.Load{Running: s.Running, Waiting: s.Waiting, QueuedTokens: s.QueuedTokens, KVUsed: s.KVUsed, Steps: fleet.Steps(s.Steps)}
}
