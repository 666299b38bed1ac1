package router_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// TestLongReason: however much a worker writes as its reason, answers and log stay short.
func TestLongReason(t *testing.T) {
	g := newRig(t, 1, 1)
	p := g.workers["p0"]
	p.on(&p.prefill, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("x-xpyd-outcome", "incompatible")
		w.WriteHeader(503)
		fmt.Fprintf(w, `{"outcome":"incompatible","message":"because %s"}`, strings.Repeat("é", 1<<19))
	})
	d := g.workers["d0"]
	d.on(&d.decode, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	resp, body := g.post("/v1/completions", ask)
	if resp.StatusCode < 500 || len(body) > 8<<10 || !strings.Contains(body, "because") {
		t.Errorf("%d, %d bytes: %.200s", resp.StatusCode, len(body), body)
	}
	if n := len(g.logs.String()); n > 256<<10 {
		t.Errorf("%d bytes of log", n)
	}
}
