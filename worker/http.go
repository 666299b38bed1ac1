package worker

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttpadaptor"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/xpyd/xpyd/internal/lobby"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/h1"
)

// Why a request's context ended.
var (
	errClientLeft = errors.New("the client left")
	errClosing    = errors.New("this worker is shutting down")
)

// route is what a method and path are served by, and to whom.
type route struct {
	to    access
	serve fasthttp.RequestHandler
	what  string
}

// routes is what a worker answers.
func (w *Worker) routes(metrics fasthttp.RequestHandler) map[string]route {
	return map[string]route{
		"POST /v1/completions":      {forUsers, w.serveCompletion, "A completion, or several."},
		"POST /v1/chat/completions": {forUsers, w.serveChat, "A chat's next message."},
		"GET /v1/models":            {forUsers, w.serveModels, "The model."},
		"POST /tokenize":            {forUsers, w.serveTokenize, "A text's tokens."},
		"POST /detokenize":          {forUsers, w.serveDetokenize, "Tokens' text."},
		"GET /version":              {forUsers, w.serveVersion, "The build."},
		"GET /health":               {forAnybody, w.serveHealth, "Whether the engine works, its ID and epoch."},
		"GET /metrics":              {forScrapers, metrics, "Metrics, in Prometheus' text format."},
		"GET /query":                {forPeers, w.serveQuery, "What a proxy for Mooncake asks of prefill."},
		"GET /debug/ledger":         {forMembers, w.serveLedger, "What this process holds, and why."},
		"GET /debug/steps":          {forMembers, w.serveSteps, "Where the latest steps' time went."},
		"GET /xpyd/v1/lifeline":     {forMembers, w.serveLifeline, "Stays open as long as the process lives."},
		"POST /xpyd/v1/prefill":     {forMembers, w.servePrefillLeg, "Prefill's leg: expect this link."},
		"POST /xpyd/v1/lease":       {forUsers, w.serveRenew, "Renew the lease of a prompt that a foreign proxy has not collected yet."},
		"POST /xpyd/v1/drain":       {forMembers, func(ctx *fasthttp.RequestCtx) { w.serveControl(ctx, w.Drain) }, "Take no new work."},
		"POST /xpyd/v1/undrain":     {forMembers, func(ctx *fasthttp.RequestCtx) { w.serveControl(ctx, w.Undrain) }, "Take work again."},
		"POST /xpyd/v1/role":        {forMembers, w.serveRole, "Another role."},
		"GET /xpyd/v1/cache":        {forMembers, w.serveCache, "What the cache holds, by tier."},
		"POST /xpyd/v1/cache/flush": {forMembers, w.serveFlush, "Forget all of it."},
		"POST /xpyd/v1/cache/reach": {forMembers, w.serveReach, "How much of a prompt is here; workers ask each other."},
		"GET /xpyd/v1/cache/pin":    {forMembers, w.servePins, "What is pinned."},
		"POST /xpyd/v1/cache/pin":   {forMembers, w.servePin, "Pin a prompt."},
		"DELETE /xpyd/v1/cache/pin": {forMembers, w.serveUnpin, "End a pin."},
		"GET /xpyd/v1/profile":      {forMembers, w.serveProfile, "How profiling stands; the last profile."},
		"POST /xpyd/v1/profile":     {forMembers, w.serveProfile, "Profile this process."},
		"DELETE /xpyd/v1/profile":   {forMembers, w.serveProfile, "End profiling."},
	}
}

// Route is a path of a worker, as the HTTP reference lists it.
type Route struct{ Method, Path, For, What string }

// Routes lists what a worker answers, by path.
func Routes() []Route {
	var list []Route
	for at, r := range (*Worker)(nil).routes(nil) {
		method, path, _ := strings.Cut(at, " ")
		list = append(list, Route{method, path, r.to.String(), r.what})
	}
	slices.SortFunc(list, func(a, b Route) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), strings.Compare(a.Method, b.Method))
	})
	return list
}

