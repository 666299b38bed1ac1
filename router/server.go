package router

import (
	"encoding/json"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/reqbody"
	"github.com/xpyd/xpyd/router/dialect"
)

// Header names of the public listener, besides the dialect's.
const (
	headerDecode   = "x-xpyd-decode"
	headerFallback = "x-xpyd-fallback" // why decode served a request alone
	headerLocal    = "x-xpyd-local"    // the same, where it could have been split
	headerExplain  = "x-xpyd-explain"
	headerTimeout  = "x-request-timeout-ms"
)

// route is what a public path is served by.
type route struct {
	method  string // its only one
	serve   func(*Router, *fasthttp.RequestCtx, string)
	key     bool // behind the API key
	streams bool // serve reads the body
	what    string
}

// routes are the public paths.
var routes = publicRoutes()

func publicRoutes() map[string]route {
	all := map[string]route{
		"/v1/completions":      {"POST", (*Router).generate, true, false, "A completion, or several."},
		"/v1/chat/completions": {"POST", (*Router).generate, true, false, "A chat's next message."},
		"/v1/models":           {"GET", (*Router).models, true, false, "The models that can be served now."},
		"/tokenize":            {"POST", (*Router).proxy, true, false, "A text's tokens; passed on."},
		"/detokenize":          {"POST", (*Router).proxy, true, false, "Tokens' text; passed on."},
		"/version":             {"GET", (*Router).version, false, false, "The build."},
		"/health":              {"GET", (*Router).health, false, false, "That the process is up."},
		"/ready":               {"GET", (*Router).ready, false, false, "Whether requests can be served (200, else 503)."},
	}
	for _, path := range passedPaths {
		all[path] = route{"POST", (*Router).pass, true, true, "Passed on to one engine."}
	}
	return all
}

// adminServer makes the admin listener's HTTP server.
func (r *Router) adminServer() *fasthttp.Server {
	return &fasthttp.Server{
		Handler: func(ctx *fasthttp.RequestCtx) {
			r.serveAdmin(ctx)
			if ctx.Request.IsBodyStream() { // still: it was not read
				ctx.SetConnectionClose()
			}
		},
		ErrorHandler: r.httpError, StreamRequestBody: true,
		MaxRequestBodySize: r.cfg.MaxBodyBytes, ReadBufferSize: r.cfg.MaxHeaderBytes,
		ReadTimeout: r.cfg.ReadTimeout, IdleTimeout: r.cfg.IdleTimeout, WriteTimeout: time.Minute, // profiles take their time
		NoDefaultServerHeader: true, NoDefaultContentType: true, DisablePreParseMultipartForm: true,
		Concurrency:           r.adminConns,
		MaxIdleWorkerDuration: 2 * time.Second, // also how long its sweeper outlives Shutdown
		CloseOnShutdown:       true, Logger: logAdapter{r.log}, SecureErrorLogMessage: true,
	}
}

// logAdapter takes what the HTTP server has to say about broken connections,
// which is a client's doing and no warning.
type logAdapter struct{ log *slog.Logger }

func (l logAdapter) Printf(format string, args ...any) {
	l.log.Debug("http", "text", strings.TrimSpace(format))
}

