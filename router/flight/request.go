package flight

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// States of a request, in order.
const (
	stateQueued  = "queued"  // waits for admission
	statePicking = "picking" // waits for a pair
	stateWaiting = "waiting" // legs are sent, no byte yet
	stateRelay   = "relay"   // decode answers
	stateOver    = "over"
)

// summary is what the ledger and /debug/requests show of a request.
type summary struct {
	id, path, model string // path is a route
	streams, probe  bool
	over            bool
	state           string
	since, start    time.Time
	end             time.Time // deadline
	admitted        time.Time
	dispatched      time.Time // first attempt
	first           time.Time // decode's first byte
	status          int
	failed          string // why
	pauses          pauses // of a stream that is over
}

// request is one inference request from its arrival to the end of its answer.
type request struct {
	s         *Service
	method    string
	asks      string // the path at engines
	guise     guise  // of a client that speaks another API; nil for none
	body      []byte // the client's; valid until the handler returns
	top       openai.Top
	seed      int64
	forwarded bool // to one engine; see forward.go
	explain   bool
	stays     bool      // its client wants no takeover
	hurried   bool      // its client shortened its deadline
	tooLarge  bool      // its answer was
	trace     [2]string // traceparent and tracestate for the legs
	span      *span     // nil unless sampled

	ctx   h1.Life     // ends with the request; see cancel
	timer *time.Timer // ends it at the deadline

	client *h1.Conn // its end ends the request; nil for the router's own
	placed bool     // it has a place to give back

	tally *tally // see came; nil: it is not counted

	chain     pick.Chain
	logged    pick.Chain    // the same to the request's end, if there is a request log
	session   string        // what the client says belongs together
	reaches   []sense.Reach // who had how much of the prompt at the last choice
	tenant    *tenant       // whose key it came with; nil if nobody asks
	adm       *admission    // mostly nil; see there
	usage     usage
	seam      *seam       // of a stream that another pair may go on with; nil otherwise
	resumes   bool        // another pair is sought to go on with the stream
	trial     int         // tokens until a suspect's trial is over; 0: there is none
	trialEnds *time.Timer // in any case
	pulse     *pulse      // of a stream that is over
	auth      string      // the client's Authorization, if it is passed on
	bytes     int64       // relayed

	mu       sync.Mutex // guards attempts, and the summary once others can see it
	attempts []*attempt
	summary
}

func (q *request) setState(state string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.state, q.since = state, time.Now()
}

// clientRequest registers a client's request, which ends when the client leaves.
func (s *Service) clientRequest(ctx *fasthttp.RequestCtx, id string) *request {
	q := s.newRequest(id, string(ctx.Method()), string(ctx.Path()), false)
	q.tenant = tenantOf(ctx)
	q.client = h1.ConnOf(ctx.Conn())
	q.client.Watch(s.Watcher, q)
	return q
}

// newRequest registers a request; finish is its end. No user made a probe.
func (s *Service) newRequest(id, method, path string, probe bool) *request {
	now := time.Now()
	q := &request{s: s, method: method, asks: path, seed: rand.Int64(),
		summary: summary{id: id, path: path, probe: probe, start: now, state: stateQueued, since: now}}
	s.mu.Lock()
	s.requests[q] = struct{}{}
	over := context.Cause(s.Ctx) // then End may not have seen q
	s.mu.Unlock()
	if over != nil {
		q.cancel(over)
	}
	return q
}

// cancel ends the request, if it is not answered yet, and its legs. It does not block.
func (q *request) cancel(why error) {
	if !q.ctx.End(why) {
		return
	}
	if !q.s.Spawn(q.endLegs) { // closing TLS can take a while
		q.endLegs()
	}
}

func (q *request) setModel(model string, streams bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.model, q.streams = model, streams
}

// deadline ends the request after d at the latest.
func (q *request) deadline(d time.Duration) {
	q.mu.Lock()
	q.end = q.start.Add(d)
	q.mu.Unlock()
	q.timer = time.AfterFunc(d, func() { q.cancel(errDeadline) })
}

// slim frees what only dispatch needs once the answer streams: the prompt can be larger
// than everything else that a stream holds.
func (q *request) slim() {
	q.usage.guess = q.top.PromptTokens()
	a := q.attempts[len(q.attempts)-1]
	switch {
	case q.seam == nil, a.rules.TakesOver:
	case a.rules.Replays && q.seam.replays:
		q.seam.rereads(q.top.Messages)
	default:
		q.seam.release()
		q.seam = nil
	}
	a.d.movable.Store(q.seam != nil && q.seam.re == nil && !q.seam.lost)
	if a.prefillOpen() {
		return // its leg may be reading it
	}
	q.body, q.chain = nil, pick.Chain{}
	q.top = openai.Top{Model: q.top.Model, N: q.top.N, Prompts: q.top.Prompts, Stream: q.top.Stream, Messages: q.top.Messages, Logprobs: q.top.Logprobs, PromptLogprobs: q.top.PromptLogprobs}
}

