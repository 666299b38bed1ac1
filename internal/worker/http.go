package worker

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttpadaptor"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/reqbody"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

var errClientLeft = errors.New("the client left")

// newHTTP makes the worker's HTTP server.
func (w *Worker) newHTTP() *fasthttp.Server {
	metrics := fasthttpadaptor.NewFastHTTPHandler(promhttp.HandlerFor(w.registry, promhttp.HandlerOpts{}))
	routes := map[string]fasthttp.RequestHandler{
		"POST /v1/completions":      w.serveCompletion,
		"POST /v1/chat/completions": w.serveChat,
		"GET /v1/models":            w.serveModels,
		"POST /tokenize":            w.serveTokenize,
		"POST /detokenize":          w.serveDetokenize,
		"GET /version":              w.serveVersion,
		"GET /health":               w.serveHealth,
		"GET /metrics":              metrics,
		"GET /query":                func(ctx *fasthttp.RequestCtx) { writeJSON(ctx, 200, w.appendQuery(nil)) },
		"GET /debug/ledger":         w.serveLedger,
		"GET /xpyd/v1/lifeline":     w.serveLifeline,
		"POST /xpyd/v1/prefill":     w.servePrefillLeg,
		"POST /xpyd/v1/drain":       func(ctx *fasthttp.RequestCtx) { w.serveControl(ctx, w.Drain) },
		"POST /xpyd/v1/undrain":     func(ctx *fasthttp.RequestCtx) { w.serveControl(ctx, w.Undrain) },
		"POST /xpyd/v1/role":        w.serveRole,
	}
	return &fasthttp.Server{
		Name: "xpyd", NoDefaultServerHeader: true, NoDefaultDate: true,
		ReadTimeout: w.cfg.ReadTimeout, IdleTimeout: 2 * time.Minute,
		MaxRequestBodySize: int(w.cfg.MaxBody), ReadBufferSize: 32 << 10,
		StreamRequestBody: true, DisablePreParseMultipartForm: true,
		CloseOnShutdown: true, Logger: quiet{}, ErrorHandler: w.httpError,
		Handler: func(ctx *fasthttp.RequestCtx) {
			if err := reqbody.Read(ctx, int(w.cfg.MaxBody)); err != nil {
				w.httpError(ctx, err)
				ctx.SetConnectionClose()
				return
			}
			h, ok := routes[string(ctx.Method())+" "+string(ctx.Path())]
			if !ok {
				writeError(ctx, openai.NotFound("no %s %s here", ctx.Method(), ctx.Path()))
				return
			}
			h(ctx)
		},
	}
}

// httpError answers what is no proper HTTP request, or one beyond the bounds.
func (w *Worker) httpError(ctx *fasthttp.RequestCtx, err error) {
	var small *fasthttp.ErrSmallBuffer
	var timeout interface{ Timeout() bool }
	switch {
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		writeError(ctx, openai.TooLarge("the body is over %d bytes", w.cfg.MaxBody))
	case errors.As(err, &small):
		writeError(ctx, &openai.Error{Status: 431, Type: openai.TypeInvalid, Code: "headers_too_large", Message: "the headers are too large"})
	case errors.As(err, &timeout) && timeout.Timeout():
		writeError(ctx, &openai.Error{Status: 408, Type: openai.TypeInvalid, Code: "request_timeout",
			Message: fmt.Sprintf("the request was not complete within %v", w.cfg.ReadTimeout)})
	default:
		writeError(ctx, openai.BadRequest("", "malformed HTTP request"))
	}
}

// quiet drops fasthttp's own log lines: errors of clients are answered, and
// counted, not logged.
type quiet struct{}

func (quiet) Printf(string, ...any) {}

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

// watched derives a context that ends when the client leaves or the worker
// closes; stop must be called before the connection is used again.
func (w *Worker) watched(ctx *fasthttp.RequestCtx) (context.Context, func()) {
	c, cancel := context.WithCancelCause(w.ctx)
	unwatch := w.clients.Watch(ctx.Conn(), func() { cancel(errClientLeft) })
	return c, func() {
		unwatch()
		cancel(nil)
	}
}

func (w *Worker) serveCompletion(ctx *fasthttp.RequestCtx) {
	j, err := w.completionJob(ctx.PostBody())
	if err != nil {
		writeError(ctx, err)
		return
	}
	w.serveJob(ctx, j)
}

