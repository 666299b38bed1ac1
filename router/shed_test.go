package router_test

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/router"
)

// TestShed: a request that a worker has shed, by either leg, is a 503 for the client at once. No other worker
// is asked: others have no time to spare either. No breaker opens, and the log has it.
func TestShed(t *testing.T) {
	t.Parallel()
	const said = `the promised time to the first token cannot be kept`
	decode := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("x-xpyd-outcome", "shed")
		w.WriteHeader(503)
		fmt.Fprint(w, `{"error":{"message":"`+said+`","type":"server_error","param":null,"code":"shed"}}`)
	}
	waits := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	prefill := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("x-xpyd-outcome", "shed")
		w.WriteHeader(503)
		fmt.Fprint(w, `{"outcome":"shed","message":"`+said+`"}`)
	}
	t.Run("hedged", func(t *testing.T) { // what the first pair says ends the second
		g := newRig(t, 2, 2, hedged)
		second := make(chan struct{})
		links := g.first(func(w http.ResponseWriter, r *http.Request) {
			<-second
			decode(w, r)
		}, func(_ http.ResponseWriter, r *http.Request) {
			close(second)
			<-r.Context().Done()
		})
		resp, text := g.post("/v1/completions", ask)
		if e := apiError(t, text); resp.StatusCode != 503 || e.Code == nil || *e.Code != "shed" || len(links()) != 2 {
			t.Errorf("%d %s after %d attempts", resp.StatusCode, text, len(links()))
		}
		g.until("the ledger to be empty", g.idle)
	})
	for how, on := range map[string]func(p, d *mock){
		"decode's":  func(p, d *mock) { d.on(&d.decode, decode) },
		"prefill's": func(p, d *mock) { p.on(&p.prefill, prefill); d.on(&d.decode, waits) },
		"both":      func(p, d *mock) { p.on(&p.prefill, prefill); d.on(&d.decode, decode) },
	} {
		t.Run(how, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "requests")
			g := newRig(t, 2, 2, func(c *router.Config) { c.RequestLog.File = path })
			for i := range 2 {
				on(g.workers[fmt.Sprint("p", i)], g.workers[fmt.Sprint("d", i)])
			}
			const n = 12
			for i := range n {
				body := ask
				if i%2 == 1 {
					body = strings.Replace(ask, "{", `{"stream":true,`, 1)
				}
				resp, text := g.post("/v1/completions", body)
				e := apiError(t, text)
				if resp.StatusCode != 503 || e.Code == nil || *e.Code != "shed" || resp.Header.Get("Retry-After") != "1" || !strings.Contains(e.Message, said) {
					t.Errorf("%d %v %s", resp.StatusCode, resp.Header, text)
				}
			}
			if text := g.logs.String(); strings.Contains(text, "level=WARN") {
				t.Errorf("the log is full of what is meant to happen: %s", text)
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
			g.until("the ledger to be empty", g.idle)
			g.until("the log", func() bool {
				b, err := os.ReadFile(path)
				return err == nil && strings.Count(string(b), `"status":503`) == n
			})
		})
	}
}
