package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/steer"
	"github.com/xpyd/xpyd/worker"
)

// RouterConfig is the configuration of `xpyd router` and `xpyd up`: the router's own settings at
// the top level, and how it joins the fleet.
type RouterConfig struct {
	router.Config
	Data string `key:"data"` // folder of the secrets
	// Join or JoinFile comes from another router of the fleet. With TrustEveryone the fleet's
	// secret is neither asked for nor shown.
	Join          string      `key:"join" secret:"true"`
	JoinFile      string      `key:"join_file"`
	TrustEveryone bool        `key:"trust_everyone"`
	Fleet         fleetConfig `key:"fleet"`
	Log           worker.Log  `key:"log"`
}

// Validate checks what the router's own check does not.
func (c *RouterConfig) Validate() error {
	err := c.Config.Validate()
	if c.Data == "" {
		err = errors.Join(err, config.Bad("data", "is empty: it must name a folder"))
	}
	if c.Join != "" && c.JoinFile != "" {
		err = errors.Join(err, config.Bad("join_file", "it and join (XPYD_JOIN) exclude each other"))
	}
	return err
}

// fleetConfig says where NATS is. Without a URL the router embeds a server.
type fleetConfig struct {
	URL       string `key:"url" secret:"url"`
	CredsFile string `key:"creds_file"`
	TLSCert   string `key:"tls_cert"`
	TLSKey    string `key:"tls_key"`
	TLSCA     string `key:"tls_ca"`
	Insecure  bool   `key:"insecure"`

	// The embedded server. Two routers name each other in cluster_routes.
	Listen          string   `key:"listen"`
	Advertise       string   `key:"advertise"`
	ClusterListen   string   `key:"cluster_listen"`
	ClusterRoutes   []string `key:"cluster_routes"`
	ClusterUser     string   `key:"cluster_user"`
	ClusterPassword string   `key:"cluster_password" secret:"true"`
}

// Validate refuses addresses that cannot be listened on or connected to.
func (c *fleetConfig) Validate() error {
	if err := trust.ValidTLS(c.TLSCert, c.TLSKey, c.TLSCA); err != nil {
		return err
	}
	server, conn := c.server(&trust.Ring{}), c.conn()
	key, err := "listen", server.Validate()
	if c.URL != "" {
		key, err = "url", conn.Validate()
	}
	if err != nil {
		return config.Bad(key, "%v", err)
	}
	return nil
}

func (c *fleetConfig) conn() fleet.ConnConfig {
	return fleet.ConnConfig{URL: c.URL, CredsFile: c.CredsFile, TLSCert: c.TLSCert, TLSKey: c.TLSKey, TLSCA: c.TLSCA, Insecure: c.Insecure}
}

func (c *fleetConfig) server(secrets *trust.Ring) fleet.ServerConfig {
	return fleet.ServerConfig{Ring: secrets, Listen: c.Listen, Advertise: c.Advertise,
		TLSCert: c.TLSCert, TLSKey: c.TLSKey, TLSCA: c.TLSCA, ClusterListen: c.ClusterListen, ClusterRoutes: c.ClusterRoutes,
		ClusterUser: c.ClusterUser, ClusterPassword: c.ClusterPassword, Insecure: c.Insecure}
}

func defaultRouterConfig() RouterConfig {
	c := RouterConfig{Config: router.DefaultConfig(), Data: datadir.Default(), Log: worker.Log{Level: "info", Format: "text"}}
	c.Fleet.Listen = "127.0.0.1:4222"
	return c
}

// Files of the data folder, which one router owns while it runs. Other commands on the same machine
// find the router by them, without a flag.
const (
	fileToken   = "admin-token"    // bearer token of the admin listener
	fileTokenRO = "admin-token-ro" // read-only token
	fileAdmin   = "admin-url"
	// fileAdminCert has the path of the admin listener's certificate, which the commands of this
	// machine trust.
	fileAdminCert = "admin-cert"

	// These outlive the router, so that it starts again with the same fleet.
	fileSecret = "fleet-secret"
	fileJoin   = "join-url"     // for --join-file
	fileScrape = "scrape-token" // for Prometheus
)

