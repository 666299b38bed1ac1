package router_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestDashboard: a browser signs in with a token, is then as good as it by cookie and key together, sends a client's
// request through the admin listener, and signs out.
func TestDashboard(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	var cookie, key string
	f := func(verb, path, body string, want int, more ...string) (*http.Response, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), verb, g.admin+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if cookie != "" {
			req.Header.Set("Cookie", cookie)
		}
		if key != "" {
			req.Header.Set("X-Xpyd-Session", key)
		}
		for i := 0; i+1 < len(more); i += 2 {
			req.Header.Set(more[i], more[i+1])
		}
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != want {
			t.Errorf("%s %s: %d %.200s, want %d", verb, path, resp.StatusCode, text, want)
		}
		return resp, string(text)
	}
	f("GET", "/dashboard", "", 200)
	f("HEAD", "/dashboard/app.css", "", 200)
	f("GET", "/dashboard/../dashboard/app.js", "", 200)
	f("GET", "/dashboard/%2e%2e/console.go", "", 401) // it is no path of the page any more
	f("POST", "/dashboard/session", `{"token":"wrong"}`, 401)
	f("POST", "/dashboard/session", `{"token":"secret"}`, 401, "Origin", "http://evil.example")
	resp, body := f("POST", "/dashboard/session", `{"token":"secret"}`, 200)
	set := resp.Header.Get("Set-Cookie")
	for _, want := range []string{"HttpOnly", "SameSite=Strict", "max-age=43200", "path=/"} {
		if !strings.Contains(strings.ToLower(set), strings.ToLower(want)) {
			t.Errorf("the cookie lacks %s: %s", want, set)
		}
	}
	if strings.Contains(set, "secret") || strings.Contains(body, "secret") {
		t.Errorf("the token is in the answer: %s %s", set, body)
	}
	var in struct{ As, Key string }
	if err := json.Unmarshal([]byte(body), &in); err != nil || in.As != "admin" || in.Key == "" {
		t.Fatalf("%s: %v", body, err)
	}
	cookie, _, _ = strings.Cut(set, ";")
	f("GET", "/admin/v1/instances", "", 401) // by the cookie alone, as from any other page
	f("POST", "/admin/v1/instances/d0/drain", `{"force":true}`, 401)
	key = in.Key
	for _, path := range []string{"/dashboard/session", "/admin/v1/instances", "/admin/v1/history", "/admin/v1/events", "/admin/v1/requests", "/debug/ledger"} {
		f("GET", path, "", 200)
	}
	f("GET", "/debug/pprof/profile", "", 401)
	f("POST", "/admin/v1/instances/d0/undrain", "", 401, "Origin", "http://127.0.0.1:1")
	f("POST", "/admin/v1/instances/d0/undrain", "", 200)

	resp, body = f("POST", "/admin/v1/try/completions", `{"model":"m","prompt":"hello","max_tokens":3,"stream":true}`, 200)
	if !strings.Contains(body, "data: [DONE]") || resp.Header.Get("X-Request-Id") == "" {
		t.Errorf("the stream is %q", body)
	}
	f("POST", "/admin/v1/try/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":3}`, 200)
	f("POST", "/admin/v1/try/embeddings", `{}`, 404)
	_, list := f("GET", "/admin/v1/requests", "", 200)
	if !strings.Contains(list, resp.Header.Get("X-Request-Id")) || !strings.Contains(list, `"path":"/v1/completions"`) {
		t.Errorf("the request is not in %s", list)
	}
	f("DELETE", "/dashboard/session", "", 204)
	f("GET", "/admin/v1/instances", "", 401)
}
