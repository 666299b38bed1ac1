package console

import (
	"encoding/json"
	"net/http"
	"net/url"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/profile"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/h1"
)

const (
	workerProfile = "/xpyd/v1/profile"
	maxProfile    = 64 << 20
)

// profiles is /admin/v1/profile of all.
type profiles struct {
	Router  json.RawMessage            `json:"router"`
	Workers map[string]json.RawMessage `json:"workers"`
}

// serveProfile turns profiling on (POST), off (DELETE), and says how it stands
// (GET): of this router and all its own kind of workers, or of one of them with
// instance=ID ("router" for this one), whose last profile GET then downloads.
func (c *Console) serveProfile(ctx *fasthttp.RequestCtx, verb string) {
	if verb != http.MethodGet && verb != http.MethodPost && verb != http.MethodDelete {
		h1.WriteError(ctx, openai.NotFound("there is no %s %s", h1.Clip(verb), h1.Clip(string(ctx.Path()))))
		return
	}
	if _, err := profile.Duration(ctx.QueryArgs()); err != nil {
		h1.WriteError(ctx, err)
		return
	}
	path := workerProfile
	if s := ctx.QueryArgs().Peek("seconds"); len(s) > 0 {
		path += "?seconds=" + url.QueryEscape(string(s))
	}
	switch id := string(ctx.QueryArgs().Peek("instance")); {
	case id == "router":
		if verb == http.MethodGet {
			ctx.QueryArgs().Set("download", "1")
		}
		if err := c.profiler.Serve(ctx); err != nil {
			h1.WriteError(ctx, err)
		}
	case id != "":
		c.profileOf(ctx, id, verb, path)
	default:
		var all profiles
		all.Workers, _ = c.everyWorker(verb, path, nil)
		if err := c.profiler.Serve(ctx); err != nil {
			all.Router = err.Append(nil)
		} else {
			all.Router = append(all.Router, ctx.Response.Body()...)
		}
		reply(ctx, 200, all)
	}
}

// profileOf asks one worker.
func (c *Console) profileOf(ctx *fasthttp.RequestCtx, id, verb, path string) {
	m := c.Fleet.Snapshot().Get(id)
	if m == nil || m.State == fleet.Gone || m.State == fleet.Dead || m.Dialect != "native" {
		h1.WriteError(ctx, openai.NotFound("there is no live worker %q of xpyd's own", h1.Clip(id)))
		return
	}
	if verb == http.MethodGet {
		path += "?download"
	}
	said, err := c.Flights.Ask(m, flight.Question{Method: verb, Path: path, Timeout: ledgerTimeout, Limit: maxProfile})
	if err != nil {
		h1.WriteError(ctx, openai.Upstream("%v", err))
		return
	}
	said.ContentType = "application/json"
	if verb == http.MethodGet && said.Status == 200 {
		said.ContentType = "application/octet-stream"
		ctx.Response.Header.Set("Content-Disposition", `attachment; filename="cpu.pprof"`)
	}
	said.Write(ctx)
}