// front is a running front door: NATS, the fleet's watcher, the router.
type front struct {
	log       *slog.Logger
	forget    bool // see frontConfig
	data      *datadir.Dir
	secret    *fleetSecret
	joinFile  string        // for --join-file
	endFollow func()        // ends following the join file; nil without one
	endKeep   func()        // ends keeping revocations; nil before it began
	nats      *fleet.Server // nil with an external NATS
	conn      *fleet.Conn
	watcher   *fleet.Watcher
	revoker   *revoker
	lifeline  *fleet.Lifeline
	router    *router.Router

	// ballast is never touched, so it takes no memory, but it counts as heap. A router holds a few
	// MiB; without ballast it would collect garbage several hundred times a second under load.
	ballast []byte
}

const ballastBytes = 16 << 20

// frontConfig is what the caller of openFront adds to the settings.
type frontConfig struct {
	level  *slog.LevelVar // of the log
	mounts map[string]fasthttp.RequestHandler
	coming func(string) bool // router.Deps.Coming
	doing  func() string     // router.Deps.Doing
	hands  steer.Hands       // router.Deps.Hands
	// guard wraps the handlers of all mounts; nil: none.
	guard   func(map[string]fasthttp.RequestHandler) map[string]fasthttp.RequestHandler
	sources config.Sources // if none sets fleet.listen, another port will do
	forget  bool           // remove everything from a data folder made here: the fleet ends too
	from    *estate        // nil: nobody is taken over from
}

// dying tells the fleet that a decode worker's process has begun to die. Of a prefill worker it tells
// nothing yet: what it has pushed can be taken up only when it is over, and whoever tries before waits.
func (f *front) dying(id string, pid int) {
	if m := f.watcher.Snapshot().Get(id); m != nil && m.PID == pid && m.Role == fleet.Decode {
		f.watcher.ReportDead(id, m.Epoch, "its process is dying")
	}
}

