package worker

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Bounds of a promise that the router tells of: 0 would be none.
const (
	leastPromise = time.Millisecond
	mostPromise  = time.Hour
	maxPromise   = 96 // bytes
)

// promiseOf reads ticket.HeaderPromise: ttft=200ms,tpot=25ms,itl=50ms, or some of them. What is not there is as
// configured.
func promiseOf(raw []byte) (p engine.Promise, err error) {
	if len(raw) == 0 {
		return p, nil
	}
	bad := func() (engine.Promise, error) {
		return engine.Promise{}, openai.BadRequest(ticket.HeaderPromise, "%s: %q is not ttft=DURATION,tpot=DURATION,itl=DURATION, or some of them, of %v to %v",
			ticket.HeaderPromise, openai.Clip(string(raw)), leastPromise, mostPromise)
	}
	if len(raw) > maxPromise {
		return bad()
	}
	for part := range strings.SplitSeq(string(raw), ",") {
		name, text, _ := strings.Cut(part, "=")
		var to *time.Duration
		switch name {
		case "ttft":
			to = &p.TTFT
		case "tpot":
			to = &p.TPOT
		case "itl":
			to = &p.ITL
		}
		d, err := time.ParseDuration(text)
		if to == nil || *to != 0 || err != nil || d < leastPromise || d > mostPromise {
			return bad()
		}
		*to = d
	}
	return p, nil
}

// validPromise checks a setting, which may be shorter than a key's: for tests, nothing keeps it.
func validPromise(key string, d time.Duration) error {
	if d < 0 || d > mostPromise {
		return bad(key, "%v is not within 0 and %v", d, mostPromise)
	}
	return nil
}

func (p *Promises) promise() engine.Promise {
	return engine.Promise{TTFT: p.TTFTPromise, TPOT: p.TPOTPromise, ITL: p.ITLPromise}
}

// promises counts which choices got what was promised of them.
type promises struct {
	all  engine.Promise // of requests without one of their own; 0: nothing
	kept *prometheus.CounterVec
}

func newPromises(all engine.Promise) *promises {
	p := &promises{all, prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_worker_promises_total",
		Help: "Choices that got what ttft_promise, tpot_promise and itl_promise of their API key or of the worker say, or did not."}, []string{"promise", "outcome"})}
	for _, promise := range []string{"ttft", "tpot", "itl"} { // any request may bring one, and rates need a first value
		p.kept.WithLabelValues(promise, "kept")
		p.kept.WithLabelValues(promise, "broken")
	}
	return p
}

func (p *promises) first(ttft time.Duration, own engine.Promise) {
	p.count("ttft", ttft, own.Or(p.all).TTFT)
}

// ended counts a choice by its mean and its longest gap.
func (p *promises) ended(tpot, itl time.Duration, own engine.Promise) {
	all := own.Or(p.all)
	p.count("tpot", tpot, all.TPOT)
	p.count("itl", itl, all.ITL)
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
