package router

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/console"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/h1"
)

type route struct {
	method  string // the only one
	serve   func(*Router, *fasthttp.RequestCtx, string)
	key     bool // behind the API key
	streams bool // serve reads the body
	what    string
}

// named are the paths with a name in them.
var named = []struct{ path, method, what string }{
	{"/v1/models/{model}", "GET", "One model, if it can be served now."},
	{"/v1/responses/{id}", "GET", "A response that is kept, or runs in the background; with `?stream=true` the events of the latter, behind `starting_after`."},
	{"/v1/responses/{id}", "DELETE", "Forgets it."},
	{"/v1/responses/{id}/input_items", "GET", "What it was asked."},
	{"/v1/responses/{id}/cancel", "POST", "Ends a response that runs in the background."},
}

// Routes lists what the router answers, by listener and path.
func Routes() []console.Route {
	const keys, anybody = "API keys", "anybody"
	list := append(console.Routes(),
		console.Route{Listener: "public", Method: "GET", Path: "/metrics", For: anybody, What: "Metrics, with `public_metrics`."})
	for _, of := range named {
		list = append(list, console.Route{Listener: "public", Method: of.method, Path: of.path, For: keys, What: of.what})
	}
	for path, r := range routes {
		who := anybody
		if r.key {
			who = keys
		}
		list = append(list, console.Route{Listener: "public", Method: r.method, Path: path, For: who, What: r.what})
	}
	slices.SortFunc(list, func(a, b console.Route) int {
		return cmp.Or(strings.Compare(b.Listener, a.Listener), strings.Compare(a.Path, b.Path), strings.Compare(a.Method, b.Method))
	})
	return list
}

var routes = publicRoutes()

func publicRoutes() map[string]route {
	all := map[string]route{
		"/v1/completions":            {"POST", flies((*flight.Service).Generate), true, false, "A completion, or several."},
		"/v1/chat/completions":       {"POST", flies((*flight.Service).Generate), true, false, "A chat's next message."},
		"/v1/chat/completions/batch": {"POST", flies((*flight.Service).Generate), true, false, "The next message of several chats: `messages` is a list of conversations."},
		"/invocations":               {"POST", flies((*flight.Service).Generate), true, false, "A chat or a completion, by what the body has; for SageMaker."},
		"/v1/responses":              {"POST", flies((*flight.Service).Responses), true, false, "A response, by a chat."},
		"/v1/messages":               {"POST", flies((*flight.Service).Messages), true, false, "A message of Anthropic's API, by a chat."},
		"/v1/messages/count_tokens":  {"POST", flies((*flight.Service).CountTokens), true, false, "How many tokens a message's prompt has."},
		"/v1/models":                 {"GET", flies((*flight.Service).Models), true, false, "The models that can be served now."},
		"/tokenize":                  {"POST", flies((*flight.Service).Tokenize), true, false, "A text's tokens; passed on."},
		"/detokenize":                {"POST", flies((*flight.Service).Tokenize), true, false, "Tokens' text; passed on."},
		"/version":                   {"GET", (*Router).version, false, false, "The build."},
		"/health":                    {"GET", (*Router).health, false, false, "That the process is up."},
		"/ready":                     {"GET", (*Router).ready, false, false, "Whether requests can be served (200, else 503)."},
		"/tokenizer_info":            {"GET", flies((*flight.Service).TokenizerInfo), true, false, "The tokenizer's special tokens and chat template; of `?model=` where there are several."},
		"/load":                      {"GET", (*Router).load, true, false, "How many requests are under way: vLLM's `server_load`."},
		"/openapi.json":              {"GET", (*Router).openapi, false, false, "This API as an OpenAPI document."},
		"/ping":                      {"GET", (*Router).ping, false, false, "As `/health`, for SageMaker."},
	}
	for _, path := range flight.ForwardedPaths {
		all[path] = route{"POST", flies((*flight.Service).Forward), true, true, "Passed on to one engine."}
	}
	return all
}

// flies serves a path in flight.
func flies(serve func(*flight.Service, *fasthttp.RequestCtx, string)) func(*Router, *fasthttp.RequestCtx, string) {
	return func(r *Router, ctx *fasthttp.RequestCtx, id string) { serve(r.flights, ctx, id) }
}

