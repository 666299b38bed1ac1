package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/clientwatch"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/lobby"
	"github.com/xpyd/xpyd/internal/profile"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/share"
	"github.com/xpyd/xpyd/router/trace"
)

// Fleet is what the router needs of who is there; *fleet.Watcher has it.
type Fleet interface {
	// Snapshot is the fleet now.
	Snapshot() *fleet.Snapshot
	// Changed returns a channel that closes when a newer version is there.
	Changed() <-chan struct{}
	// ReportDead says that the data path found a worker gone.
	ReportDead(id string, epoch uint64, reason string)
}

// Reviver is a Fleet whose members need not announce themselves: such a one
// that died is alive again when it takes connections.
type Reviver interface {
	ReportAlive(id string, epoch uint64) bool
}

// Learner is a Fleet that takes in what an engine says of itself. It says false
// when the member is not what was read any more.
type Learner interface {
	Learn(was, is fleet.Instance) (ok bool, err error)
}

// Editor is a Fleet that the admin API can add to and remove from.
type Editor interface {
	AddStatic(inst fleet.Instance, source fleet.Source) error
	Remove(id, reason string) bool
}

// Revoker shuts ids out of the fleet, and keeps the list.
type Revoker interface {
	Revoke(id string) error
	Unrevoke(id string) error
	Revocations() []fleet.Revocation
}

// Deps is what a router is given.
type Deps struct {
	Fleet      Fleet
	Log        *slog.Logger
	Registerer prometheus.Registerer
	Gatherer   prometheus.Gatherer // for /metrics; nil leaves the path out
	Bus        share.Bus           // to other routers; nil for none
	AdminToken string              // required unless AdminListen is ""
	Revoker    Revoker             // nil: nothing is revoked here
	// AdminTokenRO opens what only reads on the admin listener; "" for none.
	AdminTokenRO string
	Version      string      // for GET /version
	Ring         *trust.Ring // the fleet's secrets; nil: native workers are shown none
	TLS          *trust.TLS  // to native workers; nil: plain HTTP
	// Coming says whether a worker that the fleet does not know, or knows as
	// dead, is about to start: orders for it wait. It must not block; nil: none is.
	Coming func(id string) bool
	// Mounts adds handlers to the admin listener, behind its token:
	// "POST /admin/v1/scale" and the like.
	Mounts map[string]fasthttp.RequestHandler
}

// Router is one front door. New, Start, Shutdown, in this order, once each.
type Router struct {
	cfg      Config
	deps     Deps
	fleet    Fleet
	log      *slog.Logger
	metrics  *metrics
	gate     *gate
	keys     *keyring
	hosts    hosts
	files    *files
	tls      serverTLS // of the public listener
	adminTLS serverTLS
	// maxAnswer is cfg.MaxResponseBytes, as native workers are told.
	maxAnswer string
	budget    *budget
	hedges    *hedger
	picker    *pick.Picker
	up        *upstream
	tokens    *trust.Tokens   // for the fleet\'s workers
	tracer    *trace.Exporter // nil without tracing
	profiler  *profile.Profiler
	audit     *auditor
	legs      legs
	facts     facts
	probes    *prober
	kv        *kvFeeds
	share     *share.Sharer // nil without a bus
	found     discovery
	conns     clientConns
	// adminConns bounds those of the admin listener.
	adminConns int
	watcher    *clientwatch.Watcher
	created    time.Time

	ctx    context.Context // ends when everything must
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup // goroutines of spawn

	public            *server
	admin             *fasthttp.Server
	publicLn, adminLn net.Listener
	serving           sync.WaitGroup

	mu       sync.Mutex // guards the following; never held while calling out
	closed   bool       // spawn starts nothing more
	stopping bool       // not ready any more
	requests map[*request]struct{}
	history  history
	knocks   map[string]bool // connection attempts of knock, by worker
	marked   map[string]mark // drains that were asked for here
	marks    uint64          // changes of marked

	// orders is held while an order is judged: two at once would each find the
	// other's worker still serving. Before mu in order.
	orders sync.Mutex

	staticMu sync.Mutex // one SetStatic at a time
	statics  map[string]Static
}