// servePublic routes a request.
func (r *Router) servePublic(ctx *fasthttp.RequestCtx) {
	id := requestID(ctx.Request.Header.Peek(dialect.HeaderRequestID))
	ctx.Response.Header.Set(dialect.HeaderRequestID, id)
	path := string(ctx.Path())
	route, ok := routes[path]
	if ok && route.key && spoken(ctx) && !r.keyed(ctx) { // strangers' bodies are not read
		r.refuse(ctx, id, path, openai.Unauthorized("the API key is missing or wrong, or it has expired"))
		return
	}
	if ok && route.key && method(ctx) == route.method && !route.streams { // nobody else's are read either
		body, err := r.readBody(ctx)
		if err != nil {
			r.httpError(ctx, err)
			ctx.SetConnectionClose()
			return
		}
		ctx.Request.SetBodyRaw(body)
	}
	switch {
	case !spoken(ctx):
		ctx.SetConnectionClose()
		r.refuse(ctx, id, "other", versionNotSupported())
	case ok && method(ctx) == route.method:
		route.serve(r, ctx, id)
	case ok:
		ctx.Response.Header.Set("Allow", route.method)
		r.refuse(ctx, id, path, methodNotAllowed(ctx, route.method))
	case path == "/metrics" && r.cfg.PublicMetrics && r.deps.Gatherer != nil:
		r.serveMetrics(ctx)
	case strings.HasPrefix(path, "/v1/models/") && method(ctx) == "GET":
		r.oneModel(ctx, id, strings.TrimPrefix(path, "/v1/models/"))
	default:
		r.refuse(ctx, id, "other", openai.NotFound("there is no %s", clip(path)))
	}
}

// method treats HEAD as GET: the server leaves the body out.
func method(ctx *fasthttp.RequestCtx) string {
	if ctx.IsHead() {
		return "GET"
	}
	return string(ctx.Method())
}

func methodNotAllowed(ctx *fasthttp.RequestCtx, allowed string) *openai.Error {
	e := openai.BadRequest("", "%s is not allowed here, use %s", clip(string(ctx.Method())), allowed)
	e.Status, e.Code = 405, "method_not_allowed"
	return e
}

// spoken says whether the request is of a version that we answer in.
func spoken(ctx *fasthttp.RequestCtx) bool {
	switch string(ctx.Request.Header.Protocol()) {
	case "HTTP/1.1", "HTTP/1.0":
		return true
	}
	return false
}

func versionNotSupported() *openai.Error {
	e := openai.BadRequest("", "want HTTP/1.1 or HTTP/1.0")
	e.Status, e.Code = 505, "http_version_not_supported"
	return e
}

// refuse answers a request that has no life of its own.
func (r *Router) refuse(ctx *fasthttp.RequestCtx, id, path string, e *openai.Error) {
	writeError(ctx, e)
	r.brief(ctx, id, path)
}

// brief accounts for a request that the router answered by itself. Health
// checks and the like are logged at debug level only.
func (r *Router) brief(ctx *fasthttp.RequestCtx, id, path string) {
	status := ctx.Response.StatusCode()
	r.metrics.request(path, status)
	level := slog.LevelInfo
	if status < 400 || path == "/ready" {
		level = slog.LevelDebug
	}
	r.log.Log(r.ctx, level, "request", "request_id", id, "method", clip(string(ctx.Method())), "path", clip(string(ctx.Path())), "status", status)
}

// httpError answers what is no proper HTTP request, or one beyond the bounds.
func (r *Router) httpError(ctx *fasthttp.RequestCtx, err error) {
	var small *fasthttp.ErrSmallBuffer
	var timeout interface{ Timeout() bool }
	var framing reqbody.FramingError
	var e *openai.Error
	switch {
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		e = openai.TooLarge("the body is larger than %d bytes", r.cfg.MaxBodyBytes)
	case errors.As(err, &small):
		e = openai.BadRequest("", "the header is larger than %d bytes", r.cfg.MaxHeaderBytes)
		e.Status, e.Code = 431, "header_too_large"
	case errors.As(err, &timeout) && timeout.Timeout():
		e = openai.BadRequest("", "the request was not complete within %v", r.cfg.ReadTimeout)
		e.Status, e.Code = 408, "request_timeout"
	case errors.As(err, &framing):
		e = openai.BadRequest("", "%v", err)
	default:
		e = openai.BadRequest("", "malformed HTTP request")
	}
	id := requestID(ctx.Request.Header.Peek(dialect.HeaderRequestID))
	ctx.Response.Header.Set(dialect.HeaderRequestID, id)
	if c := clientOf(ctx.Conn()); c != nil {
		c.linger.Store(true)
	}
	writeError(ctx, e)
	r.brief(ctx, id, "other")
}

