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
	Mounted                           bool // it exists if Deps.Mounts has it
}

// Routes lists what the console answers.
func Routes() []Route {
	const anybody = "anybody"
	list := []Route{
		{"admin", "GET", "/metrics", anybody, "Metrics, in Prometheus' text format.", false},
		{"admin", "GET", "/health", anybody, "That the process is up.", false},
		{"admin", "GET", "/dashboard", anybody, "The fleet in a browser: a page, which asks for the token before it shows anything.", false},
		{"admin", "GET", "/dashboard/{…}", anybody, "Its files.", false},
		{"admin", "POST", "/dashboard/session", anybody, "Sign in with `{\"token\": \"…\"}`: a cookie and a key for `X-Xpyd-Session`, which together are as good as the token for 12 hours, but for profiles.", false},
		{"admin", "GET", "/dashboard/session", "a session", "Who is signed in, and until when.", false},
		{"admin", "DELETE", "/dashboard/session", "a session", "Sign out.", false},
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

// adminCall is an admin request that its token allows.
type adminCall struct {
	id, verb, path string
	part           string // what the path has for {…}
}

// adminRoute is a path of the admin listener, behind its tokens. {id} is one part of it, {…}
// the rest. Without serve it exists if somebody mounts it.
type adminRoute struct {
	method, path string
	serve        func(*Console, *fasthttp.RequestCtx, adminCall) *openai.Error
	what         string
}

// adminTable is in the order in which paths are tried.
var adminTable = []adminRoute{
	{"GET", "/admin/v1/instances", (*Console).listInstances, "Who is there, in which state, with which load."},
	{"POST", "/admin/v1/instances", (*Console).addInstance, "Add a worker or an engine."},
	{"DELETE", "/admin/v1/instances/{id}", (*Console).removeInstance, "Take one out; the last of a role with `force`."},
	{"POST", "/admin/v1/instances/{id}/drain", (*Console).order, "Give it no new work, and have its streams go on elsewhere; with `wait_only` they end there. The last of a role with `force`."},
	{"POST", "/admin/v1/instances/{id}/undrain", (*Console).order, "Take a drain back."},
	{"POST", "/admin/v1/instances/{id}/role", (*Console).order, "Another role, once its streams go on elsewhere; with `wait_only` at once. Of the last of one with `force`."},
	{"GET", "/admin/v1/instances/{id}/log", (*Console).workerLog, "The level of a worker's log."},
	{"POST", "/admin/v1/instances/{id}/log", (*Console).workerLog, "Another level, until it starts again: `{\"level\": \"debug\"}`, or info, warn, error."},
	{"GET", "/admin/v1/log", (*Console).ownLog, "The level of the router's own log."},
	{"POST", "/admin/v1/log", (*Console).ownLog, "Another one, likewise."},
	{"POST", "/admin/v1/scale", nil, "The numbers of workers of `xpyd up`: `{\"prefill\": 3}`; with `\"wait_only\": true` the streams of those that go end there."},
	{"POST", "/admin/v1/upgrade", nil, "Have the binary that `xpyd up --upgrade` names in the data folder take over; its workers serve within `timeout_ms`."},
	{"GET", "/admin/v1/upgrade", nil, "How that goes, or went."},
	{"GET", "/admin/v1/planner", (*Console).showPlanner, "What the planner expects and wants, and its latest decisions with reason, prediction and what came true."},
	{"GET", "/admin/v1/workers", nil, "The processes of `xpyd up`."},
	{"GET", "/admin/v1/secret", nil, "Which secrets are in force, by ID, and who has which."},
	{"POST", "/admin/v1/secret/rotate", nil, "A new secret beside the one in force."},
	{"POST", "/admin/v1/secret/retire", nil, "End the older secret; while somebody lacks the new one with `force`."},
	{"GET", "/admin/v1/revocations", (*Console).serveRevocations, "Who is shut out."},
	{"POST", "/admin/v1/revocations/{id}", (*Console).serveRevocations, "Shut a worker out."},
	{"DELETE", "/admin/v1/revocations/{id}", (*Console).serveRevocations, "Let it come back."},
	{"GET", "/admin/v1/history", (*Console).showHistory, "The last 15 minutes, a point a second; with `?after=N` the points from number N on."},
	{"GET", "/admin/v1/events", (*Console).showEvents, "What happened lately, in words: joins, deaths, orders, ejections; with `?after=N` from number N on."},
	{"GET", "/admin/v1/requests", (*Console).serveBriefs, "Running and recent requests, a line each: at most `?n=N` of either, with `?after=TIME` those that ended later."},
	{"POST", "/admin/v1/try/chat/completions", (*Console).serveTry, "A client's request, for the dashboard; where there are API keys with one in `X-Xpyd-Api-Key`."},
	{"POST", "/admin/v1/try/completions", (*Console).serveTry, "The same, a completion."},
	{"GET", "/admin/v1/cache", (*Console).showCache, "What each worker's cache holds, by tier."},
	{"POST", "/admin/v1/cache/flush", (*Console).flushCache, "Forget all of it; with `?store=true` in the shared store, too."},
	{"GET", "/admin/v1/cache/pin", (*Console).showCache, "What is pinned."},
	{"POST", "/admin/v1/cache/pin", (*Console).pinCache, "Pin a prompt."},
	{"DELETE", "/admin/v1/cache/pin", (*Console).pinCache, "End a pin."},
	{"GET", "/admin/v1/profile", (*Console).serveProfile, "How profiling stands; `?instance=ID` downloads the last profile of one."},
	{"POST", "/admin/v1/profile", (*Console).serveProfile, "Profile the router and all workers, or `?instance=ID`, for `?seconds=N` at most."},
	{"DELETE", "/admin/v1/profile", (*Console).serveProfile, "End profiling."},
	{"GET", "/debug/ledger", (*Console).serveLedger, "What this router holds, and why; with fleet=1 every process of the fleet, too."},
	{"GET", "/debug/requests", (*Console).serveRequests, "The latest requests, without prompts and answers."},
	{"GET", "/debug/requests/{…}", (*Console).serveRequest, "One by its ID; `?format=text` draws its times."},
	{"GET", "/debug/pprof{…}", (*Console).servePprof, "Go's own profiles of the router."},
	{"POST", "/debug/pprof{…}", (*Console).servePprof, "The same, for symbols."},
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

// dispatch serves a request that its token allows.
func (c *Console) dispatch(ctx *fasthttp.RequestCtx, id, verb, path string) {
	if mount := c.Mounts[verb+" "+path]; mount != nil {
		mount(ctx)
		return
	}
	plain := strings.TrimSuffix(path, "/")
	var allowed []string
	for _, route := range adminTable {
		part, ok := match(route.path, plain)
		if !ok || route.serve == nil && c.Mounts[route.method+" "+path] == nil {
			continue
		}
		if route.method == verb && route.serve != nil {
			if err := route.serve(c, ctx, adminCall{id: id, verb: verb, path: plain, part: part}); err != nil {
				h1.WriteError(ctx, err)
			}
			return
		}
		allowed = append(allowed, route.method)
	}
	if len(allowed) == 0 {
		h1.WriteError(ctx, openai.NotFound("there is no %s %s", openai.Clip(verb), openai.Clip(path)))
		return
	}
	ctx.Response.Header.Set("Allow", strings.Join(allowed, ", "))
	h1.WriteError(ctx, openai.BadRequest("", "%s is not allowed here, use %s", openai.Clip(verb), strings.Join(allowed, " or ")).
		WithStatus(405, "method_not_allowed"))
}