// Left implements h1.Leaver.
func (q *request) Left() { q.cancel(errClientGone) }

// finish ends the request with what the client was told, and accounts for it. Only the
// first call counts.
func (q *request) finish(status int, reason string) {
	q.mu.Lock()
	if q.over {
		q.mu.Unlock()
		return
	}
	q.over = true
	q.state, q.since = stateOver, time.Now()
	q.status, q.failed = status, reason
	if q.pulse != nil {
		q.pauses = q.pulse.pauses
	}
	attempts := q.attempts
	q.mu.Unlock()

	if q.placed {
		q.leave()
	}
	q.acquit()
	q.seam.release()
	if q.client != nil {
		q.client.Unwatch(q)
	}
	end := func() {
		for _, a := range attempts {
			a.close()
		}
		q.ctx.End(errOver)
		if q.timer != nil {
			q.timer.Stop()
		}
		q.record()
	}
	// Decode may end before prefill's "done" arrives. It is about to come, and closing its
	// connection would only cost the next request one. A leg that is still being sent may
	// hold the client's body, which ends here.
	if n := len(attempts); n == 0 || status != 200 || !attempts[n-1].prefillOpen() || !attempts[n-1].p.sent.Load() ||
		!q.s.Spawn(func() { await(attempts[n-1].pDone); end() }) {
		end()
	}
	if !q.probe {
		q.account()
	}
}

// record moves the request from the running ones to the recent ones. Probes leave no trace.
func (q *request) record() {
	var rec record
	if !q.probe {
		q.note(&rec)
		q.emit(&rec)
	}
	q.s.mu.Lock()
	defer q.s.mu.Unlock()
	delete(q.s.requests, q)
	if !q.probe {
		q.s.history.add(&rec)
	}
}

func (q *request) account() {
	m, now := q.s.metrics, time.Now()
	took := now.Sub(q.start)
	route := m.route(q.path)
	if q.status == 200 {
		route.requests().Inc()
	} else {
		m.request(q.path, q.status)
	}
	route.duration().Observe(took.Seconds())
	if !q.first.IsZero() {
		q.answered(route)
	}
	q.went()
	if q.s.RequestLog != nil {
		q.enter(took)
	}
	m.bytes.Add(float64(q.bytes))
	log := q.s.Log.Handler() // a Logger would look up its caller for each line
	if !log.Enabled(q.s.Ctx, slog.LevelInfo) {
		return
	}
	var space [16]slog.Attr
	attrs := append(space[:0],
		slog.String("request_id", q.id), slog.String("method", q.method), slog.String("path", q.path), slog.Int("status", q.status),
		slog.String("model", q.model), slog.Bool("stream", q.streams), slog.Duration("took", took), slog.Int64("bytes", q.bytes))
	if !q.first.IsZero() {
		attrs = append(attrs, slog.Duration("ttft", q.first.Sub(q.start)))
	}
	if n := len(q.attempts); n > 0 {
		a := q.attempts[n-1]
		attrs = append(attrs, slog.String("prefill", a.p.inst.ID), slog.String("decode", a.d.inst.ID),
			slog.String("link", a.link.String()), slog.Int("attempts", n))
		if a.falls != "" {
			attrs = append(attrs, slog.String("fallback", string(a.falls)))
		}
	}
	if q.adm != nil && q.tenant != nil {
		attrs = append(attrs, slog.String("tenant", q.tenant.name))
	}
	if q.failed != "" {
		attrs = append(attrs, slog.String("err", q.failed))
	}
	line := slog.NewRecord(now, slog.LevelInfo, "request", 0)
	line.AddAttrs(attrs...)
	_ = log.Handle(q.s.Ctx, line) // a log that cannot be written has nobody to tell
}

// answered accounts for the answer's times and tokens.
func (q *request) answered(route *routeMetrics) {
	route.ttft().Observe(q.first.Sub(q.start).Seconds())
	prompt, generated := q.tokens()
	if prompt > 0 || generated > 0 {
		route.prompt().Add(float64(prompt))
		route.generated().Add(float64(generated))
	}
	p := q.pulse
	if p == nil || p.first == 0 {
		return
	}
	route.gaps().add(p)
	if of := generated/max(q.top.N, 1) - 1; of > 0 {
		route.tpot().Observe((p.last - p.first).Seconds() / float64(of))
	}
}
