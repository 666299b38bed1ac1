package worker

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// promises counts which choices got what was promised of them.
type promises struct {
	ttft, tpot time.Duration // 0: nothing
	kept       *prometheus.CounterVec
}

func newPromises(ttft, tpot time.Duration) *promises {
	p := &promises{ttft, tpot, prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_worker_promises_total",
		Help: "Choices that got what ttft_promise and tpot_promise say, or did not."}, []string{"promise", "outcome"})}
	for promise, limit := range map[string]time.Duration{"ttft": ttft, "tpot": tpot} {
		if limit > 0 {
			p.kept.WithLabelValues(promise, "kept")
			p.kept.WithLabelValues(promise, "broken")
		}
	}
	return p
}

func (p *promises) first(ttft time.Duration) { p.count("ttft", ttft, p.ttft) }
func (p *promises) ended(tpot time.Duration) { p.count("tpot", tpot, p.tpot) }

func (p *promises) count(promise string, got, limit time.Duration) {
	switch {
	case limit == 0:
	case got <= limit:
		p.kept.WithLabelValues(promise, "kept").Inc()
	default:
		p.kept.WithLabelValues(promise, "broken").Inc()
	}
}
