package faults

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/e2e/unbroken"
	"github.com/xpyd/xpyd/internal/fleet"
)

// takenOver are requests whose streams are to outlive their decode worker. Each has a seed.
var takenOver = []struct{ path, fields string }{
	{"/v1/completions", `"prompt":"Once upon a time","temperature":0`},
	{"/v1/completions", `"prompt":"Once upon a time","temperature":1.2,"n":2,"logprobs":2,"return_token_ids":true,"stream_options":{"include_usage":true}`},
	{"/v1/completions", `"prompt":["The dog","A cat and a"],"temperature":0.9,"echo":true,"logprobs":1,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`},
	{"/v1/completions", `"prompt":[5,6,7,8,9,10,11,12],"temperature":1,"stop":["the park every day","zzz"],"frequency_penalty":0.7,"presence_penalty":0.4`},
	{"/v1/completions", `"prompt":"Lily","temperature":1.5,"repetition_penalty":1.3,"logit_bias":{"20":2},"min_tokens":20,"top_k":40`},
	{"/v1/chat/completions", `"messages":[{"role":"user","content":"Tell me of a dog"}],"temperature":0.8,"stream_options":{"include_usage":true}`},
	{"/v1/chat/completions", `"messages":[{"role":"user","content":"Hello"}],"temperature":1.1,"n":2,"logprobs":true,"top_logprobs":3`},
	{"/v1/chat/completions", `"messages":[{"role":"system","content":"Be short"},{"role":"user","content":"Hi"}],"temperature":1,"stop":["a","qq"],"min_tokens":120,"return_token_ids":true`},
	{"/v1/completions", `"prompt":[` + strings.Repeat("5,6,7,8,9,10,11,12,", 20) + `13],"temperature":1.1,"n":2,"logprobs":1,"stop":["zzz"],"presence_penalty":0.3`},
}

// tellOf tells one of takenOver.
func tellOf(t *testing.T, client *http.Client, url string, i int, met func(decode string, n int)) *unbroken.Answer {
	a := &takenOver[i]
	return unbroken.Tell(t.Context(), client, url+a.path, fmt.Sprintf("told-%d", i),
		fmt.Sprintf(`{"model":"medium","stream":true,"ignore_eos":true,"max_tokens":240,"seed":%d,%s}`, i+1, a.fields), met)
}

// all tells all streams at once.
func all(t *testing.T, client *http.Client, url string, met func(decode string, n int)) []*unbroken.Answer {
	t.Helper()
	out := make([]*unbroken.Answer, len(takenOver))
	var wg sync.WaitGroup
	for i := range takenOver {
		wg.Go(func() { out[i] = tellOf(t, client, url, i, met) })
	}
	wg.Wait()
	return out
}

// disturbed tells all streams and, when all have begun, does something to a decode worker of one.
func disturbed(t *testing.T, client *http.Client, url string, do func(decode string)) (got []*unbroken.Answer, victim string) {
	t.Helper()
	var mu sync.Mutex
	begun := 0
	got = all(t, client, url, func(decode string, n int) {
		mu.Lock()
		defer mu.Unlock()
		if n == 10 {
			begun++
		}
		if begun == len(takenOver) && victim == "" { // this stream is far from its end
			victim = decode
			do(decode)
		}
	})
	return got, victim
}

// alone starts a prefill and two decode workers that nobody starts again.
func alone(t *testing.T) (*cluster.Router, map[string]*cluster.Process) {
	t.Helper()
	return aloneWith(t, map[string]string{"prefill-0": "1", "decode-0": "1", "decode-1": "1"})
}

// aloneWith is alone for workers of so many ranks.
func aloneWith(t *testing.T, ranks map[string]string) (*cluster.Router, map[string]*cluster.Process) {
	t.Helper()
	r := cluster.Alone(t, "--config", config(t), "--nats", cluster.StartNATS(t).URL)
	model := mediumModel(t)
	procs := map[string]*cluster.Process{}
	for _, id := range []string{"prefill-0", "decode-0", "decode-1"} {
		role, _, _ := strings.Cut(id, "-")
		procs[id] = r.Worker(t, fleet.Role(role), "--id", id, "--model", model, "--tensor-parallel", ranks[id])
	}
	r.WaitServing(t, time.Minute, 1, 2)
	return r, procs
}

// TestFaultsTakeover: when a decode worker is killed, its streams go on at the other, and each
// event is what it would have been.
func TestFaultsTakeover(t *testing.T) {
	t.Parallel()
	r, procs := alone(t)
	takesOver(t, r, procs)
}

// TestFaultsTakeoverRanks: so they do where each worker has another number of ranks.
func TestFaultsTakeoverRanks(t *testing.T) {
	t.Parallel()
	r, procs := aloneWith(t, map[string]string{"prefill-0": "2", "decode-0": "3", "decode-1": "1"})
	takesOver(t, r, procs)
}

