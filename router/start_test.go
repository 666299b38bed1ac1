package router_test

import (
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/sense"
)

// registrar refuses its collector number fails, and counts those that are registered.
type registrar struct {
	prometheus.Registerer
	fails, asked, there int
}

func (r *registrar) Register(prometheus.Collector) error {
	if r.asked++; r.asked == r.fails {
		return errors.New("refused")
	}
	r.there++
	return nil
}

func (r *registrar) Unregister(prometheus.Collector) bool { r.there--; return true }

// bare is a fleet without workers, and a router's configuration for it.
func bare(t *testing.T) (*fleet.Watcher, router.Config) {
	w, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	cfg := router.DefaultConfig()
	cfg.Listen, cfg.AdminListen = "127.0.0.1:0", ""
	return w, cfg
}

// TestNewRefuses: a router that cannot be made says why, and leaves nothing behind.
func TestNewRefuses(t *testing.T) {
	w, good := bare(t)
	for why, edit := range map[string]func(*router.Config, *router.Deps){
		"attempts":               func(c *router.Config, _ *router.Deps) { c.Attempts = 0 },
		"needs a token":          func(c *router.Config, _ *router.Deps) { c.AdminListen = "127.0.0.1:0" },
		"equals the admin token": func(_ *router.Config, d *router.Deps) { d.AdminToken, d.AdminTokenRO = "a", "a" },
		"api_keys_file":          func(c *router.Config, _ *router.Deps) { c.APIKeysFile = "none" },
		"tls_cert":               func(c *router.Config, _ *router.Deps) { c.TLSCert, c.TLSKey = "none", "none" },
		"admin_tls_cert":         func(c *router.Config, _ *router.Deps) { c.AdminTLSCert, c.AdminTLSKey = "none", "none" },
		"upstream":               func(c *router.Config, _ *router.Deps) { c.Upstream.CA = "none" },
		"audit_file":             func(c *router.Config, _ *router.Deps) { c.AuditFile = "/none/x" },
		"request_log.file":       func(c *router.Config, _ *router.Deps) { c.RequestLog.File = "/none/x" },
		"request_log.max_bytes":  func(c *router.Config, _ *router.Deps) { c.RequestLog.MaxBytes = 1 << 20 },
		"kv_events.tokenizers: m": func(c *router.Config, _ *router.Deps) {
			c.Events.Tokenizers = []sense.Tokenizer{{Model: "m", Path: "none"}}
		},
	} {
		made := &registrar{}
		c, d := good, router.Deps{Fleet: w, Registerer: made}
		edit(&c, &d)
		if r, err := router.New(c, d); r != nil || err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%v, want %q", err, why)
		}
		if made.there != 0 {
			t.Errorf("%s: %d stay registered", why, made.there)
		}
	}
	reg := &registrar{}
	for reg.fails = 1; ; reg.fails++ {
		reg.asked = 0
		r, err := router.New(good, router.Deps{Fleet: w, Registerer: reg})
		if err == nil {
			if reg.fails <= reg.asked || reg.there != reg.asked {
				t.Errorf("%d of %d are registered", reg.there, reg.asked)
			}
			if err := r.Start(); err != nil {
				t.Fatal(err)
			}
			if r.AdminAddr() != nil {
				t.Errorf("an admin listener at %v", r.AdminAddr())
			}
			if err := r.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
			break
		}
		if reg.there != 0 || r != nil {
			t.Fatalf("%d stay registered after the failure of number %d", reg.there, reg.fails)
		}
	}
	if reg.there != 0 {
		t.Errorf("%d stay registered", reg.there)
	}
}

