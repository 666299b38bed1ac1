package engine

import (
	"errors"
	"io"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// metrics are the engine's collectors, all named xpyd_engine_*.
type metrics struct {
	stepSeconds                                                  prometheus.Histogram
	prefill, decode, hits, preemptions, failures, voided, spoilt prometheus.Counter
	maskSeconds                                                  prometheus.Histogram
	masked, deadEnds                                             prometheus.Counter
	requests                                                     *prometheus.CounterVec
	runs, drafted, accepted                                      *prometheus.CounterVec // of drafts
}

func newMetrics(e *Engine, reg prometheus.Registerer) (*metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "xpyd_engine_" + name, Help: help})
	}
	counters := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_engine_" + name, Help: help}, []string{label})
	}
	tokens := counters("tokens_total", "Token positions computed, by phase.", "phase")
	m := &metrics{
		stepSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "xpyd_engine_step_seconds", Help: "Time of one backend step.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14),
		}),
		prefill:     tokens.WithLabelValues("prefill"),
		decode:      tokens.WithLabelValues("decode"),
		hits:        counter("prefix_hit_tokens_total", "Tokens of prompts, counted when these were done, that were found in the prefix cache instead of computed."),
		preemptions: counter("preemptions_total", "Sequences that lost their blocks to others; a steady rate means that the pool is too small."),
		failures:    counter("step_failures_total", "Backend steps that failed; see the worker's log."),
		voided:      counter("voided_prefixes_total", "Prefixes that were on their way when their request was placed, and did not come, or were not what their digests say: what steps had computed with them was dropped, and computed again."),
		spoilt:      counter("invalid_outputs_total", "Requests that failed because the model computed no number for them: look at its weights, its dtype and the device."),
		maskSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "xpyd_engine_mask_seconds", Help: "Time to make the masks of one step's draws whose output is bound; on a GPU it passes beside the step.",
			Buckets: maskBuckets(),
		}),
		masked:   counter("masked_draws_total", "Draws whose output was bound."),
		deadEnds: counter("dead_ends_total", "Requests that failed because no token could follow as their output was bound: look at their grammars."),
		requests: counters("requests_total", "Requests ended, by how.", "outcome"),
		runs:     counters("drafts_total", "Runs of drafted tokens that steps verified, by who drafted: ngram, draft (a model) or grammar (the only tokens that could come).", "by"),
		drafted:  counters("drafted_tokens_total", "Tokens in these runs.", "by"),
		accepted: counters("accepted_tokens_total", "Drafted tokens that were what was drawn in their place. By drafts_total, this is the mean accepted length.", "by"),
	}
	all := []prometheus.Collector{m.stepSeconds, tokens, m.hits, m.preemptions, m.failures, m.voided, m.spoilt, m.maskSeconds, m.masked, m.deadEnds, m.requests, m.runs, m.drafted, m.accepted}
	gauge := func(name, help string, labels prometheus.Labels, f func() float64) {
		all = append(all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "xpyd_engine_" + name, Help: help, ConstLabels: labels}, f))
	}
	gauge("running_sequences", "Sequences in the batch.", nil, func() float64 { return float64(e.Stats().Running) })
	gauge("waiting_sequences", "Sequences that wait for a place or for memory.", nil, func() float64 { return float64(e.Stats().Waiting) })
	gauge("queued_tokens", "Prompt tokens not yet computed.", nil, func() float64 { return float64(e.Stats().QueuedTokens) })
	for state, count := range map[string]func(kvcache.Stats) int{
		"free":        func(s kvcache.Stats) int { return s.Free },
		"held":        func(s kvcache.Stats) int { return s.Held },
		"cached":      func(s kvcache.Stats) int { return s.Cached },
		"quarantined": func(s kvcache.Stats) int { return s.Quarantined },
	} {
		gauge("kv_blocks", "KV blocks, by state.", prometheus.Labels{"state": state}, func() float64 { return float64(count(e.cache.Stats())) })
	}
	for i, c := range all {
		if err := reg.Register(c); err != nil {
			for _, done := range all[:i] {
				reg.Unregister(done)
			}
			return nil, err
		}
	}
	return m, nil
}

// step records one backend step, and counts its positions.
func (m *metrics) step(took time.Duration, members []member) (positions int) {
	m.stepSeconds.Observe(took.Seconds())
	for _, p := range members {
		positions += p.chunk + p.drafts
		if p.q.h.prompted && p.chunk == 1 {
			m.decode.Add(float64(1 + p.drafts))
		} else {
			m.prefill.Add(float64(p.chunk))
		}
	}
	return positions
}

// drafts records a run of drafts of which the first were right.
func (m *metrics) drafts(by string, n, right int) {
	m.runs.WithLabelValues(by).Inc()
	m.drafted.WithLabelValues(by).Add(float64(n))
	m.accepted.WithLabelValues(by).Add(float64(right))
}

// ended records how a request ended.
func (m *metrics) ended(err error) {
	outcome := "failed"
	switch {
	case errors.Is(err, io.EOF):
		outcome = "done"
	case errors.Is(err, ErrCancelled):
		outcome = "cancelled"
	case errors.Is(err, ErrClosed):
		outcome = "aborted"
	case errors.Is(err, ErrLate):
		outcome = "shed"
	}
	m.requests.WithLabelValues(outcome).Inc()
}
