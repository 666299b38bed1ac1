package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/clientwatch"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/lobby"
	"github.com/xpyd/xpyd/internal/requestlog"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router/console"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
	"github.com/xpyd/xpyd/router/share"
	"github.com/xpyd/xpyd/router/steer"
	"github.com/xpyd/xpyd/router/trace"
)

// Deps is what a router is given.
type Deps struct {
	Fleet      *fleet.Watcher
	Log        *slog.Logger
	Level      *slog.LevelVar // of Log; nil: it stays as it is
	Registerer prometheus.Registerer
	Gatherer   prometheus.Gatherer // for /metrics; nil leaves the path out
	Bus        share.Bus           // to other routers; nil for none
	AdminToken string              // required unless AdminListen is ""
	Revoker    console.Revoker     // nil: nothing is revoked here
	// AdminTokenRO opens what only reads on the admin listener; "": none.
	AdminTokenRO string
	Version      string      // for GET /version
	Ring         *trust.Ring // the fleet's secrets; nil: native workers are shown none
	TLS          *trust.TLS  // to native workers; nil: plain HTTP
	// Coming reports whether a worker that is unknown to the fleet, or dead, is about to
	// start: orders for it wait. It must not block; nil: none is.
	Coming func(id string) bool
	// Dial opens the connections to workers; nil: a net.Dialer does.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Public and Admin are listeners that another process has handed over; nil: Open listens.
	Public, Admin net.Listener
	// Doing is what this process does besides serving, for `xpyd status`; "" for nothing. Nil: never
	// anything.
	Doing func() string
	// Hands start and end workers for the planner; nil: it cannot.
	Hands steer.Hands
	// Mounts adds handlers to the admin listener, behind its token: "POST /admin/v1/scale"
	// and the like.
	Mounts map[string]fasthttp.RequestHandler
}

// Router is a front door. Call New, Start and Shutdown once each, in this order. Instead of Start,
// Open and then Serve let it know the fleet before it takes requests.
type Router struct {
	Members *sense.Members
	Console *console.Console

	cfg      Config
	deps     Deps
	log      *slog.Logger
	metrics  *ownMetrics
	files    *files
	document []byte       // /openapi.json
	tls      h1.ServerTLS // of the public listener
	adminTLS h1.ServerTLS
	picker   *pick.Picker
	up       *h1.Client
	tracer   *trace.Exporter // nil without tracing
	share    *share.Sharer   // nil without a bus
	feeds    *sense.Feeds
	flights  *flight.Service
	watcher  *clientwatch.Watcher
	requests *requestlog.Writer // nil without a request log
	steer    *steer.Steer
	// plans ends with endPlans, when this router no longer plans.
	plans    context.Context
	endPlans context.CancelFunc
	// adminConns bounds those of the admin listener.
	adminConns    int
	public, admin *h1.Server

	ctx    context.Context // ends when everything must
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup // goroutines of spawn

	publicLn, adminLn net.Listener

	mu       sync.Mutex // guards the following; never held while calling out
	closed   bool       // spawn starts nothing more
	stopping bool       // not ready any more
}

// New checks cfg and prepares a router; it opens nothing yet.
func New(cfg Config, deps Deps) (_ *Router, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.AdminListen != "" && deps.AdminToken == "" {
		return nil, errors.New("admin_listen: the admin listener needs a token")
	}
	if deps.AdminTokenRO != "" && deps.AdminTokenRO == deps.AdminToken {
		return nil, errors.New("the read-only admin token equals the admin token")
	}
	if deps.Log == nil {
		deps.Log = slog.New(slog.DiscardHandler)
	}
	r := &Router{cfg: cfg, deps: deps, log: deps.Log, picker: pick.New(cfg.Pick, rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))),
		up: h1.NewClient(cfg.Timeouts, cfg.Upstream, deps.TLS.Client())}
	if deps.Dial != nil {
		r.up.Dial = deps.Dial
	}
	r.document = openAPI(deps.Version, routes)
	r.ctx, r.cancel = context.WithCancelCause(context.Background())
	r.plans, r.endPlans = context.WithCancel(r.ctx)
	defer func() {
		if err != nil {
			r.cancel(err)
			err = errors.Join(err, r.release())
		}
	}()
	if r.watcher, err = clientwatch.New(); err != nil {
		return nil, err
	}
	if err = r.makeParts(); err != nil {
		return nil, err
	}
	if r.metrics, err = newOwnMetrics(deps.Registerer, r); err != nil {
		return nil, err
	}
	if err = r.loadFiles(); err != nil {
		return nil, err
	}
	r.makeServers()
	return r, nil
}

