package worker

import (
	"bufio"
	"bytes"
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

// handler serves a route. It returns the value to answer as JSON ([]byte is JSON already), or an
// error; nil and nil if it has written the response itself.
type handler func(ctx *fasthttp.RequestCtx) (any, error)

// route is one method and path: who may use it, its handler, and a line of reference.
type route struct {
	to    access
	serve handler
	what  string
}

func (w *Worker) routes() map[string]route {
	return map[string]route{
		"POST /v1/completions":            {forUsers, w.serveJobs(completionJob), "A completion, or several."},
		"POST /v1/chat/completions":       {forUsers, w.serveJobs(chatJob), "A chat's next message."},
		"POST /v1/chat/completions/batch": {forUsers, w.serveJobs(batchJob), "The next message of several chats."},
		"POST /v1/embeddings":             {forUsers, w.serveEmbeddings, "Vectors of texts."},
		"POST /v2/embed":                  {forUsers, w.serveCohereEmbed, "Vectors of texts, in Cohere's API."},
		"GET /v1/models":                  {forUsers, w.serveModels, "The model."},
		"POST /tokenize":                  {forUsers, w.serveTokenize, "A text's tokens."},
		"POST /detokenize":                {forUsers, w.serveDetokenize, "Tokens' text."},
		"GET /tokenizer_info":             {forUsers, w.serveTokenizerInfo, "The tokenizer's special tokens and chat template."},
		"GET /version":                    {forUsers, w.serveVersion, "The build."},
		"GET /health":                     {forAnybody, w.serveHealth, "Whether the engine works, its ID and epoch."},
		"GET /metrics":                    {forScrapers, w.serveMetrics, "Metrics, in Prometheus' text format."},
		"GET /query":                      {forPeers, w.serveQuery, "What a proxy for Mooncake asks of prefill."},
		"GET /debug/ledger":               {forMembers, w.serveLedger, "What this process holds, and why."},
		"GET /debug/steps":                {forMembers, w.serveSteps, "Where the latest steps' time went."},
		"GET /xpyd/v1/lifeline":           {forMembers, w.serveLifeline, "Stays open as long as the process lives."},
		"POST /xpyd/v1/prefill":           {forMembers, w.servePrefillLeg, "Prefill's leg: expect this link."},
		"POST /xpyd/v1/bring":             {forMembers, w.serveBring, "Bring the KV of a stream that is to go on here."},
		"POST /xpyd/v1/lease":             {forUsers, w.serveRenew, "Renew the lease of a prompt that a foreign proxy has not collected yet."},
		"POST /xpyd/v1/drain":             {forMembers, w.serveDrain, "Take no new work; with `wait_only` its streams end there."},
		"POST /xpyd/v1/undrain":           {forMembers, w.serveUndrain, "Take work again."},
		"POST /xpyd/v1/role":              {forMembers, w.serveRole, "Another role."},
		"GET /xpyd/v1/log":                {forMembers, w.serveLog, "The level of the log."},
		"POST /xpyd/v1/log":               {forMembers, w.serveLog, "Another level, until the next start."},
		"GET /xpyd/v1/cache":              {forMembers, w.serveCache, "What the cache holds, by tier."},
		"POST /xpyd/v1/cache/flush":       {forMembers, w.serveFlush, "Forget all of it."},
		"POST /xpyd/v1/cache/reach":       {forMembers, w.serveReach, "How much of a prompt is here; workers ask each other."},
		"GET /xpyd/v1/cache/pin":          {forMembers, w.servePins, "What is pinned."},
		"POST /xpyd/v1/cache/pin":         {forMembers, w.servePin, "Pin a prompt."},
		"DELETE /xpyd/v1/cache/pin":       {forMembers, w.serveUnpin, "End a pin."},
		"GET /xpyd/v1/profile":            {forMembers, w.serveProfile, "How profiling stands; the last profile."},
		"POST /xpyd/v1/profile":           {forMembers, w.serveProfile, "Profile this process."},
		"DELETE /xpyd/v1/profile":         {forMembers, w.serveProfile, "End profiling."},
	}
}

// Route is one line of the HTTP reference.
type Route struct{ Method, Path, For, What string }

// Routes lists a worker's routes by path.
func Routes() []Route {
	var list []Route
	for at, r := range (*Worker)(nil).routes() {
		method, path, _ := strings.Cut(at, " ")
		list = append(list, Route{method, path, r.to.String(), r.what})
	}
	slices.SortFunc(list, func(a, b Route) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), strings.Compare(a.Method, b.Method))
	})
	return list
}

