// Package virtual tests a whole fleet on virtual time: a router with NATS, and workers that compute
// on the CPU, are hosts of a fakenet in one testing/synctest bubble. All code is the product's; the
// network is fake, and a step takes a given time.
package virtual

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/e2e/unbroken"
	"github.com/xpyd/xpyd/internal/fakenet"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// TestUnbroken: see package unbroken. The workers run on virtual time.
func TestUnbroken(t *testing.T) { unbrokenOf(t, "llama", 88, false, nil) }

// TestUnbrokenBound is the same for answers that are all bound: to schemas, regular expressions, choices, calls of
// tools. 88 strikes are a thousand answers.
func TestUnbrokenBound(t *testing.T) { unbrokenOf(t, "llama", 30, true, nil) }

// TestUnbrokenRanks is the same for workers of unequal numbers of ranks, two of which keep each of
// the model's two KV heads on decode-1.
func TestUnbrokenRanks(t *testing.T) {
	unbrokenOf(t, "llama", 20, false, map[string]int{"prefill-0": 2, "decode-0": 1, "decode-1": 4, unbroken.Wired: 2})
}

// TestUnbrokenLatent is the same for a model whose KV is one latent a position, which each rank keeps.
func TestUnbrokenLatent(t *testing.T) {
	unbrokenOf(t, "deepseek_v3", 12, false, map[string]int{"prefill-0": 1, "decode-0": 2, "decode-1": 1, unbroken.Wired: 4})
}

func unbrokenOf(t *testing.T, family string, otherwise int, bound bool, ranks map[string]int) {
	strikes, seed := unbroken.Asked(t, "XPYD_UNBROKEN_VIRTUAL", otherwise)
	model := filepath.Join(t.TempDir(), "tiny")
	makeModel(t, family, model)
	bubble(t, func(t *testing.T) {
		f := newFleet(t, model)
		f.ranks = ranks
		f.start(t, fleet.Prefill, "prefill-0")
		s := unbroken.Strikes{Router: f.router, Workers: f, Client: f.client, Patience: 2 * time.Second, Bound: bound}
		s.Run(t, strikes, seed)
	})
}

// bubble runs f on virtual time. Libraries keep timers in pools, nats.go those of its waits: one of an
// earlier bubble must not be used in this one, so that two collections empty all pools.
func bubble(t *testing.T, f func(t *testing.T)) {
	// Its clock runs as long as the process, outside the bubble.
	_, _ = new(fasthttp.Response).WriteTo(io.Discard)
	runtime.GC()
	runtime.GC()
	synctest.Test(t, f)
}

// virtual is a fleet. The router is at the first address, clients are at the second.
type virtual struct {
	net    *fakenet.Net
	front  *fakenet.Host
	ring   *trust.Ring
	model  string
	blocks int            // of each worker's pool; 0: as many as fit
	ranks  map[string]int // of workers by id; 0: one
	nats   string
	router *cluster.Router
	client *http.Client
	log    *slog.Logger

	killed  atomic.Int32
	mu      sync.Mutex
	workers map[string]*one
}

// one is a worker's life.
type one struct {
	*worker.Worker
	host   *fakenet.Host
	device kernels.Backend
	ended  chan struct{}
	once   sync.Once
}

const (
	frontIP, clientIP = "10.0.0.1", "10.0.0.2"
	token             = "admin"
	delay             = 100 * time.Microsecond // of the network
	buffered          = 256 << 10
	stepTime          = 4 * time.Millisecond
	drainTime         = 5 * time.Second

	natsPort, httpPort, adminPort, kvPort = 4222, 8000, 8001, 9000
)

// ips are where workers are.
var ips = map[string]string{"prefill-0": "10.0.1.1", "decode-0": "10.0.2.1", "decode-1": "10.0.2.2", "decode-2": "10.0.2.3"}

func at(ip string, port int) string { return net.JoinHostPort(ip, strconv.Itoa(port)) }