// New checks cfg and prepares a router; it opens nothing yet.
func New(cfg Config, deps Deps) (*Router, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.AdminListen != "" && deps.AdminToken == "" {
		return nil, errors.New("admin_listen: the admin listener needs a token")
	}
	if deps.AdminTokenRO != "" && deps.AdminTokenRO == deps.AdminToken {
		return nil, errors.New("the admin token that only reads is the other one")
	}
	if deps.Log == nil {
		deps.Log = slog.New(slog.DiscardHandler)
	}
	r := &Router{
		cfg: cfg, deps: deps, fleet: deps.Fleet, log: deps.Log, created: time.Now(), maxAnswer: strconv.Itoa(cfg.MaxResponseBytes),
		budget:   newBudget(cfg.RetryRatio, cfg.RetryBurst, cfg.RetryMin),
		hedges:   newHedger(cfg.Hedge),
		profiler: profile.New(nil),
		picker:   pick.New(cfg.Pick, rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))),
		legs:     legs{byID: map[string]map[*leg]struct{}{}},
		conns:    clientConns{set: map[*clientConn]struct{}{}},
		requests: map[*request]struct{}{}, history: newHistory(cfg.History),
		facts: facts{byID: map[string]known{}}, knocks: map[string]bool{}, marked: map[string]mark{}, statics: map[string]Static{},
	}
	r.conns.max, r.adminConns = cfg.fitConns(scarce.Files())
	if r.conns.max < cfg.MaxConns {
		r.log.Warn("max_conns is cut to what the limit of file descriptors allows; raise it (ulimit -n)",
			"max_conns", cfg.MaxConns, "connections", r.conns.max, "files", scarce.Files())
	}
	r.gate, r.hosts = newGate(cfg.Limits), cfg.MediaHosts
	r.up = newUpstream(&r.cfg)
	r.up.tls.members, r.tokens = deps.TLS.Client(), trust.NewTokens(deps.Ring)
	r.probes = newProber(r)
	if cfg.Tracing.Endpoint != "" {
		r.tracer = trace.New(cfg.Tracing, deps.Version, deps.Log)
	}
	r.ctx, r.cancel = context.WithCancelCause(context.Background())
	var err error
	if r.kv, err = newKVFeeds(r); err != nil {
		return nil, err
	}
	if deps.Bus != nil && cfg.Share.Interval > 0 {
		r.share = share.New(cfg.Share, deps.Bus, r.picker, deps.Log)
	}
	if r.metrics, err = newMetrics(deps.Registerer, r); err != nil {
		return nil, err
	}
	if err = r.loadFiles(); err != nil {
		r.metrics.unregister()
		return nil, err
	}
	if r.watcher, err = clientwatch.New(); err != nil {
		r.metrics.unregister()
		return nil, err
	}
	if r.audit, err = newAuditor(cfg.AuditFile, r.log); err != nil {
		r.metrics.unregister()
		return nil, errors.Join(err, r.watcher.Close())
	}
	r.public, r.admin = newServer(r), r.adminServer()
	return r, nil
}

