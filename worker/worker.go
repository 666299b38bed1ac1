// Package worker is one worker process: a model on a device, an engine, both halves of a pair
// (prefill and decode), the HTTP listener, and a place in the fleet. The role is only what it
// announces: every worker can do either phase, and does both for a plain request.
//
// A request's path:
//
//	http.go        routes, bounds, access; watches the client
//	params.go      the request in the engine's terms: a job of one or more prompts
//	bound.go       what binds its answers: grammars, calls that must be made
//	answersize.go  how large its answer can become, and the memory for it
//	origin.go      where its KV comes from: a prefill worker named by our router,
//	foreign.go,    or by a foreign proxy
//	mooncake.go,
//	rooms.go
//	turns.go       where the KV of its answer is, for the next turn
//	generate.go    a goroutine a prompt: collect KV, submit, events
//	render.go      text, stops, log probabilities
//	reading.go     reasoning and calls of tools in that text
//	serve.go       the answer, whole or streamed
package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/bind"
	"github.com/xpyd/xpyd/internal/clientwatch"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpustat"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/profile"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/prefill"
	"github.com/xpyd/xpyd/router/h1"
)

// Deps are what a worker is given.
type Deps struct {
	Log      *slog.Logger
	Level    *slog.LevelVar // of Log; nil: it stays as it is
	Registry *prometheus.Registry
	Ways     []way.Kind // the transports for KV, fastest first, the network last
	Build    string
	Ring     *trust.Ring          // the fleet's secrets; nil: the worker trusts everyone
	TLS      *trust.TLS           // of the HTTP listener and of calls to other workers; nil: plain HTTP
	NATS     *trust.Ring          // opens NATS, even if Ring is nil; nil: Fleet.URL is enough
	Progress func(model.Progress) // of a download, a fingerprint, or a load to a GPU; may be nil

	// Dial and Listen are HTTP's and NATS's network; nil: this machine's. KV has Ways.
	Dial   fleet.Dial
	Listen func(network, addr string) (net.Listener, error)
	// Backend wraps the device, for one that takes a given time; nil: nothing does.
	Backend func(kernels.Backend) kernels.Backend
}

// Worker is one running worker. Make it with Start, end it with Close.
type Worker struct {
	cfg      Config
	log      *slog.Logger
	level    *slog.LevelVar // of log; nil: it stays
	registry *prometheus.Registry
	build    string
	tokens   *trust.Tokens // for other workers
	tls      *trust.TLS    // nil: plain HTTP
	guard    *guard
	started  time.Time
	served   string // what clients call the model
	identity kvconn.Identity
	url      string
	kvAddr   string
	kvWays   map[string]string // where the faster ways reach it; see fleet.Instance

	model         *model.Model
	tok           *tokenizer.Tokenizer
	formats       formats
	binder        *bind.Binder
	longest       int // bytes of the longest token
	sizes         openai.TokenSizes
	answers       *answerMemory
	eos           []int32 // ids that end an answer
	backend       kernels.Backend
	gpu           *gpustat.Poller   // nil: none, or nothing can be read
	devices       []fleet.Device    // its GPUs; none on the CPU
	profile       *profile.Profiler // of this process, and of the device if it can
	cache         *kvcache.Cache
	tiers         *tier.Tiers // nil: none
	peers         *tier.Peers // nil: none are asked or given to
	vllm          *vllmMetrics
	rooms         *prometheus.CounterVec // by outcome; see met
	failedAccepts *prometheus.CounterVec // by listener
	engine        *engine.Engine
	prefill       *prefill.Service
	decode        *decode.Service
	chooser       *way.Chooser // of the ways to other workers
	recv          *kvconn.Receiver
	moved         func() (sent, stored int64) // bytes of KV, both ways
	movedFrom     func() map[string]int64     // stored, by sender
	server        *kvconn.Server
	fleet         *membership
	events        *eventWriter // nil without a publisher
	ring          *trust.Ring  // nil: it trusts everyone
	clients       *clientwatch.Watcher
	client        *http.Client // for other workers
	http          *h1.Server

	ctx       context.Context // ends when requests must: every request's parent
	cancel    context.CancelCauseFunc
	wg        sync.WaitGroup // the listeners' goroutines, and watch's
	requests  *requests
	lifelines *requests
	sequence  atomic.Uint64
	shutOut   atomic.Pointer[[]string] // see Revoke
	failed    chan error               // see Failed
	closers   []closer
	ended     sync.Once
	endErr    error
}

