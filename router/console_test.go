package router_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/flight"
)

// heard is what a worker was asked on other paths than the legs'.
type heard struct{ what, body string }

// hear has a worker answer so, and keeps what it is asked.
func (m *mock) hear(answer http.HandlerFunc) <-chan heard {
	list := make(chan heard, 64)
	m.on(&m.other, func(w http.ResponseWriter, r *http.Request) {
		m.mu.Lock()
		list <- heard{r.Method + " " + r.URL.RequestURI(), string(m.body)}
		m.mu.Unlock()
		answer(w, r)
	})
	return list
}

// TestOrdersAsSaid: what workers are told of an order, and which answers are relayed.
func TestOrdersAsSaid(t *testing.T) {
	t.Parallel()
	g := newRig(t, 2, 2)
	list := g.workers["d0"].hear(whole)
	for _, c := range []struct{ action, body, want string }{
		{"drain", "", ""}, {"undrain", `{"wait_only":true}`, ""}, {"drain", `{"wait_only":true}`, `{"wait_only":true}`}, {"undrain", "", ""}, {"role", `{"role":"decode","wait_only":true}`, `{"role":"decode"}`},
	} {
		if got := g.adminJSON("POST", "/admin/v1/instances/d0/"+c.action, c.body, nil); got != 200 {
			t.Errorf("%s: %d", c.action, got)
		}
		if got := <-list; got != (heard{"POST /xpyd/v1/" + c.action, c.want}) {
			t.Errorf("%s %s: it hears %+v", c.action, c.body, got)
		}
	}
	for path, want := range map[string]int{"DELETE d0": 400, "POST d0/drain": 400, "POST d0/role": 400} {
		verb, path, _ := strings.Cut(path, " ")
		if got := g.adminJSON(verb, "/admin/v1/instances/"+path, "{", nil); got != want {
			t.Errorf("%s %s with half a body: %d", verb, path, got)
		}
	}
	g.add("e", fleet.Decode, func(i *fleet.Instance) { i.Dialect, i.Model = "openai", "other" })
	var e refusal
	if got := g.adminJSON("POST", "/admin/v1/instances/e/role", `{"role":"prefill"}`, &e); got != 400 || !strings.Contains(e.Error.Message, "e is an engine of dialect openai: only native workers") {
		t.Errorf("an engine's role: %d %s", got, e.Error.Message)
	}
	if got := g.adminJSON("DELETE", "/admin/v1/instances/nobody", "", nil); got != 404 {
		t.Errorf("nobody is taken out: %d", got)
	}
	g.workers["d0"].srv.CloseClientConnections()
	g.workers["d0"].srv.Listener.Close()
	if got := g.adminJSON("POST", "/admin/v1/instances/d0/drain", "", &e); got != 502 || !strings.Contains(e.Error.Message, "this router sends it nothing all the same") {
		t.Errorf("a worker that is gone: %d %s", got, e.Error.Message)
	}
}

