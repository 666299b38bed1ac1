package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
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

// told is a stream as its client saw it.
type told struct {
	decode  string
	seams   int
	created []string
	events  map[string][]string // by choice, in order; "" for those without one
	pause   time.Duration       // the longest between two events
	err     error
}

var (
	createdField = regexp.MustCompile(`"created":\d+,`)
	cachedField  = regexp.MustCompile(`"cached_tokens":\d+`)
)

// tell sends a request and reads the answer; met is called with the number of a stream's events so
// far. The answer to one that does not stream is one event, for which met is not called.
func tell(ctx context.Context, client *http.Client, url, id, body string, met func(decode string, n int)) *told {
	s := &told{events: map[string][]string{}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		s.err = err
		return s
	}
	req.Header.Set("x-request-id", id)
	resp, err := client.Do(req)
	if err != nil {
		s.err = err
		return s
	}
	defer resp.Body.Close()
	s.decode = resp.Header.Get("x-xpyd-decode")
	if resp.StatusCode == 200 && strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		s.err = s.read(resp.Body, met)
	} else if whole, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
		s.err = fmt.Errorf("status %d, %v: %s", resp.StatusCode, err, whole)
	} else {
		s.note("whole", string(whole))
	}
	return s
}

// tellOf tells one of takenOver.
func tellOf(t *testing.T, client *http.Client, url string, i int, met func(decode string, n int)) *told {
	a := &takenOver[i]
	return tell(t.Context(), client, url+a.path, fmt.Sprintf("told-%d", i),
		fmt.Sprintf(`{"model":"medium","stream":true,"ignore_eos":true,"max_tokens":240,"seed":%d,%s}`, i+1, a.fields), met)
}

// note keeps an event without what may differ.
func (s *told) note(choice, data string) {
	if at := createdField.FindString(data); !slices.Contains(s.created, at) {
		s.created = append(s.created, at)
	}
	data = cachedField.ReplaceAllString(createdField.ReplaceAllString(data, ""), "")
	s.events[choice] = append(s.events[choice], data)
}

// differs says in what s is not as want; "" if it is.
func (s *told) differs(want *told) string {
	if s.err != nil {
		return s.err.Error()
	}
	if len(s.created) != 1 {
		return fmt.Sprintf("created at %v", s.created)
	}
	if k, l := slices.Sorted(maps.Keys(s.events)), slices.Sorted(maps.Keys(want.events)); !slices.Equal(k, l) {
		return fmt.Sprintf("choices %q, want %q", k, l)
	}
	for c, events := range want.events {
		for n := range max(len(events), len(s.events[c])) {
			if n >= len(events) || n >= len(s.events[c]) || events[n] != s.events[c][n] {
				return fmt.Sprintf("choice %s, event %d of %d, %d wanted:\n%q\n%q", c, n, len(s.events[c]), len(events),
					s.events[c][min(n, len(s.events[c])):min(n+2, len(s.events[c]))], events[min(n, len(events)):min(n+2, len(events))])
			}
		}
	}
	return ""
}

func (s *told) read(body io.Reader, met func(string, int)) error {
	in := bufio.NewReader(body)
	last := time.Time{}
	for n := 1; ; {
		line, err := in.ReadString('\n')
		if err != nil {
			return fmt.Errorf("it just stopped: %w", err)
		}
		line = strings.TrimSuffix(line, "\n")
		data, ok := strings.CutPrefix(line, "data: ")
		switch {
		case line == "":
			continue
		case line == ": xpyd seam":
			s.seams++
			continue
		case data == "[DONE]":
			_, err := io.Copy(io.Discard, in)
			return err
		case !ok:
			return fmt.Errorf("a line %q", line)
		}
		var e struct {
			Choices []struct{ Index int }
			Error   any
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil || e.Error != nil {
			return fmt.Errorf("%v in %s", err, data)
		}
		choice := ""
		if len(e.Choices) > 0 {
			choice = fmt.Sprint(e.Choices[0].Index)
		}
		s.note(choice, data)
		now := time.Now()
		if n > 1 {
			s.pause = max(s.pause, now.Sub(last))
		}
		last = now
		met(s.decode, n)
		n++
	}
}

// all tells all streams at once.
func all(t *testing.T, client *http.Client, url string, met func(decode string, n int)) []*told {
	t.Helper()
	out := make([]*told, len(takenOver))
	var wg sync.WaitGroup
	for i := range takenOver {
		wg.Go(func() { out[i] = tellOf(t, client, url, i, met) })
	}
	wg.Wait()
	return out
}

// disturbed tells all streams and, when all have begun, does something to a decode worker of one.
func disturbed(t *testing.T, client *http.Client, url string, do func(decode string)) (got []*told, victim string) {
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
	r := cluster.Alone(t, "--config", config(t), "--nats", cluster.StartNATS(t).URL)
	model := mediumModel(t)
	procs := map[string]*cluster.Process{}
	for _, id := range []string{"prefill-0", "decode-0", "decode-1"} {
		role, _, _ := strings.Cut(id, "-")
		procs[id] = r.Worker(t, fleet.Role(role), "--id", id, "--model", model)
	}
	r.WaitServing(t, time.Minute, 1, 2)
	return r, procs
}

// TestFaultsTakeover: when a decode worker is killed, its streams go on at the other, and each
// event is what it would have been.
func TestFaultsTakeover(t *testing.T) {
	t.Parallel()
	r, procs := alone(t)
	client := cluster.NewClient(t)
	want := all(t, client, r.URL, func(string, int) {})
	for i, s := range want {
		if s.err != nil || s.seams != 0 {
			t.Fatalf("undisturbed: %v, %d seams in %s", s.err, s.seams, takenOver[i].fields)
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
func same(t *testing.T, got, want []*told, victim string) (seams int) {
	t.Helper()
	for i, s := range got {
		if s.err != nil {
			t.Errorf("%s: %v", takenOver[i].fields, s.err)
			continue
		}
		if seams += s.seams; s.seams > 1 || s.seams == 1 && s.decode != victim {
			t.Errorf("%d seams in the stream of %s, %s died", s.seams, s.decode, victim)
		}
		if bad := s.differs(want[i]); bad != "" {
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
		if s.seams > 0 {
			pause = max(pause, s.pause)
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
	if want.err != nil || got.err != nil || want.seams != 0 || got.seams != 1 || !maps.EqualFunc(got.events, want.events, slices.Equal) {
		t.Errorf("%v, %d seams, %d and %d events, want %v, %d and %d", got.err, got.seams, len(got.events["0"]), len(got.events["1"]),
			want.err, len(want.events["0"]), len(want.events["1"]))
	}
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
}