func (r *Router) servePublic(ctx *fasthttp.RequestCtx) {
	id := h1.RequestID(ctx.Request.Header.Peek(ticket.HeaderRequestID))
	ctx.Response.Header.Set(ticket.HeaderRequestID, id)
	r.below(ctx)
	path := string(ctx.Path())
	route, ok := routes[path]
	if !ok && strings.HasPrefix(path, "/v1/models/") && h1.Method(ctx) != "GET" { // GET has its own checks
		path = "/v1/models"
		route, ok = routes[path]
	}
	if spoken(ctx) {
		var methods []string
		if ok {
			methods = []string{route.method}
		}
		if answered, err := r.cfg.CORS.asks(ctx, methods); err != nil {
			r.flights.Refuse(ctx, id, cmp.Or(map[bool]string{true: path}[ok], "other"), err)
			return
		} else if answered {
			r.flights.Brief(ctx, id, path)
			return
		}
	}
	if ok && route.key && spoken(ctx) && !r.flights.Keyed(ctx) { // strangers' bodies are not read
		r.flights.Refuse(ctx, id, path, openai.Unauthorized("the API key is missing or wrong, or it has expired"))
		return
	}
	if ok && route.key && h1.Method(ctx) == route.method && !route.streams { // no other body is read
		body, err := h1.ConnOf(ctx.Conn()).ReadBody()
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
		r.flights.Refuse(ctx, id, "other", openai.BadRequest("", "want HTTP/1.1 or HTTP/1.0").WithStatus(505, "http_version_not_supported"))
	case ok && h1.Method(ctx) == route.method:
		route.serve(r, ctx, id)
	case ok:
		ctx.Response.Header.Set("Allow", route.method)
		r.flights.Refuse(ctx, id, path, openai.BadRequest("", "%s is not allowed here, use %s", openai.Clip(string(ctx.Method())), route.method).
			WithStatus(405, "method_not_allowed"))
	case path == "/metrics" && r.cfg.PublicMetrics && r.deps.Gatherer != nil:
		console.ServeMetrics(ctx, r.deps.Gatherer)
	case strings.HasPrefix(path, "/v1/models/") && h1.Method(ctx) == "GET":
		r.flights.OneModel(ctx, id, strings.TrimPrefix(path, "/v1/models/"))
	case strings.HasPrefix(path, "/v1/responses/"):
		r.flights.KeptResponse(ctx, id, strings.TrimPrefix(path, "/v1/responses/"))
	default:
		r.flights.Refuse(ctx, id, "other", openai.NotFound("there is no %s", openai.Clip(path)))
	}
}

// below takes the path at which a proxy shows us off the request's.
func (r *Router) below(ctx *fasthttp.RequestCtx) {
	if rest, ok := strings.CutPrefix(string(ctx.RequestURI()), r.cfg.RootPath); ok && r.cfg.RootPath != "" && strings.HasPrefix(rest, "/") {
		ctx.Request.SetRequestURI(rest)
	}
}

// spoken reports whether the request's HTTP version is served.
func spoken(ctx *fasthttp.RequestCtx) bool {
	switch string(ctx.Request.Header.Protocol()) {
	case "HTTP/1.1", "HTTP/1.0":
		return true
	}
	return false
}

// httpError answers a request that is malformed or exceeds the bounds.
func (r *Router) httpError(ctx *fasthttp.RequestCtx, err error) {
	id := h1.RequestID(ctx.Request.Header.Peek(ticket.HeaderRequestID))
	ctx.Response.Header.Set(ticket.HeaderRequestID, id)
	flight.WriteError(ctx, id, r.cfg.Refusal(err))
	r.flights.Brief(ctx, id, "other")
}

func (r *Router) health(ctx *fasthttp.RequestCtx, id string) {
	h1.WriteJSON(ctx, 200, []byte(`{"status":"ok"}`))
	r.flights.Brief(ctx, id, "/health")
}

func (r *Router) ping(ctx *fasthttp.RequestCtx, id string) {
	h1.WriteJSON(ctx, 200, []byte(`{}`))
	r.flights.Brief(ctx, id, "/ping")
}

func (r *Router) load(ctx *fasthttp.RequestCtx, id string) {
	h1.WriteJSON(ctx, 200, fmt.Appendf(nil, `{"server_load":%d}`, r.flights.Load()))
	r.flights.Brief(ctx, id, "/load")
}

func (r *Router) openapi(ctx *fasthttp.RequestCtx, id string) {
	h1.WriteJSON(ctx, 200, r.document)
	r.flights.Brief(ctx, id, "/openapi.json")
}

func (r *Router) ready(ctx *fasthttp.RequestCtx, id string) {
	if r.Ready() {
		h1.WriteJSON(ctx, 200, []byte(`{"status":"ready"}`))
	} else {
		h1.WriteError(ctx, openai.Unavailable("no live, compatible pair of workers has passed its probe"))
	}
	r.flights.Brief(ctx, id, "/ready")
}

func (r *Router) version(ctx *fasthttp.RequestCtx, id string) {
	b := openai.AppendString([]byte(`{"version":`), r.deps.Version)
	h1.WriteJSON(ctx, 200, append(b, '}'))
	r.flights.Brief(ctx, id, "/version")
}
