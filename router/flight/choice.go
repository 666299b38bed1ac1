package flight

import (
	"time"

	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/pick"
)

// maxHead is how much of a prompt's beginning counts for consistent hashing.
const maxHead = 1 << 10

// enrich adds to a pick request what policies want to know beyond its shape.
func (q *request) enrich(req *pick.Request) {
	req.Session = q.session
	req.Head = q.top.Prompt[:min(len(q.top.Prompt), maxHead)]
	req.Local = q.local
	q.warm(req)
}

// local reports whether decode of a dialect could serve the request alone though
// it can be split.
func (q *request) local(name string) bool {
	d := dialect.For(name)
	return d != nil && !q.probe && (d.Typed || d.Falls) && d.Cannot(&q.top) == ""
}

// learned tells the picker how long the answer's first byte took.
func (q *request) learned(ans *answer) {
	n := len(q.attempts)
	if n == 0 || q.probe || q.first.IsZero() || ans == nil || ans.status != 200 {
		return
	}
	a := q.attempts[n-1]
	var prefill time.Duration
	if state, since := a.p.get(); state == legDone && since.Before(q.first) {
		prefill = since.Sub(a.start)
	}
	if a.choice.Local != "" {
		q.s.metrics.local.WithLabelValues(a.choice.Local).Inc()
	}
	if q.s.Hedge.Enabled {
		q.s.hedges.first.add(q.first.Sub(q.dispatched))
	}
	a.choice.Answered(prefill, q.first.Sub(a.start))
}