func newFleet(t *testing.T, model string) *virtual {
	t.Helper()
	f := &virtual{net: fakenet.New(delay, buffered), model: model, workers: map[string]*one{}}
	f.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	f.net.Swift(natsPort) // nats.go holds a lock while it connects
	f.front = f.net.Host(frontIP)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	listen := func(port int) net.Listener {
		ln, err := f.front.Listen("tcp", at(frontIP, port))
		must(err)
		return ln
	}
	var err error
	f.ring, err = trust.NewRing(trust.NewSecret())
	must(err)
	server, err := fleet.StartServer(fleet.ServerConfig{Ring: f.ring, Listener: listen(natsPort), Log: f.log})
	must(err)
	t.Cleanup(server.Close)
	f.nats = server.ClientURL()
	conn, err := fleet.Connect(fleet.ConnConfig{URL: f.nats, Ring: f.ring, Dial: f.front.DialContext, Log: f.log})
	must(err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	reg := prometheus.NewRegistry()
	watcher, err := fleet.Watch(fleet.WatcherConfig{Conn: conn, Leads: true, Probe: fleet.ProbeHealth(nil, f.front.DialContext), Log: f.log, Registerer: reg})
	must(err)
	t.Cleanup(watcher.Close)
	lifeline := fleet.WatchLifeline(watcher, fleet.LifelineConfig{Ring: f.ring, Dial: f.front.DialContext, Log: f.log})
	t.Cleanup(lifeline.Close)
	r, err := router.New(router.DefaultConfig(), router.Deps{Ring: f.ring, Fleet: watcher, Bus: conn.Bus(), Log: f.log, Registerer: reg, Gatherer: reg,
		AdminToken: token, Dial: f.front.DialContext, Public: listen(httpPort), Admin: listen(adminPort)})
	must(err)
	must(r.Start())
	t.Cleanup(func() { _ = r.Shutdown(context.Background()) })
	tr := &http.Transport{DialContext: f.net.Host(clientIP).DialContext, MaxIdleConnsPerHost: 64}
	t.Cleanup(tr.CloseIdleConnections)
	f.client = &http.Client{Transport: tr}
	f.router = cluster.At("http://"+at(frontIP, httpPort), "http://"+at(frontIP, adminPort), token, f.client)
	t.Cleanup(func() {
		for id := range f.workers {
			f.Kill(id)
			f.Ended(id)
		}
	})
	return f
}

func (f *virtual) start(t testing.TB, role fleet.Role, id string) {
	t.Helper()
	ip := ips[id]
	h := f.net.Host(ip)
	cfg := worker.DefaultConfig(role)
	cfg.ToolParser = "hermes"
	cfg.ID, cfg.Model, cfg.Device, cfg.Threads, cfg.Fleet.URL = id, f.model, "cpu", 1, f.nats
	cfg.Listen, cfg.KVListen = at(ip, httpPort), at(ip, kvPort)
	cfg.KVEvents = worker.KVEvents{} // it has sockets of its own
	cfg.KVMemory, cfg.Blocks, cfg.TensorParallel = 8<<20, f.blocks, max(f.ranks[id], 1)
	var device kernels.Backend
	w, err := worker.Start(context.Background(), cfg, worker.Deps{Ring: f.ring, NATS: f.ring, Log: f.log.With("worker", id), Registry: prometheus.NewRegistry(),
		Ways: []way.Kind{way.Network(transport{h})}, Dial: h.DialContext, Listen: h.Listen,
		Backend: func(b kernels.Backend) kernels.Backend { device = b; return &paced{b, b.(kernels.Viewer)} }})
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.workers[id] = &one{Worker: w, host: h, device: device, ended: make(chan struct{})}
}

func (f *virtual) get(id string) *one {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.workers[id]
}

// Start implements unbroken.Workers, as do the following.
func (f *virtual) Start(t testing.TB, id string) { f.start(t, fleet.Decode, id) }

// Kill takes the host away; that the worker's goroutines then end is seen by nobody. Every other
// time its connections are reset: a kernel does that where bytes have not been read.
func (f *virtual) Kill(id string) {
	w := f.get(id)
	w.host.Crash(f.killed.Add(1)%2 == 0)
	w.end(time.Second)
}

// Stop stops the host. nats.go holds a lock until it is connected, and while somebody waits for
// that lock, time in the bubble does not pass: so an attempt to connect fails at once, instead of by
// its timeout.
func (f *virtual) Stop(id string) {
	h := f.get(id).host
	h.Stop()
	h.Cut(func(c *fakenet.Conn) bool { return c.Port() == natsPort && time.Since(c.Since()) < 2*time.Second })
}

func (f *virtual) Continue(id string) { f.get(id).host.Continue() }
func (f *virtual) Leave(id string)    { f.get(id).end(drainTime) }
func (f *virtual) Ended(id string)    { <-f.get(id).ended }
func (f *virtual) Cut() {
	h := f.get(unbroken.Wired).host
	h.Cut(func(c *fakenet.Conn) bool { return c.Port() == httpPort })
}

// end ends the worker as SIGTERM does.
func (w *one) end(drain time.Duration) {
	go w.once.Do(func() {
		defer close(w.ended)
		ctx, cancel := context.WithTimeout(context.Background(), drain)
		defer cancel()
		if w.Close(ctx) != nil { // then it leaves the device to the end of the process
			_ = w.device.Close()
		}
		w.host.Crash(false)
	})
}

// transport is KV's way.
type transport struct{ h *fakenet.Host }

func (t transport) Name() string { return "tcp" }

func (t transport) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return t.h.DialContext(ctx, "tcp", addr)
}

func (t transport) Listen(addr string) (net.Listener, error) { return t.h.Listen("tcp", addr) }

// paced is a device whose steps take stepTime.
type paced struct {
	kernels.Backend
	kernels.Viewer
}

func (p *paced) Step(s *kernels.Step) ([]kernels.Result, error) {
	time.Sleep(stepTime) // virtual
	return p.Backend.Step(s)
}

// makeModel writes a tiny model of a family with random weights and the tokenizer of stories260k.
func makeModel(t *testing.T, family, dir string) {
	t.Helper()
	files := map[string][]byte{"chat_template.jinja": []byte("{% for m in messages %}{{ m.content }} {% endfor %}")}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		b, err := os.ReadFile(filepath.Join("..", "..", "internal", "model", "stories260k", name))
		if err != nil {
			t.Fatal(err)
		}
		files[name] = b
	}
	c := modeltest.Tiny(family)
	c.Vocab, c.MaxPositions = 512, 4096
	if err := modeltest.WriteHF(dir, c, modeltest.HFOptions{Seed: 1, DType: kernels.F16, Files: files}); err != nil {
		t.Fatal(err)
	}
}