// Start listens and serves. On an error the router is closed.
func (r *Router) Start() (err error) {
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	ln, err := net.Listen("tcp", r.cfg.Listen)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	ln = scarce.Listener(ln, r.log, r.metrics.failedAccepts.WithLabelValues("public"))
	r.publicLn = &listener{Listener: ln, conns: &r.conns, tls: r.cfg.TLSCert != ""}
	if r.cfg.TLSCert != "" {
		r.publicLn = r.tls.listen(r.publicLn)
	}
	if r.cfg.AdminListen != "" {
		if r.adminLn, err = net.Listen("tcp", r.cfg.AdminListen); err != nil {
			return errors.Join(fmt.Errorf("admin_listen: %w", err), ln.Close())
		}
		r.adminLn = scarce.Listener(r.adminLn, r.log, r.metrics.failedAccepts.WithLabelValues("admin"))
		r.adminLn = lobby.New(r.adminConns/4).Listener(r.adminLn, guestPatience)
		if r.cfg.AdminTLSCert != "" {
			r.adminLn = r.adminTLS.listen(r.adminLn)
		}
		r.serving.Go(r.serveAdminConns)
	}
	if err := errors.Join(r.SetStatic(r.cfg.Static), r.discover()); err != nil {
		return errors.Join(err, r.publicLn.Close())
	}
	r.spawn(r.followFleet)
	r.spawn(r.probes.run)
	r.spawn(r.followPicks)
	r.spawn(r.followGuards)
	r.spawn(r.kv.run)
	if r.share != nil {
		r.spawn(func() { r.share.Run(r.ctx) })
	}
	if len(r.files.all) > 0 {
		r.spawn(r.files.follow)
	}
	if r.tracer != nil {
		r.tracer.Start()
	}
	r.public.start(r.publicLn)
	return nil
}

func (r *Router) serveAdminConns() {
	if err := r.admin.Serve(r.adminLn); err != nil {
		r.log.Error("serve", "addr", r.adminLn.Addr().String(), "err", err)
	}
}

// Addr is where the public listener is, once started.
func (r *Router) Addr() net.Addr { return r.publicLn.Addr() }

// AdminAddr is where the admin listener is, nil without one.
func (r *Router) AdminAddr() net.Addr {
	if r.adminLn == nil {
		return nil
	}
	return r.adminLn.Addr()
}

// Reload puts new limits and the policy in force, and reads keys and
// certificates again; requests go on.
func (r *Router) Reload(l Limits, policy string) error {
	if err := l.Validate(); err != nil {
		return fmt.Errorf("limits.%w", err)
	}
	if err := pick.ValidPolicy(policy); err != nil {
		return fmt.Errorf("pick.%w", err)
	}
	if err := r.files.reload(true); err != nil {
		return err
	}
	r.gate.set(l)
	r.picker.SetPolicy(policy)
	r.kv.wake()
	return nil
}

// Ready says whether a live, probed, compatible pair exists; see serves.
func (r *Router) Ready() bool {
	r.mu.Lock()
	stopping := r.stopping
	r.mu.Unlock()
	return !stopping && r.serves()
}

// serves says whether some model has a pair. An engine that embeds and does not
// generate counts as one until a pair has generated something: it would hide
// that all those are lost.
func (r *Router) serves() bool {
	v := r.view()
	return r.picker.Ready(v, func(model string) bool { return !r.probes.haveGenerated() || !r.onlyEmbeds(v.Snapshot, model) })
}

// view is the fleet as users' requests may use it.
func (r *Router) view() pick.View {
	r.mu.Lock()
	marks := r.marks
	r.mu.Unlock()
	return pick.View{Snapshot: r.fleet.Snapshot(), Generation: r.probes.generation() + marks, Now: time.Now(), Behind: true,
		Eligible: func(m *fleet.Member) bool { return r.probes.passed(m) && !r.drained(m) }}
}

// spawn runs f on a goroutine that Shutdown waits for; false when it is too
// late for that.
func (r *Router) spawn(f func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.wg.Go(f)
	return true
}

// followFleet ends the legs of workers that died, as soon as that is known.
func (r *Router) followFleet() {
	tick := time.NewTicker(reviveEvery)
	defer tick.Stop()
	for {
		changed := r.fleet.Changed()
		s := r.fleet.Snapshot()
		r.legs.sweep(s)
		r.forgetMarks(s)
		r.facts.prune(s)
		r.picker.Refresh(r.view()) // also for marks that went
		r.probes.wake()
		select {
		case <-changed:
		case <-tick.C:
			r.up.prune()
			r.revive(s)
		case <-r.ctx.Done():
			return
		}
	}
}

