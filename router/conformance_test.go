package router_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

// TestReplay: recorded streams pass through byte-true, however they are cut.
func TestReplay(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/sse/*.sse")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, dialect := range []string{"native", "openai"} {
		g := newRig(t, 0, 0)
		d := g.add("d0", fleet.Decode, func(i *fleet.Instance) { i.Dialect = dialect })
		if dialect == "native" {
			g.add("p0", fleet.Prefill)
		}
		g.until("ready", func() bool { return g.r.Ready() && g.idle() })
		for _, file := range files {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, step := range []int{1 << 20, 1000, 7} {
				d.on(&d.decode, func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
					for piece := range slices.Chunk(want, step) {
						_, _ = w.Write(piece)
						w.(http.Flusher).Flush()
					}
				})
				resp, got := g.post("/v1/chat/completions", `{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}`)
				if resp.StatusCode != 200 || got != string(want) || resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" {
					t.Errorf("%s, %s by %d: %d, %d bytes of %d", dialect, file, step, resp.StatusCode, len(got), len(want))
				}
			}
		}
	}
}

// schema is as much of JSON Schema as the error shapes use.
type schema struct {
	Ref        string            `json:"$ref"`
	Type       string            `json:"type"`
	AnyOf      []schema          `json:"anyOf"`
	Properties map[string]schema `json:"properties"`
	Required   []string          `json:"required"`
}

func (s schema) check(all map[string]schema, v any) error {
	if name, ok := strings.CutPrefix(s.Ref, "#/components/schemas/"); ok {
		return all[name].check(all, v)
	}
	if len(s.AnyOf) > 0 {
		var err error
		for _, one := range s.AnyOf {
			if err = one.check(all, v); err == nil {
				return nil
			}
		}
		return err
	}
	is := map[string]bool{}
	switch v.(type) {
	case nil:
		is["null"] = true
	case string:
		is["string"] = true
	case map[string]any:
		is["object"] = true
	}
	if !is[s.Type] {
		return fmt.Errorf("%v is no %s", v, s.Type)
	}
	object, _ := v.(map[string]any)
	for _, name := range s.Required {
		if _, ok := object[name]; !ok {
			return fmt.Errorf("%s is missing", name)
		}
	}
	for name, sub := range s.Properties {
		if part, ok := object[name]; ok {
			if err := sub.check(all, part); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

// TestErrorShapes: whatever the router refuses or fails, the body is what the
// OpenAPI document calls an ErrorResponse.
func TestErrorShapes(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/openapi/error.json")
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]schema
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	g := newRig(t, 1, 1, func(c *router.Config) { c.MaxBodyBytes, c.MaxHeaderBytes, c.Attempts = 1024, 2048, 1 })
	d := g.workers["d0"]
	conform := func(name, body string) {
		t.Helper()
		var v any
		if err := json.Unmarshal([]byte(body), &v); err != nil {
			t.Errorf("%s: %q: %v", name, body, err)
		} else if err := all["ErrorResponse"].check(all, v); err != nil {
			t.Errorf("%s: %q: %v", name, body, err)
		}
	}
	f := func(status int, method, path, body string, header ...string) {
		t.Helper()
		req, _ := http.NewRequest(method, g.url+path, strings.NewReader(body))
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != status || !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json") {
			t.Errorf("%s %s %.40s: %d %s", method, path, body, resp.StatusCode, got)
		}
		conform(fmt.Sprint(status, " ", path), string(got))
	}
	const c = "/v1/completions"
	f(400, "POST", c, `{`)
	f(400, "POST", c, `{"model":"m"}`)
	f(400, "POST", c, `{"model":"m","prompt":"x","bootstrap_room":1}`)
	f(400, "POST", c, ask, "x-request-timeout-ms", "never")
	f(404, "POST", c, `{"model":"none","prompt":"x"}`)
	f(404, "POST", "/v1/embeddings", `{"model":"none"}`)
	f(404, "GET", "/v1/models/none", "")
	f(404, "GET", "/nowhere", "")
	f(405, "GET", c, "")
	f(413, "POST", c, `{"model":"m","prompt":"`+strings.Repeat("x", 2000)+`"}`)
	f(415, "POST", c, ask, "Content-Encoding", "br")
	f(431, "GET", "/v1/models", "", "x-large", strings.Repeat("x", 4000))
	d.on(&d.decode, outcome(503, "no_space"))
	f(503, "POST", c, ask)
	started, ended := make(chan time.Time, 1), make(chan time.Time, 1)
	d.on(&d.decode, hold(started, ended))
	f(504, "POST", c, ask, "x-request-timeout-ms", "60")
	<-ended
	d.on(&d.decode, func(w http.ResponseWriter, _ *http.Request) { // after the first byte it is an event
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"n\":0}\n\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	_, stream := g.post(c, askStream)
	event, _ := strings.CutPrefix(stream, "data: {\"n\":0}\n\ndata: ")
	event, _, _ = strings.Cut(event, "\n\n")
	conform("an event", event)
	d.on(&d.decode, reset)
	f(502, "POST", c, ask)
}