func (r *Router) makeParts() (err error) {
	cfg, deps := &r.cfg, &r.deps
	if cfg.Tracing.Endpoint != "" {
		r.tracer = trace.New(cfg.Tracing, deps.Version, deps.Log)
	}
	if deps.Bus != nil && cfg.Share.Interval > 0 {
		r.share = share.New(cfg.Share, deps.Bus, r.picker, deps.Log)
		if cfg.Planner.Mode == steer.Act && deps.Hands != nil {
			r.share.Prefer()
		}
	}
	if r.feeds, err = sense.NewFeeds(sense.FeedsDeps{Events: cfg.Events, Fleet: deps.Fleet, Picker: r.picker, Ring: deps.Ring, Log: deps.Log, Ctx: r.ctx}); err != nil {
		return err
	}
	r.Members = sense.NewMembers(sense.MembersDeps{Fleet: deps.Fleet, Log: deps.Log, Picker: r.picker, Client: r.up, Ring: deps.Ring, MemberTLS: deps.TLS != nil,
		ProbeTimeout: cfg.ProbeTimeout, Judge: cfg.Pick.Ejection.Interval, Share: r.share, HTTP: r.up.HTTPClient(discover.NewClient()), Ctx: r.ctx, Spawn: r.spawn})
	if cfg.RequestLog.File != "" {
		if r.requests, err = requestlog.New(cfg.RequestLog, r.logHeader, deps.Log); err != nil {
			return config.Within("request_log", err)
		}
	}
	r.flights, err = flight.New(flight.Deps{Policy: cfg.Policy, Bounds: cfg.Bounds, PassAuthorization: cfg.Upstream.PassAuthorization,
		Expect: flight.Expect{TTFT: cfg.Planner.TTFT, TPOT: cfg.Planner.TPOT}, PeerTokens: cfg.Events.PeerTokens, Paced: cfg.Pick.Ejection.Mode == pick.EjectAll, AskTimeout: cfg.FirstByteTimeout, Coming: deps.Coming,
		Log: deps.Log, Members: r.Members, Feeds: r.feeds, Picker: r.picker, Client: r.up, Watcher: r.watcher, Tracer: r.tracer, RequestLog: r.requests,
		Paths: slices.Collect(maps.Keys(routes)), Ctx: r.ctx, Spawn: r.spawn})
	if err != nil {
		return err
	}
	r.steer = steer.New(steer.Deps{Config: cfg.Planner, Log: deps.Log, Snapshot: deps.Fleet.Snapshot, Serves: r.Members.Serves, Drained: r.Members.Drained,
		Tallies: r.flights.Tallies, Legs: r.legs, Leads: r.leads, Busy: func() bool { return deps.Doing != nil && deps.Doing() != "" }, Hands: deps.Hands, Mark: func(id string, epoch uint64) { r.Members.Mark(id, epoch, false) },
		Unmark: r.Members.Unmark, Turn: func(ctx context.Context, id string, role fleet.Role) error { return r.Console.Turn(ctx, id, role) },
		Note: func(action, is string) { r.Console.Audit(action, "planner", is) }})
	r.Console, err = console.New(console.Deps{Token: deps.AdminToken, TokenRO: deps.AdminTokenRO, AuditFile: cfg.AuditFile, Log: deps.Log, Level: deps.Level, Gatherer: deps.Gatherer,
		Fleet: deps.Fleet, Members: r.Members, Feeds: r.feeds, Flights: r.flights, Picker: r.picker, TopologyLevel: cfg.Pick.TopologyLevel, Share: r.share,
		Revoker: deps.Revoker, TrustsEveryone: deps.Ring == nil, Ready: r.Ready, Coming: deps.Coming, Doing: deps.Doing, Planner: r.steer, Mounts: deps.Mounts, Refuse: r.httpError, Ctx: r.ctx})
	return err
}

