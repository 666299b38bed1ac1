package router

import (
	"context"
	crand "crypto/rand"
	"encoding/hex"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/pick"
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
	r      *Router
	id     string
	method string
	path   string // route
	body   []byte // the client's; valid until the handler returns
	top    openai.Top
	seed   int64
	probe  bool
	ex     bool      // explain
	trace  [2]string // traceparent and tracestate for the legs
	span   *span     // nil unless sampled
	start  time.Time
	end    time.Time // deadline

	ctx    context.Context
	cancel context.CancelCauseFunc
	unhook func() bool // the legs from ctx
	stop   []func()    // run at the end, last first
	timer  *time.Timer // ends it at the deadline

	chain   pick.Chain
	session string     // what the client says belongs together
	adm     *admission // nil for most; see there
	auth    string     // the client's Authorization, if it is to be passed on

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
func (r *Router) newRequest(id, method, path string) *request {
	q := &request{r: r, id: id, method: method, path: path, start: time.Now(), seed: rand.Int64()}
	q.state, q.since = stateQueued, q.start
	q.ctx, q.cancel = context.WithCancelCause(r.ctx)
	q.unhook = context.AfterFunc(q.ctx, q.endLegs)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests[q] = struct{}{}
	return q
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
	if q.attempts[len(q.attempts)-1].prefillOpen() {
		return // its leg may be reading it
	}
	q.body, q.chain = nil, pick.Chain{}
	q.top = openai.Top{N: q.top.N, Stream: q.top.Stream}
}

// watch cancels the request when its client leaves.
func (q *request) watch(conn net.Conn) {
	q.stop = append(q.stop, q.r.watcher.Watch(conn, func() { q.cancel(errClientGone) }))
}

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

	for i := len(q.stop) - 1; i >= 0; i-- {
		q.stop[i]()
	}
	end := func() {
		for _, a := range attempts {
			a.close()
		}
		q.unhook()
		q.cancel(errOver)
		if q.timer != nil {
			q.timer.Stop()
		}
		q.record()
	}
	// Decode may end before prefill's "done" is here. It is about to come, and
	// closing its connection would only cost the next request one. A leg that
	// is still being sent may hold the client's body, which ends here.
	if n := len(attempts); n == 0 || status != 200 || !attempts[n-1].prefillOpen() || !attempts[n-1].p.sent.Load() ||
		!q.r.spawn(func() { await(attempts[n-1].pDone); end() }) {
		end()
	}
	if !q.probe {
		q.account()
	}
}

// record moves the request from those that run to the recent ones.
func (q *request) record() {
	var info *requestInfo
	if !q.probe {
		if info = q.info(); q.span != nil {
			q.emit()
		}
	}
	r := q.r
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.requests, q)
	if info != nil {
		r.history.add(info)
	}
}

func (q *request) account() {
	m, took := q.r.metrics, time.Since(q.start)
	route := m.good[q.path]
	switch {
	case route == nil: // not a public route
		route = m.route(q.path)
		fallthrough
	case q.status != 200:
		m.request(q.path, q.status)
	default:
		route.requests.Inc()
	}
	route.duration.Observe(took.Seconds())
	if !q.first.IsZero() {
		route.ttft.Observe(q.first.Sub(q.start).Seconds())
	}
	m.bytes.Add(float64(q.bytes))
	log := q.r.log
	if !log.Enabled(q.ctx, slog.LevelInfo) {
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
	log.LogAttrs(q.ctx, slog.LevelInfo, "request", attrs...)
}

// requestID is the client's if it is a plain name, else a fresh one.
func requestID(client []byte) string {
	if plainID(client) {
		return string(client)
	}
	var b [12]byte
	crand.Read(b[:]) // never fails
	return "req-" + hex.EncodeToString(b[:])
}

func plainID(id []byte) bool {
	if len(id) == 0 || len(id) > 128 {
		return false
	}
	for _, c := range id {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}
