package worker_test

import (
	"fmt"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/worker"
)

// counter reads one series; labels are part of its name.
func counter(t testing.TB, w *worker.Worker, name string) (v float64) {
	t.Helper()
	_, rest, ok := strings.Cut(metrics(t, w), "\n"+name+" ")
	if !ok {
		t.Fatalf("no %s", name)
	}
	fmt.Sscan(rest, &v)
	return v
}

func metrics(t testing.TB, w *worker.Worker) string {
	t.Helper()
	_, b := send(t, http.MethodGet, w.URL()+"/metrics", nil, "")
	return string(b)
}

// TestMetricNames: what a worker with every tier counts has a name and a sentence, each
// in its place.
func TestMetricNames(t *testing.T) {
	w := start(t, func(c *worker.Config) {
		c.KV.HostMemory, c.KV.SSDDir, c.KV.SSDSize = 4<<20, filepath.Join(t.TempDir(), "kv"), 16<<20
	})
	complete(t, w, nil, `{"prompt":"Once upon a time","max_tokens":4}`)
	line := regexp.MustCompile(`^(xpyd|vllm|go|process)[a-z0-9_:]+ [A-Z0-9].* .*$`)
	n := 0
	for text := range strings.Lines(metrics(t, w)) {
		if help, ok := strings.CutPrefix(strings.TrimSpace(text), "# HELP "); ok {
			if n++; !line.MatchString(help) {
				t.Errorf("%q is no name with a sentence", help)
			}
		}
	}
	if n < 60 {
		t.Errorf("only %d metrics", n)
	}
	all := metrics(t, w)
	for _, name := range []string{`kv_cache_max_concurrency="`, `kv_cache_size_tokens="`, `vllm:num_requests_waiting_by_reason{engine="0",model_name="stories260k",reason="capacity"} 0`, `reason="deferred"} 0`} {
		if !strings.Contains(all, name) {
			t.Errorf("%s is not there", name)
		}
	}
}

