package worker

import (
	"fmt"
	"maps"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// registerMetrics registers the process's metrics; some have vLLM's names, for its dashboards and
// pickers.
func (w *Worker) registerMetrics() error {
	label := prometheus.Labels{"model_name": w.served, "engine": "0"}
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: label}, f)
	}
	waiting := func(reason string, f func() float64) prometheus.Collector {
		labels := prometheus.Labels{"reason": reason}
		maps.Copy(labels, label)
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "vllm:num_requests_waiting_by_reason",
			Help: "Requests not started, by what they wait for, as vLLM names it: all for capacity.", ConstLabels: labels}, f)
	}
	stats := func(f func(engine.Stats) float64) func() float64 {
		return func() float64 { return f(w.engine.Stats()) }
	}
	longest := w.backend.Arch().MaxPositions
	if n := w.cfg.MaxModelLen; n > 0 {
		longest = min(longest, n)
	}
	size := w.backend.Blocks() * w.cfg.BlockTokens
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "vllm:cache_config_info", Help: "KV cache configuration, as vLLM names it.",
		ConstLabels: prometheus.Labels{"engine": "0", "block_size": fmt.Sprint(w.cfg.BlockTokens), "num_gpu_blocks": fmt.Sprint(w.backend.Blocks()),
			"kv_cache_size_tokens": fmt.Sprint(size), "kv_cache_max_concurrency": fmt.Sprintf("%.2f", float64(size)/float64(max(longest, 1)))}})
	info.Set(1)
	w.vllm = newVLLMMetrics(label, longest)
	w.vllm.promises = newPromises(w.cfg.promise())
	w.failedAccepts = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_worker_accept_errors_total",
		Help: "Connections that could not be accepted, mostly for want of file descriptors: raise the limit (ulimit -n)."}, []string{"listener"})
	for _, l := range []string{"http", "kv_events"} {
		w.failedAccepts.WithLabelValues(l)
	}
	w.rooms = newRoomMetric()
	for _, c := range append(append(w.vllm.collectors(), w.answers.collectors()...), w.vllm.promises.kept,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), info, w.failedAccepts, w.rooms,
		gauge("vllm:num_requests_running", "Sequences in the batch, as vLLM names it.", stats(func(s engine.Stats) float64 { return float64(s.Running) })),
		gauge("vllm:num_requests_waiting", "Requests not started, as vLLM names it.", stats(func(s engine.Stats) float64 { return float64(s.Waiting) })),
		waiting("capacity", stats(func(s engine.Stats) float64 { return float64(s.Waiting) })),
		waiting("deferred", func() float64 { return 0 }), // what waits for KV is not in the queue
		gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1, as vLLM names it.", stats(func(s engine.Stats) float64 { return s.KVUsed })),
	) {
		if err := w.registry.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}

// vllmMetrics have vLLM's names, labels and buckets (vllm/v1/metrics, 0.33), so that dashboards and
// pickers made for it work. Each choice counts as a request, as in vLLM. A router's probes do not
// count.
type vllmMetrics struct {
	ttft, itl, tpot, e2e, queue       prometheus.Histogram
	prefill, decode, inference        prometheus.Histogram
	prompts, generations, step        prometheus.Histogram // tokens
	asked, most, preempted            prometheus.Histogram // n, max_tokens, and how often
	rejected                          prometheus.Counter
	longest                           int // tokens of a context
	prompt, generation, queries, hits prometheus.Counter
	stopped, cut, aborted, failed     prometheus.Counter
	preemptions                       prometheus.Counter
	promises                          *promises
}

// Reasons of vllm:request_success_total besides the engine's own.
const (
	reasonAbort = "abort"
	reasonError = "error"
)

