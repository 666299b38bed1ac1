package router

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/pick"
)

// followPicks brings the picker's table up to each change of the fleet and of
// who has passed a probe, so that requests need not. A little after the first
// pair is there, most of the fleet is, and other routers' knowledge is of use.
func (r *Router) followPicks() {
	asks := r.share != nil
	var settled <-chan time.Time
	for {
		changed, probed := r.fleet.Changed(), r.probes.changed()
		r.picker.Refresh(r.view())
		if asks && r.serves() {
			asks, settled = false, time.After(settling)
		}
		select {
		case <-settled:
			r.share.Ask()
		case <-changed:
		case <-probed:
		case <-r.ctx.Done():
			return
		}
	}
}

const settling = time.Second

// maxHead is how much of a prompt's beginning counts for consistent hashing.
const maxHead = 1 << 10

// enrich adds to a pick request what policies want to know beyond its shape.
func (q *request) enrich(req *pick.Request) {
	req.Session = q.session
	req.Head = q.top.Prompt[:min(len(q.top.Prompt), maxHead)]
	req.Local = q.local
	q.r.kv.warm(q, req)
}

// local says whether decode of a dialect could serve the request alone though
// it can be split.
func (q *request) local(name string) bool {
	d := dialect.For(name)
	return d != nil && !q.probe && (d.Rules().Typed || d.Rules().Falls) && d.Rules().Cannot(&q.top) == ""
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
		q.r.metrics.local.WithLabelValues(a.choice.Local).Inc()
	}
	if q.r.cfg.Hedge.Enabled {
		q.r.hedges.first.add(q.first.Sub(q.dispatched))
	}
	a.choice.Answered(prefill, q.first.Sub(a.start))
}

// pickCollectors are the metrics of choices and KV events.
func pickCollectors(r *Router) []prometheus.Collector {
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	count := func(name, help string, f func() uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(f()) })
	}
	e := r.kv
	return []prometheus.Collector{
		gauge("xpyd_router_prefix_bytes", "Memory of where prefixes went, by their text. At pick.affinity_bytes the oldest are forgotten; 0 long after a start: other routers told nothing, and no prompt is long enough.", func() float64 { return float64(r.picker.AffinityBytes()) }),
		gauge("xpyd_router_kv_index_blocks", "Blocks of all workers in the index of KV events.", func() float64 { return float64(e.index.Stats().Blocks) }),
		gauge("xpyd_router_kv_index_bytes", "Memory of that index. At kv_events.index_bytes it forgets what no prompt asks for.", func() float64 { return float64(e.index.Stats().Bytes) }),
		count("xpyd_router_kv_index_evicted_total", "Blocks forgotten to stay within kv_events.index_bytes. If it rises fast, raise that.", func() uint64 { return e.index.Stats().Evicted }),
		count("xpyd_router_kv_index_orphans_total", "Blocks that came without their parent being known. They rise after a router's start, where engines cannot replay all.", func() uint64 { return e.index.Stats().Orphans }),
		gauge("xpyd_router_kv_feeds", "Publishers of KV events that are followed.", func() float64 { n, _, _, _ := e.totals(); return float64(n) }),
		gauge("xpyd_router_kv_feeds_connected", "Those that are connected. While one is not, its worker looks as warm as it was.", func() float64 { _, n, _, _ := e.totals(); return float64(n) }),
	}
}
