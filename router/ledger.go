package router

import (
	"cmp"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
)

// ledger is what this process holds, for whom and since when. At rest
// requests is empty and the counts are zero.
type ledger struct {
	Process   string                     `json:"process"`
	At        time.Time                  `json:"at"`
	Requests  []*requestInfo             `json:"requests"`
	Legs      int                        `json:"legs"`
	Running   int                        `json:"running"` // admitted
	Waiting   int                        `json:"waiting"` // for admission
	ConnsBusy int                        `json:"upstream_conns_busy"`
	ConnsIdle int                        `json:"upstream_conns_idle"`
	Fleet     map[string]json.RawMessage `json:"fleet,omitempty"` // the workers' ledgers, or their errors
}

func (r *Router) ledger() *ledger {
	l := &ledger{Process: "router", At: time.Now(), Requests: []*requestInfo{}, Legs: r.legs.count()}
	l.Running, l.Waiting = r.gate.counts()
	l.ConnsBusy, l.ConnsIdle = r.up.counts()
	r.mu.Lock()
	qs := make([]*request, 0, len(r.requests))
	for q := range r.requests {
		qs = append(qs, q)
	}
	r.mu.Unlock()
	for _, q := range qs {
		l.Requests = append(l.Requests, q.info())
	}
	slices.SortFunc(l.Requests, func(a, b *requestInfo) int { return cmp.Or(a.Start.Compare(b.Start), cmp.Compare(a.ID, b.ID)) })
	return l
}

// serveLedger adds the workers' own ledgers with ?fleet=1.
func (r *Router) serveLedger(ctx *fasthttp.RequestCtx) {
	l := r.ledger()
	if string(ctx.QueryArgs().Peek("fleet")) == "1" {
		l.Fleet, _ = r.everyWorker("GET", "/debug/ledger", nil)
	}
	reply(ctx, 200, l)
}

const (
	ledgersAtOnce = 16
	ledgerTimeout = 2 * time.Second
	maxLedger     = 8 << 20
)

// everyWorker sends one request to each worker that may answer, and returns
// the JSON that they said by their ids, an error object for those that failed,
// and the statuses, in no order: below 400 are only those from 200 to 299.
func (r *Router) everyWorker(verb, path string, body []byte) (map[string]json.RawMessage, []int) {
	s := r.fleet.Snapshot()
	out := make(map[string]json.RawMessage, len(s.Members))
	var statuses []int
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, ledgersAtOnce)
	for i := range s.Members {
		m := &s.Members[i]
		if m.State == fleet.Gone || m.State == fleet.Dead || m.Dialect != "native" {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			status, b := r.oneWorker(m, s.Version, verb, path, body)
			mu.Lock()
			defer mu.Unlock()
			out[m.ID] = b
			statuses = append(statuses, status)
		})
	}
	wg.Wait()
	return out, statuses
}

func (r *Router) oneWorker(m *fleet.Member, version uint64, verb, path string, body []byte) (int, json.RawMessage) {
	status, answer, err := r.askWorker(m, version, verb, path, body, maxLedger)
	var fail *openai.Error
	switch {
	case err != nil:
		fail = openai.Upstream("%v", err)
	case !json.Valid(answer):
		fail = openai.Upstream("status %d, and no JSON", status)
	case status < 200 || status > 299 && status < 400 || status > 599:
		fail = openai.Upstream("status %d, which no worker answers", status)
	default:
		return status, answer
	}
	return fail.Status, fail.Append(nil)
}

// askWorker sends one request, and returns up to limit bytes of the answer's
// body.
func (r *Router) askWorker(m *fleet.Member, version uint64, verb, path string, body []byte, limit int) (status int, answer []byte, err error) {
	q := r.newRequest(requestID(nil), verb, path)
	q.internal()
	q.deadline(ledgerTimeout)
	defer q.finish(200, "")
	l := newLeg(m.Role, &m.Instance, version)
	defer l.end(errOver)
	defer l.within(&q.ctx)()
	var h fasthttp.RequestHeader
	h.SetMethod(verb)
	h.SetRequestURI(path)
	h.SetContentLength(len(body))
	b, err := r.send(l, &h, [][]byte{body})
	if err != nil {
		return 0, nil, err
	}
	defer b.finish()
	answer, err = b.all(limit)
	return b.header.StatusCode(), answer, err
}
