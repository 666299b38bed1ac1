package router

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/pprofhandler"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/lobby"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/profile"
	"github.com/xpyd/xpyd/internal/reqbody"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/share"
)

// serveAdmin routes the admin listener: all but /metrics and /health are
// behind a token, before which no body is read, and what is asked besides is written
// down.
func (r *Router) serveAdmin(ctx *fasthttp.RequestCtx) {
	id := requestID(ctx.Request.Header.Peek(dialect.HeaderRequestID))
	ctx.Response.Header.Set(dialect.HeaderRequestID, id)
	verb, path := method(ctx), string(ctx.Path())
	if err := reqbody.Framed(&ctx.Request.Header); err != nil {
		r.httpError(ctx, err)
		ctx.SetConnectionClose()
		return
	}
	switch {
	case path == "/metrics" && r.deps.Gatherer != nil:
		r.serveMetrics(ctx)
		return
	case path == "/health":
		writeJSON(ctx, 200, []byte(`{"status":"ok"}`))
		return
	}
	by := r.holder(ctx, verb, path)
	if by != nobody {
		lobby.Admit(ctx.Conn())
	}
	switch {
	case by == nobody:
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
		if path == "/dashboard" {
			ctx.Response.Header.Set("WWW-Authenticate", dashboardRealm)
		}
		writeError(ctx, openai.Unauthorized("the admin token is missing or wrong"))
	case by == reader && (verb != "GET" || !readable(path)):
		writeError(ctx, onlyReads(verb))
	default:
		if err := reqbody.Read(ctx, r.cfg.MaxBodyBytes); err != nil {
			r.httpError(ctx, err)
			return
		}
		r.administer(ctx, id, verb, path)
	}
	r.audited(ctx, id, verb, path, by)
}

// holder is whose token a request shows.
type holder int

const (
	nobody holder = iota
	reader
	admin
)

func (h holder) String() string { return [...]string{"nobody", "reader", "admin"}[h] }

// holder looks for a token: as a bearer, or as a password where that is enough.
func (r *Router) holder(ctx *fasthttp.RequestCtx, verb, path string) holder {
	shown, ok := bearer(&ctx.Request.Header)
	if !ok && dashboardReads(verb, path) {
		shown, ok = basic(&ctx.Request.Header)
	}
	is := func(token string) bool { // in constant time
		got, want := sha256.Sum256(shown), sha256.Sum256([]byte(token))
		return subtle.ConstantTimeCompare(got[:], want[:]) == 1
	}
	full, reads := is(r.deps.AdminToken), is(r.deps.AdminTokenRO)
	switch {
	case !ok:
		return nobody
	case full:
		return admin
	case reads && r.deps.AdminTokenRO != "":
		return reader
	}
	return nobody
}

// readable says whether the token that only reads is enough for a path: not for
// profiles, which show memory and take time.
func readable(path string) bool {
	return !strings.HasPrefix(path, "/debug/pprof") && path != "/admin/v1/profile"
}

func onlyReads(verb string) *openai.Error {
	e := openai.BadRequest("", "this token only reads")
	if verb == "GET" {
		e.Message += ", and no profiles"
	}
	e.Status, e.Type, e.Code = 403, "permission_error", "read_only_token"
	return e
}

// serveMetrics writes the text format.
func (r *Router) serveMetrics(ctx *fasthttp.RequestCtx) {
	families, err := r.deps.Gatherer.Gather()
	if err != nil && len(families) == 0 {
		writeError(ctx, openai.Internal("gather metrics: %v", err))
		return
	}
	var buf bytes.Buffer
	format := expfmt.NewFormat(expfmt.TypeTextPlain)
	enc := expfmt.NewEncoder(&buf, format)
	for _, f := range families {
		if err := enc.Encode(f); err != nil {
			writeError(ctx, openai.Internal("encode metrics: %v", err))
			return
		}
	}
	ctx.SetContentType(string(format))
	ctx.SetBody(buf.Bytes())
}

// servePprof is Go's, but that nothing takes longer than a profile may.
func servePprof(ctx *fasthttp.RequestCtx, path string) {
	if path != "/debug/pprof/symbol" { // else a form could say how long, too
		ctx.Request.ResetBody()
	}
	if _, err := profile.Duration(ctx.QueryArgs()); err != nil {
		writeError(ctx, err)
		return
	}
	pprofhandler.PprofHandler(ctx)
}

// instanceInfo is one member as the admin API lists it.
type instanceInfo struct {
	*fleet.Member
	Probed     bool       `json:"probed"`
	ProbeError string     `json:"probe_error,omitempty"`
	Embeds     bool       `json:"embeds_only,omitempty"` // it generates nothing
	Draining   bool       `json:"draining"`              // announced, or asked for here
	InFlight   pick.Loads `json:"in_flight"`
	Breaker    pick.Guard `json:"breaker"`
	KVEvents   *feedInfo  `json:"kv_feed,omitempty"`
}

