package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/worker"
	"github.com/xpyd/xpyd/router"
)

// RouterConfig is what `xpyd router` and `xpyd up` read: the router's own
// settings at the top level, and how it sees the fleet.
type RouterConfig struct {
	router.Config
	Data  string      `koanf:"data"` // folder of the admin token and the join URL
	Fleet fleetConfig `koanf:"fleet"`
	Log   worker.Log  `koanf:"log"`
}

// fleetConfig says where NATS is. Without a URL the router embeds a server.
type fleetConfig struct {
	URL       string `koanf:"url" secret:"url"`
	CredsFile string `koanf:"creds_file"`
	TLSCert   string `koanf:"tls_cert"`
	TLSKey    string `koanf:"tls_key"`
	TLSCA     string `koanf:"tls_ca"`
	Insecure  bool   `koanf:"insecure"`

	// The embedded server. Two routers name each other in cluster_routes and
	// share user, password and the cluster's.
	Listen          string   `koanf:"listen"`
	Advertise       string   `koanf:"advertise"`
	User            string   `koanf:"user"`
	Password        string   `koanf:"password" secret:"true"`
	ClusterListen   string   `koanf:"cluster_listen"`
	ClusterRoutes   []string `koanf:"cluster_routes"`
	ClusterUser     string   `koanf:"cluster_user"`
	ClusterPassword string   `koanf:"cluster_password" secret:"true"`
}

// Validate refuses what could not be listened on or connected to.
func (c *fleetConfig) Validate() error {
	if c.URL != "" {
		conn := fleet.ConnConfig{URL: c.URL, CredsFile: c.CredsFile, TLSCert: c.TLSCert, TLSCA: c.TLSCA, Insecure: c.Insecure}
		if err := conn.Validate(); err != nil {
			return &config.KeyError{Key: "url", Msg: err.Error()}
		}
		return nil
	}
	server := c.server()
	if err := server.Validate(); err != nil {
		return &config.KeyError{Key: "listen", Msg: err.Error()}
	}
	return nil
}

func (c *fleetConfig) server() fleet.ServerConfig {
	return fleet.ServerConfig{Listen: c.Listen, Advertise: c.Advertise, User: c.User, Password: c.Password,
		TLSCert: c.TLSCert, TLSKey: c.TLSKey, TLSCA: c.TLSCA, ClusterListen: c.ClusterListen, ClusterRoutes: c.ClusterRoutes,
		ClusterUser: c.ClusterUser, ClusterPassword: c.ClusterPassword, Insecure: c.Insecure}
}

func defaultRouterConfig() RouterConfig {
	c := RouterConfig{Config: router.DefaultConfig(), Data: defaultData(), Log: worker.Log{Level: "info", Format: "text"}}
	c.Fleet.Listen = "127.0.0.1:4222"
	return c
}

// defaultData is XPYD_DATA, else a folder of this user's that a reboot clears.
func defaultData() string {
	if d := os.Getenv("XPYD_DATA"); d != "" {
		return d
	}
	if d := os.Getenv("XDG_RUNTIME_DIR"); d != "" {
		return filepath.Join(d, "xpyd")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("xpyd-%d", os.Getuid()))
}

// dataDir is the folder that one router owns while it runs. What is in it is
// how other commands find the router: they need no flag on the same machine.
type dataDir struct {
	path string
	lock *os.File
}

const (
	fileLock  = "lock"
	fileToken = "admin-token" // bearer token of the admin listener
	fileAdmin = "admin-url"
	// fileAdminCert says where the admin listener's certificate is, if it has
	// one: the commands of this machine believe it.
	fileAdminCert = "admin-cert"
	fileJoin      = "join-url" // NATS URL for --join
)

// openData takes the folder; a second router with the same one is refused.
func openData(path string) (*dataDir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(path, fileLock), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("data: another xpyd uses %s; stop it, or choose another folder with --data", path)
	}
	return &dataDir{path: path, lock: f}, nil
}

// write puts a file for this user's eyes only, whole or not at all.
func (d *dataDir) write(name, content string) error {
	tmp := filepath.Join(d.path, "."+name)
	if err := os.WriteFile(tmp, []byte(content+"\n"), 0o600); err != nil {
		return fmt.Errorf("data: %w", err)
	}
	return os.Rename(tmp, filepath.Join(d.path, name))
}

// close removes what we put there; the folder too, if that leaves it empty. It may be
// called again, and meanwhile.
func (d *dataDir) close() {
	for _, name := range []string{fileToken, fileAdmin, fileAdminCert, fileJoin, fileLock} {
		os.Remove(filepath.Join(d.path, name))
	}
	os.Remove(d.path)
	_ = syscall.Flock(int(d.lock.Fd()), syscall.LOCK_UN) // also for a child that was just forked and has a copy
	d.lock.Close()
}

