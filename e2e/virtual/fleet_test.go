package virtual

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fakenet"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// transport is KV's way over a host's network.
type transport struct{ h *fakenet.Host }

func (t transport) Name() string { return "tcp" }

func (t transport) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return t.h.DialContext(ctx, "tcp", addr)
}

func (t transport) Listen(addr string) (net.Listener, error) { return t.h.Listen("tcp", addr) }

// paced is a device whose steps take some time.
type paced struct {
	kernels.Backend
	kernels.Viewer
	step time.Duration
}

func (p *paced) Step(s *kernels.Step) ([]kernels.Result, error) {
	time.Sleep(p.step) // the work of a device that is not there
	return p.Backend.Step(s)
}

type cluster struct {
	t       *testing.T
	net     *fakenet.Net
	ring    *trust.Ring
	model   string
	natsURL string
	watcher *fleet.Watcher
	router  *router.Router
	client  *http.Client
	log     *slog.Logger
}

func newCluster(t *testing.T, model string) *cluster {
	c := &cluster{t: t, net: fakenet.New(100*time.Microsecond, 1<<20), model: model}
	c.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	var err error
	must := func() {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	c.ring, err = trust.NewRing(trust.NewSecret())
	must()
	h := c.net.Host("10.0.0.1")
	ln, err := h.Listen("tcp", "10.0.0.1:4222")
	must()
	server, err := fleet.StartServer(fleet.ServerConfig{Ring: c.ring, Listener: ln, Log: c.log})
	must()
	t.Cleanup(func() { server.Close() })
	c.natsURL = server.ClientURL()
	conn, err := fleet.Connect(fleet.ConnConfig{URL: c.natsURL, Ring: c.ring, Dial: h.DialContext, Log: c.log})
	must()
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	reg := prometheus.NewRegistry()
	c.watcher, err = fleet.Watch(fleet.WatcherConfig{Conn: conn, Leads: true, Probe: fleet.ProbeHealth(nil, h.DialContext), Log: c.log, Registerer: reg})
	must()
	t.Cleanup(func() { c.watcher.Close() })
	lifeline := fleet.WatchLifeline(c.watcher, fleet.LifelineConfig{Ring: c.ring, Dial: h.DialContext, Log: c.log})
	t.Cleanup(lifeline.Close)
	cfg := router.DefaultConfig()
	public, err := h.Listen("tcp", "10.0.0.1:8000")
	must()
	cfg.AdminListen = ""
	c.router, err = router.New(cfg, router.Deps{Ring: c.ring, Fleet: c.watcher, Bus: conn.Bus(), Log: c.log, Registerer: reg, Dial: h.DialContext, Public: public})
	must()
	err = c.router.Start()
	must()
	t.Cleanup(func() { _ = c.router.Shutdown(context.Background()) })
	tr := &http.Transport{DialContext: c.net.Host("10.0.0.2").DialContext}
	t.Cleanup(tr.CloseIdleConnections)
	c.client = &http.Client{Transport: tr}
	return c
}

func (c *cluster) worker(id, ip string, role fleet.Role) (*worker.Worker, *fakenet.Host) {
	h := c.net.Host(ip)
	cfg := worker.DefaultConfig(role)
	cfg.ID, cfg.Model, cfg.Device, cfg.Threads, cfg.Fleet.URL = id, c.model, "cpu", 1, c.natsURL
	cfg.Listen, cfg.KVListen = ip+":8000", ip+":9000"
	cfg.KVEvents = worker.KVEvents{} // these have sockets of their own
	w, err := worker.Start(context.Background(), cfg, worker.Deps{Ring: c.ring, NATS: c.ring, Log: c.log, Registry: prometheus.NewRegistry(),
		Ways: []way.Kind{way.Network(transport{h})}, Dial: h.DialContext, Listen: h.Listen,
		Backend: func(b kernels.Backend) kernels.Backend {
			return &paced{Backend: b, Viewer: b.(kernels.Viewer), step: 5 * time.Millisecond}
		}})
	if err != nil {
		c.t.Fatal(err)
	}
	return w, h
}

func TestThin(t *testing.T) {
	model := t.TempDir() + "/tiny"
	makeModel(t, model)
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, model)
		began := time.Now()
		for i, role := range []fleet.Role{fleet.Prefill, fleet.Decode, fleet.Decode} {
			w, _ := c.worker(fmt.Sprintf("w%d", i), fmt.Sprintf("10.0.1.%d", i), role)
			t.Cleanup(func() { _ = w.Close(context.Background()) })
		}
		for !c.router.Ready() {
			time.Sleep(10 * time.Millisecond)
			if time.Since(began) > time.Minute {
				t.Fatal("not ready")
			}
		}
		t.Log("ready after", time.Since(began))
		resp, err := c.client.Post("http://10.0.0.1:8000/v1/completions", "application/json", strings.NewReader(`{"model":"tiny","prompt":"Once upon a time","max_tokens":20,"seed":1}`))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		t.Log(resp.StatusCode, string(b), err, time.Since(began))
		resp.Body.Close()
		c.client.CloseIdleConnections()
	})
}

