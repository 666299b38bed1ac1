// Package engine runs requests on a backend. One loop goroutine owns the schedule: it takes in
// new requests (queue.go), admits them to the batch when memory allows (admit.go), plans a step
// of decoding sequences and prefill chunks (plan.go), describes it (step.go), runs it, if the
// backend can while the step before is still under way (flight.go), and delivers the tokens
// (deliver.go). Everyone else talks to it through Handles.
//
// A sequence is a list of tokens, some of which have KV rows. Decoding, prefill, recomputing after
// a preemption and going on behind tokens that another worker drew are one path: they differ only
// in how many rows are missing. Draws depend on seed, choice, position and the tokens so far, so
// scheduling never changes a result.
//
// Non-goals: text (callers decode tokens and look for stop strings), transport of KV rows
// (prefill and decode), and choosing a worker.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// Engine is a running loop. Make it with New, end it with Close.
type Engine struct {
	cfg      Config
	backend  kernels.Backend
	device   kernels.Launcher // the backend, for steps
	verifies bool             // the backend takes drafts
	holder   kernels.Holder   // the same, if its steps can wait for masks; else nil
	depth    int              // steps that may be under way
	cache    *kvcache.Cache
	log      *slog.Logger
	now      func() time.Time
	metrics  *metrics
	prompts  trace // of steps that carry a piece of one
	decodes  trace // of others

	vocab      int
	layers     int
	blockToks  int
	maxLen     int // prompt and output tokens
	wake       chan struct{}
	brought    atomic.Uint64 // prefixes that have come to their end; see arrive.go
	loopExited chan struct{}

	mu       sync.Mutex // guards the fields below, up to the loop's own
	inbox    []*Handle  // handles the loop must look at
	unseen   Stats      // Waiting and QueuedTokens of requests still in inbox
	queued   int        // requests submitted and not yet started
	orders   uint64     // arrival numbers given out
	closing  bool       // no more requests
	aborting bool       // end those there are
	stopped  bool       // the loop is gone
	load     Stats      // as of the last turn of the loop
	failure  error      // why Health is bad

	// The loop's own.
	waiting     []*sequence // by age, oldest first
	running     []*sequence // by age, oldest first
	taken       Stats       // the part of unseen that this turn has seen
	batch       []*sequence // of the step that is planned
	cut         []*sequence // that the last one was too large for
	walk        []*sequence
	behind      []*sequence // of the prompts that wait: those too late for their promise
	flights     []*flight   // steps under way, oldest first
	spare       *flight     // for reuse
	listsPrompt bool        // some prompt's log probabilities are asked for
	short       bool        // no more steps until those under way have freed memory
	settled     time.Time   // when the last step ended
	decoded     time.Time   // when the last one ended that carried what decodes
	pace        pacer
	deep        depth // of drafts; see speculate.go
	draftIDs    uint64
	asks        []Ask       // of the step that is planned
	asked       []*sequence // theirs
	chances     []chance    // theirs
	steps       Steps
	own         int           // requests begun and not ended with a promise of their own
	tpot        time.Duration // promised of the step that is planned; see strictest
	saved       time.Duration // of the promised mean gap, by short steps; see spend
	overrun     time.Duration // of what was foretold of prompts, by most of them; see shed.go
	longest     time.Duration // that the step that is planned may take; 0: any; see gap.go
	turns       turns         // of takeovers and prompts
	shortage    shortage      // of blocks
	expected    atomic.Int64  // until when, in ns of Unix time; see expect.go
	holding     time.Time     // since when the next step waits for a stream; zero: it does not
	holdNext    time.Time     // when one may
	ends        atomic.Int64  // when a device will have ended what was launched, in ns of Unix time
	takes       atomic.Int64  // ns of that the step launched last
	planned     int           // steps since RetractEvery last took its turn
	failures    int           // steps failed in a row
	said        time.Time     // when spoilt output was told of last
	unsaid      int           // requests that it has ended since
	live        int           // requests begun and not ended
	held        int           // ended PrefillOnly requests whose blocks wait for Release
}

// New checks that cache and backend agree, registers metrics and starts the loop. The engine
// becomes the cache's Notify receiver. The caller closes the backend, after Close.
func New(cfg Config, backend kernels.Backend, cache *kvcache.Cache, log *slog.Logger, reg prometheus.Registerer) (*Engine, error) {
	e, err := open(cfg, backend, cache, log, reg, time.Now)
	if err == nil {
		go e.loop()
	}
	return e, err
}

