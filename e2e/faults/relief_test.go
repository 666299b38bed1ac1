package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/e2e/unbroken"
	"github.com/xpyd/xpyd/internal/fleet"
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

// TestBalanceMoves: of a decode worker that gets a third of the time that the other has, streams move to that,
// and each event is what it would have been.
func TestBalanceMoves(t *testing.T) {
	t.Parallel()
	const streams, most = 16, 900
	file := filepath.Join(t.TempDir(), "router.yaml")
	if err := os.WriteFile(file, []byte("balance: {interval: 1s, windows: 1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := cluster.Alone(t, "--config", file)
	r.Worker(t, fleet.Prefill, "--id", "prefill-0", "--model", mediumModel(t))
	slow := r.Worker(t, fleet.Decode, "--id", "decode-0", "--model", mediumModel(t))
	r.Worker(t, fleet.Decode, "--id", "decode-1", "--model", mediumModel(t))
	r.WaitServing(t, time.Minute, 1, 2)
	client := cluster.NewClient(t)
	tell := func() (all []*unbroken.Answer) {
		all = make([]*unbroken.Answer, streams)
		var wg sync.WaitGroup
		for i := range all {
			wg.Go(func() {
				all[i] = unbroken.Tell(t.Context(), client, r.URL+"/v1/completions", fmt.Sprintf("slow-%d", i),
					fmt.Sprintf(`{"model":"medium","prompt":"Once upon a time","stream":true,"ignore_eos":true,"max_tokens":%d,"seed":%d}`, most, i+1), func(string, int) {})
			})
		}
		wg.Wait()
		return all
	}
	want := tell()
	metric := `xpyd_router_takeovers_total{outcome="continued",reason="balance"}`
	before, err := r.Metric(metric) // on a busy machine some move without
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	var hinder sync.WaitGroup
	hinder.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-over:
				slow.Signal(syscall.SIGCONT)
				return
			case <-tick.C:
			}
			switch n % 3 {
			case 0:
				slow.Signal(syscall.SIGSTOP)
			case 2:
				slow.Signal(syscall.SIGCONT)
			}
		}
	})
	got := tell()
	close(over)
	hinder.Wait()
	seams := 0
	for i, s := range got {
		if want[i].Err != nil {
			t.Fatalf("undisturbed, %d: %v", i, want[i].Err)
		}
		if bad := s.Differs(want[i]); bad != "" {
			t.Errorf("stream %d, with %d seams: %s", i, s.Seams, bad)
		}
		seams += s.Seams
	}
	moved, err := r.Metric(metric)
	if moved -= before; int(moved) != seams || seams == 0 || err != nil {
		t.Errorf("%v streams moved, %v; %d seams", moved, err, seams)
	}
	cluster.Wait(t, 10*time.Second, "ledgers empty", r.Idle)
}