// TestStartFails: a port that is taken is an error that names its setting, and the other is free again.
func TestStartFails(t *testing.T) {
	w, cfg := bare(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free.Close()
	for why, edit := range map[string]func(*router.Config){
		"listen (--listen)":      func(c *router.Config) { c.Listen = taken.Addr().String() },
		"admin_listen (--admin)": func(c *router.Config) { c.Listen, c.AdminListen = free.Addr().String(), taken.Addr().String() },
		"discovery.p2p_listen": func(c *router.Config) {
			c.Listen, c.Discovery.P2PListen = free.Addr().String(), taken.Addr().String()
		},
	} {
		c := cfg
		edit(&c)
		r, err := router.New(c, router.Deps{Fleet: w, AdminToken: "a"})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Start(); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%v, want %q", err, why)
		}
		if again, err := net.Listen("tcp", free.Addr().String()); err != nil {
			t.Errorf("after %q: %v", why, err)
		} else {
			again.Close()
		}
	}
}

// TestCloseFails: a router that cannot close its audit file at its end says so in its log.
func TestCloseFails(t *testing.T) {
	w, cfg := bare(t)
	cfg.AuditFile = filepath.Join(t.TempDir(), "audit")
	log := &logs{}
	r, err := router.New(cfg, router.Deps{Fleet: w, Log: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	if err := r.Console.Close(); err != nil { // it cannot be closed again
		t.Error(err)
	}
	if err := r.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if s := log.String(); strings.Count(s, "level=ERROR") != 1 || !strings.Contains(s, cfg.AuditFile) {
		t.Errorf("it says %s", s)
	}
}

// mute is a bus on which nobody must speak.
type mute struct{ *testing.T }

func (b mute) Publish([]byte) error { b.Error("it tells"); return nil }

func (b mute) Subscribe(func([]byte)) (stop func(), err error) {
	b.Error("it listens")
	return func() {}, nil
}

// TestSharesNothing: a router that is not to share is no peer of others, though it could be.
func TestSharesNothing(t *testing.T) {
	g := newRigOf(t, func(d *router.Deps) { d.Bus = mute{t} }, 1, 1, func(c *router.Config) { c.Share.Interval = 0 })
	var list struct{ Router *string }
	if g.adminJSON("GET", "/admin/v1/instances", "", &list); list.Router != nil {
		t.Errorf("it has a name among others: %s", *list.Router)
	}
}

// TestReloadRefuses: what is wrong with a reload is named, and nothing changes.
func TestReloadRefuses(t *testing.T) {
	w, cfg := bare(t)
	r, err := router.New(cfg, router.Deps{Fleet: w})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	for _, c := range []struct {
		limits func(*flight.Limits)
		policy string
		want   string
	}{
		{func(*flight.Limits) {}, "least_loaded", ""},
		{func(l *flight.Limits) { l.MaxInFlight = 0 }, "least_loaded", "limits.max_in_flight"},
		{func(l *flight.Limits) { l.QueueWait = -time.Second }, "least_loaded", "limits.queue_wait"},
		{func(*flight.Limits) {}, "best", "pick.policy"},
	} {
		l := cfg.Limits
		c.limits(&l)
		if err := r.Reload(l, c.policy); (err == nil) != (c.want == "") || err != nil && !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

// TestRoutes: the reference lists each path once, the public listener's first, and for whom it is.
func TestRoutes(t *testing.T) {
	who, last := map[string]string{}, ""
	for _, r := range router.Routes() {
		name := r.Listener + " " + r.Path + " " + r.Method
		if who[name] != "" {
			t.Errorf("%s is there twice", name)
		}
		if who[name] = r.For; last != "" && strings.HasPrefix(last, r.Listener+" ") && name < last || r.Listener == "public" && strings.HasPrefix(last, "admin ") {
			t.Errorf("%s stands behind %s", name, last)
		}
		last = name
	}
	for name, want := range map[string]string{"public /v1/completions POST": "API keys", "public /v1/models GET": "API keys", "public /v1/embeddings POST": "API keys", "public /health GET": "anybody",
		"public /ready GET": "anybody", "public /version GET": "anybody", "public /metrics GET": "anybody", "admin /admin/v1/instances POST": "the admin token"} {
		if who[name] != want {
			t.Errorf("%s is for %q, want %q", name, who[name], want)
		}
	}
}
