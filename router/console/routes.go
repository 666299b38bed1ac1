package console

import (
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

// Route is a path of a listener, as the HTTP reference lists it.
type Route struct {
	Listener, Method, Path, For, What string
	Mounted                           bool // it is there if Deps.Mounts has it
}

// Routes lists what the console answers.
func Routes() []Route {
	const anybody = "anybody"
	list := []Route{
		{"admin", "GET", "/metrics", anybody, "Metrics, in Prometheus' text format.", false},
		{"admin", "GET", "/health", anybody, "That the process is up.", false},
	}
	for _, r := range adminTable {
		who := "the admin token"
		if r.method == "GET" && readable(r.path) {
			who = "either token"
		}
		list = append(list, Route{"admin", r.method, r.path, who, r.what, r.serve == nil})
	}
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
	serve        func(*Console, *fasthttp.RequestCtx, adminCall)
	what         string
}

// adminTable is in the order in which paths are tried.
var adminTable = adminRoutes()

func adminRoutes() []adminRoute {
	order := func(c *Console, ctx *fasthttp.RequestCtx, a adminCall) {
		c.order(ctx, a.id, a.part, a.path[strings.LastIndexByte(a.path, '/')+1:])
	}
	cache := func(c *Console, ctx *fasthttp.RequestCtx, a adminCall) {
		c.serveCache(ctx, a.verb, strings.TrimPrefix(a.path, "/admin/v1/cache"))
	}
	revocations := func(c *Console, ctx *fasthttp.RequestCtx, a adminCall) { c.serveRevocations(ctx, a.verb, a.part) }
	profiles := func(c *Console, ctx *fasthttp.RequestCtx, a adminCall) { c.serveProfile(ctx, a.verb) }
	pprof := func(_ *Console, ctx *fasthttp.RequestCtx, a adminCall) { servePprof(ctx, a.path) }
	return []adminRoute{
		{"GET", "/dashboard", func(_ *Console, ctx *fasthttp.RequestCtx, _ adminCall) { serveDashboard(ctx) }, "The fleet in a browser; the token is the password."},
		{"GET", "/admin/v1/instances", func(c *Console, ctx *fasthttp.RequestCtx, _ adminCall) { c.listInstances(ctx) }, "Who is there, in which state, with which load."},
		{"POST", "/admin/v1/instances", func(c *Console, ctx *fasthttp.RequestCtx, _ adminCall) { c.addInstance(ctx) }, "Add a worker or an engine."},
		{"DELETE", "/admin/v1/instances/{id}", func(c *Console, ctx *fasthttp.RequestCtx, a adminCall) { c.removeInstance(ctx, a.part) }, "Take one out; the last of a role with `force`."},
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
		{"GET", "/debug/ledger", func(c *Console, ctx *fasthttp.RequestCtx, _ adminCall) { c.serveLedger(ctx) }, "What every process holds, and why."},
		{"GET", "/debug/requests", func(c *Console, ctx *fasthttp.RequestCtx, _ adminCall) { c.serveRequests(ctx) }, "The latest requests, without prompts and answers."},
		{"GET", "/debug/requests/{…}", func(c *Console, ctx *fasthttp.RequestCtx, a adminCall) { c.serveRequest(ctx, a.part) }, "One by its ID; `?format=text` draws its times."},
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
func (c *Console) administer(ctx *fasthttp.RequestCtx, id, verb, path string) {
	if mount := c.Mounts[verb+" "+path]; mount != nil {
		mount(ctx)
		return
	}
	plain := strings.TrimSuffix(path, "/")
	for _, route := range adminTable {
		if part, ok := match(route.path, plain); ok && route.method == verb && route.serve != nil {
			route.serve(c, ctx, adminCall{id: id, verb: verb, path: plain, part: part})
			return
		}
	}
	h1.WriteError(ctx, openai.NotFound("there is no %s %s", h1.Clip(verb), h1.Clip(path)))
}
