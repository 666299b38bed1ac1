package console

import (
	"embed"
	"path"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/h1"
)

// The dashboard is a page of static files, open to everybody: what it shows, it asks for with the session.
//
//go:embed dashboard
var dashboard embed.FS

// dashboardPolicy allows the page files and answers from where it came from, and nothing else.
const dashboardPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

var dashboardTypes = map[string]string{".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml", ".txt": "text/plain; charset=utf-8"}

// serveDashboard answers with the page, or one of its files.
func serveDashboard(ctx *fasthttp.RequestCtx, verb, asked string) {
	name := strings.TrimPrefix(strings.TrimPrefix(asked, "/dashboard"), "/")
	if name == "" {
		name = "index.html"
	}
	file, err := dashboard.ReadFile("dashboard/" + name)
	kind, known := dashboardTypes[path.Ext(name)]
	switch {
	case err != nil || !known:
		h1.WriteError(ctx, openai.NotFound("there is no %s", openai.Clip(asked)))
		return
	case verb != "GET": // HEAD is a GET here
		ctx.Response.Header.Set("Allow", "GET")
		h1.WriteError(ctx, openai.BadRequest("", "%s is not allowed here, use GET", openai.Clip(verb)).WithStatus(405, "method_not_allowed"))
		return
	}
	h := &ctx.Response.Header
	h.Set("Content-Security-Policy", dashboardPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
	ctx.SetContentType(kind)
	ctx.Response.SetBodyRaw(file)
}

// headerTryKey has the API key for a request of the dashboard's chat box, where there are keys: Authorization is for
// the admin token.
const headerTryKey = "X-Xpyd-Api-Key"

// serveTry serves a client's request on the admin listener, as the public one does: a page cannot ask another port.
func (c *Console) serveTry(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	h := &ctx.Request.Header
	h.Del("Authorization") // no engine sees it
	h.Del("Cookie")
	h.Del(headerSession)
	if key := string(h.Peek(headerTryKey)); key != "" {
		h.Del(headerTryKey)
		h.Set("Authorization", "Bearer "+key)
	}
	if !c.Flights.Keyed(ctx) {
		return openai.Unauthorized("this router wants an API key: it is missing or wrong, or it has expired").WithStatus(403, "api_key_needed")
	}
	ctx.URI().SetPath("/v1/" + strings.TrimPrefix(a.path, "/admin/v1/try/"))
	c.Flights.Generate(ctx, a.id)
	return nil
}

// serveBriefs lists running and recent requests in a line each: ?n=N of either, ?after=RFC 3339 those that ended later.
func (c *Console) serveBriefs(ctx *fasthttp.RequestCtx, _ adminCall) *openai.Error {
	since, most, err := briefly(ctx)
	if err != nil {
		return err
	}
	return reply(ctx, 200, struct {
		Requests []flight.Brief `json:"requests"`
	}{c.Flights.Briefs(since, most)})
}
