// Package worker is one worker process: a model on a device, an engine, both
// halves of a pair (prefill and decode), the HTTP listener, and its place in
// the fleet. The role is only what it announces: every worker can do either
// phase, and both for a plain request.
//
// A request travels http.go (parse, watch the client), params.go (to engine
// terms), generate.go (one goroutine a prompt: collect KV, submit, events),
// render.go (text, stops, log probabilities), and back through http.go.
package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/internal/clientwatch"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/engine"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvcache"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/prefill"
)

// Deps are what a worker is given rather than makes.
type Deps struct {
	Log       *slog.Logger
	Registry  *prometheus.Registry
	Transport kvconn.Transport
	Build     string
	Progress  func(model.Progress) // of a download or a fingerprint; may be nil
}

// Worker is one running worker. Make it with Start, end it with Close.
type Worker struct {
	cfg      Config
	log      *slog.Logger
	registry *prometheus.Registry
	build    string
	started  time.Time
	served   string // what clients call the model
	identity kvconn.Identity
	url      string
	kvAddr   string

	model   *model.Model
	tok     *tokenizer.Tokenizer
	longest int // bytes of the longest token
	backend kernels.Backend
	cache   *kvcache.Cache
	engine  *engine.Engine
	prefill *prefill.Service
	decode  *decode.Service
	recv    *kvconn.Receiver
	server  *kvconn.Server
	fleet   *membership
	clients *clientwatch.Watcher
	client  *http.Client // to a foreign prefill's bootstrap
	http    *fasthttp.Server
	unused  unused
	serving bool // http was given its listener

	ctx      context.Context // ends when requests must: every request's parent
	cancel   context.CancelFunc
	wg       sync.WaitGroup // the listeners' goroutines
	streams  sync.WaitGroup // responses still being written
	sequence atomic.Uint64
	failed   chan error // a listener that ended by itself
	closers  []closer
}

// closer is one step of Close, run in reverse order of construction.
type closer struct {
	name string
	run  func(context.Context) error
}

// Start loads the model, opens the listeners and joins the fleet. The caller
// closes the worker, also when Start's ctx has ended.
func Start(ctx context.Context, cfg Config, d Deps) (*Worker, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	w := &Worker{cfg: cfg, log: d.Log, registry: d.Registry, build: d.Build, started: time.Now(), failed: make(chan error, 2),
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute}}}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	if err := w.start(ctx, d); err != nil {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		return nil, errors.Join(err, w.close(stop))
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
	layout := w.backend.Layout()
	w.identity = kvconn.Identity{
		PeerID:           kvconn.PeerID{ID: w.cfg.ID, Epoch: fleet.NewEpoch()},
		ModelFingerprint: w.model.Fingerprint, TokenizerFingerprint: w.tok.Fingerprint(),
		Numerics: w.backend.Info().Numerics, Build: d.Build,
		Layout: kvconn.Layout{BlockTokens: layout.BlockTokens, Groups: []kvconn.Group{{Kind: "full", Layers: layout.Layers,
			KVHeads: layout.KVHeads, HeadDim: layout.HeadDim, RowBytes: layout.RowBytes, DType: layout.DType}}},
	}
	if err := w.registerMetrics(); err != nil {
		return err
	}
	if err := w.startEngine(); err != nil {
		return err
	}
	if err := w.startKV(d.Transport); err != nil {
		return err
	}
	ln, err := w.listenHTTP()
	if err != nil {
		return err
	}
	// Callers that come before Serve wait in the listener's queue, so the
	// fleet may hear of us first; handlers may then rely on w.fleet.
	if w.fleet, err = join(w); err != nil {
		return err
	}
	w.later("leave the fleet", w.fleet.close)
	w.serveHTTP(ln)
	w.log.Info("worker is up", "id", w.identity.ID, "role", w.cfg.Role, "url", w.url, "kv", w.kvAddr, "model", w.served,
		"device", w.backend.Info().Device, "simd", w.backend.Info().SIMD, "threads", w.backend.Info().Threads,
		"blocks", w.backend.Blocks(), "block_tokens", layout.BlockTokens, "max_model_len", w.engine.MaxModelLen())
	return nil
}

func (w *Worker) later(name string, run func(context.Context) error) {
	w.closers = append(w.closers, closer{name, run})
}

func (w *Worker) load(ctx context.Context, d Deps) error {
	m, err := model.Open(ctx, w.cfg.Model, model.Options{Log: w.log, Progress: d.Progress})
	if err != nil {
		return err
	}
	w.model = m
	w.later("unmap the model", func(context.Context) error { return m.Close() })
	w.served = w.cfg.ServedName
	if w.served == "" {
		w.served = m.Name
	}
	if w.tok, err = loadTokenizer(m); err != nil {
		return err
	}
	for id := range w.tok.VocabSize() {
		w.longest = max(w.longest, len(w.tok.TokenBytes(int32(id))))
	}
	if w.backend, err = newBackend(&w.cfg, m); err != nil {
		return err
	}
	w.later("free the backend", func(context.Context) error { return w.backend.Close() })
	return nil
}

