package router

import (
	"cmp"
	"slices"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
)

// Route is a path of a listener, as the HTTP reference lists it.
type Route struct {
	Listener, Method, Path, For, What string
	Mounted                           bool // it is there if Deps.Mounts has it
}

// Routes lists what the router answers, by listener and path.
func Routes() []Route {
	const keys, anybody = "API keys", "anybody"
	list := []Route{
		{"public", "GET", "/v1/models/{model}", keys, "One model, if it can be served now.", false},
		{"public", "GET", "/metrics", anybody, "Metrics, with `public_metrics`.", false},
		{"admin", "GET", "/metrics", anybody, "Metrics, in Prometheus' text format.", false},
		{"admin", "GET", "/health", anybody, "That the process is up.", false},
	}
	for path, r := range routes {
		who := anybody
		if r.key {
			who = keys
		}
		list = append(list, Route{"public", r.method, path, who, r.what, false})
	}
	for _, r := range adminTable {
		who := "the admin token"
		if r.method == "GET" && readable(r.path) {
			who = "either token"
		}
		list = append(list, Route{"admin", r.method, r.path, who, r.what, r.serve == nil})
	}
	slices.SortFunc(list, func(a, b Route) int {
		return cmp.Or(strings.Compare(b.Listener, a.Listener), strings.Compare(a.Path, b.Path), strings.Compare(a.Method, b.Method))
	})
	return list
}

// adminCall is a request of the admin listener that may be made.
type adminCall struct {
	id, verb, path string
	part           string // what the path has for {…}
}

// adminRoute is a path of the admin listener, behind its tokens. {id} is one part of
// it, {…} all that follows. Without serve it is there if somebody mounts it.
type adminRoute struct {
	method, path string
	serve        func(*Router, *fasthttp.RequestCtx, adminCall)
	what         string
}

// adminTable is in the order in which paths are tried.
var adminTable = adminRoutes()

func adminRoutes() []adminRoute {
	order := func(r *Router, ctx *fasthttp.RequestCtx, a adminCall) {
		r.order(ctx, a.id, a.part, a.path[strings.LastIndexByte(a.path, '/')+1:])
	}
	cache := func(r *Router, ctx *fasthttp.RequestCtx, a adminCall) {
		r.serveCache(ctx, a.verb, strings.TrimPrefix(a.path, "/admin/v1/cache"))
	}
	revocations := func(r *Router, ctx *fasthttp.RequestCtx, a adminCall) { r.serveRevocations(ctx, a.verb, a.part) }
	profiles := func(r *Router, ctx *fasthttp.RequestCtx, a adminCall) { r.serveProfile(ctx, a.verb) }
	pprof := func(_ *Router, ctx *fasthttp.RequestCtx, a adminCall) { servePprof(ctx, a.path) }
	return []adminRoute{
		{"GET", "/dashboard", func(_ *Router, ctx *fasthttp.RequestCtx, _ adminCall) { serveDashboard(ctx) }, "The fleet in a browser; the token is the password."},
		{"GET", "/admin/v1/instances", func(r *Router, ctx *fasthttp.RequestCtx, _ adminCall) { r.listInstances(ctx) }, "Who is there, in which state, with which load."},
		{"POST", "/admin/v1/instances", func(r *Router, ctx *fasthttp.RequestCtx, _ adminCall) { r.addInstance(ctx) }, "Add a worker or an engine."},
		{"DELETE", "/admin/v1/instances/{id}", func(r *Router, ctx *fasthttp.RequestCtx, a adminCall) { r.removeInstance(ctx, a.part) }, "Take one out; the last of a role with `force`."},
		{"POST", "/admin/v1/instances/{id}/drain", order, "Give it no new work; the last of a role with `force`."},
		{"POST", "/admin/v1/instances/{id}/undrain", order, "Take a drain back."},
		{"POST", "/admin/v1/instances/{id}/role", order, "Another role; of the last of one with `force`."},
		{"POST", "/admin/v1/scale", nil, "The numbers of workers of `xpyd up`: `{\"prefill\": 3}`."},
		{"GET", "/admin/v1/workers", nil, "The processes of `xpyd up`."},
		{"GET", "/admin/v1/secret", nil, "Which secrets are in force, by ID, and who has which."},
		{"POST", "/admin/v1/secret/rotate", nil, "A new secret beside the one in force."},
		{"POST", "/admin/v1/secret/retire", nil, "End the older secret; while somebody lacks the new one with `force`."},
		{"GET", "/admin/v1/revocations", revocations, "Who is shut out."},
		{"POST", "/admin/v1/revocations/{id}", revocations, "Shut a worker out."},
		{"DELETE", "/admin/v1/revocations/{id}", revocations, "Let it come back."},
		{"GET", "/admin/v1/cache", cache, "What each worker's cache holds, by tier."},
		{"POST", "/admin/v1/cache/flush", cache, "Forget all of it; with `?store=true` in the shared store, too."},
		{"GET", "/admin/v1/cache/pin", cache, "What is pinned."},
		{"POST", "/admin/v1/cache/pin", cache, "Pin a prompt."},
		{"DELETE", "/admin/v1/cache/pin", cache, "End a pin."},
		{"GET", "/admin/v1/profile", profiles, "How profiling stands; `?instance=ID` downloads the last profile of one."},
		{"POST", "/admin/v1/profile", profiles, "Profile the router and all workers, or `?instance=ID`, for `?seconds=N` at most."},
		{"DELETE", "/admin/v1/profile", profiles, "End profiling."},
		{"GET", "/debug/ledger", func(r *Router, ctx *fasthttp.RequestCtx, _ adminCall) { r.serveLedger(ctx) }, "What every process holds, and why."},
		{"GET", "/debug/requests", func(r *Router, ctx *fasthttp.RequestCtx, _ adminCall) { r.serveRequests(ctx) }, "The latest requests, without prompts and answers."},
		{"GET", "/debug/requests/{…}", func(r *Router, ctx *fasthttp.RequestCtx, a adminCall) { r.serveRequest(ctx, a.part) }, "One by its ID; `?format=text` draws its times."},
		{"GET", "/debug/pprof{…}", pprof, "Go's own profiles of the router."},
		{"POST", "/debug/pprof{…}", pprof, "The same, for symbols."},
	}
}

// match finds {…} of a pattern in a path.
func match(pattern, path string) (part string, ok bool) {
	before, after, has := strings.Cut(pattern, "{")
	if !has {
		return "", path == pattern
	}
	name, after, _ := strings.Cut(after, "}")
	rest, ok := strings.CutPrefix(path, before)
	part, ends := strings.CutSuffix(rest, after)
	return part, ok && ends && (name == "…" || part != "" && !strings.Contains(part, "/"))
}

// administer routes a request that may be made.
func (r *Router) administer(ctx *fasthttp.RequestCtx, id, verb, path string) {
	if mount := r.deps.Mounts[verb+" "+path]; mount != nil {
		mount(ctx)
		return
	}
	plain := strings.TrimSuffix(path, "/")
	for _, route := range adminTable {
		if part, ok := match(route.path, plain); ok && route.method == verb && route.serve != nil {
			route.serve(r, ctx, adminCall{id: id, verb: verb, path: plain, part: part})
			return
		}
	}
	writeError(ctx, openai.NotFound("there is no %s %s", clip(verb), clip(path)))
}
