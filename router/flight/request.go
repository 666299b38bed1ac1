package flight

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// States of a request, in order.
const (
	stateQueued  = "queued"  // waits for admission
	statePicking = "picking" // waits for a pair
	stateWaiting = "waiting" // legs are out, no byte yet
	stateRelay   = "relay"   // decode answers
	stateOver    = "over"
)

// request is one inference request from its arrival to the end of its answer.
type request struct {
	s         *Service
	id        string
	method    string
	path      string // route
	body      []byte // the client's; valid until the handler returns
	top       openai.Top
	seed      int64
	probe     bool
	forwarded bool      // it is passed on to one engine; see forward.go
	ex        bool      // explain
	trace     [2]string // traceparent and tracestate for the legs
	span      *span     // nil unless sampled
	start     time.Time
	end       time.Time // deadline

	ctx   h1.Life     // ends with it; see cancel
	timer *time.Timer // ends it at the deadline

	client *h1.Conn // whose end ends it; nil for the router's own
	placed bool     // it has a place, to be given back

	chain   pick.Chain
	session string        // what the client says belongs together
	reaches []sense.Reach // who has how much of the prompt, as the last choice knew it
	tenant  *tenant       // whose key it came with; nil if nobody asks
	adm     *admission    // nil for most; see there
	usage   usage
	pulse   *pulse // of a stream that is over
	auth    string // the client's Authorization, if it is to be passed on

	mu         sync.Mutex // guards what the ledger shows
	model      string
	streams    bool
	admitted   time.Time
	dispatched time.Time // first dispatch
	first      time.Time // decode's first byte
	state      string
	since      time.Time
	attempts   []*attempt
	status     int
	failed     string // why, for the log
	bytes      int64
	over       bool
}

func (q *request) set(state string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.state, q.since = state, time.Now()
}

// newRequest registers a request; finish is its end.
func (s *Service) newRequest(id, method, path string) *request {
	q := &request{s: s, id: id, method: method, path: path, start: time.Now(), seed: rand.Int64()}
	q.state, q.since = stateQueued, q.start
	s.mu.Lock()
	s.requests[q] = struct{}{}
	over := context.Cause(s.Ctx) // end, which comes behind that, has not seen q
	s.mu.Unlock()
	if over != nil {
		q.cancel(over)
	}
	return q
}

// cancel ends the request before it is answered, and its legs. It does not
// block.
func (q *request) cancel(why error) {
	if !q.ctx.End(why) {
		return
	}
	if !q.s.Spawn(q.endLegs) { // closing TLS can take a while
		q.endLegs()
	}
}

// shown sets what the ledger shows of the request: others read it from the
// moment when it was made.
func (q *request) shown(model string, streams bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.model, q.streams = model, streams
}

// internal marks a request that no user made.
func (q *request) internal() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.probe = true
}

// deadline makes the request end after d at most.
func (q *request) deadline(d time.Duration) {
	q.mu.Lock()
	q.end = q.start.Add(d)
	q.mu.Unlock()
	q.timer = time.AfterFunc(d, func() { q.cancel(errDeadline) })
}

// slim gives up what only dispatch needs, once the answer streams: the prompt
// can be larger than all else that a stream takes.
func (q *request) slim() {
	q.usage.guess = q.top.PromptTokens()
	if q.attempts[len(q.attempts)-1].prefillOpen() {
		return // its leg may be reading it
	}
	q.body, q.chain = nil, pick.Chain{}
	q.top = openai.Top{N: q.top.N, Prompts: q.top.Prompts, Stream: q.top.Stream, Messages: q.top.Messages, Logprobs: q.top.Logprobs, PromptLogprobs: q.top.PromptLogprobs}
}

// watch cancels the request when its client leaves.
func (q *request) watch(conn net.Conn) {
	q.client = h1.ConnOf(conn)
	q.client.Watch(q.s.Watcher, q)
}

// Left implements Leaver.
func (q *request) Left() { q.cancel(errClientGone) }

// finish ends the request with what the client was told, and accounts for it.
// Only the first call counts.
func (q *request) finish(status int, reason string) {
	q.mu.Lock()
	if q.over {
		q.mu.Unlock()
		return
	}
	q.over = true
	q.state, q.since = stateOver, time.Now()
	q.status, q.failed = status, reason
	attempts := q.attempts
	q.mu.Unlock()

	if q.placed {
		q.leave()
	}
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
	// Decode may end before prefill's "done" is here. It is about to come, and
	// closing its connection would only cost the next request one. A leg that
	// is still being sent may hold the client's body, which ends here.
	if n := len(attempts); n == 0 || status != 200 || !attempts[n-1].prefillOpen() || !attempts[n-1].p.sent.Load() ||
		!q.s.Spawn(func() { await(attempts[n-1].pDone); end() }) {
		end()
	}
	if !q.probe {
		q.account()
	}
}

// record moves the request from those that run to the recent ones.
func (q *request) record() {
	s := q.s
	var rec record
	if keep := !q.probe && len(s.history.ring) > 0; keep {
		q.note(&rec)
	}
	if q.span != nil && !q.probe {
		q.emit()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.requests, q)
	if rec.start != (time.Time{}) {
		s.history.add(&rec)
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
	m.bytes.Add(float64(q.bytes))
	log := q.s.Log.Handler() // itself: a Logger looks up who calls it, for each line
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
	}
	if n := len(q.attempts); n > 0 && q.attempts[n-1].falls != "" {
		attrs = append(attrs, slog.String("fallback", string(q.attempts[n-1].falls)))
	}
	if q.adm != nil && q.adm.tenant != nil {
		attrs = append(attrs, slog.String("tenant", q.adm.tenant.name))
	}
	if q.failed != "" {
		attrs = append(attrs, slog.String("err", q.failed))
	}
	line := slog.NewRecord(now, slog.LevelInfo, "request", 0)
	line.AddAttrs(attrs...)
	_ = log.Handle(q.s.Ctx, line) // a log that cannot be written has nobody to tell
}

// answered accounts for what a request was answered with.
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