func (w *Worker) startEngine() error {
	var err error
	w.cache, err = kvcache.New(kvcache.Config{Blocks: w.backend.Blocks(), BlockTokens: w.cfg.BlockTokens,
		Fingerprint: w.model.Fingerprint, Numerics: w.backend.Info().Numerics})
	if err != nil {
		return err
	}
	cfg := engine.DefaultConfig()
	cfg.MaxRunning, cfg.MaxWaiting = w.cfg.MaxBatch, w.cfg.MaxWaiting
	cfg.StepTokens, cfg.MaxStepTime = w.cfg.StepTokens, w.cfg.MaxStepTime
	cfg.MaxModelLen, cfg.EOS = w.cfg.MaxModelLen, w.eos()
	w.engine, err = engine.New(cfg, w.backend, w.cache, w.log, w.registry)
	if err != nil {
		return err
	}
	w.later("stop the engine", w.engine.Close)
	return nil
}

// eos joins what the model's configuration and its tokenizer call the end.
func (w *Worker) eos() []int32 {
	if len(w.model.Config.EOS) > 0 {
		return w.model.Config.EOS
	}
	return w.tok.EOS()
}

func (w *Worker) startKV(tr kvconn.Transport) error {
	metrics, err := kvconn.NewMetrics(w.registry)
	if err != nil {
		return err
	}
	cfg := w.cfg.kvconn(w.identity)
	if w.recv, err = kvconn.NewReceiver(cfg, tr, w.log, metrics); err != nil {
		return err
	}
	dcfg := decode.DefaultConfig(w.cache.Blocks())
	dcfg.ReserveTimeout = w.cfg.ReserveWait
	w.decode = decode.New(dcfg, w.recv, w.cache, w.backend, w.log)
	w.later("close sessions to prefill", func(ctx context.Context) error {
		err := w.recv.Close(ctx)
		w.decode.Close()
		return err
	})
	pcfg := prefill.DefaultConfig()
	pcfg.Lease, pcfg.TicketWait = w.cfg.LeaseTime, w.cfg.TicketWait
	w.prefill = prefill.New(pcfg, w.engine, w.backend, w.backend.Layout(), w.log)
	if w.server, err = kvconn.NewServer(cfg, w.log, metrics); err != nil {
		return err
	}
	ln, err := tr.Listen(w.cfg.KVListen)
	if err != nil {
		return fmt.Errorf("kv_listen: %w", err)
	}
	if w.kvAddr, err = w.advertised(ln.Addr()); err != nil {
		return errors.Join(err, ln.Close())
	}
	serve, stop := context.WithCancel(context.Background())
	w.wg.Add(1)
	done := make(chan struct{})
	go func() {
		defer w.wg.Done()
		defer close(done)
		if err := w.server.Serve(serve, ln, w.prefill); err != nil && serve.Err() == nil {
			w.failed <- fmt.Errorf("kv listener: %w", err)
		}
	}()
	w.later("end sessions of decode", func(ctx context.Context) error {
		err := w.server.Drain(ctx)
		stop()
		<-done
		w.prefill.Close()
		return err
	})
	return nil
}

