package router_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/xpyd/xpyd/router"
)

// collector takes OTLP exports and keeps the spans.
type collector struct {
	*httptest.Server
	mu    sync.Mutex
	spans []collected
	fault error
	auth  string
}

type collected struct {
	trace, id, parent, name, err string
	kind, start, end             uint64
	attrs                        map[string]string
}

// fields calls f for each field of a message.
func fields(b []byte, f func(n protowire.Number, v uint64, b []byte)) error {
	for len(b) > 0 {
		n, typ, size := protowire.ConsumeTag(b)
		if size < 0 {
			return protowire.ParseError(size)
		}
		b = b[size:]
		var v uint64
		var part []byte
		switch typ {
		case protowire.VarintType:
			v, size = protowire.ConsumeVarint(b)
		case protowire.Fixed64Type:
			v, size = protowire.ConsumeFixed64(b)
		case protowire.BytesType:
			part, size = protowire.ConsumeBytes(b)
		default:
			return fmt.Errorf("field %d is of type %d", n, typ)
		}
		if size < 0 {
			return protowire.ParseError(size)
		}
		b = b[size:]
		f(n, v, part)
	}
	return nil
}

func newCollector(t *testing.T) *collector {
	c := &collector{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.auth = r.Header.Get("Authorization")
		if err == nil && r.Header.Get("Content-Type") != "application/x-protobuf" {
			err = fmt.Errorf("content type %q", r.Header.Get("Content-Type"))
		}
		note := func(e error) {
			if err == nil {
				err = e
			}
		}
		note(fields(body, func(n protowire.Number, _ uint64, resource []byte) { // ExportTraceServiceRequest
			note(fields(resource, func(n protowire.Number, _ uint64, scope []byte) { // ResourceSpans
				if n == 2 {
					note(fields(scope, func(n protowire.Number, _ uint64, span []byte) { // ScopeSpans
						if n == 2 {
							note(c.span(span))
						}
					}))
				}
			}))
		}))
		if err != nil && c.fault == nil {
			c.fault = err
		}
	}))
	t.Cleanup(c.Close)
	return c
}

func (c *collector) span(b []byte) error {
	s := collected{attrs: map[string]string{}}
	err := fields(b, func(n protowire.Number, v uint64, part []byte) {
		switch n {
		case 1:
			s.trace = fmt.Sprintf("%x", part)
		case 2:
			s.id = fmt.Sprintf("%x", part)
		case 4:
			s.parent = fmt.Sprintf("%x", part)
		case 5:
			s.name = string(part)
		case 6:
			s.kind = v
		case 7:
			s.start = v
		case 8:
			s.end = v
		case 9:
			key, value := "", ""
			_ = fields(part, func(n protowire.Number, _ uint64, p []byte) {
				if n == 1 {
					key = string(p)
					return
				}
				_ = fields(p, func(_ protowire.Number, v uint64, p []byte) {
					if value = string(p); p == nil {
						value = fmt.Sprint(v)
					}
				})
			})
			s.attrs[key] = value
		case 15:
			s.err = string(part)
		}
	})
	c.spans = append(c.spans, s)
	return err
}