// logHeader is what a file of the request log begins with.
func (r *Router) logHeader() requestlog.Header {
	h := requestlog.Header{Xpyd: r.deps.Version, Policy: r.picker.Policy()}
	models, _ := r.Members.Served()
	for _, m := range models {
		h.Models = append(h.Models, m.ID)
	}
	for _, b := range pick.Blocks {
		h.Grain = append(h.Grain, requestlog.Grain{From: b.From, Bytes: b.Bytes})
	}
	return h
}

func (r *Router) makeServers() {
	public, admin := h1.ServerConfig{Bounds: r.cfg.Bounds, Handler: r.servePublic, Refuse: r.httpError, Log: r.log, Who: "the router"},
		h1.ServerConfig{Bounds: r.cfg.Bounds, Handler: r.Console.Serve, Refuse: r.httpError, Log: r.log, Who: "the admin listener"}
	public.MaxConns, admin.MaxConns = r.cfg.fitConns(scarce.Files())
	if public.MaxConns < r.cfg.MaxConns {
		r.log.Warn("max_conns is cut to what the limit of file descriptors allows; raise it (ulimit -n)",
			"max_conns", r.cfg.MaxConns, "connections", public.MaxConns, "files", scarce.Files())
	}
	if r.cfg.TLSCert != "" {
		public.TLS = r.tls.Config()
	}
	if r.cfg.AdminTLSCert != "" {
		admin.TLS = r.adminTLS.Config()
	}
	admin.StallTimeout = time.Minute // profiles take their time
	r.adminConns = admin.MaxConns
	r.public, r.admin = h1.NewServer(public), h1.NewServer(admin)
}

// Start is Open and Serve. On an error the router is closed.
func (r *Router) Start() error {
	if err := r.Open(); err != nil {
		return err
	}
	r.Serve()
	return nil
}

// Open listens, accepts nothing yet, and begins to follow the fleet. On an error the router is
// closed.
func (r *Router) Open() (err error) {
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if r.publicLn, err = listen(r.deps.Public, r.cfg.Listen); err != nil {
		return fmt.Errorf("listen (--listen): %w", err)
	}
	if r.cfg.AdminListen != "" {
		if r.adminLn, err = listen(r.deps.Admin, r.cfg.AdminListen); err != nil {
			return fmt.Errorf("admin_listen (--admin): %w", err)
		}
	}
	if err := errors.Join(r.Members.SetStatic(r.cfg.Static), r.Members.Discover(r.cfg.Discovery)); err != nil {
		return err
	}
	r.spawn(r.followFleet)
	r.spawn(r.flights.Listen)
	r.Members.Start(r.flights)
	r.spawn(r.feeds.Run)
	r.spawn(r.Console.Run)
	if r.share != nil {
		r.spawn(func() { r.share.Run(r.ctx) })
	}
	if len(r.files.all) > 0 {
		r.spawn(r.files.follow)
	}
	if r.tracer != nil {
		r.tracer.Start()
	}
	if r.requests != nil {
		r.requests.Start()
	}
	return nil
}

// listen returns ln, or if it is nil a new listener.
func listen(ln net.Listener, addr string) (net.Listener, error) {
	if ln != nil {
		return ln, nil
	}
	return net.Listen("tcp", addr)
}