func (w *Worker) newHTTP() *h1.Server {
	bounds := h1.Bounds{MaxConns: w.fitConns(scarce.Files()), MaxBodyBytes: int(w.cfg.MaxBody), MaxHeaderBytes: 32 << 10,
		ReadTimeout: w.cfg.ReadTimeout, IdleTimeout: 2 * time.Minute, StallTimeout: w.cfg.StallTimeout}
	refuse := func(ctx *fasthttp.RequestCtx, err error) { writeError(ctx, bounds.Refusal(err)) }
	routes := w.routes()
	return h1.NewServer(h1.ServerConfig{Bounds: bounds, TLS: w.tls.Server(), Refuse: refuse, LastWords: lastWords, Who: "the worker",
		Failed: func(err error) { w.fail(fmt.Errorf("http listener: %w", err)) },
		Handler: func(ctx *fasthttp.RequestCtx) {
			ctx.Response.Header.SetServer("xpyd")
			r, ok := routes[string(ctx.Method())+" "+string(ctx.Path())]
			if !ok {
				r = route{to: forUsers, serve: serveNothing}
			}
			if err := w.guard.check(ctx, r.to); err != nil { // a stranger's body is not read
				writeError(ctx, err)
				return
			}
			if r.to != forAnybody && r.to != forScrapers { // their callers may be strangers
				body, err := h1.ConnOf(ctx.Conn()).ReadBody()
				if err != nil {
					refuse(ctx, err)
					return
				}
				ctx.Request.SetBodyRaw(body)
			}
			switch v, err := r.serve(ctx); {
			case err != nil:
				writeError(ctx, err)
			case v != nil:
				writeJSON(ctx, 200, v)
			}
		}})
}

// lastWords is how long a connection may take its last bytes once the worker closes.
const lastWords = time.Second

// maxConns bounds the HTTP connections; more are answered 503 at once. Below fewConns the worker
// warns: a router opens a connection for each request.
const maxConns, fewConns = 16384, 2048

// fitConns fits the HTTP connections to the limit of open files.
func (w *Worker) fitConns(files int) int {
	n := mostConns(files)
	if n < fewConns {
		w.log.Warn("fewer HTTP connections, because of the limit of file descriptors; raise it (ulimit -n)", "connections", n, "files", files)
	}
	return n
}

// mostConns leaves half of the files to other workers, the KV tiers and the fleet.
func mostConns(files int) int { return max(min(maxConns, files/2), 8) }

// maxGuests bounds the connections that have not shown yet who they are; each of their reads takes
// at most guestPatience.
const maxGuests, guestPatience = 512, 5 * time.Second

// newLobby gives guests at most half of the connections, counting those that were put out and
// have not ended.
func newLobby(conns int) *lobby.Lobby { return lobby.New(min(maxGuests, conns/4)) }

func serveNothing(ctx *fasthttp.RequestCtx) (any, error) {
	return nil, openai.NotFound("no %s %s here", ctx.Method(), ctx.Path())
}

func (w *Worker) serveMetrics(ctx *fasthttp.RequestCtx) (any, error) {
	fasthttpadaptor.NewFastHTTPHandler(promhttp.HandlerFor(w.registry, promhttp.HandlerOpts{}))(ctx)
	return nil, nil
}

// writeJSON answers with v, one of our own plain structs or []byte that is JSON already.
func writeJSON(ctx *fasthttp.RequestCtx, status int, v any) {
	body, raw := v.([]byte)
	if !raw {
		body = mustJSON(v)
	}
	ctx.SetStatusCode(status)
	ctx.SetContentType("application/json")
	ctx.SetBody(body)
}

// mustJSON encodes our own plain structs, which cannot fail.
func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// requestID is the caller's, if it is printable and short: it goes into logs, the answer and every
// ticket.
func requestID(h *fasthttp.RequestHeader) string {
	id := h.Peek(ticket.HeaderRequestID)
	bad := func(r rune) bool { return r <= ' ' || r >= 0x7f }
	if len(id) == 0 || len(id) > 256 || bytes.ContainsFunc(id, bad) {
		return randomID()
	}
	return string(id)
}

func randomID() string { return ticket.NewLink().String() }

// call is a request under way. Its context ends when the client leaves or the worker closes.
type call struct {
	context.Context
	run     *Running
	end     func()
	streams bool
}

// begin enters a request, whose handler must call leave. It fails when the worker is closing;
// another worker may serve the request then.
func (w *Worker) begin(ctx *fasthttp.RequestCtx, in *requests, kind, id string) (*call, error) {
	run, ok := in.enter(kind, id)
	if !ok {
		return nil, closing()
	}
	c, cancel := context.WithCancelCause(w.ctx)
	unwatch := w.clients.Watch(ctx.Conn(), func() { cancel(errClientLeft) })
	return &call{Context: c, run: run, end: func() {
		unwatch()
		cancel(nil)
		in.leave(run)
	}}, nil
}

// leave ends the call, unless stream has taken it over.
func (c *call) leave() {
	if !c.streams {
		c.end()
	}
}

// stream has write produce the response's body after the handler has returned, and then ends the
// call.
func (c *call) stream(ctx *fasthttp.RequestCtx, write func(*bufio.Writer)) {
	c.streams = true
	h1.StreamWriter(ctx, func(out *bufio.Writer) {
		defer c.end()
		write(out)
	})
}

// serveLifeline holds the connection open for as long as the process lives: when it breaks, the
// caller knows that the process is gone.
func (w *Worker) serveLifeline(ctx *fasthttp.RequestCtx) (any, error) {
	c, err := w.begin(ctx, w.lifelines, "lifeline", "")
	if err != nil {
		return nil, err
	}
	ctx.SetContentType("text/plain")
	c.stream(ctx, func(out *bufio.Writer) {
		if _, err := out.WriteString("\n"); err == nil && out.Flush() == nil {
			<-c.Done()
		}
	})
	return nil, nil
}