func newVLLMMetrics(labels prometheus.Labels, maxModelLen int) *vllmMetrics {
	lengths := upTo(maxModelLen)
	latency := []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	first := []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	between := []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: "vllm:" + name, Help: help, ConstLabels: labels, Buckets: buckets})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "vllm:" + name, Help: help, ConstLabels: labels})
	}
	ended := func(reason string) prometheus.Counter {
		all := prometheus.Labels{"finished_reason": reason}
		maps.Copy(all, labels)
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "vllm:request_success_total", Help: "Requests that ended, by how.", ConstLabels: all})
	}
	return &vllmMetrics{
		longest:   maxModelLen,
		asked:     histogram("request_params_n", "Choices that a request asked for (n).", []float64{1, 2, 5, 10, 20}),
		most:      histogram("request_params_max_tokens", "Tokens that a request may have as its answer: max_tokens, or what its context had left.", lengths),
		preempted: histogram("request_num_preemptions", "How often a request lost its blocks to others.", []float64{1, 2, 3, 4, 5, 10, 20}),
		rejected: prometheus.NewCounter(prometheus.CounterOpts{Name: "vllm:admission_rejections_total", Help: "Requests refused because max_waiting wait already: raise it, or add workers.",
			ConstLabels: prometheus.Labels{"model_name": labels["model_name"], "reason": "max_num_queued_reqs"}}),

		ttft:  histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", first),
		itl:   histogram("inter_token_latency_seconds", "Between a request's tokens.", between),
		tpot:  histogram("request_time_per_output_token_seconds", "Mean of a request's times between tokens.", between),
		e2e:   histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", latency),
		queue: histogram("request_queue_time_seconds", "Wait of a request for blocks and for a place in the batch.", latency),

		prefill:     histogram("request_prefill_time_seconds", "From a request's first step to its first token.", latency),
		decode:      histogram("request_decode_time_seconds", "From a request's first token to its last.", latency),
		inference:   histogram("request_inference_time_seconds", "From a request's first step to its last token.", latency),
		prompts:     histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths),
		generations: histogram("request_generation_tokens", "Tokens generated for a request.", lengths),
		step:        histogram("iteration_tokens_total", "Tokens computed in one step of the engine.", []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}),
		preemptions: counter("num_preemptions_total", "Sequences that lost their blocks to others."),

		prompt:     counter("prompt_tokens_total", "Prompt tokens of requests that have their first token, computed here or not."),
		generation: counter("generation_tokens_total", "Tokens generated."),
		queries:    counter("prefix_cache_queries_total", "Prompt tokens that were looked for in the prefix cache."),
		hits:       counter("prefix_cache_hits_total", "Prompt tokens that the prefix cache had."),

		stopped: ended(string(engine.FinishStop)), cut: ended(string(engine.FinishLength)),
		aborted: ended(reasonAbort), failed: ended(reasonError),
	}
}

func (m *vllmMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.ttft, m.itl, m.tpot, m.e2e, m.queue, m.prefill, m.decode, m.inference, m.prompts, m.generations, m.step,
		m.prompt, m.generation, m.queries, m.hits, m.stopped, m.cut, m.aborted, m.failed, m.preemptions, m.asked, m.most, m.preempted, m.rejected, older{m.itl}}
}

// upTo returns vLLM's buckets of token counts: 1, 2, 5, 10, 20, 50 and so on to most.
func upTo(most int) (edges []float64) {
	for ten := 1; ; ten *= 10 {
		for _, n := range []int{1, 2, 5} {
			if n*ten > most {
				return edges
			}
			edges = append(edges, float64(n*ten))
		}
	}
}

func (m *vllmMetrics) stepped(positions int) { m.step.Observe(float64(positions)) }

// prompted counts a prompt that has its first token.
func (m *vllmMetrics) prompted(tokens, cached int, queued time.Duration) {
	m.prompt.Add(float64(tokens))
	m.queries.Add(float64(tokens))
	m.hits.Add(float64(cached))
	m.queue.Observe(queued.Seconds())
}

func (m *vllmMetrics) token(c *choice, arrived, now time.Time) {
	if c.first.IsZero() {
		c.first = now
		m.ttft.Observe(now.Sub(arrived).Seconds())
		m.promises.first(now.Sub(arrived), c.promise)
	} else {
		c.longest = max(c.longest, now.Sub(c.last))
		m.itl.Observe(now.Sub(c.last).Seconds())
	}
	c.last = now
	m.generation.Inc()
}