// legs are how many this router has open, and how many the others.
func (r *Router) legs() (own, others int) {
	if r.share != nil {
		for _, p := range r.share.List() {
			others += p.Legs
		}
	}
	return r.flights.Legs(), others
}

// leads reports whether this router plans: of those that hear each other the one with the lowest ID, which one that
// can act has.
func (r *Router) leads() bool { return r.share == nil || r.share.First() }

// Serve accepts connections, and has the planner plan, until Leave or Shutdown.
func (r *Router) Serve() {
	if r.adminLn != nil {
		ln := scarce.Listener(r.adminLn, r.log, r.metrics.failedAccepts.WithLabelValues("admin"))
		r.admin.Start(lobby.New(r.adminConns/4).Listener(ln, guestPatience))
	}
	if r.cfg.Planner.Mode != steer.Off {
		r.spawn(func() { r.steer.Run(r.plans) })
	}
	r.public.Start(scarce.Listener(r.publicLn, r.log, r.metrics.failedAccepts.WithLabelValues("public")))
}

// Listeners are the public and the admin listener, once open, for another process; the latter may
// be nil.
func (r *Router) Listeners() (public, admin net.Listener) { return r.publicLn, r.adminLn }

// Leave stops accepting, as another process does from now on. What was accepted is served to its
// end: see Left.
func (r *Router) Leave() error {
	r.endPlans()
	err := r.public.Leave()
	if r.adminLn != nil {
		err = errors.Join(err, r.admin.Leave())
	}
	return err
}

// Legs is how many of this router's legs a worker has.
func (r *Router) Legs(m *fleet.Member) int { return r.picker.Loads(m.ID, m.Epoch).Legs }

// Patience is when all that was accepted until now has ended: no request lives longer, and then no
// connection idles longer.
func (r *Router) Patience() time.Duration { return r.flights.LongestLife() + r.cfg.IdleTimeout }

// Left is how many requests there are, and public connections, idle ones included.
func (r *Router) Left() (requests, conns int) { return r.flights.InFlight(), r.public.Count() }

// Addr is the public listener's address, once started.
func (r *Router) Addr() net.Addr { return r.publicLn.Addr() }

// AdminAddr is the admin listener's address, nil without one.
func (r *Router) AdminAddr() net.Addr {
	if r.adminLn == nil {
		return nil
	}
	return r.adminLn.Addr()
}

// Reopen opens the audit file and the request log again, as they may have been moved away.
// On an error the old ones stay in use.
func (r *Router) Reopen() error {
	r.requests.Reopen()
	return r.Console.ReopenAudit()
}

// Reload puts new limits and the policy in force, and reads keys and
// certificates again; requests go on.
func (r *Router) Reload(l flight.Limits, policy string) error {
	if err := l.Validate(); err != nil {
		return fmt.Errorf("limits.%w", err)
	}
	if err := pick.ValidPolicy(policy); err != nil {
		return fmt.Errorf("pick.%w", err)
	}
	if err := r.files.reload(true); err != nil {
		return err
	}
	r.flights.SetLimits(l)
	r.picker.SetPolicy(policy)
	r.feeds.Wake()
	return nil
}

// Ready reports whether requests can be served: see sense.Members.HasPair.
func (r *Router) Ready() bool {
	r.mu.Lock()
	stopping := r.stopping
	r.mu.Unlock()
	return !stopping && r.Members.HasPair()
}

// spawn runs f on a goroutine that Shutdown waits for; false if it is too late.
func (r *Router) spawn(f func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.wg.Go(f)
	return true
}