// open is New without the loop.
func open(cfg Config, backend kernels.Backend, cache *kvcache.Cache, log *slog.Logger, reg prometheus.Registerer, now func() time.Time) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	arch, layout := backend.Arch(), backend.Layout()
	if backend.Blocks() != cache.Blocks() || layout.BlockTokens != cache.BlockTokens() {
		return nil, fmt.Errorf("engine: backend has %d blocks of %d tokens, cache %d of %d",
			backend.Blocks(), layout.BlockTokens, cache.Blocks(), cache.BlockTokens())
	}
	cfg.EOS = slices.DeleteFunc(slices.Clone(cfg.EOS), func(id int32) bool {
		return id < 0 || int(id) >= arch.Vocab // never drawn, and no id to ban
	})
	e := &Engine{
		cfg: cfg, backend: backend, cache: cache, log: log, now: now,
		vocab: arch.Vocab, layers: arch.Layers, blockToks: layout.BlockTokens,
		maxLen:     min(arch.MaxPositions, cache.Blocks()*cache.BlockTokens()),
		wake:       make(chan struct{}, 1),
		loopExited: make(chan struct{}),
	}
	e.device, e.depth = launcherOf(backend)
	e.verifies = backend.Info().Verify
	e.holder, _ = e.device.(kernels.Holder)
	if cfg.MaxModelLen > 0 {
		e.maxLen = min(e.maxLen, cfg.MaxModelLen)
	}
	var err error
	if e.metrics, err = newMetrics(e, reg); err != nil {
		return nil, fmt.Errorf("engine: register metrics: %w", err)
	}
	cache.Notify(e.signal)
	cache.OnWait(e.signal)
	return e, nil
}

// MaxModelLen is the longest prompt plus output, in tokens.
func (e *Engine) MaxModelLen() int { return e.maxLen }

// MaxRunning is how many sequences one step carries.
func (e *Engine) MaxRunning() int { return e.cfg.MaxRunning }

// Gap is the time between tokens that steps keep to; 0: none.
func (e *Engine) Gap() time.Duration { return e.cfg.Gap() }

// Stats returns the current load.
func (e *Engine) Stats() Stats {
	kv := e.cache.Stats()
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.load
	s.Waiting += e.unseen.Waiting
	s.QueuedTokens += e.unseen.QueuedTokens
	s.KVUsed = float64(kv.Held+kv.Quarantined) / float64(kv.Blocks)
	return s
}

// Holders lists who holds blocks, for the ledger.
func (e *Engine) Holders() []kvcache.Holder { return e.cache.Holders() }

// Health returns nil, or after MaxFailures failed steps in a row the last failure, until a step
// succeeds.
func (e *Engine) Health() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.failure
}

// Close waits until queued and running requests have finished and PrefillOnly ones are released.
// When ctx ends first it aborts them with ErrClosed and returns the context's cause. It waits for
// the loop either way.
func (e *Engine) Close(ctx context.Context) error {
	e.mu.Lock()
	e.closing = true
	e.mu.Unlock()
	e.signal()
	select {
	case <-e.loopExited:
		return nil
	case <-ctx.Done():
	}
	e.mu.Lock()
	e.aborting = true
	e.mu.Unlock()
	e.signal()
	<-e.loopExited
	return fmt.Errorf("close engine: %w", context.Cause(ctx))
}

// loop turns until the engine is closed. With nothing to compute it sleeps until a handle, the
// cache or Close signals, or a prompt is too late.
func (e *Engine) loop() {
	defer close(e.loopExited)
	for {
		e.linger()
		e.intake()
		if e.leave() {
			e.cache.Prioritise(0, 0, time.Time{})
			return
		}
		if e.hold() {
			continue
		}
		if !e.turn() {
			e.sleep()
		}
	}
}

// leave reports whether the engine is closed and everything has ended. From then on handles give
// back their own blocks.
func (e *Engine) leave() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closing || e.live > 0 || len(e.flights) > 0 || len(e.inbox) > 0 || e.held > 0 && !e.aborting {
		return false
	}
	e.stopped = true
	e.load, e.unseen = Stats{}, Stats{}
	return true
}

// publish updates what Stats returns.
func (e *Engine) publish() {
	s := Stats{Running: len(e.running), Waiting: len(e.waiting), Steps: e.steps}
	for _, list := range [][]*sequence{e.waiting, e.running} {
		for _, q := range list {
			if n := len(q.tokens) - q.computed; n > 1 {
				s.QueuedTokens += n
			}
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.load = s
	e.unseen.Waiting -= e.taken.Waiting
	e.unseen.QueuedTokens -= e.taken.QueuedTokens
	e.taken = Stats{}
}

// signal wakes the loop, now or when it sleeps next.
func (e *Engine) signal() { poke(e.wake) }

func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// guard runs f, which calls foreign code, and turns a panic into an error.
func guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			cause, ok := p.(error)
			if !ok {
				cause = fmt.Errorf("%v", p)
			}
			err = &StepError{Panicked: true, Err: cause}
		}
	}()
	if err = f(); err != nil {
		var step *StepError
		if !errors.As(err, &step) {
			err = &StepError{Err: err}
		}
	}
	return err
}