// TestAdminMethods: a path of the admin listener says which methods it has.
func TestAdminMethods(t *testing.T) {
	t.Parallel()
	g := newRigOf(t, func(d *router.Deps) {
		d.Mounts = map[string]fasthttp.RequestHandler{"POST /admin/v1/scale": func(*fasthttp.RequestCtx) {}}
	}, 1, 1)
	for ask, allow := range map[string]string{
		"PUT /admin/v1/instances": "GET, POST", "GET /admin/v1/instances/d0/drain": "POST", "GET /admin/v1/instances/d0": "DELETE",
		"DELETE /debug/ledger": "GET", "PUT /admin/v1/scale": "POST", "GET /admin/v1/workers": "", "GET /admin/v1/nothing": "",
	} {
		verb, path, _ := strings.Cut(ask, " ")
		status := 405
		if allow == "" { // nothing is mounted there
			status = 404
		}
		req, err := http.NewRequest(verb, g.admin+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer secret")
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != status || resp.Header.Get("Allow") != allow {
			t.Errorf("%s: %d, allowed %q", ask, resp.StatusCode, resp.Header.Get("Allow"))
		}
	}
}

// TestAsk: a worker's whole answer in time, or an error.
func TestAsk(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	cut := func(w http.ResponseWriter, _ *http.Request) {
		conn, out, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprint(out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{}")
		out.Flush()
	}
	silent := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for name, c := range map[string]struct {
		answer  http.HandlerFunc
		timeout time.Duration
		limit   int
		want    string
	}{
		"whole":     {whole, time.Minute, 1 << 10, `{"whole":true}`},
		"too large": {whole, time.Minute, 5, ""},
		"cut short": {cut, time.Minute, 1 << 10, ""},
		"silent":    {silent, 20 * time.Millisecond, 1 << 10, ""},
	} {
		d.on(&d.other, c.answer)
		r, err := g.r.Ask(g.watcher.Snapshot().Get("d0"), flight.Question{ID: "x", Method: "GET", Path: "/xpyd/v1/x", Timeout: c.timeout, Limit: c.limit})
		if (err == nil) != (c.want != "") || err == nil && (string(r.Body) != c.want || r.Status != 200 || !strings.HasPrefix(r.ContentType, "application/json")) {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
}

// TestEveryWorkerAsked: all workers are asked, also where they are more than are asked at once, and
// what no worker would say is an error of its own.
func TestEveryWorkerAsked(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	for i := range 40 {
		g.add(fmt.Sprintf("x%d", i), fleet.Prefill, func(i *fleet.Instance) { i.Model = "other" })
	}
	for id, status := range map[string]int{"x0": 200, "x1": 302, "x2": 404, "x3": 599, "x4": 600, "x5": 299} {
		g.workers[id].on(&g.workers[id].other, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			fmt.Fprint(w, `{"own":"words"}`)
		})
	}
	g.workers["x6"].on(&g.workers["x6"].other, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "words") })
	var all map[string]json.RawMessage
	if got := g.adminJSON("GET", "/admin/v1/cache", "", &all); got != 200 || len(all) != 42 {
		t.Errorf("%d: %d answers", got, len(all))
	}
	for id, want := range map[string]string{"x0": "own", "x1": "status 302, which no worker answers", "x2": "own", "x3": "own", "x4": "status 600, which", "x5": "own", "x6": "status 200, and no JSON", "p0": "whole"} {
		if !strings.Contains(string(all[id]), want) {
			t.Errorf("%s: %s, want %q", id, all[id], want)
		}
	}
}

// TestProfiles: the router's and the workers' profiles are turned on, shown, downloaded and ended.
func TestProfiles(t *testing.T) {
	g := newRig(t, 1, 1)
	const path = "/admin/v1/profile"
	list := g.workers["d0"].hear(whole)
	ask := func(verb, query string, want int) (string, http.Header) {
		t.Helper()
		req, _ := http.NewRequest(verb, g.admin+path+query, nil)
		req.Header.Set("Authorization", "Bearer secret")
		req.Header.Set("x-request-id", "mine")
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != want || resp.Header.Get("x-request-id") != "mine" {
			t.Errorf("%s %s: %d %.200s, %v", verb, query, resp.StatusCode, body, resp.Header)
		}
		return string(body), resp.Header
	}
	hears := func(want string) {
		t.Helper()
		select {
		case got := <-list:
			if got.what != want {
				t.Errorf("it hears %q, want %q", got.what, want)
			}
		default:
			t.Errorf("it does not hear %q", want)
		}
	}
	type said struct {
		Router  struct{ On bool }
		Workers map[string]struct{ Whole bool }
	}
	both := func(verb, query string, on bool) {
		t.Helper()
		var s said
		if text, _ := ask(verb, query, 200); json.Unmarshal([]byte(text), &s) != nil || s.Router.On != on || !s.Workers["d0"].Whole || !s.Workers["p0"].Whole {
			t.Errorf("%s: %s", verb, text)
		}
	}
	for _, query := range []string{"?seconds=0", "?seconds=", "?seconds=x", "?seconds=601", "?seconds=0&instance=d0", "?seconds=-1&instance=router"} {
		ask("POST", query, 400)
	}
	both("GET", "", false)
	hears("GET /xpyd/v1/profile")
	both("POST", "?seconds=60", true)
	hears("POST /xpyd/v1/profile?seconds=60")
	if text, _ := ask("POST", "", 200); !strings.Contains(text, `"router":{"error":`) {
		t.Errorf("a second profile of the router: %s", text)
	}
	hears("POST /xpyd/v1/profile")
	both("DELETE", "", false)
	hears("DELETE /xpyd/v1/profile")
	if body, h := ask("GET", "?instance=router", 200); h.Get("Content-Type") != "application/octet-stream" || len(body) == 0 {
		t.Errorf("the router's profile: %d bytes, %v", len(body), h)
	}
	ask("GET", "?instance=nobody", 404)

	if body, h := ask("GET", "?instance=d0", 200); h.Get("Content-Type") != "application/octet-stream" || !strings.Contains(h.Get("Content-Disposition"), "cpu.pprof") || body != `{"whole":true}` {
		t.Errorf("%s, %v", body, h)
	}
	hears("GET /xpyd/v1/profile?download")
	if _, h := ask("POST", "?instance=d0&seconds=5", 200); h.Get("Content-Type") != "application/json" || h.Get("Content-Disposition") != "" {
		t.Errorf("%v", h)
	}
	hears("POST /xpyd/v1/profile?seconds=5")
	list = g.workers["d0"].hear(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404); fmt.Fprint(w, `{}`) })
	if _, h := ask("GET", "?instance=d0", 404); h.Get("Content-Type") != "application/json" || h.Get("Content-Disposition") != "" {
		t.Errorf("%v", h)
	}
}