// front is a running front door: NATS, the fleet's watcher, the router.
type front struct {
	log      *slog.Logger
	data     *dataDir
	nats     *fleet.Server // nil with an external NATS
	joinURL  string        // for workers, with credentials
	conn     *fleet.Conn
	watcher  *fleet.Watcher
	lifeline *fleet.Lifeline
	router   *router.Router

	// ballast is never touched, so it takes no memory, but counts as held. A
	// router holds a few MiB, which would be collected several hundred times a
	// second under load: whenever garbage has grown to as much.
	ballast []byte
}

const ballastBytes = 16 << 20

// openFront wires and starts everything that listens.
func openFront(cfg *RouterConfig, log *slog.Logger, mounts map[string]fasthttp.RequestHandler) (f *front, err error) {
	f = &front{log: log, ballast: make([]byte, ballastBytes)}
	defer func() {
		if err != nil {
			f.close(context.Background())
			f = nil
		}
	}()
	if f.data, err = openData(cfg.Data); err != nil {
		return
	}
	token := os.Getenv("XPYD_ADMIN_TOKEN")
	if token == "" {
		var raw [24]byte
		rand.Read(raw[:]) // never fails (crypto/rand)
		token = hex.EncodeToString(raw[:])
	}
	if err = f.data.write(fileToken, token); err != nil {
		return
	}
	if f.joinURL = cfg.Fleet.URL; f.joinURL == "" {
		server := cfg.Fleet.server()
		server.Log = log
		f.nats, err = fleet.StartServer(server)
		if err != nil {
			return
		}
		f.joinURL = f.nats.ClientURL()
	}
	if err = f.data.write(fileJoin, f.joinURL); err != nil {
		return
	}
	f.conn, err = fleet.Connect(fleet.ConnConfig{URL: f.joinURL, Name: "router", CredsFile: cfg.Fleet.CredsFile,
		TLSCert: cfg.Fleet.TLSCert, TLSKey: cfg.Fleet.TLSKey, TLSCA: cfg.Fleet.TLSCA, Insecure: cfg.Fleet.Insecure, Log: log})
	if err != nil {
		return
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if f.watcher, err = fleet.Watch(fleet.WatcherConfig{Conn: f.conn, Log: log, Registerer: reg}); err != nil {
		return
	}
	f.lifeline = fleet.WatchLifeline(f.watcher, fleet.LifelineConfig{Log: log})
	r, err := router.New(cfg.Config, router.Deps{Fleet: f.watcher, Bus: f.conn.Bus(), Log: log, Registerer: reg, Gatherer: reg,
		AdminToken: token, Version: build(), Mounts: mounts})
	if err != nil {
		return
	}
	if err = r.Start(); err != nil {
		return
	}
	f.router = r
	if a := r.AdminAddr(); a != nil {
		scheme := "http"
		if cfg.AdminTLSCert != "" {
			scheme = "https"
			var path string
			if path, err = filepath.Abs(cfg.AdminTLSCert); err == nil {
				err = f.data.write(fileAdminCert, path)
			}
		}
		err = errors.Join(err, f.data.write(fileAdmin, scheme+"://"+a.String()))
	}
	return
}

// reloading puts limits, policy and static members in force anew on each SIGHUP, until end is
// called.
func (f *front) reloading(cfg *RouterConfig, load func() (*RouterConfig, error)) (end func()) {
	r, log := f.router, f.log
	reload := config.NewReloader(cfg, load, func(old, next *RouterConfig) error {
		if err := r.Reload(next.Limits, next.Pick.Policy); err != nil {
			return err
		}
		if err := r.SetStatic(next.Static); err != nil { // the others of the list are in force
			log.Error("static members", "err", err)
		}
		rest := *next
		rest.Limits, rest.Pick.Policy, rest.Static = old.Limits, old.Pick.Policy, old.Static
		if !reflect.DeepEqual(&rest, old) {
			log.Warn("limits, pick.policy, static, keys and certificates are in force; what else has changed needs a restart")
		}
		return nil
	}, log)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		reload.Run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// url is the public listener's.
func (f *front) url(cfg *RouterConfig) string {
	scheme := "http://"
	if cfg.TLSCert != "" {
		scheme = "https://"
	}
	return scheme + strings.Replace(f.router.Addr().String(), "[::]", "127.0.0.1", 1)
}

// close ends along the data path: no new requests, running ones to their end
// (until ctx), then the view of the fleet, then NATS.
func (f *front) close(ctx context.Context) {
	defer runtime.KeepAlive(f.ballast)
	var errs []error
	if f.router != nil {
		errs = append(errs, f.router.Shutdown(ctx))
	}
	if f.lifeline != nil {
		f.lifeline.Close()
	}
	if f.watcher != nil {
		f.watcher.Close()
	}
	if f.conn != nil {
		errs = append(errs, f.conn.Close(ctx))
	}
	if f.nats != nil {
		f.nats.Close()
	}
	if f.data != nil {
		f.data.close()
	}
	if err := errors.Join(errs...); err != nil {
		f.log.Warn("shutdown was not clean", "error", err)
	}
}
