package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestTop(t *testing.T) {
	answers := map[string]string{
		"/admin/v1/instances": `{"ready":true,"at":"2026-01-02T03:04:05Z","planner":"planner: all is well","instances":[
			{"id":"d0","role":"decode","state":"live","probed":true,"load":{"running":3,"waiting":1,"kv_used":0.5}},
			{"id":"p0","role":"prefill","state":"live","probed":true,"breaker":{"state":"open","why":"5 failures in a row"}}]}`,
		"/admin/v1/history": `{"columns":["seq","output_tokens","ttft_p95"],"next":3,"ttft_promise_s":0.5,"points":[[0,0,0],[1,10,0.1],[2,20,0.2]]}`,
		"/admin/v1/events":  `{"next":2,"events":[{"at":"2026-01-02T03:04:00Z","who":"d0","text":"joined"},{"at":"2026-01-02T03:04:01Z","text":"a \u001b[2Jreload"}]}`,
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, answers[r.URL.Path])
	}))
	defer srv.Close()
	out, errs, code := xpyd(t, "top", "--admin", srv.URL, "--token", "x")
	if code != exitDone || errs != "" {
		t.Fatalf("%d %q", code, errs)
	}
	for _, want := range []string{", ready\n", "output    20 tok/s        ▄█\n", "TTFT p95  200 ms of 500", "█████░░░░░", "5 failures in a row", "planner: all is well", "d0: joined\n", "a  [2Jreload\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	if strings.Index(out, "reload") > strings.Index(out, "joined") {
		t.Error("the older event is first")
	}
	if _, errs, code = xpyd(t, "top", "--admin", "127.0.0.1:1", "--token", "x"); code != exitFailed || !strings.Contains(errs, "no router at") {
		t.Errorf("%d %q", code, errs)
	}
}

func TestSparkline(t *testing.T) {
	for want, values := range map[string][]float64{"": nil, "  ": {0, 0}, " ▁█": {0, 1e-9, 8}, "██": {3, 3}, " █": {-1, 2}} {
		if got := sparkline(values); got != want {
			t.Errorf("%v: %q, want %q", values, got, want)
		}
	}
	for want, share := range map[string]float64{"░░░░░░░░░░": -1, "█░░░░░░░░░": 0.1, "██████████": 7} {
		if got := gauge(share); got != want {
			t.Errorf("%v: %q", share, got)
		}
	}
}

// TestCropped: no line wraps, and the page's top stays in sight.
func TestCropped(t *testing.T) {
	const page = "äöü\nabcd\nx\n"
	for _, c := range []struct {
		width, height int
		want          string
	}{{0, 0, page}, {3, 0, "äöü\nabc\nx\n"}, {2, 2, "äö\n"}, {9, 4, page}} {
		if got := cropped(page, c.width, c.height); got != c.want {
			t.Errorf("%d, %d: %q", c.width, c.height, got)
		}
	}
}
