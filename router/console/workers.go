package console

import (
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/profile"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/h1"
)

// serveLedger answers with the router's ledger, and with ?fleet=1 the workers', too.
func (c *Console) serveLedger(ctx *fasthttp.RequestCtx, _ adminCall) *openai.Error {
	l := c.Flights.Ledger()
	if string(ctx.QueryArgs().Peek("fleet")) == "1" {
		l.Fleet, _ = c.askEvery("GET", "/debug/ledger", nil)
	}
	return reply(ctx, 200, l)
}

// showPlanner answers with what the planner thinks.
func (c *Console) showPlanner(ctx *fasthttp.RequestCtx, _ adminCall) *openai.Error {
	return reply(ctx, 200, c.Planner.Status())
}

const (
	askedAtOnce = 16
	askTimeout  = 2 * time.Second
	maxReply    = 8 << 20
	maxProfile  = 64 << 20
)

// own reports whether m is a worker of xpyd's own that can answer.
func own(m *fleet.Member) bool {
	return m != nil && m.State != fleet.Gone && m.State != fleet.Dead && m.Dialect == fleet.Native
}

// askEvery sends one request to each own worker. It returns their answers by ID, an error
// object for each that failed, and the statuses, in no order: each is 2xx, 4xx or 5xx.
func (c *Console) askEvery(verb, path string, body []byte) (map[string]json.RawMessage, []int) {
	s := c.Fleet.Snapshot()
	out := make(map[string]json.RawMessage, len(s.Members))
	var statuses []int
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, askedAtOnce)
	for i := range s.Members {
		m := &s.Members[i]
		if !own(m) {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			status, b := c.askOne(m, verb, path, body)
			mu.Lock()
			defer mu.Unlock()
			out[m.ID] = b
			statuses = append(statuses, status)
		})
	}
	wg.Wait()
	return out, statuses
}

func (c *Console) askOne(m *fleet.Member, verb, path string, body []byte) (int, json.RawMessage) {
	said, err := c.Flights.Ask(m, flight.Question{Method: verb, Path: path, Body: body, Timeout: askTimeout, Limit: maxReply})
	var fail *openai.Error
	switch {
	case err != nil:
		fail = openai.Upstream("%v", err)
	case !json.Valid(said.Body):
		fail = openai.Upstream("status %d, and no JSON", said.Status)
	case said.Status < 200 || said.Status > 299 && said.Status < 400 || said.Status > 599:
		fail = openai.Upstream("status %d, which no worker answers", said.Status)
	default:
		return said.Status, said.Body
	}
	return fail.Status, fail.Append(nil)
}

// workerCache is where workers serve what /admin/v1/cache does for all of them.
const workerCache = "/xpyd/v1/cache"

// showCache answers with what each worker says, or why it says nothing.
func (c *Console) showCache(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	said, _ := c.askEvery(a.verb, workerCache+strings.TrimPrefix(a.path, "/admin/v1/cache"), nil)
	return reply(ctx, 200, said)
}

func (c *Console) flushCache(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	path := workerCache + "/flush"
	if string(ctx.QueryArgs().Peek("store")) == "true" {
		path += "?store=true"
	}
	return c.changeEvery(ctx, a.verb, path, nil)
}

func (c *Console) pinCache(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	// What is wrong for every worker is said once, before any changes.
	if _, err := openai.ParsePin(ctx.PostBody(), a.verb == http.MethodDelete); err != nil {
		return err
	}
	return c.changeEvery(ctx, a.verb, workerCache+"/pin", ctx.PostBody())
}

// changeEvery has every worker change something. Scripts look only at the status, so it is 200
// only if all workers that can have done it.
func (c *Console) changeEvery(ctx *fasthttp.RequestCtx, verb, path string, body []byte) *openai.Error {
	said, statuses := c.askEvery(verb, path, body)
	if len(statuses) == 0 {
		return openai.Unavailable("there is no live worker of xpyd's own to do it: start one, then ask again")
	}
	status := combine(statuses)
	if s := h1.RetryAfter(status); s > 0 {
		ctx.Response.Header.Set("Retry-After", strconv.Itoa(s))
	}
	return reply(ctx, status, said)
}

// combine is one status for the answers of several workers:
//
//	all accepted                                200
//	all refused with the same status            that one
//	all refused, all with 4xx                   the greatest
//	some accepted, the rest answered 404, 409   200: they have no such pin, or no memory to pin in
//	otherwise                                   502
func combine(statuses []int) int {
	refused := slices.DeleteFunc(slices.Clone(statuses), func(s int) bool { return s < 400 })
	accepted := len(refused) < len(statuses)
	if accepted {
		refused = slices.DeleteFunc(refused, func(s int) bool { return s == http.StatusNotFound || s == http.StatusConflict })
	}
	if len(refused) == 0 {
		return http.StatusOK
	}
	least, most := slices.Min(refused), slices.Max(refused)
	if !accepted && (least == most || most < 500) {
		return most
	}
	return http.StatusBadGateway
}

// profiles is the answer of /admin/v1/profile about all.
type profiles struct {
	Router  json.RawMessage            `json:"router"`
	Workers map[string]json.RawMessage `json:"workers"`
}

// serveProfile turns profiling on (POST) and off (DELETE), and says how it stands (GET), for
// the router and its own workers. With instance=ID ("router" for the router) it does so for
// one, and GET downloads its last profile.
func (c *Console) serveProfile(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	query := ctx.QueryArgs()
	if _, err := profile.Duration(query); err != nil {
		return err
	}
	path := "/xpyd/v1/profile"
	if s := query.Peek("seconds"); len(s) > 0 {
		path += "?seconds=" + url.QueryEscape(string(s))
	}
	id := string(query.Peek("instance"))
	switch {
	case id != "" && id != "router":
		return c.profileOf(ctx, id, a.verb, path)
	case id == "router":
		if a.verb == http.MethodGet {
			query.Set("download", "1")
		}
		return c.profiler.Serve(ctx)
	}
	var all profiles
	all.Workers, _ = c.askEvery(a.verb, path, nil)
	if err := c.profiler.Serve(ctx); err != nil {
		all.Router = err.Append(nil)
	} else {
		all.Router = append(all.Router, ctx.Response.Body()...)
	}
	return reply(ctx, 200, all)
}

func (c *Console) profileOf(ctx *fasthttp.RequestCtx, id, verb, path string) *openai.Error {
	m := c.Fleet.Snapshot().Get(id)
	if !own(m) {
		return openai.NotFound("there is no live worker %q of xpyd's own", openai.Clip(id))
	}
	if verb == http.MethodGet {
		path += "?download"
	}
	said, err := c.Flights.Ask(m, flight.Question{Method: verb, Path: path, Timeout: askTimeout, Limit: maxProfile})
	if err != nil {
		return openai.Upstream("%v", err)
	}
	said.ContentType = "application/json"
	if verb == http.MethodGet && said.Status == 200 {
		said.ContentType = "application/octet-stream"
		ctx.Response.Header.Set("Content-Disposition", `attachment; filename="cpu.pprof"`)
	}
	said.Write(ctx)
	return nil
}
