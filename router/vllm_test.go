package router_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/router"
)

// TestBatchAndInvocations: a batch of chats goes to its workers' path, and an invocation to that of what its body
// is; both are counted under the path that the client asked.
func TestBatchAndInvocations(t *testing.T) {
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	said := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"choices":[],"path":"`+r.URL.Path+`"}`)
	}
	d.on(&d.decode, said)
	d.on(&d.other, said)
	const chat, chats, text = "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions"
	const one, several = `"messages":[{"role":"user","content":"a"}]`, `"messages":[[{"role":"user","content":"a"}],[{"role":"user","content":"b"}]]`
	for _, c := range []struct{ path, body, want string }{
		{chats, `{"model":"m",` + several + `}`, chats},
		{"/invocations", `{"model":"m",` + one + `}`, chat},
		{"/invocations", `{"model":"m","prompt":"a"}`, text},
	} {
		if resp, body := g.post(c.path, c.body); resp.StatusCode != 200 || !strings.Contains(body, `"path":"`+c.want+`"`) {
			t.Errorf("%s %s: %d %s", c.path, c.body, resp.StatusCode, body)
		}
	}
	for _, c := range []struct{ path, body, want string }{
		{chats, `{"model":"m","prompt":"a"}`, "messages is required"},
		{"/invocations", `{"model":"m"}`, "prompt is required"},
		{text, `{"model":"m","prompt":null,"prompt_embeds":[]}`, "Either prompt or prompt_embeds must be provided and non-empty."},
		{text, `{"model":"m","prompt_embeds":"AAAA"}`, `"param":"prompt_embeds"`},
		{chats, `{"model":"m",` + several + `,"kv_transfer_params":{}}`, "kv_transfer_params"},
		{chats, `{"model":"m","messages":[[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://inside/x"}}]}]]}`, "media_hosts"},
	} {
		if resp, body := g.post(c.path, c.body); resp.StatusCode != 400 || !strings.Contains(body, c.want) {
			t.Errorf("%s %s: %d %s", c.path, c.body, resp.StatusCode, body)
		}
	}
	if n := g.counted("/invocations", 200); n != 2 {
		t.Errorf("%v invocations", n)
	}
}

// TestRootPath: paths below the root that a proxy shows are as those without it, behind the same keys.
func TestRootPath(t *testing.T) {
	g := newRig(t, 1, 1, func(cfg *router.Config) { cfg.RootPath, cfg.APIKeys = "/llm", []string{"secret"} })
	g.inOrder(whole)
	for _, c := range []struct {
		path, key string
		status    int
	}{
		{"/llm/v1/completions", "secret", 200}, {"/v1/completions", "secret", 200}, {"/llm/v1/completions", "wrong", 401}, {"/v1/completions", "", 401},
		{"/llm/llm/v1/completions", "secret", 404}, {"/llmv1/completions", "secret", 404}, {"/other/v1/completions", "secret", 404},
	} {
		if resp, body := g.post(c.path, `{"model":"m","prompt":"x"}`, "Authorization", "Bearer "+c.key); resp.StatusCode != c.status {
			t.Errorf("%s with %q: %d %s", c.path, c.key, resp.StatusCode, body)
		}
	}
	if status, text := g.get("/llm/health"); status != 200 {
		t.Errorf("%d %s", status, text)
	}
	var asked string
	d := g.workers["d0"]
	p := g.workers["p0"]
	note := func(w http.ResponseWriter, r *http.Request) { asked = r.RequestURI; whole(w, r) }
	d.on(&d.other, note)
	p.on(&p.other, note)
	if resp, body := g.post("/llm/v1/rerank?a=b", `{"model":"m"}`, "Authorization", "Bearer secret"); resp.StatusCode != 200 || asked != "/v1/rerank?a=b" {
		t.Errorf("%d %s, asked %s", resp.StatusCode, body, asked)
	}
	for _, bad := range []string{"/", "llm", "/llm/", "/a//b", "/a/../b", "/a b", "/a?b", "/v1", "/v1/chat", "/health"} {
		cfg := router.DefaultConfig()
		cfg.RootPath = bad
		var e *config.KeyError
		if err := cfg.Validate(); !errors.As(err, &e) || e.Key != "root_path" {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestLoadReport: who asks by ORCA's header gets the load of the decode worker that answered.
func TestLoadReport(t *testing.T) {
	g := newRig(t, 1, 1)
	g.inOrder(whole)
	for format, want := range map[string]string{
		"TEXT":   "TEXT named_metrics.kv_cache_usage_perc=0.0000, named_metrics.num_requests_waiting=0",
		"json":   `JSON {"named_metrics": {"kv_cache_usage_perc": 0.0000, "num_requests_waiting": 0}}`,
		"BINARY": "", "": "",
	} {
		resp, body := g.post("/v1/completions", `{"model":"m","prompt":"x"}`, "endpoint-load-metrics-format", format)
		if got := resp.Header.Get("endpoint-load-metrics"); resp.StatusCode != 200 || got != want {
			t.Errorf("%q: %d %q %s", format, resp.StatusCode, got, body)
		}
	}
}