type fleetInfo struct {
	Version uint64       `json:"version"`
	At      time.Time    `json:"at"` // the router's clock, for all that is said of times here
	Ready   bool         `json:"ready"`
	Link    fleet.Link   `json:"link"`
	Router  string       `json:"router,omitempty"`  // its id, as others know it
	Routers []share.Peer `json:"routers,omitempty"` // the others, if they share
	// TrustsEveryone says that no worker is shown the fleet's secret.
	TrustsEveryone bool            `json:"trusts_everyone"`
	Instances      []instanceInfo  `json:"instances"`
	Revoked        []string        `json:"revoked,omitempty"` // ids that are shut out
	Refusals       []fleet.Refusal `json:"refusals"`
	// Strangers are engines that were found and not added.
	Strangers []discover.Refusal `json:"strangers"`
}

func (r *Router) listInstances(ctx *fasthttp.RequestCtx) {
	s := r.fleet.Snapshot()
	info := fleetInfo{Version: s.Version, At: time.Now(), Ready: r.Ready(), Link: s.Link, TrustsEveryone: r.deps.Ring == nil, Revoked: s.Revoked, Instances: []instanceInfo{}, Refusals: s.Refusals(), Strangers: r.found.refusals()}
	if r.share != nil {
		info.Router, info.Routers = r.share.ID(), r.share.List()
	}
	for i := range s.Members {
		m := &s.Members[i]
		ok, err := r.probes.state(m)
		info.Instances = append(info.Instances, instanceInfo{Member: m, Probed: ok, ProbeError: err, Embeds: slices.Contains(r.probes.embedders(), m.ID),
			Draining: m.Draining || r.drained(m), InFlight: r.picker.Loads(m.ID, m.Epoch), Breaker: r.picker.Guard(m.ID, m.Epoch), KVEvents: r.kv.info(m)})
	}
	reply(ctx, 200, info)
}

func (r *Router) addInstance(ctx *fasthttp.RequestCtx) {
	ed, ok := r.fleet.(Editor)
	if !ok {
		writeError(ctx, openai.BadRequest("", "this fleet cannot be added to"))
		return
	}
	var inst fleet.Instance
	dec := json.NewDecoder(bytes.NewReader(ctx.PostBody()))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&inst); err != nil {
		param, wrong := "", (*json.UnmarshalTypeError)(nil)
		if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
			param = strings.Trim(name, `"`)
		} else if errors.As(err, &wrong) {
			param = wrong.Field
		}
		writeError(ctx, openai.BadRequest(clip(param), "read instance: %v", err))
		return
	}
	if inst.Dialect == "" {
		inst.Dialect = "native"
	}
	if inst.Epoch == 0 {
		inst.Epoch = r.nextEpoch(inst.ID)
	}
	NoteChange(ctx, r.state(inst.ID), fmt.Sprintf("%s %s", inst.Role, inst.URL))
	err := checkInstance(&inst)
	if err == nil {
		err = ed.AddStatic(inst, fleet.Admin)
	}
	if err != nil {
		param := ""
		if key := (*config.KeyError)(nil); errors.As(err, &key) {
			param = key.Key
		}
		writeError(ctx, openai.BadRequest(param, "%v", err))
		return
	}
	reply(ctx, 201, inst)
}

// nextEpoch is one for an instance that does not tell its own: newer than what is
// known of that id, so that who was removed can be added again.
func (r *Router) nextEpoch(id string) uint64 {
	now := fleet.NewEpoch()
	if m := r.fleet.Snapshot().Get(id); m != nil {
		return max(now, m.Epoch+1)
	}
	return now
}

// describe is a member for the audit log.
func describe(m *fleet.Member) string { return fmt.Sprintf("%s %s %s", m.State, m.Role, m.URL) }

// checkInstance refuses what the router could not reach, or would not know what
// for. The error is a *config.KeyError.
func checkInstance(inst *fleet.Instance) error {
	_, err := hostPort(inst.URL)
	switch {
	case inst.ID == "" || strings.ContainsAny(inst.ID, "/? \r\n"):
		return bad("id", "%q is no id", clip(inst.ID))
	case inst.Role != fleet.Prefill && inst.Role != fleet.Decode:
		return bad("role", "want prefill or decode, not %q", clip(string(inst.Role)))
	case inst.Model == "":
		return bad("model", "it is required: what clients call it")
	case dialect.For(inst.Dialect) == nil:
		return bad("dialect", "%q is unknown", clip(inst.Dialect))
	case err != nil:
		return bad("url", "%v", err)
	}
	return nil
}

func reply(ctx *fasthttp.RequestCtx, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		writeError(ctx, openai.Internal("encode answer: %v", err))
		return
	}
	writeJSON(ctx, status, b)
}
