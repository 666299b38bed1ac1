package router_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/router"
)

// from sends a request as a page's browser does.
func (g *rig) from(origin, method, path, body string, header ...string) *http.Response {
	g.t.Helper()
	req, err := http.NewRequest(method, g.url+path, strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	if origin != "" {
		req.Header.Set("Origin", origin)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := g.client.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// TestCORS: which pages may ask, and what a browser does not ask about beforehand.
func TestCORS(t *testing.T) {
	const page, stranger = "https://chat.example.com", "http://attacker.example"
	const form, json = "text/plain;charset=UTF-8", "application/json"
	asks := []string{"Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "authorization, content-type"}
	for name, c := range map[string]struct {
		origins          []string
		mine, others     string // what a page is told
		preflight, alien int    // statuses
		posted           int    // of a stranger's form
	}{
		"nobody":   {nil, "", "", 403, 403, 403},
		"one page": {[]string{page}, page, "", 204, 403, 403},
		"all":      {[]string{"*"}, "*", "*", 204, 204, 200},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, 1, 1, func(cfg *router.Config) { cfg.CORS.Origins = c.origins })
			g.inOrder(story)
			told := func(r *http.Response) string { return r.Header.Get("Access-Control-Allow-Origin") }
			for _, path := range []string{"/v1/chat/completions", "/v1/embeddings"} {
				r := g.from(page, "OPTIONS", path, "", asks...)
				if r.StatusCode != c.preflight || told(r) != c.mine {
					t.Errorf("%s: %d %q", path, r.StatusCode, told(r))
				}
				if c.mine != "" && (r.Header.Get("Access-Control-Allow-Methods") != "POST" || r.Header.Get("Access-Control-Allow-Headers") != asks[3] || r.Header.Get("Access-Control-Max-Age") != "600") {
					t.Errorf("%s: %v", path, r.Header)
				}
			}
			if r := g.from(stranger, "OPTIONS", "/v1/completions", "", asks...); r.StatusCode != c.alien || told(r) != c.others {
				t.Errorf("a stranger's preflight: %d %q", r.StatusCode, told(r))
			}
			if r := g.from(page, "OPTIONS", "/nowhere", "", asks...); r.StatusCode != 404 {
				t.Errorf("nowhere: %d", r.StatusCode)
			}
			if r := g.from(page, "POST", "/v1/completions", askStream, "Content-Type", json); r.StatusCode != 200 || told(r) != c.mine {
				t.Errorf("a page: %d %q", r.StatusCode, told(r))
			}
			if r := g.from(stranger, "GET", "/v1/models", ""); r.StatusCode != 200 || told(r) != c.others {
				t.Errorf("a stranger reads: %d %q", r.StatusCode, told(r))
			}
			for _, kind := range []string{form, "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""} {
				if r := g.from(stranger, "POST", "/v1/completions", askStream, "Content-Type", kind); r.StatusCode != c.posted {
					t.Errorf("a stranger's form of %q: %d", kind, r.StatusCode)
				}
				if r := g.from("null", "POST", "/v1/completions", askStream, "Content-Type", kind); r.StatusCode != c.posted {
					t.Errorf("of nowhere, %q: %d", kind, r.StatusCode)
				}
				for _, own := range []string{"", g.url} { // curl, and a page of this address
					if r := g.from(own, "POST", "/v1/completions", askStream, "Content-Type", kind); r.StatusCode != 200 {
						t.Errorf("%q of %q: %d", kind, own, r.StatusCode)
					}
				}
			}
		})
	}
}

// TestCORSConfig: what is no origin is refused by its key.
func TestCORSConfig(t *testing.T) {
	for _, bad := range []string{"", "example.com", "https://", "https://a/", "https://a/b", "https://u@a", "**", "null"} {
		cfg := router.DefaultConfig()
		cfg.CORS.Origins = []string{bad}
		var e *config.KeyError
		if err := cfg.Validate(); !errors.As(err, &e) || e.Key != "cors.origins" {
			t.Errorf("%q: %v", bad, err)
		}
	}
	cfg := router.DefaultConfig()
	cfg.CORS.Origins = []string{"*", "https://a:8443", "http://[::1]:3000", "app://x"}
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	cfg.CORS.MaxAge = -1
	var e *config.KeyError
	if err := cfg.Validate(); !errors.As(err, &e) || e.Key != "cors.max_age" {
		t.Error(err)
	}
}

// TestOpenAPI: the document has every path, by its method, and resolves its own references.
func TestOpenAPI(t *testing.T) {
	g := newRig(t, 1, 1)
	status, text := g.get("/openapi.json")
	var doc struct {
		OpenAPI    string
		Paths      map[string]map[string]json.RawMessage
		Components struct{ Schemas map[string]json.RawMessage }
	}
	if err := json.Unmarshal([]byte(text), &doc); err != nil || status != 200 || doc.OpenAPI != "3.1.0" {
		t.Fatalf("%d %v %.100s", status, err, text)
	}
	paths := map[string]bool{}
	for _, r := range router.Routes() {
		if r.Listener != "public" || r.Path == "/metrics" {
			continue
		}
		paths[r.Path] = true
		if _, ok := doc.Paths[r.Path][strings.ToLower(r.Method)]; !ok {
			t.Errorf("%s %s is not there", r.Method, r.Path)
		}
		want, other := "schemas/Error\"", "schemas/MessagesError\""
		if strings.HasPrefix(r.Path, "/v1/messages") {
			want, other = other, want
		}
		if of := string(doc.Paths[r.Path][strings.ToLower(r.Method)]); !strings.Contains(of, want) || strings.Contains(of, other) {
			t.Errorf("%s: errors are not of %s: %s", r.Path, want, of)
		}
	}
	if len(paths) != len(doc.Paths) {
		t.Errorf("%d paths, %d in routes", len(doc.Paths), len(paths))
	}
	for _, part := range strings.Split(text, `"#/components/schemas/`)[1:] {
		name, _, _ := strings.Cut(part, `"`)
		if _, ok := doc.Components.Schemas[name]; !ok {
			t.Errorf("no schema %s", name)
		}
	}
	for _, field := range []string{`"allowed_token_ids"`, `"messages"`, `"return_token_strs"`} {
		if !strings.Contains(text, field) {
			t.Errorf("%s is not there", field)
		}
	}
}

// TestSmallPaths: what monitors and vLLM's clients ask for.
func TestSmallPaths(t *testing.T) {
	g := newRig(t, 1, 1)
	for path, want := range map[string]string{"/ping": "{}", "/load": `{"server_load":0}`} {
		if status, text := g.get(path); status != 200 || text != want {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
	began, ends := make(chan struct{}), make(chan struct{})
	g.inOrder(func(w http.ResponseWriter, r *http.Request) {
		close(began)
		<-ends
		whole(w, r)
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.post("/v1/completions", `{"model":"m","prompt":"x"}`)
	}()
	<-began
	if _, text := g.get("/load"); text != `{"server_load":1}` {
		t.Error(text)
	}
	close(ends)
	<-done
	d := g.workers["d0"]
	var asked string
	d.on(&d.other, func(w http.ResponseWriter, r *http.Request) {
		asked = r.Method + " " + r.URL.Path
		w.Write([]byte(`{"tokenizer_class":"x"}`))
	})
	if status, text := g.get("/tokenizer_info?model=m"); status != 200 || text != `{"tokenizer_class":"x"}` || asked != "GET /tokenizer_info" {
		t.Errorf("%d %s, asked %s", status, text, asked)
	}
	if status, text := g.get("/tokenizer_info?model=none"); status != 404 {
		t.Errorf("%d %s", status, text)
	}
}
