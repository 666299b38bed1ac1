package worker

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/xpyd/xpyd/internal/engine"
)

// registerMetrics adds the process's own metrics, and vLLM's names beside
// ours so that existing dashboards and pickers work.
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
	w.vllm = newVLLMMetrics(label)
	for _, c := range append(w.vllm.collectors(),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), info,
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
