package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/mock"
)

func startMock(t *testing.T, cfg mock.Config) *mock.Engine {
	t.Helper()
	cfg.Dialect, cfg.Role, cfg.Listen, cfg.Model = "openai", "decode", "127.0.0.1:0", "m"
	e, err := mock.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

// bench runs a benchmark and returns its report.
func bench(t *testing.T, args ...string) report.Report {
	t.Helper()
	out, errs, code := xpyd(t, append(append([]string{"bench"}, args...), "--model", "m", "--json", "-")...)
	if code != exitDone {
		t.Fatalf("%v: %d %s", args, code, errs)
	}
	var r report.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v: %v: %s", args, err, out)
	}
	return r
}

// TestBench: what the mock takes is what the report says.
func TestBench(t *testing.T) {
	e := startMock(t, mock.Config{TTFT: 20 * time.Millisecond, ITL: 4 * time.Millisecond})
	page := filepath.Join(t.TempDir(), "r.html")
	for _, endpoint := range []string{"chat", "completions"} {
		r := bench(t, "--url", e.URL(), "--endpoint", endpoint, "--concurrency", "2,4", "--requests", "12", "--warmup", "2", "--output", "5", "--ignore-eos", "--slo", "e2e=10s", "--html", page, "--api-key", "secret")
		if len(r.Phases) != 3 || r.Phases[0].Measured || !r.Phases[2].Measured || r.Phases[2].Concurrency != 4 {
			t.Fatalf("%+v", r.Phases)
		}
		for _, p := range r.Phases[1:] {
			if p.Requests.Completed != 12 || p.Requests.Failed != 0 || p.Goodput.Requests != 12 || p.Tokens.Output.Mean != 5 || p.Tokens.FromUsage != 12 {
				t.Errorf("%s %s: %+v %+v", endpoint, p.Name, p.Requests, p.Tokens)
			}
			l := p.Latency
			if l.TTFT.Min < 20 || l.ITL.Count != 48 || l.TPOT.Count != 12 || l.E2E.Min < 36 { // a reader that did not run sees tokens closer together than they were sent
				t.Errorf("%s %s: %+v", endpoint, p.Name, l)
			}
		}
		if b, err := os.ReadFile(page); err != nil || strings.Contains(string(b), "secret") {
			t.Errorf("the page: %v, or it has the key", err)
		}
	}
	records := e.Records()
	var body struct {
		Messages []struct{ Content string }
		Ignore   bool `json:"ignore_eos"`
	}
	last := records[0]
	if err := json.Unmarshal([]byte(last.Body), &body); err != nil || !body.Ignore || len(strings.Fields(body.Messages[0].Content)) != 512 || last.Header.Get("Authorization") != "Bearer secret" {
		t.Errorf("%v %+v", err, last.Header)
	}
}