// reviveEvery is how often dead members that do not announce themselves are
// tried.
const reviveEvery = 2 * time.Second

// revive tries them, each on its own goroutine and one at a time.
func (r *Router) revive(s *fleet.Snapshot) {
	rev, ok := r.fleet.(Reviver)
	if !ok {
		return
	}
	for i := range s.Members {
		if m := &s.Members[i]; m.State == fleet.Dead && m.Source != fleet.NATS {
			r.knock(&m.Instance, func(err error) {
				if err == nil {
					rev.ReportAlive(m.ID, m.Epoch)
				}
			})
		}
	}
}

// prune forgets what engines said that are no more.
func (k *facts) prune(s *fleet.Snapshot) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.byID, func(id string, v known) bool {
		m := s.Get(id)
		return m == nil || m.State == fleet.Gone || m.Epoch != v.epoch
	})
}

// Shutdown drains along the data path: not ready and accepting nothing, then
// the running requests to their end, then the connections. When ctx ends
// first, what still runs is cut with an error event. It may be called once.
func (r *Router) Shutdown(ctx context.Context) error {
	r.mu.Lock()
	r.stopping = true
	r.mu.Unlock()
	drained := make(chan error, 1)
	if r.publicLn != nil {
		r.spawn(func() { drained <- r.public.drain(ctx, r.publicLn) })
	} else {
		drained <- nil
	}
	err := r.drain(ctx, drained)
	if err != nil {
		err = fmt.Errorf("drain: %w", err)
	}
	if r.adminLn != nil {
		// Last, so that the drain can be watched.
		if aerr := r.adminLn.Close(); aerr != nil {
			err = errors.Join(err, aerr)
		}
		actx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = r.admin.ShutdownWithContext(actx) // its requests are short, and may be cut
	}
	r.close()
	return err
}

// drain waits for the public server, which closes its listener first.
func (r *Router) drain(ctx context.Context, drained <-chan error) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		r.conns.closeIdle() // no request will come on these
		select {
		case err := <-drained:
			if err == nil || ctx.Err() == nil {
				return err
			}
			// Too late: the streams end with an error event, the rest with a
			// 503, and what cannot even write that is cut.
			r.end(errShutdown)
			cut, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			for r.inFlight() > 0 && cut.Err() == nil {
				select {
				case <-tick.C:
				case <-cut.Done():
				}
			}
			r.conns.closeAll()
			return err
		case <-tick.C:
		}
	}
}

// end ends everything that runs, and what will begin.
func (r *Router) end(why error) {
	r.cancel(why)
	r.mu.Lock()
	running := make([]*request, 0, len(r.requests))
	for q := range r.requests {
		running = append(running, q)
	}
	r.mu.Unlock()
	for _, q := range running {
		q.cancel(why)
	}
}

func (r *Router) inFlight() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.requests)
}

// close ends everything and waits for it.
func (r *Router) close() {
	r.profiler.Close()
	r.end(errShutdown)
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	for _, ln := range []net.Listener{r.publicLn, r.adminLn} {
		if ln != nil {
			ln.Close() // mostly closed already
		}
	}
	r.conns.closeAll()
	if err := r.found.close(); err != nil {
		r.log.Warn("stop looking for engines", "err", err)
	}
	r.up.close()
	r.serving.Wait()
	r.public.conns.Wait()
	r.wg.Wait()
	if r.tracer != nil {
		r.tracer.Close() // the last requests' spans too
	}
	if err := r.watcher.Close(); err != nil {
		r.log.Error("close client watcher", "err", err)
	}
	if err := r.audit.close(); err != nil {
		r.log.Error("close audit_file", "err", err)
	}
	r.metrics.unregister()
}