// Start loads the model, opens the listeners and joins the fleet. The end of ctx does not close the
// worker: call Close.
func Start(ctx context.Context, cfg Config, d Deps) (*Worker, error) {
	cfg.KV.Ways = way.Names(d.Ways)
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	w := &Worker{cfg: cfg, ring: d.Ring, log: d.Log, level: d.Level, registry: d.Registry, build: d.Build, started: time.Now(), failed: make(chan error, 1),
		answers: newAnswerMemory(int64(cfg.AnswerMemory), cfg.MaxWaiting, cfg.ReserveWait),
		tokens:  trust.NewTokens(d.Ring), tls: d.TLS, client: newClient(d.TLS, d.Dial), requests: newRequests(), lifelines: newRequests()}
	w.ctx, w.cancel = context.WithCancelCause(context.Background())
	if err := w.start(ctx, d); err != nil {
		return nil, errors.Join(err, w.close(ctx))
	}
	return w, nil
}

func (w *Worker) start(ctx context.Context, d Deps) error {
	if err := w.load(ctx, d); err != nil {
		return err
	}
	if w.cfg.ID == "" {
		w.cfg.ID = w.cfg.Role + "-" + randomID()[:6]
	}
	w.identity = kvconn.Identity{
		PeerID:           kvconn.PeerID{ID: w.cfg.ID, Epoch: fleet.NewEpoch()},
		ModelFingerprint: w.model.Fingerprint, TokenizerFingerprint: w.tok.Fingerprint(),
		Numerics: w.backend.Info().Numerics, Build: d.Build,
		Layout: w.backend.Layout(),
	}
	if err := w.registerMetrics(); err != nil {
		return err
	}
	if err := w.newBinder(); err != nil {
		return err
	}
	var err error
	if w.guard, err = newGuard(w); err != nil {
		return err
	}
	if err := w.startEvents(); err != nil {
		return err
	}
	if err := w.startEngine(ctx); err != nil {
		return err
	}
	if err := w.startKV(d); err != nil {
		return err
	}
	ln, err := w.listenHTTP(d.Listen)
	if err != nil {
		return err
	}
	// Join before serving, so that handlers can rely on w.fleet. Early callers wait in the
	// listener's queue.
	if w.fleet, err = join(w, d.NATS, d.Dial); err != nil {
		return err
	}
	w.later("leave the fleet", w.fleet.close)
	w.fleet.begin(w)
	w.http.Start(ln)
	tool, think := w.formats.names()
	w.log.Info("worker is up", "id", w.identity.ID, "role", w.cfg.Role, "url", w.url, "kv", w.kvAddr, "model", w.served,
		"device", w.backend.Info().Device, "simd", w.backend.Info().SIMD, "threads", w.backend.Info().Threads, "ranks", max(1, w.backend.Info().Ranks),
		"blocks", w.backend.Blocks(), "block_tokens", w.identity.Layout.BlockTokens, "kv_memory", config.Size(w.poolBytes()).String(), "max_model_len", w.engine.MaxModelLen(),
		"tool_parser", tool, "reasoning_parser", think)
	return nil
}