// TestBenchOpen: an open loop at a rate, and a trace with its shared prefixes.
func TestBenchOpen(t *testing.T) {
	e := startMock(t, mock.Config{TTFT: time.Millisecond})
	r := bench(t, "--url", e.URL(), "--rate", "200", "--duration", "500ms", "--output", "3", "--burstiness", "fixed", "--no-stream")
	p := r.Phases[0]
	if p.Mode != "open" || p.Arrival != "fixed" || p.RateAsked != 200 || p.Requests.Completed > 99 || p.Requests.Completed == 0 || p.Latency.SchedE2E == nil || p.Latency.TTFT.Count != 0 {
		t.Errorf("%+v", p)
	}
	trace := filepath.Join(t.TempDir(), "t.jsonl")
	lines := `{"timestamp":0,"input_length":700,"output_length":2,"hash_ids":[1,2]}
{"timestamp":100,"input_length":600,"output_length":3,"hash_ids":[1,3]}
{"timestamp":200,"input_length":9000,"output_length":3}
`
	if err := os.WriteFile(trace, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	r = bench(t, "--url", e.URL(), "--endpoint", "completions", "--trace", trace, "--speed", "10", "--max-context", "8192")
	if p = r.Phases[0]; p.Arrival != "trace" || p.Requests.Completed != 2 {
		t.Errorf("%+v", p)
	}
	records := e.Records()
	var prompts [2][]string
	for i := range prompts {
		var body struct{ Prompt string }
		if err := json.Unmarshal([]byte(records[len(records)-2+i].Body), &body); err != nil {
			t.Fatal(err)
		}
		prompts[i] = strings.Fields(body.Prompt)
	}
	if len(prompts[0]) < len(prompts[1]) { // they are 10 ms apart, and may overtake each other
		slices.Reverse(prompts[:])
	}
	n := 0
	for n < 600 && prompts[0][n] == prompts[1][n] {
		n++
	}
	if len(prompts[0]) != 700 || len(prompts[1]) != 600 || n < 512 || n > 515 {
		t.Errorf("%d and %d words, %d in common", len(prompts[0]), len(prompts[1]), n)
	}
}

// TestBenchMultiturn: each turn has the mock's real answers before it.
func TestBenchMultiturn(t *testing.T) {
	e := startMock(t, mock.Config{})
	r := bench(t, "multiturn", "--url", e.URL(), "--clients", "2", "--working-set", "3", "--conversations", "6", "--turns", "3", "--input", "10", "--output", "4", "--prefix", "20", "--think", "1ms")
	p := r.Phases[0]
	if p.Requests.Completed != 18 || len(p.Turns) != 3 || p.Turns[2].E2E.Count != 6 || r.Load.Kind != "multiturn" {
		t.Errorf("%+v", p)
	}
	for _, rec := range e.Records() {
		var body struct {
			Messages []struct{ Role, Content string }
		}
		var raw struct{ Messages []json.RawMessage }
		if json.Unmarshal([]byte(rec.Body), &body) != nil || json.Unmarshal([]byte(rec.Body), &raw) != nil {
			t.Fatal(rec.Body)
		}
		for i, m := range body.Messages {
			if m.Role != "assistant" {
				continue
			}
			before := make([]string, i)
			for j := range before {
				before[j] = string(raw.Messages[j])
			}
			want := ""
			for _, w := range mock.Words("["+strings.Join(before, ",")+"]", 0, 4) {
				want += w
			}
			if m.Content != want {
				t.Errorf("message %d is %q, the answer was %q", i, m.Content, want)
			}
		}
	}
}

// TestBenchFailures: failures have their kinds, and a run without an answer
// fails.
func TestBenchFailures(t *testing.T) {
	e := startMock(t, mock.Config{Fault: mock.Fault{Status: 503}})
	out, errs, code := xpyd(t, "bench", "--url", e.URL(), "--model", "m", "--requests", "5", "--output", "3")
	if code != exitFailed || !strings.Contains(errs, "no request completed") || !strings.Contains(out, "failed http_503          5  mock: status 503 was ordered") {
		t.Errorf("%d %q %s", code, errs, out)
	}
	f := func(want string, args ...string) {
		t.Helper()
		_, errs, code := xpyd(t, append([]string{"bench", "--progress", "off"}, args...)...)
		if code != exitUsage || !strings.Contains(errs, want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: exit code %d: %q lacks %q", args, code, errs, want)
		}
	}
	url := []string{"--url", e.URL(), "--model", "m"}
	f("--url is missing")
	f("--endpoint", append(url, "--endpoint", "x")...)
	f("give one", append(url, "--rate", "1", "--concurrency", "1")...)
	f("--rate", append(url, "--rate", "1,x")...)
	f("--burstiness", append(url, "--rate", "1", "--burstiness", "-1x")...)
	f("burstiness -1", append(url, "--rate", "1", "--burstiness", "-1")...)
	f("--slo", append(url, "--slo", "ttft")...)
	f("--slo", append(url, "--slo", "p99=1s")...)
	f("--no-stream", append(url, "--slo", "e2e=1s,ttft=1s", "--no-stream")...)
	f("--input", append(url, "--input", "0")...)
	f("--prompt-ids", append(url, "--prompt-ids", "1-5")...)
	f("--extra", append(url, "--extra", `{"stream":false}`)...)
	f("http://HOST", "--url", "localhost:8000")
	f("the ramp", append(url, "--duration", "1s", "--ramp", "2s")...)
	f("no more clients", "multiturn", "--url", e.URL(), "--clients", "4", "--working-set", "2")
	f("--think", "multiturn", "--url", e.URL(), "--think", "x")
}