// followFleet follows the fleet, so that the legs of dead workers end at once.
func (r *Router) followFleet() {
	tick := time.NewTicker(sense.ReviveEvery)
	defer tick.Stop()
	for {
		changed := r.deps.Fleet.Changed()
		s := r.deps.Fleet.Snapshot()
		r.flights.Sweep(s)
		r.Members.Sweep(s)
		select {
		case <-changed:
		case <-tick.C:
			r.up.Prune()
			r.Members.Revive()
		case <-r.ctx.Done():
			return
		}
	}
}

// Shutdown drains along the data path: it accepts nothing more, lets running requests end,
// and then closes. If ctx ends first, what still runs is cut with an error event. Call it
// once.
func (r *Router) Shutdown(ctx context.Context) error {
	r.mu.Lock()
	r.stopping = true
	r.mu.Unlock()
	r.endPlans() // nobody starts workers any more
	var err error
	if r.publicLn != nil {
		if err = r.public.Drain(ctx); err != nil {
			err = fmt.Errorf("drain: %w", err)
		} else if err = r.flights.Rest(ctx); err != nil {
			err = fmt.Errorf("drain: responses in the background: %w", err)
		}
		if ctx.Err() != nil {
			r.cutShort()
		}
	}
	if r.adminLn != nil { // last, so that the drain can be watched
		actx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = r.admin.Drain(actx) // its requests are short, and may be cut
	}
	r.close()
	return err
}

// cutShort ends what the drain did not wait for: streams with an error event, the rest with a
// 503. What cannot even write that is cut.
func (r *Router) cutShort() {
	r.end(flight.ErrShutdown)
	tick, late := time.NewTicker(20*time.Millisecond), time.NewTimer(time.Second)
	defer tick.Stop()
	defer late.Stop()
	for r.flights.InFlight() > 0 {
		select {
		case <-tick.C:
		case <-late.C:
			return
		}
	}
}

// end ends everything that runs, and what will begin.
func (r *Router) end(why error) {
	r.cancel(why)
	r.flights.End(why)
}

// close ends everything and waits for it.
func (r *Router) close() {
	r.end(flight.ErrShutdown)
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.public.Cut()
	r.admin.Cut()
	for _, ln := range []net.Listener{r.publicLn, r.adminLn} {
		if ln != nil {
			_ = ln.Close() // closed already, unless it was never served
		}
	}
	if err := r.Members.Close(); err != nil {
		r.log.Warn("stop looking for engines", "err", err)
	}
	r.up.Close()
	r.public.Wait()
	r.wg.Wait()
	if r.tracer != nil {
		r.tracer.Close() // the last requests' spans too
	}
	r.requests.Close() // and lines
	if err := r.release(); err != nil {
		r.log.Error("close", "err", err)
	}
}

func (r *Router) release() error {
	var errs []error
	if r.watcher != nil {
		errs = append(errs, r.watcher.Close())
	}
	if r.Console != nil {
		errs = append(errs, r.Console.Close())
	}
	if r.flights != nil {
		errs = append(errs, r.flights.Close())
	}
	if r.metrics != nil {
		r.metrics.unregister()
	}
	return errors.Join(errs...)
}

// maxAdminConns bounds the admin listener's connections. At most half of them have shown no
// token yet: each of their reads takes at most guestPatience.
const maxAdminConns, guestPatience = 256, 5 * time.Second

// ownFiles is what a small fleet's router opens besides connections for requests. `xpyd up` of a
// pair has 28: 18 of its own, 5 for each worker (two pipes, a process, NATS, a lifeline). The rest
// is for strangers at the port of NATS and for what is open for a moment.
const ownFiles = 40

// fitConns is how many connections the public and the admin listener may have if so many
// files may be open. A request in flight may take two more, to prefill and to decode; the
// router's other files get a share too.
func (c *Config) fitConns(files int) (public, admin int) {
	admin = max(min(maxAdminConns, files/16), 4)
	left := files - admin - min(1024, max(ownFiles, files/4))
	public = max(left/3, left-2*c.Limits.MaxInFlight)
	return min(c.MaxConns, max(public, 4)), admin
}
