// Package flight takes a request from its admission to the end of its answer: it picks
// pairs, sends both legs, tries again while nothing has reached the client, and relays.
// DESIGN.md has the rules.
package flight

import (
	"context"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/clientwatch"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/requestlog"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/kept"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
	"github.com/xpyd/xpyd/router/trace"
)

// Deps is what requests in flight need of the rest of the router.
type Deps struct {
	Policy
	h1.Bounds
	PassAuthorization bool          // the client's Authorization goes to engines
	PeerTokens        int           // see Events
	Paced             bool          // workers are compared by the pace of their streams
	AskTimeout        time.Duration // of requests that any worker can answer
	Expect            Expect        // what requests are to see, for Tallies
	// Coming reports whether a worker that is dead is about to be started again; nil: none is.
	Coming func(id string) bool

	Log     *slog.Logger
	Members *sense.Members
	Feeds   *sense.Feeds
	Picker  *pick.Picker
	Client  *h1.Client
	Watcher *clientwatch.Watcher // for clients that leave
	Tracer  *trace.Exporter      // nil without tracing
	// RequestLog gets a line for each request that is over; nil: there is none.
	RequestLog *requestlog.Writer
	Paths      []string          // those with metrics of their own
	Ctx        context.Context   //nolint:containedctx // ends when everything must
	Spawn      func(func()) bool // runs what shutdown waits for; false if it is too late
}

// Service takes requests from admission to the end of their answer.
type Service struct {
	Deps
	fleet   *fleet.Watcher
	metrics *metrics
	gate    *gate
	keys    *keyring
	hosts   hosts
	// maxAnswer is MaxResponseBytes, as native workers are told.
	maxAnswer  string
	budget     *budget
	hedges     *hedger
	legs       legs
	facts      facts
	kept       pot
	silence    silence
	reliefs    reliefs
	balance    balance
	trials     *trials
	tallies    tallies
	responses  *kept.Store
	background *background
	guises     sync.Pool    // of *[]byte: a run in a guise, while it is written
	tellers    atomic.Int64 // connections that are told the events of a response in the background

	mu       sync.Mutex // guards the following; never held while calling out
	requests map[*request]struct{}
	history  history
}

// New makes the service. It does not load the keys of APIKeysFile; LoadKeys does.
func New(d Deps) (*Service, error) {
	s := &Service{Deps: d, fleet: d.Members.Fleet, gate: newGate(d.Limits), hosts: d.MediaHosts, maxAnswer: strconv.Itoa(d.MaxResponseBytes),
		budget: newBudget(d.RetryRatio, d.RetryBurst, d.RetryMin), hedges: newHedger(d.Hedge),
		legs: legs{open: map[*leg]struct{}{}}, facts: facts{byID: map[string]known{}}, trials: newTrials(), tallies: tallies{by: map[string]*tally{}}, reliefs: reliefs{by: map[workerKey]*relief{}}, balance: balance{cfg: d.Balance},
		requests: map[*request]struct{}{}, history: history{ring: make([]record, d.History)}}
	s.silence = silence{s: s, ask: d.Members.Ask, gone: s.gone, elsewhere: s.elsewhere, asked: map[workerKey]*question{}}
	var err error
	if s.responses, err = kept.New(d.Responses); err != nil {
		return nil, config.Within("responses", err)
	}
	s.background = newBackground(s)
	s.metrics = newMetrics(s)
	s.keys, err = newKeyring(&d.Policy, s.metrics.tenants)
	return s, err
}

// Collectors returns the metrics.
func (s *Service) Collectors() []prometheus.Collector { return s.metrics.all }

// Close ends what requests have kept, once all are over.
func (s *Service) Close() error { return s.responses.Close() }

// LoadKeys reads APIKeysFile; on an error the old keys stay in force.
func (s *Service) LoadKeys() error { return s.keys.load() }

// SetLimits puts new limits in force; running requests go on.
func (s *Service) SetLimits(l Limits) { s.gate.set(l) }

// LongestLife is the most time that a request may take.
func (s *Service) LongestLife() time.Duration { return s.gate.get().RequestTimeout }

// Sweep follows the fleet: it ends the legs of dead workers and forgets engines that left.
func (s *Service) Sweep(now *fleet.Snapshot) {
	s.legs.sweep(now)
	s.facts.prune(now)
	s.reliefs.prune(now)
}

// End cancels all running requests.
func (s *Service) End(why error) {
	for _, q := range s.running() {
		q.cancel(why)
	}
}

// Load is the number of clients' requests that are under way.
func (s *Service) Load() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for q := range s.requests {
		if !q.probe {
			n++
		}
	}
	return n
}

// InFlight is the number of running requests, and of connections that follow a response in the background.
func (s *Service) InFlight() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.requests) + int(s.tellers.Load())
}

// Brief accounts for a request that is answered at once. Health checks and the like are
// logged at debug level only.
func (s *Service) Brief(ctx *fasthttp.RequestCtx, id, path string) {
	status := ctx.Response.StatusCode()
	s.metrics.request(path, status)
	level := slog.LevelInfo
	if status < 400 || path == "/ready" {
		level = slog.LevelDebug
	}
	s.Log.Log(s.Ctx, level, "request", "request_id", id, "method", openai.Clip(string(ctx.Method())), "path", openai.Clip(string(ctx.Path())), "status", status)
}

// Refuse answers a request with an error at once.
func (s *Service) Refuse(ctx *fasthttp.RequestCtx, id, path string, e *openai.Error) {
	WriteError(ctx, id, e)
	s.Brief(ctx, id, path)
}

// Models serves /v1/models: what can be served now.
func (s *Service) Models(ctx *fasthttp.RequestCtx, id string) {
	h1.WriteJSON(ctx, 200, openai.AppendModels(nil, s.servedTo(tenantOf(ctx))))
	s.Brief(ctx, id, "/v1/models")
}

// OneModel serves /v1/models/NAME.
func (s *Service) OneModel(ctx *fasthttp.RequestCtx, id, name string) {
	if !s.Keyed(ctx) {
		s.Refuse(ctx, id, "/v1/models", openai.Unauthorized("the API key is missing or wrong, or it has expired"))
		return
	}
	list, known := s.Members.Served()
	if t := tenantOf(ctx); t != nil && !t.key.May(name) {
		list, known = nil, nil
	}
	for _, m := range list {
		if m.ID == name {
			h1.WriteJSON(ctx, 200, openai.AppendModel(nil, m))
			s.Brief(ctx, id, "/v1/models")
			return
		}
	}
	err := openai.ModelNotFound(name)
	if _, ok := known[name]; ok {
		err = openai.Unavailable("the model %q cannot be served now: no live, compatible pair of workers that have passed their probe has it", openai.Clip(name))
	}
	s.Refuse(ctx, id, "/v1/models", err)
}

// servedTo lists the served models that a tenant may use.
func (s *Service) servedTo(t *tenant) []openai.Model {
	all, _ := s.Members.Served()
	if t == nil {
		return all
	}
	var out []openai.Model
	for _, m := range all {
		if t.key.May(m.ID) {
			out = append(out, m)
		}
	}
	return out
}