func (w *Worker) serveChat(ctx *fasthttp.RequestCtx) {
	j, err := w.chatJob(ctx.PostBody())
	if err != nil {
		writeError(ctx, err)
		return
	}
	w.serveJob(ctx, j)
}

// serveJob answers a generation, alone or as one side of a pair.
func (w *Worker) serveJob(ctx *fasthttp.RequestCtx, j *job) {
	requestID := string(ctx.Request.Header.Peek(headerRequestID))
	if requestID == "" {
		requestID = randomID()
	}
	params, err := parseTransfer(j.KVTransferParams)
	if err != nil {
		writeError(ctx, err)
		return
	}
	seed, err := seedOf(j, ctx.Request.Header.Peek(headerSeed))
	if err != nil {
		writeError(ctx, err)
		return
	}
	// The client's id may come again while it is in use; ours may not.
	id := fmt.Sprintf("%s#%d", requestID, w.sequence.Add(1))
	if params != nil && params.DoRemoteDecode {
		w.serveKeep(ctx, j, params, id, seed)
		return
	}
	ex, err := w.nativeExchange(&ctx.Request.Header)
	if err == nil && ex == nil && params != nil && params.DoRemotePrefill {
		ex, err = w.foreignExchange(params)
	}
	if err != nil {
		writeError(ctx, err)
		return
	}
	if ex != nil {
		ex.requestID = requestID
	}
	rctx, stop := w.watched(ctx)
	g := w.generate(rctx, j, ex, id, seed)
	prefix := "cmpl-"
	if j.chat {
		prefix = "chatcmpl-"
	}
	enc := openai.NewEncoder(openai.Meta{ID: prefix + requestID, Model: w.served, Created: time.Now().Unix(),
		Chat: j.chat, IncludeUsage: j.IncludeUsage, ReturnTokenIDs: j.ReturnTokenIDs})
	if j.Stream {
		w.stream(ctx, rctx, g, enc, stop)
		return
	}
	defer stop()
	defer g.close()
	w.whole(ctx, rctx, g, enc)
}

// seedOf returns the client's seed, the router's, or a fresh one.
func seedOf(j *job, header []byte) (uint64, *openai.Error) {
	if j.Seed != nil {
		return uint64(*j.Seed), nil
	}
	if len(header) > 0 {
		n, err := strconv.ParseUint(string(header), 10, 64)
		if err != nil {
			return 0, openai.BadRequest(headerSeed, "%v", err)
		}
		return n, nil
	}
	var b [8]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return binary.LittleEndian.Uint64(b[:]), nil
}

func randomID() string {
	l := ticket.NewLink()
	return l.String()
}

// whole answers a request that does not stream.
func (w *Worker) whole(ctx *fasthttp.RequestCtx, rctx context.Context, g *generation, enc *openai.Encoder) {
	for g.next(rctx) {
	}
	if g.err != nil {
		writeFailure(ctx, g.err)
		return
	}
	choices := make([]openai.Choice, len(g.choices))
	for i, c := range g.choices {
		choices[i] = c.take()
	}
	ctx.Response.Header.Set("Server-Timing", g.timings().header())
	writeJSON(ctx, 200, enc.AppendFull(nil, choices, g.usage))
}

// stream answers with server-sent events, one a token as far as its text is
// whole characters. The status waits for the first token, so that a failure
// before it has a real one.
func (w *Worker) stream(ctx *fasthttp.RequestCtx, rctx context.Context, g *generation, enc *openai.Encoder, stop func()) {
	var buf []byte
	g.emit = func(c *choice) {
		out := c.take()
		c.sent = c.done
		var usage *openai.Usage
		if g.j.ContinuousUsage {
			u := g.usage
			usage = &u
		}
		buf = enc.AppendChunk(buf, &out, usage)
	}
	if !g.next(rctx) && g.err != nil {
		writeFailure(ctx, g.err)
		g.close()
		stop()
		return
	}
	ctx.SetContentType("text/event-stream; charset=utf-8")
	ctx.Response.Header.Set("Cache-Control", "no-cache")
	ctx.Response.Header.Set("Server-Timing", g.timings().header())
	w.streams.Add(1)
	ctx.SetBodyStreamWriter(func(out *bufio.Writer) {
		defer w.streams.Done()
		defer stop()
		defer g.close()
		for more := true; more; more = g.next(rctx) {
			if len(buf) == 0 {
				continue
			}
			if _, err := out.Write(buf); err != nil || out.Flush() != nil {
				return // the client left; close cancels the rest
			}
			buf = buf[:0]
		}
		switch {
		case g.err != nil:
			buf = openai.AppendErrorEvent(buf, g.err.Error)
		default:
			if g.j.IncludeUsage {
				buf = enc.AppendUsage(buf, g.usage)
			}
			buf = openai.AppendDone(buf)
		}
		_, _ = out.Write(buf) // the flush reports what fails
		_ = out.Flush()       // nobody is left to tell
	})
}