func takesOver(t *testing.T, r *cluster.Router, procs map[string]*cluster.Process) {
	t.Helper()
	client := cluster.NewClient(t)
	want := all(t, client, r.URL, func(string, int) {})
	for i, s := range want {
		if s.Err != nil || s.Seams != 0 {
			t.Fatalf("undisturbed: %v, %d seams in %s", s.Err, s.Seams, takenOver[i].fields)
		}
	}

	got, victim := disturbed(t, client, r.URL, func(decode string) { procs[decode].Kill() })
	seams := same(t, got, want, victim)
	continued := (&scene{Router: r}).continued(t)
	if seams == 0 || continued != seams {
		t.Errorf("%d seams, %d takeovers after the death of %s", seams, continued, victim)
	}
	pauses, err := r.Metric("xpyd_router_takeover_pause_seconds_sum")
	t.Logf("%d streams went on, after %.0f ms on average, %v", seams, 1000*pauses/max(float64(continued), 1), err)
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
}

// same checks streams that outlived their decode worker against undisturbed ones, and counts the
// seams.
func same(t *testing.T, got, want []*unbroken.Answer, victim string) (seams int) {
	t.Helper()
	for i, s := range got {
		if s.Err != nil {
			t.Errorf("%s: %v", takenOver[i].fields, s.Err)
			continue
		}
		if seams += s.Seams; s.Seams > 1 || s.Seams == 1 && s.Decode != victim {
			t.Errorf("%d seams in the stream of %s, %s died", s.Seams, s.Decode, victim)
		}
		if bad := s.Differs(want[i]); bad != "" {
			t.Errorf("%s: %s", takenOver[i].fields, bad)
		}
	}
	return seams
}

// TestFaultsTakeoverStopped: when a decode worker is stopped, its streams go on at the other long
// before it is called dead, and what it says when it is woken reaches nobody.
func TestFaultsTakeoverStopped(t *testing.T) {
	t.Parallel()
	r, procs := alone(t)
	client := cluster.NewClient(t)
	want := all(t, client, r.URL, func(string, int) {})
	got, victim := disturbed(t, client, r.URL, func(decode string) { procs[decode].Signal(syscall.SIGSTOP) })
	procs[victim].Signal(syscall.SIGCONT)
	seams := same(t, got, want, victim)
	if seams == 0 {
		t.Errorf("%s had no streams", victim)
	}
	pause := time.Duration(0)
	for _, s := range got {
		if s.Seams > 0 {
			pause = max(pause, s.Pause)
		}
	}
	t.Logf("%d streams went on, the longest pause was %v", seams, pause)
	if cluster.Late(pause, 1500*time.Millisecond) {
		t.Errorf("a stream stood still for %v", pause)
	}
	r.WaitServing(t, 10*time.Second, 1, 2)
	n, err := r.Metric(`xpyd_router_takeovers_total{outcome="continued",reason="silent"}`)
	if err != nil || int(n) != seams {
		t.Errorf("%v streams of silent workers went on, %d seams, %v", n, seams, err)
	}
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
}

// TestFaultsTakeoverForced: when a decode worker is made to end before its streams have, they go on
// at the other.
func TestFaultsTakeoverForced(t *testing.T) {
	t.Parallel()
	r, procs := alone(t)
	client := cluster.NewClient(t)
	want := all(t, client, r.URL, func(string, int) {})
	got, victim := disturbed(t, client, r.URL, func(decode string) {
		procs[decode].Signal(syscall.SIGTERM)
		cluster.Wait(t, 10*time.Second, "it to drain", func() error {
			if log := procs[decode].Stderr.String(); !strings.Contains(log, "draining") {
				return errors.New(log)
			}
			return nil
		})
		procs[decode].Signal(syscall.SIGTERM)
	})
	seams := same(t, got, want, victim)
	failed, err := r.Metric(`xpyd_router_takeovers_total{outcome="continued",reason="error"}`)
	moved, merr := r.Metric(`xpyd_router_takeovers_total{outcome="continued",reason="drain"}`)
	if err != nil || merr != nil || int(failed+moved) != seams || seams == 0 {
		t.Errorf("%v streams of workers that failed went on and %v had moved before, %d seams, %v, %v", failed, moved, seams, err, merr)
	}
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
}

// TestFaultsTakeoverAlone: where the only decode worker is killed, its stream waits for the one
// that `up` starts in its place.
func TestFaultsTakeoverAlone(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--prefill", "1", "--decode", "1", "--config", config(t), "--model", mediumModel(t))
	client := cluster.NewClient(t)
	const which = 1
	want := tellOf(t, client, r.URL, which, func(string, int) {})
	f, err := r.Fleet()
	if err != nil {
		t.Fatal(err)
	}
	pid := f.Get("decode-0").PID
	got := tellOf(t, client, r.URL, which, func(_ string, n int) {
		if n == 10 {
			_ = syscall.Kill(pid, syscall.SIGKILL) // what follows tells
		}
	})
	if want.Err != nil || got.Err != nil || want.Seams != 0 || got.Seams != 1 || !maps.EqualFunc(got.Events, want.Events, slices.Equal) {
		t.Errorf("%v, %d seams, %d and %d events, want %v, %d and %d", got.Err, got.Seams, len(got.Events["0"]), len(got.Events["1"]),
			want.Err, len(want.Events["0"]), len(want.Events["1"]))
	}
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
}
