package router_test

import (
	"encoding/json"
	"net/http"
	"testing"
)

// TestPinEverywhere: a pin goes to every worker with its body, and each one's
// answer comes back, refusals too.
func TestPinEverywhere(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	for id, m := range g.workers {
		m.on(&m.other, func(w http.ResponseWriter, r *http.Request) {
			m.mu.Lock()
			body := m.body
			m.mu.Unlock()
			if id == "p0" && r.Method == "DELETE" {
				w.WriteHeader(http.StatusNotFound)
			}
			json.NewEncoder(w).Encode(map[string]string{"worker": id, "asked": r.Method + " " + r.URL.Path, "body": string(body)})
		})
	}
	for verb, body := range map[string]string{"GET": "", "POST": `{"prompt":"a prompt","ttl_s":5}`, "DELETE": `{"id":"00"}`} {
		var out map[string]map[string]string
		if code := g.adminJSON(verb, "/admin/v1/cache/pin", body, &out); code != 200 || len(out) != 2 {
			t.Errorf("%s: status %d, %v", verb, code, out)
		}
		for id, got := range out {
			if got["worker"] != id || got["asked"] != verb+" /xpyd/v1/cache/pin" || got["body"] != body {
				t.Errorf("%s: %s says %v", verb, id, got)
			}
		}
	}
	if code := g.adminJSON("PUT", "/admin/v1/cache/pin", "", nil); code != 404 {
		t.Errorf("PUT: status %d", code)
	}
}