// ended counts a choice that has ended, of a request that was preempted so often.
func (m *vllmMetrics) ended(c *choice, reason string, took time.Duration, preempted int) {
	switch reason {
	case string(engine.FinishStop):
		m.stopped.Inc()
	case string(engine.FinishLength):
		m.cut.Inc()
	case reasonAbort:
		m.aborted.Inc()
	default:
		m.failed.Inc()
	}
	m.e2e.Observe(took.Seconds())
	m.prompts.Observe(float64(len(c.item.tokens)))
	most := m.longest - len(c.item.tokens)
	if c.j.MaxTokens != nil {
		most = *c.j.MaxTokens
	}
	m.params(c.j.N, most)
	m.preempted.Observe(float64(preempted))
	if c.first.IsZero() || c.item.info == nil { // no token
		m.generations.Observe(0)
		return
	}
	drawn := c.tokens - c.given
	m.generations.Observe(float64(drawn))
	decode := c.last.Sub(c.first)
	m.times(c.item.info.Prefill, decode)
	if drawn > 1 {
		m.tpot.Observe(decode.Seconds() / float64(drawn-1))
		m.promises.ended(decode/time.Duration(drawn-1), c.longest, c.promise)
	}
}

func (m *vllmMetrics) params(n, most int) {
	m.asked.Observe(float64(n))
	m.most.Observe(float64(most))
}

func (m *vllmMetrics) times(prefill, decode time.Duration) {
	m.prefill.Observe(prefill.Seconds())
	m.decode.Observe(decode.Seconds())
	m.inference.Observe((prefill + decode).Seconds())
}

// prefilled counts a prompt that was run for a decode worker: its choices end here with their first
// token.
func (m *vllmMetrics) prefilled(info *engine.PromptInfo, choices int, took time.Duration) {
	m.prompted(info.Tokens, info.CachedTokens, info.Queued)
	for range choices {
		m.ttft.Observe(took.Seconds())
		m.generation.Inc()
		m.cut.Inc()
		m.e2e.Observe(took.Seconds())
		m.prompts.Observe(float64(info.Tokens))
		m.generations.Observe(1)
		m.params(choices, 1)
		m.preempted.Observe(0)
		m.times(info.Prefill, 0)
	}
}

// embedded counts an input that has its vector.
func (m *vllmMetrics) embedded(info *engine.PromptInfo, took time.Duration) {
	m.prompted(info.Tokens, info.CachedTokens, info.Queued)
	m.stopped.Inc()
	m.e2e.Observe(took.Seconds())
	m.prompts.Observe(float64(info.Tokens))
	m.generations.Observe(0)
	m.times(info.Prefill, 0)
}

// reason is why choices that the generation's end cut off ended; "" if they were refused.
func (g *generation) reason() string {
	switch {
	case g.err == nil || g.err.outcome == ticket.Cancelled:
		return reasonAbort
	case g.err.outcome == ticket.Refused:
		return ""
	}
	return reasonError
}

// older exports the times between tokens under their name before vLLM 0.11 too.
type older struct{ itl prometheus.Histogram }

func (o older) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(o, ch) }

func (o older) Collect(ch chan<- prometheus.Metric) {
	var now dto.Metric
	if err := o.itl.Write(&now); err != nil {
		return
	}
	labels := prometheus.Labels{}
	for _, l := range now.Label {
		labels[l.GetName()] = l.GetValue()
	}
	buckets := map[float64]uint64{}
	for _, b := range now.Histogram.Bucket {
		buckets[b.GetUpperBound()] = b.GetCumulativeCount()
	}
	desc := prometheus.NewDesc("vllm:time_per_output_token_seconds", "As vllm:inter_token_latency_seconds, which replaced it.", nil, labels)
	ch <- prometheus.MustNewConstHistogram(desc, now.Histogram.GetSampleCount(), now.Histogram.GetSampleSum(), buckets)
}
