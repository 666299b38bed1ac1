// Package console answers the admin listener: which workers there are, orders to them, what
// is held and why, and the audit log of changes.
package console

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/pprofhandler"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/lobby"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/profile"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
	"github.com/xpyd/xpyd/router/share"
	"github.com/xpyd/xpyd/router/steer"
)

// Deps is what the console is given.
type Deps struct {
	Token   string // may do all
	TokenRO string // opens what only reads; "" for none
	// AuditFile gets a line of JSON for each change, besides the log.
	AuditFile string

	Log            *slog.Logger
	Level          *slog.LevelVar      // of Log; nil: it stays as it is
	Gatherer       prometheus.Gatherer // for /metrics; nil leaves the path out
	Fleet          *fleet.Watcher
	Members        *sense.Members
	Feeds          *sense.Feeds
	Flights        *flight.Service
	Picker         *pick.Picker
	TopologyLevel  int           // of pairs
	Share          *share.Sharer // nil without a bus
	Revoker        Revoker       // nil: nothing is revoked here
	TrustsEveryone bool          // no worker is shown the fleet's secret
	Ready          func() bool
	// Coming reports whether a worker that is unknown to the fleet, or dead, is about to
	// start: orders for it wait. It must not block; nil: none is.
	Coming func(id string) bool
	// Doing is what the router's process does besides serving; nil: never anything.
	Doing   func() string
	Planner *steer.Steer
	// Mounts adds handlers behind the token: "POST /admin/v1/scale" and the like.
	Mounts map[string]fasthttp.RequestHandler
	// Refuse answers what is no proper HTTP request.
	Refuse func(*fasthttp.RequestCtx, error)
	Ctx    context.Context //nolint:containedctx // ends when everything must
}

// Console answers the admin listener.
type Console struct {
	Deps
	audit    *auditor
	profiler *profile.Profiler
	sessions sessions
	history  history
	events   events

	// orders is held while an order is judged: otherwise two at once would each find the
	// other's worker still serving.
	orders sync.Mutex
}

// New opens the audit file.
func New(d Deps) (*Console, error) {
	audit, err := newAuditor(d.AuditFile, d.Log)
	c := &Console{Deps: d, audit: audit, profiler: profile.New(nil)}
	audit.also = c.noteOrder
	return c, err
}

// Close ends profiling and the audit log.
func (c *Console) Close() error {
	c.profiler.Close()
	return c.audit.close()
}

// Serve routes the admin listener. Everything except /metrics, /health and the dashboard's files is behind a
// token or a session, before which no body is read, and is written to the audit log unless it only
// reads.
func (c *Console) Serve(ctx *fasthttp.RequestCtx) {
	id := h1.RequestID(ctx.Request.Header.Peek(ticket.HeaderRequestID))
	ctx.Response.Header.Set(ticket.HeaderRequestID, id)
	verb, path := h1.Method(ctx), string(ctx.Path())
	switch {
	case path == "/metrics" && c.Gatherer != nil:
		ServeMetrics(ctx, c.Gatherer)
		return
	case path == "/health":
		h1.WriteJSON(ctx, 200, []byte(`{"status":"ok"}`))
		return
	case path == "/dashboard/": // its files' names are relative
		ctx.Response.Header.Set("Location", "/dashboard")
		ctx.SetStatusCode(fasthttp.StatusPermanentRedirect)
		return
	case path == "/dashboard/session":
		c.audited(ctx, id, verb, path, c.serveSession(ctx, verb))
		return
	case path == "/dashboard" || strings.HasPrefix(path, "/dashboard/"):
		serveDashboard(ctx, verb, path)
		return
	}
	by := c.holder(ctx, path)
	if by != nobody {
		lobby.Admit(ctx.Conn())
	}
	switch {
	case by == nobody:
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
		h1.WriteError(ctx, openai.Unauthorized("the admin token is missing or wrong"))
	case by == reader && (verb != "GET" || !readable(path)):
		h1.WriteError(ctx, onlyReads(verb))
	default:
		body, err := h1.ConnOf(ctx.Conn()).ReadBody()
		if err != nil {
			c.Refuse(ctx, err)
			return
		}
		ctx.Request.SetBodyRaw(body)
		c.dispatch(ctx, id, verb, path)
	}
	c.audited(ctx, id, verb, path, by)
}