func (w *Worker) load(ctx context.Context, d Deps) error {
	ordinals, err := claim(&w.cfg, gpustat.Cards, w.log)
	if err != nil {
		return err
	}
	m, err := model.Open(ctx, w.cfg.Model, model.Options{Log: w.log, Progress: d.Progress})
	if err != nil {
		return err
	}
	w.model = m
	w.free("unmap the model", func(context.Context) error { return m.Close() })
	w.served = w.cfg.ServedName
	if w.served == "" {
		w.served = m.Name
	}
	if w.tok, err = loadTokenizer(m); err != nil {
		return err
	}
	w.eos = ends(m, w.tok)
	w.formats = formatsOf(&w.cfg.Compute, w.tok)
	for id := range w.tok.VocabSize() {
		w.longest = max(w.longest, len(w.tok.TokenBytes(int32(id))))
	}
	w.sizes = openai.MeasureTokens(w.tok, w.tok.VocabSize())
	if w.backend, err = newBackend(&w.cfg, m, ordinals, way.MapPool(d.Ways, w.cfg.KV.Transport), d.Progress, w.log); err != nil {
		return err
	}
	w.watch()
	if d.Backend != nil {
		w.backend = d.Backend(w.backend)
	}
	w.free("free the backend", func(context.Context) error { return w.backend.Close() })
	if err := w.populate(ctx); err != nil {
		return err
	}
	if err := w.startGPU(); err != nil {
		return err
	}
	device, _ := w.backend.(profile.Device)
	w.profile = profile.New(device)
	w.free("end the profile", func(context.Context) error { w.profile.Close(); return nil })
	return nil
}

func (w *Worker) startEngine(ctx context.Context) error {
	if unit := kvcache.UnitTokens(w.cfg.BlockTokens); unit > max(kvcache.Grain, w.cfg.BlockTokens) {
		w.log.Warn(fmt.Sprintf("blocks of %d tokens: only whole units of %d are cached; take %d or a multiple", w.cfg.BlockTokens, unit, kvcache.Grain))
	}
	if err := w.openTiers(ctx); err != nil {
		return err
	}
	pool := kvcache.Config{Blocks: w.backend.Blocks(), BlockTokens: w.cfg.BlockTokens,
		Fingerprint: w.model.Fingerprint, Numerics: w.backend.Info().Numerics, Listener: w.listener()}
	if w.tiers != nil {
		w.tiers.Tune(&pool)
	}
	var err error
	if w.cache, err = kvcache.New(pool); err != nil {
		return err
	}
	if w.tiers != nil {
		w.tiers.Attach(w.cache)
	}
	cfg := EngineConfig(&w.cfg, w.backend.Info().Name == "cuda")
	cfg.EOS, cfg.Model, cfg.Stepped, cfg.Preempted = w.eos, w.served, w.vllm.stepped, w.vllm.preemptions.Inc
	if cfg.Speculation.Drafter, err = w.drafter(ctx); err != nil {
		return err
	}
	w.engine, err = engine.New(cfg, w.backend, w.cache, w.log, w.registry)
	if err != nil {
		return err
	}
	w.later("stop the engine", w.engine.Close)
	return nil
}

// EngineConfig is the engine's part of the settings. A GPU's buffers are sized by it.
func EngineConfig(c *Config, gpu bool) engine.Config {
	cfg := engine.DefaultConfig()
	cfg.MaxRunning, cfg.StepTokens = 64, 512 // on a CPU large steps are no faster
	if gpu {
		cfg.MaxRunning, cfg.StepTokens = 256, 8192
	}
	cfg.MaxRunning, cfg.StepTokens = cmp.Or(c.MaxBatch, cfg.MaxRunning), cmp.Or(c.StepTokens, cfg.StepTokens)
	cfg.MaxWaiting, cfg.MaxModelLen, cfg.MaxStepTime, cfg.QueueTime = c.MaxWaiting, c.MaxModelLen, c.MaxStepTime, c.QueueTime
	cfg.Promise, cfg.ShedLate = c.promise(), c.ShedLate
	cfg.Speculation.Depth = c.SpeculationDepth
	if gpu {
		cfg.PrefillTokens = cfg.StepTokens
	}
	return cfg
}

func (w *Worker) poolBytes() int64 {
	return int64(w.backend.Layout().BlockBytes()) * int64(w.backend.Blocks())
}

