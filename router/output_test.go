package router_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// TestInvalidOutput: if a model's output is not a number the client gets a 500 with its
// code, from either leg. No other worker is asked, and no breaker opens.
func TestInvalidOutput(t *testing.T) {
	const said = `the output of model \"m\" is not a number at position 3`
	decode := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("x-xpyd-outcome", "invalid")
		w.WriteHeader(500)
		fmt.Fprint(w, `{"error":{"message":"`+said+`","type":"server_error","param":null,"code":"model_output_invalid"}}`)
	}
	waits := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	prefill := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("x-xpyd-outcome", "invalid")
		w.WriteHeader(502)
		fmt.Fprint(w, `{"outcome":"invalid","message":"`+said+`"}`)
	}
	for how, on := range map[string]func(p, d *mock){
		"decode's own": func(p, d *mock) { d.on(&d.decode, decode) },
		"prefill's":    func(p, d *mock) { p.on(&p.prefill, prefill); d.on(&d.decode, waits) },
	} {
		t.Run(how, func(t *testing.T) {
			g := newRig(t, 2, 2)
			for i := range 2 {
				on(g.workers[fmt.Sprint("p", i)], g.workers[fmt.Sprint("d", i)])
			}
			const n = 12
			for range n {
				resp, body := g.post("/v1/completions", ask)
				e := apiError(t, body)
				if resp.StatusCode != 500 || e.Code == nil || *e.Code != "model_output_invalid" || !strings.Contains(e.Message, `model "m"`) {
					t.Errorf("%d %s", resp.StatusCode, body)
				}
			}
			if a, b := g.workers["d0"].calls.Load(), g.workers["d1"].calls.Load(); a+b > n {
				t.Errorf("%d and %d attempts", a, b)
			}
			var list struct {
				Instances []struct {
					ID      string
					Breaker struct{ State string }
				}
			}
			g.adminJSON("GET", "/admin/v1/instances", "", &list)
			for _, i := range list.Instances {
				if i.Breaker.State != "closed" {
					t.Errorf("%s: its breaker is %s", i.ID, i.Breaker.State)
				}
			}
		})
	}
}