// holder is whose token a request shows.
type holder int

const (
	nobody holder = iota
	reader
	admin
)

func (h holder) String() string { return [...]string{"nobody", "reader", "admin"}[h] }

// holder looks for a token or, without one, for a session.
func (c *Console) holder(ctx *fasthttp.RequestCtx, path string) holder {
	if shown, ok := flight.Credentials(&ctx.Request.Header, "bearer "); ok {
		return c.holds(shown)
	}
	by, _ := c.shownSession(ctx, path)
	return by
}

// holds is whose token it is.
func (c *Console) holds(shown []byte) holder {
	is := func(token string) bool { // in constant time
		got, want := sha256.Sum256(shown), sha256.Sum256([]byte(token))
		return subtle.ConstantTimeCompare(got[:], want[:]) == 1
	}
	full, reads := is(c.Token), is(c.TokenRO)
	switch {
	case full:
		return admin
	case reads && c.TokenRO != "":
		return reader
	}
	return nobody
}

// readable reports whether the read-only token is enough for a path: not for profiles,
// which show memory and take time.
func readable(path string) bool {
	return !strings.HasPrefix(path, "/debug/pprof") && strings.TrimRight(path, "/") != "/admin/v1/profile"
}

func onlyReads(verb string) *openai.Error {
	e := openai.BadRequest("", "this token only reads")
	if verb == "GET" {
		e.Message += ", and no profiles"
	}
	e.Status, e.Type, e.Code = 403, "permission_error", "read_only_token"
	return e
}

// ServeMetrics answers with the metrics in the text format.
func ServeMetrics(ctx *fasthttp.RequestCtx, g prometheus.Gatherer) {
	families, err := g.Gather()
	if err != nil && len(families) == 0 {
		h1.WriteError(ctx, openai.Internal("gather metrics: %v", err))
		return
	}
	var buf bytes.Buffer
	format := expfmt.NewFormat(expfmt.TypeTextPlain)
	enc := expfmt.NewEncoder(&buf, format)
	for _, f := range families {
		if err := enc.Encode(f); err != nil {
			h1.WriteError(ctx, openai.Internal("encode metrics: %v", err))
			return
		}
	}
	ctx.SetContentType(string(format))
	ctx.SetBody(buf.Bytes())
}

// servePprof serves Go's own profiles, none of which may take longer than ours.
func (c *Console) servePprof(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	if a.path != "/debug/pprof/symbol" { // elsewhere a form could also say how long
		ctx.Request.ResetBody()
	}
	if _, err := profile.Duration(ctx.QueryArgs()); err != nil {
		return err
	}
	pprofhandler.PprofHandler(ctx)
	return nil
}

// instanceInfo is a member as the admin API lists it.
type instanceInfo struct {
	*fleet.Member
	Probed     bool            `json:"probed"`
	ProbeError string          `json:"probe_error,omitempty"`
	Embeds     bool            `json:"embeds_only,omitempty"` // it generates nothing
	Draining   bool            `json:"draining"`              // announced, or asked for here
	InFlight   pick.Loads      `json:"in_flight"`
	ToMove     int             `json:"to_move,omitempty"` // streams that are to go on elsewhere
	Moved      flight.Moved    `json:"moved,omitzero"`    // those that did, though they need not
	Breaker    pick.Guard      `json:"breaker"`
	KVEvents   *sense.FeedInfo `json:"kv_feed,omitempty"`
}