// ends returns the token ids that end an answer, from the model's configuration and its tokenizer.
func ends(m *model.Model, tok *tokenizer.Tokenizer) []int32 {
	list := append(slices.Clone(m.Config.EOS), tok.EOS()...)
	slices.Sort(list)
	return slices.Compact(list)
}

// Instance is what the worker announces.
func (w *Worker) Instance() fleet.Instance {
	if w.fleet != nil {
		if i, ok := w.fleet.instance(); ok {
			return i
		}
	}
	events, replay := w.eventAddrs()
	return fleet.Instance{
		ID: w.identity.ID, Epoch: w.identity.Epoch, Role: fleet.Role(w.cfg.Role), URL: w.url, KVAddr: w.kvAddr, KVWays: w.kvWays, Machine: way.Machine(w.cfg.KV.Sockets), Secrets: w.ring.IDs(),
		Draining: w.cfg.Drained,
		Dialect:  fleet.Native, Model: w.served, Build: w.build, ProtocolMin: kvconn.ProtocolMin, ProtocolMax: kvconn.ProtocolMax,
		ModelFingerprint: w.identity.ModelFingerprint, TokenizerFingerprint: w.identity.TokenizerFingerprint, Numerics: w.identity.Numerics,
		Convert:     w.cfg.KV.Convert == convertAllow,
		Unchecked:   w.cfg.KV.Digest == "off",
		Layout:      w.identity.Layout.Form(),
		MaxModelLen: w.engine.MaxModelLen(), Blocks: w.backend.Blocks(), KVBytes: w.poolBytes(), MaxBatch: w.engine.MaxRunning(), Gap: w.engine.Gap().Seconds(), Devices: w.devices, Parsers: w.formats.announced(), Grammars: true, TP: w.backend.Info().Ranks, PID: os.Getpid(),
		KVEvents: events, KVReplay: replay, KVTopic: w.cfg.KVEvents.Topic, KVEventsOpen: w.cfg.KVEvents.Open, Topology: w.cfg.Topology,
	}
}

func (w *Worker) currentLoad() fleet.Load {
	s := w.engine.Stats()
	return fleet.Load{Running: s.Running, Waiting: s.Waiting, QueuedTokens: s.QueuedTokens, KVUsed: s.KVUsed, Steps: fleet.Steps(s.Steps), GPU: w.gpuLoad()}
}

// URL is where the worker's HTTP listener is reached.
func (w *Worker) URL() string { return w.url }

// ID is the worker's name in the fleet.
func (w *Worker) ID() string { return w.identity.ID }

// Role is what the worker announces now.
func (w *Worker) Role() fleet.Role { return w.Instance().Role }

// Rejoin applies a changed join line: it moves to NATS at url and announces the secrets now in
// force.
func (w *Worker) Rejoin(url string) error { return errors.Join(w.fleet.rejoin(url), w.renew()) }

// renew applies a changed ring.
func (w *Worker) renew() error {
	w.recv.Renew()
	w.server.Renew()
	if w.events != nil {
		w.events.pub.Renew()
	}
	return w.fleet.update(func(i *fleet.Instance) { i.Secrets = w.ring.IDs() })
}

// Drain announces that the worker takes no new work.
func (w *Worker) Drain() error { return w.fleet.update(func(i *fleet.Instance) { i.Draining = true }) }

// Undrain takes Drain back.
func (w *Worker) Undrain() error {
	return w.fleet.update(func(i *fleet.Instance) { i.Draining, i.WaitOnly = false, false })
}

// SetRole changes what the worker announces; running requests are untouched.
func (w *Worker) SetRole(r fleet.Role) error {
	return w.fleet.update(func(i *fleet.Instance) { i.Role = r })
}

// Failed yields an error when a listener ends by itself, or when a rank hangs (kernels.ErrHung).
func (w *Worker) Failed() <-chan error { return w.failed }

// fail passes an error to Failed. One is enough to end the worker; others are dropped.
func (w *Worker) fail(err error) {
	select {
	case w.failed <- err:
	default:
	}
}