// openFront wires and starts everything that listens. With how.from it accepts nothing, and writes
// nothing to the data folder, until take. The end of ctx ends waiting for a join file that is a pipe.
func openFront(ctx context.Context, cfg *RouterConfig, log *slog.Logger, how frontConfig) (f *front, err error) {
	f = &front{log: log, forget: how.forget, ballast: make([]byte, ballastBytes)}
	defer func() {
		if err != nil {
			f.close(context.Background())
			f = nil
		}
	}()
	creds, err := fleetTLS(cfg.Fleet.TLSCert, cfg.Fleet.TLSKey, cfg.Fleet.TLSCA, log)
	if err != nil {
		return
	}
	joined, err := readJoining(ctx, cfg.Join, cfg.JoinFile)
	if err != nil {
		return
	}
	if how.from == nil {
		f.data, err = datadir.Own(cfg.Data)
	} else {
		f.data, err = datadir.Inherit(cfg.Data, how.from.lock, how.from.Made)
	}
	if err != nil {
		return
	}
	f.joinFile = filepath.Join(f.data.Path(), fileJoin)
	token, err := f.token("XPYD_ADMIN_TOKEN", fileToken, how.from)
	if err != nil {
		return
	}
	tokenRO, err := f.token("XPYD_ADMIN_TOKEN_RO", fileTokenRO, how.from)
	if err != nil {
		return
	}
	if f.secret, err = openFleetSecret(f.data, &joined, log); err != nil {
		return
	}
	if err = f.openNATS(cfg, &joined, how.sources["fleet.listen"] != "", how.from); err != nil {
		return
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(buildInfo(), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	revoked, err := readRevoked(f.data)
	if err != nil {
		return
	}
	if f.watcher, err = fleet.Watch(fleet.WatcherConfig{Conn: f.conn, Revoked: revoked, Leads: true, Probe: fleet.ProbeHealth(creds.Client(), nil), Log: log, Registerer: reg}); err != nil {
		return
	}
	f.secret.watch = f.watcher
	f.revoker = &revoker{Watcher: f.watcher, data: f.data, heed: f.secret.heed, log: log}
	ring := f.secret.ring
	if cfg.TrustEveryone {
		ring = nil
		log.Warn("trust_everyone: workers are shown no secret, so they must trust everyone too: " + trustMeans)
	}
	f.lifeline = fleet.WatchLifeline(f.watcher, fleet.LifelineConfig{TLS: creds.Client(), Ring: ring, Log: log})
	mounts := f.secret.mounts()
	maps.Copy(mounts, how.mounts)
	if how.guard != nil {
		mounts = how.guard(mounts)
	}
	deps := router.Deps{Ring: ring, TLS: creds, Fleet: f.watcher, Bus: f.conn.Bus(), Log: log, Level: how.level, Registerer: reg, Gatherer: reg,
		AdminToken: token, AdminTokenRO: tokenRO, Revoker: f.revoker, Version: build(), Mounts: mounts, Coming: how.coming, Doing: how.doing, Hands: how.hands}
	if how.from != nil {
		deps.Public, deps.Admin = how.from.public, how.from.admin
	}
	r, err := router.New(cfg.Config, deps)
	if err != nil {
		return
	}
	if err = r.Open(); err != nil {
		return
	}
	f.router = r
	if how.from != nil {
		how.from.joined = &joined
		return
	}
	f.serve(&joined)
	err = f.tell(cfg)
	return
}

// serve begins what only one process of a data folder does.
func (f *front) serve(joined *joining) {
	f.revoker.host(f.nats)
	f.endKeep = background(f.revoker.follow)
	if joined.file != "" {
		f.follow(joined)
	}
	f.router.Serve()
}

// tell writes where the admin listener is.
func (f *front) tell(cfg *RouterConfig) error {
	a := f.router.AdminAddr()
	if a == nil {
		return nil
	}
	scheme := "http"
	if cfg.AdminTLSCert != "" {
		scheme = "https"
		path, err := filepath.Abs(cfg.AdminTLSCert)
		if err == nil {
			err = f.data.Write(fileAdminCert, []byte(path+"\n"))
		}
		if err != nil {
			return err
		}
	}
	return f.data.Write(fileAdmin, []byte(scheme+"://"+a.String()+"\n"))
}

// token returns the environment's token, or makes one; it is written to the data folder, unless it
// comes from there.
func (f *front) token(env, file string, from *estate) (string, error) {
	if from != nil {
		text, err := f.data.Read(file)
		return strings.TrimSpace(string(text)), err
	}
	token := os.Getenv(env)
	if token == "" {
		var raw [24]byte
		rand.Read(raw[:]) // never fails (crypto/rand)
		token = hex.EncodeToString(raw[:])
	}
	return token, f.data.Write(file, []byte(token+"\n"))
}

// openNATS starts the embedded server unless there is another one, connects, and writes the join line.
func (f *front) openNATS(cfg *RouterConfig, joined *joining, chosen bool, from *estate) error {
	url := cfg.Fleet.URL
	if url == "" && cfg.Fleet.ClusterListen == "" {
		url, f.secret.moves = joined.URL, joined.URL != ""
	}
	embedded := url == ""
	if embedded && from != nil {
		url = from.NATS
	} else if embedded {
		server := cfg.Fleet.server(f.secret.ring)
		server.Log = f.log
		addrs := []string{server.Listen}
		if !chosen {
			addrs = natsAddrs(server.Listen, f.secret.before())
		}
		var err error
		for _, server.Listen = range addrs {
			if f.nats, err = fleet.StartServer(server); !errors.Is(err, syscall.EADDRINUSE) {
				break
			}
			f.log.Info("a port for NATS is taken", "addr", server.Listen)
		}
		if err != nil {
			return err
		}
		url = f.nats.ClientURL()
	}
	f.secret.url, f.secret.nats = url, f.nats
	if from == nil {
		if err := f.secret.publish(); err != nil {
			return err
		}
	}
	conn := cfg.Fleet.conn()
	conn.URL, conn.Ring, conn.Name, conn.Log = url, f.secret.ring, routerName, f.log
	conn.Insecure = conn.Insecure && !embedded
	var err error
	f.conn, err = fleet.Connect(conn)
	return err
}

// natsAddrs lists where the embedded server may listen if no setting says so: on the previous port,
// which join lines name, then the default, then any.
func natsAddrs(listen string, before trust.Join) []string {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return []string{listen} // validated before
	}
	var out []string
	first, _, _ := strings.Cut(before.URL, ",")
	if u, err := url.Parse(first); err == nil && u.Port() != "" {
		out = append(out, net.JoinHostPort(host, u.Port()))
	}
	return slices.Compact(append(out, listen, net.JoinHostPort(host, "0")))
}

// follow applies the other router's join file as it changes, until close.
func (f *front) follow(joined *joining) {
	f.endFollow = background(func(ctx context.Context) {
		joined.follow(ctx, nil, f.log, func(j trust.Join) error { return f.secret.follow(j, f.conn) })
	})
}

// letGo releases the data folder. It may be called again, and concurrently.
func (f *front) letGo() {
	files := []string{fileToken, fileTokenRO, fileAdmin, fileAdminCert}
	if f.forget && f.data.Made() {
		files = append(files, fileSecret, fileJoin, fileScrape, fileRevoked)
	}
	f.data.Close(files...)
}

// reloading reloads limits, policy and static members at each SIGHUP, until end is called. It also
// reopens the audit file and the request log, even if the configuration is invalid.
func (f *front) reloading(cfg *RouterConfig, load func() (*RouterConfig, error)) (end func()) {
	r, log := f.router, f.log
	anew := func() (*RouterConfig, error) {
		if err := r.Reopen(); err != nil {
			log.Error("the audit file is not reopened; the old one stays in use", "err", err)
		}
		return load()
	}
	reload := config.NewReloader(cfg, anew, func(old, next *RouterConfig) error {
		if err := r.Reload(next.Limits, next.Pick.Policy); err != nil {
			return err
		}
		if err := r.Members.SetStatic(next.Static); err != nil { // the valid ones are in force
			log.Error("static members", "err", err)
		}
		now := *old // in force
		now.Limits, now.Pick.Policy, now.Static = next.Limits, next.Pick.Policy, next.Static
		rest := *next
		rest.Limits, rest.Pick.Policy, rest.Static = old.Limits, old.Pick.Policy, old.Static
		if !reflect.DeepEqual(&rest, old) {
			log.Warn("limits, pick.policy, static, keys and certificates are in force; other changes need a restart")
		}
		if changes, err := config.Changes(old, &now); err != nil {
			log.Error("audit", "err", err)
		} else if len(changes) > 0 {
			r.Console.Audit("reload", "SIGHUP", strings.Join(changes, "; "))
		}
		return nil
	}, log)
	return background(reload.Run)
}

// url is the public listener's.
func (f *front) url(cfg *RouterConfig) string {
	scheme := "http://"
	if cfg.TLSCert != "" {
		scheme = "https://"
	}
	return scheme + strings.Replace(f.router.Addr().String(), "[::]", "127.0.0.1", 1)
}

// close first lets running requests end (until ctx ends), then closes the view of the fleet, then
// NATS.
func (f *front) close(ctx context.Context) {
	defer runtime.KeepAlive(f.ballast)
	var errs []error
	if f.router != nil {
		errs = append(errs, f.router.Shutdown(ctx))
	}
	if f.endFollow != nil {
		f.endFollow()
	}
	if f.lifeline != nil {
		f.lifeline.Close()
	}
	if f.endKeep != nil {
		f.endKeep()
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
		f.letGo()
	}
	if err := errors.Join(errs...); err != nil {
		f.log.Warn("shutdown was not clean", "error", err)
	}
}