// TestTraces: the client's trace goes through both legs, and the router's spans of a
// request are exported if it is sampled.
func TestTraces(t *testing.T) {
	c := newCollector(t)
	g := newRig(t, 1, 1, func(cfg *router.Config) {
		cfg.Tracing.Endpoint, cfg.Tracing.Ratio = c.URL+"/v1/traces", 0
		cfg.Tracing.Headers = map[string]string{"Authorization": "Bearer otel"}
	})
	g.inOrder(story)
	const trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	asked := int64(0)
	f := func(sampled string, header ...string) (p, d string) {
		t.Helper()
		if resp, text := g.post("/v1/completions", askStream, header...); resp.StatusCode != 200 || text != storyText {
			t.Fatalf("%d %q", resp.StatusCode, text)
		}
		var got [2]string
		asked++
		for i, id := range []string{"p0", "d0"} {
			m := g.workers[id]
			if n := m.calls.Load(); n != asked {
				t.Errorf("%d legs came to %s, want %d", n, id, asked)
			}
			m.mu.Lock()
			got[i] = m.last.Get("traceparent")
			if len(header) > 2 && m.last.Get("tracestate") != header[3] {
				t.Errorf("tracestate %q", m.last.Get("tracestate"))
			}
			m.mu.Unlock()
			if !strings.HasSuffix(got[i], sampled) {
				t.Errorf("%s got %q", id, got[i])
			}
		}
		return got[0], got[1]
	}
	f("-00")                                                      // by the ratio
	p, _ := f("-00", "traceparent", "00-"+trace+"-"+parent+"-00") // the client wants none
	if !strings.HasPrefix(p, "00-"+trace+"-") {
		t.Errorf("%q is of another trace", p)
	}
	p, d := f("-01", "traceparent", "00-"+trace+"-"+parent+"-01", "tracestate", "a=b")
	g.shutdown() // exports what is left
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fault != nil || c.auth != "Bearer otel" {
		t.Fatal(c.fault, c.auth)
	}
	by := map[string]collected{}
	for _, s := range c.spans {
		if s.trace != trace || s.end < s.start || s.attrs["xpyd.request_id"] == "" && s.name == "POST /v1/completions" {
			t.Errorf("%+v", s)
		}
		by[s.name] = s
	}
	root := by["POST /v1/completions"]
	if len(by) != 7 || len(c.spans) != 7 || root.parent != parent || root.kind != 2 || root.attrs["http.response.status_code"] != "200" {
		t.Fatalf("%d spans: %+v", len(c.spans), c.spans)
	}
	for name, kind := range map[string]uint64{"admit": 1, "pick": 1, "prefill": 3, "decode": 3, "first_byte": 1, "relay": 1} {
		if s := by[name]; s.parent != root.id || s.kind != kind || s.start < root.start {
			t.Errorf("%s: %+v", name, s)
		}
	}
	for name, header := range map[string]string{"prefill": p, "decode": d} {
		if want := "00-" + trace + "-" + by[name].id + "-01"; header != want {
			t.Errorf("%s was told %q, not %q", name, header, want)
		}
	}
	at := by["decode"].attrs
	if port, err := strconv.Atoi(at["server.port"]); at["xpyd.worker"] != "d0" || at["server.address"] != "127.0.0.1" || err != nil || port == 0 {
		t.Errorf("%+v", by["decode"])
	}
	for key, want := range map[string]string{"http.request.method": "POST", "http.route": "/v1/completions", "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "xpyd", "error.type": ""} {
		if root.attrs[key] != want {
			t.Errorf("%s is %q, want %q", key, root.attrs[key], want)
		}
	}
	if in, err := strconv.Atoi(root.attrs["gen_ai.usage.input_tokens"]); err != nil || in == 0 || root.attrs["gen_ai.usage.output_tokens"] == "" || root.attrs["gen_ai.request.model"] == "" {
		t.Errorf("%+v", root.attrs)
	}
	for _, s := range c.spans {
		for _, v := range s.attrs {
			if strings.Contains(v, "Once upon") {
				t.Errorf("a prompt in %s", s.name)
			}
		}
	}
}

// TestTracedFailure: the root span of a failed request is an error with its reason; a
// client's mistake is not an error.
func TestTracedFailure(t *testing.T) {
	c := newCollector(t)
	g := newRig(t, 1, 1, func(cfg *router.Config) {
		once(cfg)
		cfg.Tracing.Endpoint, cfg.Tracing.Ratio = c.URL+"/v1/traces", 1
		cfg.Tracing.Headers = map[string]string{"Authorization": "Bearer otel"}
	})
	for _, id := range []string{"p0", "d0"} {
		w := g.workers[id]
		broken := func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "broken", http.StatusInternalServerError) }
		w.on(&w.prefill, broken)
		w.on(&w.decode, broken)
	}
	if resp, text := g.post("/v1/completions", askStream); resp.StatusCode < 500 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	if resp, text := g.post("/v1/chat/completions", `{"model":`); resp.StatusCode != 400 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	g.shutdown()
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, s := range c.spans {
		switch s.name {
		case "POST /v1/completions":
			if n++; s.err == "" || s.attrs["error.type"] != s.attrs["http.response.status_code"] {
				t.Errorf("no error: %+v", s)
			}
		case "POST /v1/chat/completions":
			if n++; s.err != "" {
				t.Errorf("the client's error: %+v", s)
			}
		}
	}
	if n != 2 {
		t.Errorf("%d roots of %d spans", n, len(c.spans))
	}
}

