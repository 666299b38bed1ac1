package faults

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/e2e/unbroken"
)

// TestShortageMoves: streams that need more blocks than their decode worker has move to one with room,
// and each event is what it would have been.
func TestShortageMoves(t *testing.T) {
	t.Parallel()
	const streams, most = 4, 480
	r := cluster.Up(t, "--prefill", "1", "--decode", "2", "--config", config(t), "--model", mediumModel(t),
		"--kv-memory", "18MiB") // 85 blocks of 16 tokens: for two of the streams, and a half
	client := cluster.NewClient(t)
	ask := func(i int, met func(string, int)) *unbroken.Answer {
		return unbroken.Tell(t.Context(), client, r.URL+"/v1/completions", fmt.Sprintf("short-%d", i),
			fmt.Sprintf(`{"model":"medium","prompt":"Once upon a time","stream":true,"ignore_eos":true,"max_tokens":%d,"seed":%d,"logprobs":1}`, most, i+1), met)
	}
	want, got := make([]*unbroken.Answer, streams), make([]*unbroken.Answer, streams)
	var wg, begun sync.WaitGroup
	for i := range want {
		wg.Go(func() { want[i] = ask(i, func(string, int) {}) })
		if i%2 == 1 {
			wg.Wait()
		}
	}
	for i, s := range want {
		if s.Err != nil || s.Seams > 0 {
			t.Fatalf("undisturbed, %d: %v, %d seams", i, s.Err, s.Seams)
		}
	}
	order(t, r, "drain", "decode-1")
	begun.Add(streams)
	for i := range got {
		wg.Go(func() {
			once := sync.OnceFunc(begun.Done)
			defer once()
			got[i] = ask(i, func(string, int) { once() })
		})
	}
	begun.Wait()
	order(t, r, "undrain", "decode-1")
	wg.Wait()
	seams := 0
	for i, s := range got {
		if bad := s.Differs(want[i]); bad != "" {
			t.Errorf("stream %d, with %d seams: %s", i, s.Seams, bad)
		}
		seams += s.Seams
	}
	moved, err := r.Metric(`xpyd_router_takeovers_total{outcome="continued",reason="shortage"}`)
	if int(moved) != seams || seams == 0 || err != nil {
		t.Errorf("%v streams moved, %v; %d seams", moved, err, seams)
	}
	preempted, err := r.WorkerMetric("decode-0", "xpyd_engine_preemptions_total")
	t.Logf("%v moved, %v preempted, %v", moved, preempted, err)
	cluster.Wait(t, 10*time.Second, "ledgers empty", r.Idle)
}