// serveKeep is prefill's side behind a foreign proxy: run the prompt, keep its
// blocks under a lease, and say how decode collects them.
func (w *Worker) serveKeep(ctx *fasthttp.RequestCtx, j *job, p *transferParams, id string, seed uint64) {
	if len(j.items) != 1 || j.N != 1 {
		writeError(ctx, openai.BadRequest("n", "do_remote_decode takes one prompt and one choice"))
		return
	}
	if j.Stream {
		writeError(ctx, openai.BadRequest("stream", "do_remote_decode answers once, without a stream"))
		return
	}
	rctx, stop := w.watched(ctx)
	defer stop()
	lease := ""
	if p.TransferID != "" {
		lease = prefill.EarlyClaim + p.TransferID
	}
	r := w.request(j, 0, id, seed)
	kept, kerr := w.prefill.Keep(rctx, r, lease)
	if kerr != nil {
		f := &failure{engineError(kerr), ticket.Dead}
		if errors.Is(kerr, prefill.ErrTooManyLeases) {
			f = &failure{openai.Unavailable("%v", kerr), ticket.NoSpace}
		}
		writeFailure(ctx, f)
		return
	}
	choices := make([]openai.Choice, len(kept.First))
	for i := range kept.First {
		c := newChoice(w, j, &j.items[0], i)
		c.push(&kept.First[i])
		choices[i] = c.take()
	}
	prefix := "cmpl-"
	if j.chat {
		prefix = "chatcmpl-"
	}
	enc := openai.NewEncoder(openai.Meta{ID: prefix + id, Model: w.served, Created: time.Now().Unix(), Chat: j.chat, ReturnTokenIDs: j.ReturnTokenIDs})
	body := enc.AppendFull(nil, choices, openai.Usage{Prompt: kept.Info.Tokens, Completion: len(choices), Cached: kept.Info.CachedTokens})
	params, merr := json.Marshal(w.keptParams(kept))
	if merr != nil {
		panic(merr) // a plain struct
	}
	body = bytes.TrimSuffix(body, []byte("}"))
	body = append(append(append(body, `,"kv_transfer_params":`...), params...), '}')
	writeJSON(ctx, 200, body)
}

// servePrefillLeg is our router's leg to prefill: it waits for the exchange of
// one link to end, and its own end ends the exchange.
func (w *Worker) servePrefillLeg(ctx *fasthttp.RequestCtx) {
	var leg struct {
		Link string `json:"link"`
	}
	if err := json.Unmarshal(ctx.PostBody(), &leg); err != nil {
		writeError(ctx, openai.BadRequest("", "%v", err))
		return
	}
	link, err := ticket.ParseLink(leg.Link)
	if err != nil {
		writeError(ctx, openai.BadRequest("link", "%v", err))
		return
	}
	rctx, stop := w.watched(ctx)
	defer stop()
	report := w.prefill.Await(rctx, link)
	body, merr := json.Marshal(report)
	if merr != nil {
		panic(merr) // a plain struct
	}
	status := 502
	switch report.Outcome {
	case ticket.Done:
		status = 200
	case ticket.NoSpace:
		status = 503
	case ticket.Late:
		status = 504
	case ticket.Cancelled:
		status = 499
	}
	if status != 200 {
		ctx.Response.Header.Set(headerOutcome, string(report.Outcome))
	}
	writeJSON(ctx, status, body)
}

// serveLifeline holds the connection open for ever: its end tells the other
// side that this process is gone.
func (w *Worker) serveLifeline(ctx *fasthttp.RequestCtx) {
	rctx, stop := w.watched(ctx)
	ctx.SetContentType("text/plain")
	w.streams.Add(1)
	ctx.SetBodyStreamWriter(func(out *bufio.Writer) {
		defer w.streams.Done()
		defer stop()
		if _, err := out.WriteString("\n"); err != nil || out.Flush() != nil {
			return
		}
		<-rctx.Done()
	})
}
