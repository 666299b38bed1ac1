package router

import (
	"cmp"
	"slices"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/dialect"
)

// route is what a public path is served by.
type route struct {
	method  string // its only one
	serve   func(*Router, *fasthttp.RequestCtx, string)
	key     bool // behind the API key
	streams bool // serve reads the body
	what    string
}

// Routes lists what the router answers, by listener and path.
func Routes() []Route {
	const keys, anybody = "API keys", "anybody"
	list := append(AdminRoutes(),
		Route{"public", "GET", "/v1/models/{model}", keys, "One model, if it can be served now.", false},
		Route{"public", "GET", "/metrics", anybody, "Metrics, with `public_metrics`.", false})
	for path, r := range routes {
		who := anybody
		if r.key {
			who = keys
		}
		list = append(list, Route{"public", r.method, path, who, r.what, false})
	}
	slices.SortFunc(list, func(a, b Route) int {
		return cmp.Or(strings.Compare(b.Listener, a.Listener), strings.Compare(a.Path, b.Path), strings.Compare(a.Method, b.Method))
	})
	return list
}

// routes are the public paths.
var routes = publicRoutes()

func publicRoutes() map[string]route {
	all := map[string]route{
		"/v1/completions":      {"POST", flies((*Service).generate), true, false, "A completion, or several."},
		"/v1/chat/completions": {"POST", flies((*Service).generate), true, false, "A chat's next message."},
		"/v1/models":           {"GET", (*Router).models, true, false, "The models that can be served now."},
		"/tokenize":            {"POST", flies((*Service).proxy), true, false, "A text's tokens; passed on."},
		"/detokenize":          {"POST", flies((*Service).proxy), true, false, "Tokens' text; passed on."},
		"/version":             {"GET", (*Router).version, false, false, "The build."},
		"/health":              {"GET", (*Router).health, false, false, "That the process is up."},
		"/ready":               {"GET", (*Router).ready, false, false, "Whether requests can be served (200, else 503)."},
	}
	for _, path := range passedPaths {
		all[path] = route{"POST", flies((*Service).pass), true, true, "Passed on to one engine."}
	}
	return all
}

// flies is a path that is served in flight.
func flies(serve func(*Service, *fasthttp.RequestCtx, string)) func(*Router, *fasthttp.RequestCtx, string) {
	return func(r *Router, ctx *fasthttp.RequestCtx, id string) { serve(r.flights, ctx, id) }
}

// servePublic routes a request.
func (r *Router) servePublic(ctx *fasthttp.RequestCtx) {
	id := requestID(ctx.Request.Header.Peek(dialect.HeaderRequestID))
	ctx.Response.Header.Set(dialect.HeaderRequestID, id)
	path := string(ctx.Path())
	route, ok := routes[path]
	if ok && route.key && spoken(ctx) && !r.flights.keyed(ctx) { // strangers' bodies are not read
		r.refuse(ctx, id, path, openai.Unauthorized("the API key is missing or wrong, or it has expired"))
		return
	}
	if ok && route.key && method(ctx) == route.method && !route.streams { // nobody else's are read either
		body, err := clientOf(ctx.Conn()).readBody()
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
		ServeMetrics(ctx, r.deps.Gatherer)
	case strings.HasPrefix(path, "/v1/models/") && method(ctx) == "GET":
		r.oneModel(ctx, id, strings.TrimPrefix(path, "/v1/models/"))
	default:
		r.refuse(ctx, id, "other", openai.NotFound("there is no %s", clip(path)))
	}
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
	r.flights.Brief(ctx, id, path)
}

// httpError answers what is no proper HTTP request, or one beyond the bounds.
func (r *Router) httpError(ctx *fasthttp.RequestCtx, err error) {
	id := requestID(ctx.Request.Header.Peek(dialect.HeaderRequestID))
	ctx.Response.Header.Set(dialect.HeaderRequestID, id)
	writeError(ctx, r.cfg.Refusal(err))
	r.flights.Brief(ctx, id, "other")
}

// health says that the process is up.
func (r *Router) health(ctx *fasthttp.RequestCtx, id string) {
	writeJSON(ctx, 200, []byte(`{"status":"ok"}`))
	r.flights.Brief(ctx, id, "/health")
}

// ready says whether requests can be served.
func (r *Router) ready(ctx *fasthttp.RequestCtx, id string) {
	if r.Ready() {
		writeJSON(ctx, 200, []byte(`{"status":"ready"}`))
	} else {
		writeError(ctx, openai.Unavailable("no live, compatible pair of workers has passed its probe"))
	}
	r.flights.Brief(ctx, id, "/ready")
}

func (r *Router) version(ctx *fasthttp.RequestCtx, id string) {
	b := openai.AppendString([]byte(`{"version":`), r.deps.Version)
	writeJSON(ctx, 200, append(b, '}'))
	r.flights.Brief(ctx, id, "/version")
}

func (r *Router) models(ctx *fasthttp.RequestCtx, id string) {
	writeJSON(ctx, 200, openai.AppendModels(nil, r.flights.servedTo(tenantOf(ctx))))
	r.flights.Brief(ctx, id, "/v1/models")
}

func (r *Router) oneModel(ctx *fasthttp.RequestCtx, id, name string) {
	if !r.flights.keyed(ctx) {
		r.refuse(ctx, id, "/v1/models", openai.Unauthorized("the API key is missing or wrong, or it has expired"))
		return
	}
	list, known := r.members.served()
	if t := tenantOf(ctx); t != nil && !t.key.May(name) {
		list, known = nil, nil
	}
	for _, m := range list {
		if m.ID == name {
			writeJSON(ctx, 200, openai.AppendModel(nil, m))
			r.flights.Brief(ctx, id, "/v1/models")
			return
		}
	}
	err := openai.ModelNotFound(name)
	if _, ok := known[name]; ok {
		err = openai.Unavailable("the model %q cannot be served now: no live, compatible pair of workers that have passed their probe has it", clip(name))
	}
	r.refuse(ctx, id, "/v1/models", err)
}