// TestVLLMMetrics: vLLM's names, labels and counts, alone and in a pair; a
// router's probes do not count.
func TestVLLMMetrics(t *testing.T) {
	const labels = `engine="0",model_name="stories260k"`
	want := func(w *worker.Worker, series map[string]int) {
		t.Helper()
		for name, n := range series {
			name, more, _ := strings.Cut(name, "|")
			if name = "vllm:" + name + "{" + labels + "}"; more != "" {
				name = strings.Replace(name, `",model`, `",finished_reason="`+more+`",model`, 1)
			}
			if got := counter(t, w, name); got != float64(n) {
				t.Errorf("%s is %v, want %d", name, got, n)
			}
		}
	}
	const body = `{"prompt":"Once upon a time there was a little girl who liked birds","max_tokens":5,"ignore_eos":true,"seed":1`
	w := start(t, nil)
	first := complete(t, w, nil, body+`,"n":2}`).Usage.Prompt
	alone := map[string]int{"prompt_tokens_total": first, "generation_tokens_total": 10, "prefix_cache_queries_total": first, "prefix_cache_hits_total": 0,
		"time_to_first_token_seconds_count": 2, "inter_token_latency_seconds_count": 8, "time_per_output_token_seconds_count": 8,
		"request_time_per_output_token_seconds_count": 2, "e2e_request_latency_seconds_count": 2, "request_queue_time_seconds_count": 1,
		"request_success_total|length": 2, "request_success_total|stop": 0, "request_success_total|abort": 0, "request_success_total|error": 0,
		"num_requests_running": 0, "num_requests_waiting": 0,
		"request_prompt_tokens_count": 2, "request_prompt_tokens_sum": 2 * first, "request_generation_tokens_count": 2, "request_generation_tokens_sum": 10,
		"request_prefill_time_seconds_count": 2, "request_decode_time_seconds_count": 2, "request_inference_time_seconds_count": 2,
		"num_preemptions_total": 0, "request_num_preemptions_sum": 0, "request_num_preemptions_count": 2,
		"request_params_n_sum": 4, "request_params_n_count": 2, "request_params_max_tokens_sum": 10, "request_params_max_tokens_count": 2}
	want(w, alone)
	if n := counter(t, w, "vllm:iteration_tokens_total_sum{"+labels+"}"); n < float64(first+8) { // of each choice the last token is not computed
		t.Errorf("%v tokens in all steps", n)
	}
	for _, phase := range []string{"prefill", "decode"} {
		if s := counter(t, w, "vllm:request_"+phase+"_time_seconds_sum{"+labels+"}"); s < 0 || s > counter(t, w, "vllm:request_inference_time_seconds_sum{"+labels+"}") {
			t.Errorf("%s took %v", phase, s)
		}
	}
	complete(t, w, map[string]string{"x-xpyd-probe": "1"}, body+`}`)
	want(w, alone)
	again := complete(t, w, nil, body+`,"stop":" "}`)
	if again.Usage.Details.Cached == 0 {
		t.Fatal("nothing was cached")
	}
	want(w, map[string]int{"prefix_cache_queries_total": 2 * first, "prefix_cache_hits_total": again.Usage.Details.Cached,
		"request_success_total|stop": 1, "request_success_total|length": 2, "generation_tokens_total": 10 + again.Usage.Completion})
	conn, r := dial(t, w, "/v1/completions", `{`+long+`,"n":16,"stream":true}`)
	firstEvent(t, r)
	conn.Close()
	empty(t, w)
	want(w, map[string]int{"request_success_total|abort": 16, "e2e_request_latency_seconds_count": 3 + 16})

	p, d := pair(t, nil)
	const link = "000102030405060708090a0b0c0d0e0f"
	done := leg(p, link)
	complete(t, d, linked(p, link), body+`}`)
	<-done
	want(p, map[string]int{"prompt_tokens_total": first, "generation_tokens_total": 1, "prefix_cache_queries_total": first, "time_to_first_token_seconds_count": 1,
		"inter_token_latency_seconds_count": 0, "request_success_total|length": 1, "request_queue_time_seconds_count": 1,
		"request_prompt_tokens_sum": first, "request_generation_tokens_sum": 1, "request_prefill_time_seconds_count": 1, "request_decode_time_seconds_sum": 0, "request_inference_time_seconds_count": 1})
	want(d, map[string]int{"prompt_tokens_total": first, "generation_tokens_total": 5, "prefix_cache_queries_total": first, "prefix_cache_hits_total": 0,
		"time_to_first_token_seconds_count": 1, "inter_token_latency_seconds_count": 4, "request_success_total|length": 1, "request_queue_time_seconds_count": 1,
		"request_prompt_tokens_sum": first, "request_generation_tokens_sum": 5, "request_prefill_time_seconds_count": 1, "request_decode_time_seconds_count": 1})

	const another = "100102030405060708090a0b0c0d0e0f"
	done = leg(p, another)
	complete(t, d, linked(p, another), body+`}`)
	<-done
	if n := counter(t, d, "vllm:prefix_cache_hits_total{"+labels+"}"); n == 0 || n > float64(first) {
		t.Errorf("decode had %v of a prompt of %d tokens that it has just answered", n, first)
	}

	for name, edges := range map[string]string{
		"time_to_first_token_seconds":  "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560 +Inf",
		"inter_token_latency_seconds":  "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80 +Inf",
		"request_prompt_tokens":        "1 2 5 10 20 50 100 200 500 +Inf",
		"request_generation_tokens":    "1 2 5 10 20 50 100 200 500 +Inf",
		"iteration_tokens_total":       "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384 +Inf",
		"request_prefill_time_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680 +Inf",
		"e2e_request_latency_seconds":  "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680 +Inf",
	} {
		var got []string
		for _, m := range regexp.MustCompile(`(?m)^vllm:`+name+`_bucket\{`+labels+`,le="(.*)"\}`).FindAllStringSubmatch(metrics(t, w), -1) {
			got = append(got, m[1])
		}
		if strings.Join(got, " ") != edges {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestVLLMPreemptions: a sequence that loses its blocks counts by both names.
func TestVLLMPreemptions(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Blocks = 8 }) // 128 tokens
	complete(t, w, nil, `{"prompt":"Once","max_tokens":80,"ignore_eos":true,"n":3,"seed":1}`)
	if counter(t, w, `vllm:request_num_preemptions_sum{engine="0",model_name="stories260k"}`) == 0 {
		t.Error("no request was preempted")
	}
	n := counter(t, w, "xpyd_engine_preemptions_total")
	if got := counter(t, w, `vllm:num_preemptions_total{engine="0",model_name="stories260k"}`); n == 0 || got != n {
		t.Errorf("%v, want %v", got, n)
	}
}