func writeError(ctx *fasthttp.RequestCtx, e *openai.Error) {
	ctx.Response.ResetBody()
	ctx.SetStatusCode(e.Status)
	ctx.SetContentType("application/json")
	if s := max(e.RetryAfter, retryAfter(e.Status)); s > 0 {
		ctx.Response.Header.Set("Retry-After", strconv.Itoa(s))
	}
	ctx.Response.SetBodyRaw(e.Append(nil))
}

func writeJSON(ctx *fasthttp.RequestCtx, status int, body []byte) {
	ctx.SetStatusCode(status)
	ctx.SetContentType("application/json")
	ctx.Response.SetBodyRaw(body)
}

// health says that the process is up.
func (r *Router) health(ctx *fasthttp.RequestCtx, id string) {
	writeJSON(ctx, 200, []byte(`{"status":"ok"}`))
	r.brief(ctx, id, "/health")
}

// ready says whether requests can be served.
func (r *Router) ready(ctx *fasthttp.RequestCtx, id string) {
	if r.Ready() {
		writeJSON(ctx, 200, []byte(`{"status":"ready"}`))
	} else {
		writeError(ctx, openai.Unavailable("no live, compatible pair of workers has passed its probe"))
	}
	r.brief(ctx, id, "/ready")
}

func (r *Router) version(ctx *fasthttp.RequestCtx, id string) {
	b := openai.AppendString([]byte(`{"version":`), r.deps.Version)
	writeJSON(ctx, 200, append(b, '}'))
	r.brief(ctx, id, "/version")
}

// served lists the models that some pair can serve now, in order of their
// workers, and says of all that are known whether they are such.
func (r *Router) served() (list []openai.Model, known map[string]bool) {
	v := r.view()
	known = r.picker.Models(v)
next:
	for m := range v.Snapshot.Usable(fleet.Decode) {
		if !known[m.Model] || !v.Eligible(m) {
			continue
		}
		for i := range list {
			if list[i].ID == m.Model {
				list[i].MaxModelLen = min(list[i].MaxModelLen, m.MaxModelLen)
				continue next
			}
		}
		list = append(list, openai.Model{ID: m.Model, Created: r.created.Unix(), MaxModelLen: m.MaxModelLen})
	}
	return list, known
}

func (r *Router) models(ctx *fasthttp.RequestCtx, id string) {
	writeJSON(ctx, 200, openai.AppendModels(nil, r.servedTo(tenantOf(ctx))))
	r.brief(ctx, id, "/v1/models")
}

func (r *Router) oneModel(ctx *fasthttp.RequestCtx, id, name string) {
	if !r.keyed(ctx) {
		r.refuse(ctx, id, "/v1/models", openai.Unauthorized("the API key is missing or wrong, or it has expired"))
		return
	}
	t := tenantOf(ctx)
	list, known := r.served()
	if t != nil && !t.key.May(name) {
		list, known = nil, nil
	}
	for _, m := range list {
		if m.ID == name {
			writeJSON(ctx, 200, openai.AppendModel(nil, m))
			r.brief(ctx, id, "/v1/models")
			return
		}
	}
	err := openai.ModelNotFound(name)
	if _, ok := known[name]; ok {
		err = openai.Unavailable("the model %q cannot be served now: no live, compatible pair of workers that have passed their probe has it", clip(name))
	}
	r.refuse(ctx, id, "/v1/models", err)
}

// errorMessage is the message of an error body, for logs and wrapping.
func errorMessage(body []byte) string {
	var b struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &b) == nil && b.Error.Message != "" {
		return clip(b.Error.Message)
	}
	return clip(string(body))
}

func isEventStream(contentType string) bool {
	return strings.HasPrefix(contentType, "text/event-stream")
}
func isJSON(contentType string) bool { return strings.HasPrefix(contentType, "application/json") }

// clip bounds foreign text in messages and logs.
func clip(s string) string {
	if len(s) > 200 {
		return strings.ToValidUTF8(s[:200], "") + "…"
	}
	return s
}
