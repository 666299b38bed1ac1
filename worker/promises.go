package worker

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/openai"
)

// Bounds of a promise that the router tells of: 0 would be none.
const (
	leastPromise = time.Millisecond
	mostPromise  = time.Hour
	maxPromise   = 64 // bytes
)

// promiseOf reads headerPromise: ttft=200ms,tpot=25ms, or one of them. What is not there is as
// configured.
func promiseOf(raw []byte) (p engine.Promise, err error) {
	if len(raw) == 0 {
		return p, nil
	}
	bad := func() (engine.Promise, error) {
		return engine.Promise{}, openai.BadRequest(headerPromise, "%s: %q is not ttft=DURATION,tpot=DURATION, or one of them, of %v to %v",
			headerPromise, openai.Clip(string(raw)), leastPromise, mostPromise)
	}
	if len(raw) > maxPromise {
		return bad()
	}
	for part := range strings.SplitSeq(string(raw), ",") {
		name, text, _ := strings.Cut(part, "=")
		to := &p.TTFT
		if name == "tpot" {
			to = &p.TPOT
		}
		d, err := time.ParseDuration(text)
		if name != "ttft" && name != "tpot" || *to != 0 || err != nil || d < leastPromise || d > mostPromise {
			return bad()
		}
		*to = d
	}
	return p, nil
}

// promises counts which choices got what was promised of them.
type promises struct {
	all  engine.Promise // of requests without one of their own; 0: nothing
	kept *prometheus.CounterVec
}

func newPromises(ttft, tpot time.Duration) *promises {
	p := &promises{engine.Promise{TTFT: ttft, TPOT: tpot}, prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_worker_promises_total",
		Help: "Choices that got what ttft_promise and tpot_promise of their API key or of the worker say, or did not."}, []string{"promise", "outcome"})}
	for _, promise := range []string{"ttft", "tpot"} { // any request may bring one, and rates need a first value
		p.kept.WithLabelValues(promise, "kept")
		p.kept.WithLabelValues(promise, "broken")
	}
	return p
}

func (p *promises) first(ttft time.Duration, own engine.Promise) {
	p.count("ttft", ttft, own.Or(p.all).TTFT)
}

func (p *promises) ended(tpot time.Duration, own engine.Promise) {
	p.count("tpot", tpot, own.Or(p.all).TPOT)
}

func (p *promises) count(promise string, got, limit time.Duration) {
	switch {
	case limit == 0:
	case got <= limit:
		p.kept.WithLabelValues(promise, "kept").Inc()
	default:
		p.kept.WithLabelValues(promise, "broken").Inc()
	}
}