type fleetInfo struct {
	Version uint64       `json:"version"`
	At      time.Time    `json:"at"` // by the router's clock, as all times here
	Ready   bool         `json:"ready"`
	Doing   string       `json:"doing,omitempty"`   // what this process does besides serving
	Planner string       `json:"planner,omitempty"` // what it wants, in a line
	Link    fleet.Link   `json:"link"`
	Router  string       `json:"router,omitempty"`  // its id, as others know it
	Routers []share.Peer `json:"routers,omitempty"` // the others, if they share
	// TrustsEveryone says that no worker is shown the fleet's secret.
	TrustsEveryone bool            `json:"trusts_everyone"`
	Instances      []instanceInfo  `json:"instances"`
	Revoked        []string        `json:"revoked,omitempty"` // IDs that are shut out
	Refusals       []fleet.Refusal `json:"refusals"`
	// Strangers are engines that were found and not added.
	Strangers []discover.Refusal `json:"strangers"`
}

func (c *Console) listInstances(ctx *fasthttp.RequestCtx, _ adminCall) *openai.Error {
	s := c.Fleet.Snapshot()
	info := fleetInfo{Version: s.Version, At: time.Now(), Ready: c.Ready(), Link: s.Link, TrustsEveryone: c.TrustsEveryone, Revoked: s.Revoked, Instances: []instanceInfo{}, Refusals: s.Refusals(), Strangers: c.Members.Refusals()}
	if c.Doing != nil {
		info.Doing = c.Doing()
	}
	if c.Planner != nil {
		info.Planner = c.Planner.Line()
	}
	if c.Share != nil {
		info.Router, info.Routers = c.Share.ID(), c.Share.List()
	}
	for i := range s.Members {
		m := &s.Members[i]
		ok, err := c.Members.ProbeState(m)
		info.Instances = append(info.Instances, instanceInfo{Member: m, Probed: ok, ProbeError: err, Embeds: slices.Contains(c.Members.Embedders(), m.ID),
			Draining: m.Draining || c.Members.Drained(m), InFlight: c.Picker.Loads(m.ID, m.Epoch), ToMove: c.Flights.ToMove(m), Moved: c.Flights.Moved(m), Breaker: c.Picker.Guard(m.ID, m.Epoch), KVEvents: c.Feeds.Info(m)})
	}
	return reply(ctx, 200, info)
}

func (c *Console) addInstance(ctx *fasthttp.RequestCtx, _ adminCall) *openai.Error {
	var inst fleet.Instance
	if err := ReadBody(ctx, &inst, true); err != nil {
		return err
	}
	if inst.Dialect == "" {
		inst.Dialect = fleet.Native
	}
	if inst.Epoch == 0 {
		inst.Epoch = c.Members.NextEpoch(inst.ID)
	}
	NoteChange(ctx, c.state(inst.ID), fmt.Sprintf("%s %s", inst.Role, inst.URL))
	err := sense.CheckInstance(&inst)
	if err == nil {
		err = c.Fleet.AddStatic(inst, fleet.Admin)
	}
	if errors.Is(err, fleet.ErrTaken) {
		return openai.BadRequest("id", "%v; another id, or DELETE it first", err).WithStatus(409, "id_taken")
	}
	if err != nil {
		param := ""
		if key, ok := errors.AsType[*config.KeyError](err); ok {
			param = key.Key
		}
		return openai.BadRequest(param, "%v", err)
	}
	return reply(ctx, 201, inst)
}

// describe is a member for the audit log.
func describe(m *fleet.Member) string { return fmt.Sprintf("%s %s %s", m.State, m.Role, m.URL) }

func reply(ctx *fasthttp.RequestCtx, status int, v any) *openai.Error {
	b, err := json.Marshal(v)
	if err != nil {
		return openai.Internal("encode answer: %v", err)
	}
	h1.WriteJSON(ctx, status, b)
	return nil
}
