package worker

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/xpyd/xpyd/engine"
)

// registerMetrics registers the process's metrics; some have vLLM's names, for its dashboards and
// pickers.
func (w *Worker) registerMetrics() error {
	label := prometheus.Labels{"model_name": w.served, "engine": "0"}
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: label}, f)
	}
	stats := func(f func(engine.Stats) float64) func() float64 {
		return func() float64 { return f(w.engine.Stats()) }
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "vllm:cache_config_info", Help: "KV cache configuration, as vLLM names it.",
		ConstLabels: prometheus.Labels{"engine": "0", "block_size": fmt.Sprint(w.cfg.BlockTokens), "num_gpu_blocks": fmt.Sprint(w.backend.Blocks())}})
	info.Set(1)
	longest := w.backend.Arch().MaxPositions
	if n := w.cfg.MaxModelLen; n > 0 {
		longest = min(longest, n)
	}
	w.vllm = newVLLMMetrics(label, longest)
	w.failedAccepts = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_worker_accept_errors_total",
		Help: "Connections that could not be accepted, mostly for want of file descriptors: raise the limit (ulimit -n)."}, []string{"listener"})
	for _, l := range []string{"http", "kv_events"} {
		w.failedAccepts.WithLabelValues(l)
	}
	for _, c := range append(append(w.vllm.collectors(), w.answers.collectors()...),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), info, w.failedAccepts,
		gauge("vllm:num_requests_running", "Sequences in the batch, as vLLM names it.", stats(func(s engine.Stats) float64 { return float64(s.Running) })),
		gauge("vllm:num_requests_waiting", "Requests not started, as vLLM names it.", stats(func(s engine.Stats) float64 { return float64(s.Waiting) })),
		gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1, as vLLM names it.", stats(func(s engine.Stats) float64 { return s.KVUsed })),
	) {
		if err := w.registry.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}