// listenHTTP opens the HTTP listener; serveHTTP answers on it.
func (w *Worker) listenHTTP() (net.Listener, error) {
	var err error
	if w.clients, err = clientwatch.New(); err != nil {
		return nil, err
	}
	w.later("stop watching clients", func(context.Context) error { return w.clients.Close() })
	ln, err := net.Listen("tcp", w.cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	w.http = w.newHTTP()
	w.unused.set = map[*clientConn]struct{}{}
	w.later("close the HTTP listener", func(ctx context.Context) error {
		// Streams and lifelines hold their connections for as long as they
		// like: what has not ended by itself is ended now.
		w.cancel()
		w.unused.close()
		err := w.http.ShutdownWithContext(ctx) // closes ln once it is served
		if !w.serving {
			err = ln.Close()
		}
		w.streams.Wait()
		return err
	})
	addr, err := w.advertised(ln.Addr())
	w.url = "http://" + addr
	return ln, err
}

func (w *Worker) serveHTTP(ln net.Listener) {
	w.serving = true
	w.wg.Add(1)
	go func() {
		defer w.wg.Done()
		if err := w.http.Serve(&listener{Listener: ln, unused: &w.unused}); err != nil && w.ctx.Err() == nil {
			w.failed <- fmt.Errorf("http listener: %w", err)
		}
	}()
}

// advertised is the address that others dial for a listener of ours.
func (w *Worker) advertised(a net.Addr) (string, error) {
	host, port, err := net.SplitHostPort(a.String())
	if err != nil {
		return "", err
	}
	if w.cfg.Advertise != "" {
		return net.JoinHostPort(w.cfg.Advertise, port), nil
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsUnspecified() {
		return net.JoinHostPort(host, port), nil
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return "", err
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			return net.JoinHostPort(n.IP.String(), port), nil
		}
	}
	return "", &config.KeyError{Key: "advertise", Msg: "listening on every address, and none can be found that others could dial; set it"}
}

// instance describes this worker to the fleet.
func (w *Worker) instance() fleet.Instance {
	if w.fleet != nil {
		if i, ok := w.fleet.instance(); ok {
			return i
		}
	}
	l := w.backend.Layout()
	return fleet.Instance{
		ID: w.identity.ID, Epoch: w.identity.Epoch, Role: fleet.Role(w.cfg.Role), URL: w.url, KVAddr: w.kvAddr,
		Dialect: "native", Model: w.served, Build: w.build, ProtocolMin: kvconn.ProtocolMin, ProtocolMax: kvconn.ProtocolMax,
		ModelFingerprint: w.identity.ModelFingerprint, TokenizerFingerprint: w.identity.TokenizerFingerprint, Numerics: w.identity.Numerics,
		Layout:      fleet.Layout{Layers: l.Layers, KVHeads: l.KVHeads, HeadDim: l.HeadDim, BlockTokens: l.BlockTokens, DType: l.DType},
		MaxModelLen: w.engine.MaxModelLen(), Blocks: w.backend.Blocks(), MaxBatch: w.cfg.MaxBatch, PID: os.Getpid(),
	}
}

func (w *Worker) currentLoad() fleet.Load {
	s := w.engine.Stats()
	return fleet.Load{Running: s.Running, Waiting: s.Waiting, QueuedTokens: s.QueuedTokens, KVUsed: s.KVUsed}
}

// Instance is what the worker announces.
func (w *Worker) Instance() fleet.Instance { return w.instance() }

// URL is where the worker's HTTP listener is reached.
func (w *Worker) URL() string { return w.url }

// ID is the worker's name in the fleet.
func (w *Worker) ID() string { return w.identity.ID }

// Role is what the worker announces now.
func (w *Worker) Role() fleet.Role { return w.instance().Role }

// Drain announces that the worker takes no new work.
func (w *Worker) Drain() error { return w.fleet.update(func(i *fleet.Instance) { i.Draining = true }) }

// Undrain takes Drain back.
func (w *Worker) Undrain() error {
	return w.fleet.update(func(i *fleet.Instance) { i.Draining = false })
}

// SetRole changes what the worker announces; running requests are untouched.
func (w *Worker) SetRole(r fleet.Role) error {
	return w.fleet.update(func(i *fleet.Instance) { i.Role = r })
}

// Failed yields an error when a listener ended by itself.
func (w *Worker) Failed() <-chan error { return w.failed }

// Close drains and ends the worker: it announces the drain, lets running
// requests finish until ctx ends, leaves the fleet, closes listeners and
// sessions, and frees the model. Each step's reason is its name.
func (w *Worker) Close(ctx context.Context) error {
	if err := w.Drain(); err != nil {
		w.log.Warn("announce drain", "error", err)
	}
	w.idle(ctx)
	return w.close(ctx)
}

// idle waits until nothing runs, or ctx ends.
func (w *Worker) idle(ctx context.Context) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !w.Ledger().Empty() || w.engine.Stats().Waiting > 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (w *Worker) close(ctx context.Context) error {
	var errs []error
	w.client.CloseIdleConnections()
	for i := len(w.closers) - 1; i >= 0; i-- {
		if err := w.closers[i].run(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", w.closers[i].name, err))
		}
	}
	w.cancel()
	w.wg.Wait()
	return errors.Join(errs...)
}

// registerMetrics adds the process's own metrics, and vLLM's names beside
// ours so that existing dashboards and pickers work.
func (w *Worker) registerMetrics() error {
	label := prometheus.Labels{"model_name": w.served}
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: label}, f)
	}
	stats := func(f func(engine.Stats) float64) func() float64 {
		return func() float64 { return f(w.engine.Stats()) }
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "vllm:cache_config_info", Help: "KV cache configuration, as vLLM names it.",
		ConstLabels: prometheus.Labels{"block_size": fmt.Sprint(w.cfg.BlockTokens), "num_gpu_blocks": fmt.Sprint(w.backend.Blocks())}})
	info.Set(1)
	for _, c := range []prometheus.Collector{
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), info,
		gauge("vllm:num_requests_running", "Sequences in the batch, as vLLM names it.", stats(func(s engine.Stats) float64 { return float64(s.Running) })),
		gauge("vllm:num_requests_waiting", "Requests not started, as vLLM names it.", stats(func(s engine.Stats) float64 { return float64(s.Waiting) })),
		gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1, as vLLM names it.", stats(func(s engine.Stats) float64 { return s.KVUsed })),
	} {
		if err := w.registry.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}
