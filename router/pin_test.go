package router_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
)

// everyStatus makes each worker answer all requests but legs with a status of its own,
// and say what it was asked; 0 breaks the connection.
func (g *rig) everyStatus(statuses map[string]int) {
	for id, status := range statuses {
		m := g.workers[id]
		m.on(&m.other, func(w http.ResponseWriter, r *http.Request) {
			if status == 0 {
				reset(w, r)
				return
			}
			m.mu.Lock()
			body := m.body
			m.mu.Unlock()
			w.WriteHeader(status)
			json.NewEncoder(w).Encode(map[string]string{"worker": id, "asked": r.Method + " " + r.URL.String(), "body": string(body)})
		})
	}
}

// TestPinEverywhere: a pin goes to every worker with its body, and each one's
// answer comes back, refusals too.
func TestPinEverywhere(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	g.everyStatus(map[string]int{"p0": 200, "d0": 201})
	f := func(verb, body string, status int) {
		t.Helper()
		var out map[string]map[string]string
		if code := g.adminJSON(verb, "/admin/v1/cache/pin", body, &out); code != status || len(out) != 2 {
			t.Errorf("%s: status %d, %v", verb, code, out)
		}
		for id, got := range out {
			if got["worker"] != id || got["asked"] != verb+" /xpyd/v1/cache/pin" || got["body"] != body {
				t.Errorf("%s: %s says %v", verb, id, got)
			}
		}
	}
	const pin, unpin = `{"prompt":"a prompt","ttl_s":5}`, `{"id":"00"}`
	f("GET", "", 200)
	f("POST", pin, 200)
	f("DELETE", unpin, 200)
	g.everyStatus(map[string]int{"p0": 404, "d0": 404})
	f("GET", "", 200) // it only reports
	f("POST", pin, 404)
	f("DELETE", unpin, 404)
	for path, want := range map[string]int{"/pin": 405, "/flush/": 405, "/other": 404, "x": 404} {
		if code := g.adminJSON("PUT", "/admin/v1/cache"+path, "", nil); code != want {
			t.Errorf("PUT %s: status %d", path, code)
		}
	}
}

// TestPinStatus: the status reports whether a pin holds everywhere.
func TestPinStatus(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	for _, c := range []struct{ prefill, decode, want int }{
		{200, 200, 200},
		{409, 409, 409},
		{429, 429, 429},
		{504, 504, 504},
		{404, 429, 429},
		{409, 400, 409},
		{500, 503, 502},
		{404, 503, 502},
		{200, 409, 200},
		{404, 200, 200},
		{200, 429, 502},
		{500, 200, 502},
		{200, 0, 502},
		{0, 0, 502},
		{304, 304, 502},
	} {
		g.everyStatus(map[string]int{"p0": c.prefill, "d0": c.decode})
		req, _ := http.NewRequest("POST", g.admin+"/admin/v1/cache/pin", strings.NewReader(`{"prompt":"x","ttl_s":5}`))
		req.Header.Set("Authorization", "Bearer secret")
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var said map[string]any
		err = json.NewDecoder(resp.Body).Decode(&said)
		resp.Body.Close()
		if resp.StatusCode != c.want || err != nil || said["p0"] == nil || said["d0"] == nil {
			t.Errorf("%d and %d: status %d, not %d: %v, %v", c.prefill, c.decode, resp.StatusCode, c.want, said, err)
		}
		if retry := resp.Header.Get("Retry-After"); (retry != "") != (c.want == 429) {
			t.Errorf("%d and %d: Retry-After %q", c.prefill, c.decode, retry)
		}
	}
}

// TestBadPin: what is wrong for every worker is refused before any is asked.
func TestBadPin(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	var asked atomic.Int64
	for _, m := range g.workers {
		m.on(&m.other, func(w http.ResponseWriter, r *http.Request) { asked.Add(1); whole(w, r) })
	}
	for _, c := range []struct{ verb, body, param, message string }{
		{"DELETE", "", "", "the body must be JSON: it is empty; send {"},
		{"POST", "nonsense", "", "the body must be JSON: "},
		{"POST", `{"promp":"x"}`, "promp", "promp is unknown"},
		{"POST", `{"prompt":"x"}`, "ttl_s", "ttl_s is required"},
		{"DELETE", `{}`, "id", "id, prompt or messages is required"},
	} {
		var out struct {
			Error struct{ Message, Type, Param string }
		}
		if code := g.adminJSON(c.verb, "/admin/v1/cache/pin", c.body, &out); code != 400 || out.Error.Param != c.param ||
			out.Error.Type != "invalid_request_error" || !strings.Contains(out.Error.Message, c.message) {
			t.Errorf("%s %s: status %d, %+v", c.verb, c.body, code, out)
		}
	}
	if n := asked.Load(); n != 0 {
		t.Errorf("workers were asked %d times", n)
	}
}

// TestCacheEverywhere shows every worker's cache, and flushes: with one worker that
// fails, and without any worker.
func TestCacheEverywhere(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	f := func(verb, path, asked string, status int) {
		t.Helper()
		var out map[string]map[string]string
		if code := g.adminJSON(verb, "/admin/v1/cache"+path, "", &out); code != status || len(out) != 2 {
			t.Errorf("%s %s: status %d, %v", verb, path, code, out)
		}
		for id, got := range out {
			if want := fmt.Sprintf("%s /xpyd/v1/cache%s", verb, asked); got["worker"] != id || got["asked"] != want {
				t.Errorf("%s %s: %s says %v", verb, path, id, got)
			}
		}
	}
	g.everyStatus(map[string]int{"p0": 200, "d0": 200})
	f("GET", "", "", 200)
	f("POST", "/flush", "/flush", 200)
	f("POST", "/flush?store=true", "/flush?store=true", 200)
	f("POST", "/flush?store=false", "/flush", 200)
	g.everyStatus(map[string]int{"d0": 504})
	f("GET", "", "", 200)
	f("POST", "/flush", "/flush", 502)
	g.everyStatus(map[string]int{"p0": 504})
	f("POST", "/flush", "/flush", 504)

	none := newRig(t, 0, 0)
	none.add("other", fleet.Decode, func(i *fleet.Instance) { i.Dialect = "vllm-nixl" }) // has no such thing
	var out map[string]map[string]any
	if code := none.adminJSON("POST", "/admin/v1/cache/flush", "", &out); code != 503 || out["error"]["code"] != "unavailable" {
		t.Errorf("without a worker: status %d, %v", code, out)
	}
	if code := none.adminJSON("GET", "/admin/v1/cache", "", &out); code != 200 {
		t.Errorf("without a worker: status %d, %v", code, out)
	}
}