// newHTTP makes the worker's HTTP server.
func (w *Worker) newHTTP() *h1.Server {
	bounds := h1.Bounds{MaxConns: w.fitConns(scarce.Files()), MaxBodyBytes: int(w.cfg.MaxBody), MaxHeaderBytes: 32 << 10,
		ReadTimeout: w.cfg.ReadTimeout, IdleTimeout: 2 * time.Minute, StallTimeout: w.cfg.StallTimeout}
	refuse := func(ctx *fasthttp.RequestCtx, err error) { writeError(ctx, bounds.Refusal(err)) }
	routes := w.routes(fasthttpadaptor.NewFastHTTPHandler(promhttp.HandlerFor(w.registry, promhttp.HandlerOpts{})))
	return h1.NewServer(h1.ServerConfig{Bounds: bounds, TLS: w.tls.Server(), Refuse: refuse, LastWords: lastWords, Who: "the worker",
		Failed: func(err error) { w.fail(fmt.Errorf("http listener: %w", err)) },
		Handler: func(ctx *fasthttp.RequestCtx) {
			ctx.Response.Header.SetServer("xpyd")
			r, ok := routes[string(ctx.Method())+" "+string(ctx.Path())]
			if !ok {
				r = route{to: forUsers, serve: serveNothing}
			}
			if err := w.guard.check(ctx, r.to); err != nil { // strangers' bodies are not read
				writeError(ctx, err)
				return
			}
			if r.to != forAnybody && r.to != forScrapers { // whose callers may be strangers
				body, err := h1.ConnOf(ctx.Conn()).ReadBody()
				if err != nil {
					refuse(ctx, err)
					return
				}
				ctx.Request.SetBodyRaw(body)
			}
			r.serve(ctx)
		}})
}

// lastWords is how long a connection may take its last bytes once the worker
// closes.
const lastWords = time.Second

// maxConns bounds the HTTP connections; more are answered 503 at once. Fewer than
// fewConns are worth a warning: a router opens one for each request.
const maxConns, fewConns = 16384, 2048

// fitConns is how many HTTP connections there may be where so many files may be
// open: half are left for other workers, the KV tiers and the fleet.
func (w *Worker) fitConns(files int) int {
	n := mostConns(files)
	if n < fewConns {
		w.log.Warn("HTTP connections are cut to what the limit of file descriptors allows; raise it (ulimit -n)", "connections", n, "files", files)
	}
	return n
}

func mostConns(files int) int { return max(min(maxConns, files/2), 8) }

// Of the connections, so many may be of those who have not shown yet who they are;
// each read of theirs takes at most guestPatience.
const maxGuests, guestPatience = 512, 5 * time.Second

// newLobby has at most half of the connections for guests, those included that were
// put out and have not ended.
func newLobby(conns int) *lobby.Lobby { return lobby.New(min(maxGuests, conns/4)) }

// serveNothing answers for a path that is not there.
func serveNothing(ctx *fasthttp.RequestCtx) {
	writeError(ctx, openai.NotFound("no %s %s here", ctx.Method(), ctx.Path()))
}

func writeJSON(ctx *fasthttp.RequestCtx, status int, body []byte) {
	ctx.SetStatusCode(status)
	ctx.SetContentType("application/json")
	ctx.SetBody(body)
}

func writeError(ctx *fasthttp.RequestCtx, err *openai.Error) {
	writeJSON(ctx, err.Status, err.Append(nil))
}

func writeFailure(ctx *fasthttp.RequestCtx, f *failure) {
	if f.outcome != "" && f.Status >= 500 {
		ctx.Response.Header.Set(headerOutcome, string(f.outcome))
	}
	writeError(ctx, f.Error)
}

// mustJSON encodes our own plain structs, which cannot fail.
func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// requestID is the caller's, if it is one; it goes into logs, the answer and
// every ticket.
func requestID(h *fasthttp.RequestHeader) string {
	id := h.Peek(headerRequestID)
	ok := len(id) > 0 && len(id) <= 256
	for _, c := range id {
		ok = ok && c > ' ' && c < 0x7f
	}
	if !ok {
		return randomID()
	}
	return string(id)
}

func randomID() string { return ticket.NewLink().String() }

// call is a request under way: its context ends when the client leaves or the
// worker closes. leave must be called before the connection is used again.
type call struct {
	context.Context
	run   *Running
	leave func()
}

// begin books a request. It is nil when the worker is closing; then the caller
// has its answer: that another worker may try.
func (w *Worker) begin(ctx *fasthttp.RequestCtx, in *requests, kind, id string) *call {
	run, ok := in.enter(kind, id)
	if !ok {
		writeFailure(ctx, closing())
		return nil
	}
	c, cancel := context.WithCancelCause(w.ctx)
	unwatch := w.clients.Watch(ctx.Conn(), func() { cancel(errClientLeft) })
	return &call{Context: c, run: run, leave: func() {
		unwatch()
		cancel(nil)
		in.leave(run)
	}}
}

// serveLifeline holds the connection open for ever: its end tells the other
// side that this process is gone.
func (w *Worker) serveLifeline(ctx *fasthttp.RequestCtx) {
	c := w.begin(ctx, w.lifelines, "lifeline", "")
	if c == nil {
		return
	}
	ctx.SetContentType("text/plain")
	h1.StreamWriter(ctx, func(out *bufio.Writer) {
		defer c.leave()
		if _, err := out.WriteString("\n"); err != nil || out.Flush() != nil {
			return
		}
		<-c.Done()
	})
}