// TestTracingOff: the client's context goes through as it came.
func TestTracingOff(t *testing.T) {
	g := newRig(t, 1, 1)
	g.inOrder(story)
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	g.post("/v1/completions", ask, "traceparent", parent, "tracestate", "a=b")
	for _, id := range []string{"p0", "d0"} {
		m := g.workers[id]
		m.mu.Lock()
		if m.last.Get("traceparent") != parent || m.last.Get("tracestate") != "a=b" {
			t.Errorf("%s: %v", id, m.last)
		}
		m.mu.Unlock()
	}
}

// TestServerTiming: where the engine does not say how long prefill took, the
// router does.
func TestServerTiming(t *testing.T) {
	g, _, _ := pairRig(t, "vllm-nixl", 1, 1)
	resp, _ := g.post("/v1/completions", askLive)
	line := resp.Header.Get("Server-Timing")
	for _, part := range []string{"queue;dur=", ", prefill;dur=", ", ttft;dur="} {
		if !strings.Contains(line, part) {
			t.Errorf("no %q in %q", part, line)
		}
	}
}

// TestRecentRequests: the list and the waterfall, as JSON and as text, without
// the prompt; no more than so many.
func TestRecentRequests(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.History = 3 })
	g.inOrder(story)
	for i := range 5 {
		g.post("/v1/completions", askStream, "x-request-id", fmt.Sprint("r", i))
		g.until("idle", g.idle) // its client may know of the end first
	}
	g.post("/v1/completions", `{"model":"none","prompt":"Once upon"}`, "x-request-id", "refused")
	g.until("idle", g.idle)
	type info struct {
		ID     string `json:"request_id"`
		Status int
		Phases []struct {
			Name    string
			StartMS float64  `json:"start_ms"`
			EndMS   *float64 `json:"end_ms"`
			Worker  string
		}
	}
	var list struct{ Requests []info }
	g.adminJSON("GET", "/debug/requests", "", &list)
	if len(list.Requests) != 3 || list.Requests[0].ID != "refused" || list.Requests[1].ID != "r4" || list.Requests[2].ID != "r3" {
		t.Fatalf("%+v", list)
	}
	var one info
	g.adminJSON("GET", "/debug/requests/r4", "", &one)
	var names []string
	for _, p := range one.Phases {
		names = append(names, p.Name)
		if p.EndMS == nil || *p.EndMS < p.StartMS {
			t.Errorf("%+v", p)
		}
	}
	if got := strings.Join(names, " "); got != "admit pick prefill decode first_byte relay" {
		t.Errorf("%s", got)
	}
	text := func(path string) string {
		req, _ := http.NewRequest("GET", g.admin+path, nil)
		req.Header.Set("Authorization", "Bearer secret")
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return string(b)
	}
	all := text("/debug/requests?format=text&n=2") + text("/debug/requests/r4?format=text")
	for _, want := range []string{"refused", "404", "p0/d0", "relay", "====", "d0 done, attempt 1"} {
		if !strings.Contains(all, want) {
			t.Errorf("no %q in\n%s", want, all)
		}
	}
	if strings.Contains(text("/debug/requests?format=text&n=2"), "r3") {
		t.Error("more than asked for")
	}
	if all += text("/debug/requests") + text("/debug/requests/r4"); bytes.Contains([]byte(all), []byte("Once upon")) {
		t.Errorf("a prompt in\n%s", all)
	}
}
