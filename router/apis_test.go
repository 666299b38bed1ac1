package router_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/apikey"
)

// api is how a client asks in one of the APIs that chats stand behind.
type api struct{ path, ask string }

var apis = map[string]api{
	"responses": {"/v1/responses", `{"model":"m","input":"hi","tools":[{"type":"function","name":"f"}]`},
	"messages":  {"/v1/messages", `{"model":"m","max_tokens":50,"messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","input_schema":{}}]`},
}

func (a api) whole() string  { return a.ask + "}" }
func (a api) stream() string { return a.ask + `,"stream":true}` }

// said is what a chat's decode says, an event each, of which every one but the last is a token.
var said = []string{
	`{"choices":[{"index":0,"delta":{"role":"assistant","content":"","reasoning_content":"th","reasoning":"th"},"finish_reason":null}]`,
	`{"choices":[{"index":0,"delta":{"reasoning_content":"ink","reasoning":"ink"},"finish_reason":null}]`,
	`{"choices":[{"index":0,"delta":{"content":"Hel"},"finish_reason":null}]`,
	`{"choices":[{"index":0,"delta":{"content":"lo \"ä\""},"finish_reason":null}]`,
	`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":""}}]},"finish_reason":null}]`,
	`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\":"}}]},"finish_reason":null}]`,
	`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]},"finish_reason":"tool_calls"}]`,
	`{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":7,"total_tokens":16,"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":2}}`,
}

const saidWhole = `{"id":"c","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello \"ä\"","reasoning_content":"think","reasoning":"think",` +
	`"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},"finish_reason":"tool_calls"}],` +
	`"usage":{"prompt_tokens":9,"completion_tokens":7,"total_tokens":16,"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":2}}}`

// saidStream is said as a stream, framed for a takeover from a token on.
func saidStream(framed bool, from int) (list []string) {
	for i, e := range said[from:] {
		text := "data: " + e + `,"id":"c","model":"m","created":` + fmt.Sprint(madeAt) + "}\n\n"
		if n := from + i; framed && n < len(said)-1 {
			mark, who := ":t", ""
			if n == len(said)-2 {
				mark = ":f"
			}
			if i == 0 {
				who = fmt.Sprintf(" %d %s", madeAt, hashed)
			}
			text = fmt.Sprintf("%s 0 %s%s\n", mark, openai.AppendIDs(nil, []int32{int32(n)}), who) + text
		}
		list = append(list, text)
	}
	return append(list, "data: [DONE]\n\n")
}

// says answers a chat, whole or as a stream.
func says(w http.ResponseWriter, r *http.Request, body string) {
	w.Header().Set("x-xpyd-prompt", "9 4")
	if !strings.Contains(body, `"stream":true`) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, saidWhole)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	for _, e := range saidStream(r.Header.Get("x-xpyd-tokens") == "1", 0) {
		io.WriteString(w, e)
		w.(http.Flusher).Flush()
	}
}

// chats makes a decode answer chats by f, which gets the body.
func (g *rig) chats(id string, f func(w http.ResponseWriter, r *http.Request, body string)) {
	d := g.workers[id]
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		d.mu.Lock()
		body := string(d.body)
		d.mu.Unlock()
		f(w, r, body)
	})
}

var varying = regexp.MustCompile(`[0-9a-f]{48}|"(created_at|completed_at)":\d+`)

// alike is a text without what differs between two alike answers.
func alike(text string) string { return varying.ReplaceAllString(text, "ID") }

// TestAPIs: workers see a chat, clients their own API, and logs and metrics the path that was asked.
func TestAPIs(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	g.chats("d0", func(w http.ResponseWriter, r *http.Request, body string) {
		if r.URL.Path != "/v1/chat/completions" || !strings.Contains(body, `"messages":[{"role":"user","content":"hi"}]`) || !strings.Contains(body, `"function":{"name":"f"`) {
			t.Errorf("the worker got %s %s", r.URL.Path, body)
		}
		says(w, r, body)
	})
	for name, want := range map[string]struct {
		whole  string
		events []string
	}{
		"responses": {`"output":[{"id":"rs_ID00","type":"reasoning","status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"think"}]},` +
			`{"id":"msg_ID01","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello \"ä\"","annotations":[],"logprobs":[]}]},` +
			`{"id":"fc_ID02","type":"function_call","status":"completed","call_id":"c1","name":"f","arguments":"{\"a\":1}"}],"usage":{"input_tokens":9,`,
			strings.Fields("created in_progress output_item.added content_part.added reasoning_text.delta reasoning_text.delta reasoning_text.done content_part.done output_item.done " +
				"output_item.added content_part.added output_text.delta output_text.delta output_text.done content_part.done output_item.done " +
				"output_item.added function_call_arguments.delta function_call_arguments.delta function_call_arguments.done output_item.done completed")},
		"messages": {`"content":[{"type":"thinking","thinking":"think","signature":"unsigned"},{"type":"text","text":"Hello \"ä\""},` +
			`{"type":"tool_use","id":"c1","name":"f","input":{"a":1}}],"stop_reason":"tool_use","stop_sequence":null,"usage":{"input_tokens":5,`,
			strings.Fields("message_start ping content_block_start content_block_delta content_block_delta content_block_delta content_block_stop " +
				"content_block_start content_block_delta content_block_delta content_block_stop content_block_start content_block_delta content_block_delta content_block_stop message_delta message_stop")},
	} {
		a := apis[name]
		resp, text := g.post(a.path, a.whole(), "x-request-id", "r-"+name)
		if resp.StatusCode != 200 || !strings.Contains(alike(text), want.whole) || !json.Valid([]byte(text)) || resp.Header.Get("Content-Type") != "application/json" ||
			resp.Header.Get("x-xpyd-decode") != "d0" || resp.Header.Get("x-request-id") != "r-"+name {
			t.Errorf("%s: %d %s %v", name, resp.StatusCode, text, resp.Header)
		}
		resp, text = g.post(a.path, a.stream())
		var events []string
		for line := range strings.Lines(text) {
			if e, ok := strings.CutPrefix(line, "event: "); ok {
				events = append(events, strings.TrimPrefix(strings.TrimSpace(e), "response."))
			}
		}
		if resp.StatusCode != 200 || strings.Join(events, " ") != strings.Join(want.events, " ") || resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" || resp.Header.Get("Cache-Control") != "no-cache" {
			t.Errorf("%s: %d %v %v\n%s", name, resp.StatusCode, resp.Header, events, text)
		}
		if name == "messages" && (!strings.Contains(text, `"usage":{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":0}`) || resp.Header.Get("request-id") == "") {
			t.Errorf("it begins without the prompt's tokens: %s", text)
		}
		g.until("it to be over", g.idle)
		if n := g.counted(a.path, 200); n != 2 {
			t.Errorf("%s: %v are counted", name, n)
		}
		var rec struct {
			Path   string
			Status int
		}
		if g.adminJSON("GET", "/debug/requests/r-"+name, "", &rec); rec.Path != a.path || rec.Status != 200 {
			t.Errorf("%+v", rec)
		}
		if n := g.metric(fmt.Sprintf("xpyd_router_generation_tokens_total{path=%q}", a.path)); n != 14 {
			t.Errorf("%s: %v tokens", name, n)
		}
	}
}

// TestAPIsCut: wherever an engine's bytes are cut on their way, the client's are the same.
func TestAPIsCut(t *testing.T) {
	t.Parallel()
	stream := strings.Join(saidStream(false, 0), "")
	var at atomic.Int64
	g := newRig(t, 1, 1)
	g.chats("d0", func(w http.ResponseWriter, r *http.Request, body string) {
		w.Header().Set("Content-Type", "text/event-stream")
		n := int(at.Load())
		for _, part := range []string{stream[:n], stream[n:]} {
			io.WriteString(w, part)
			w.(http.Flusher).Flush()
		}
	})
	for name, a := range apis {
		at.Store(int64(len(stream)))
		_, want := g.post(a.path, a.stream(), "x-xpyd-takeover", "0")
		if want = alike(want); !strings.Contains(want, `{\"a\":`) {
			t.Fatal(want)
		}
		for n := range len(stream) {
			at.Store(int64(n))
			if resp, text := g.post(a.path, a.stream(), "x-xpyd-takeover", "0"); resp.StatusCode != 200 || alike(text) != want {
				t.Fatalf("%s: cut at %d: %d\n%s\nwant\n%s", name, n, resp.StatusCode, text, want)
			}
		}
	}
}

// TestAPIsTakeover: a stream that loses its worker goes on at another, and is what it would have been; where none
// can, it ends with the API's own error.
func TestAPIsTakeover(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 2)
	var cut atomic.Int64
	var broke, never atomic.Bool
	for _, id := range []string{"d0", "d1"} {
		g.chats(id, func(w http.ResponseWriter, r *http.Request, body string) {
			from := 0
			if r.Header.Get("x-xpyd-given") != "" {
				var told given
				if err := json.NewDecoder(strings.NewReader(body[strings.LastIndex(body, `{"created"`):])).Decode(&told); err != nil || len(told.Choices) != 1 {
					t.Errorf("given %s: %v", body, err)
				}
				from = len(told.Choices[0].IDs)
			}
			list := saidStream(r.Header.Get("x-xpyd-tokens") == "1", from)
			breaks := never.Load() || !broke.Swap(true)
			if breaks {
				list = list[:min(int(cut.Load()), len(list))]
			}
			w.Header().Set("Content-Type", "text/event-stream")
			for _, e := range list {
				io.WriteString(w, e)
				w.(http.Flusher).Flush()
			}
			if breaks {
				reset(w, r)
			}
		})
	}
	for name, a := range apis {
		broke.Store(true)
		_, want := g.post(a.path, a.stream())
		want = alike(want)
		for n := range len(said) {
			broke.Store(false)
			cut.Store(int64(n))
			if resp, text := g.post(a.path, a.stream()); resp.StatusCode != 200 || alike(text) != want {
				t.Errorf("%s: broken after %d events: %d\n%s\nwant\n%s", name, n, resp.StatusCode, text, want)
			}
		}
		never.Store(true)
		cut.Store(1)
		resp, text := g.post(a.path, a.stream())
		events := strings.Split(strings.TrimSpace(text), "\n\n")
		last := events[len(events)-1]
		if resp.StatusCode != 200 || !strings.Contains(text, "event: error\n") || name == "messages" && !strings.Contains(last, `"error":{"type":"api_error"`) ||
			name == "responses" && !strings.Contains(last, `"status":"failed"`) {
			t.Errorf("%s: %d %s", name, resp.StatusCode, text)
		}
		never.Store(false)
		g.until("the ledger to be empty", g.idle)
	}
}

// TestAPIsRetried: before its client has a byte a request is tried elsewhere; what all refuse is an error of the API.
func TestAPIsRetried(t *testing.T) {
	t.Parallel()
	for name, a := range apis {
		t.Run(name, func(t *testing.T) { apiRetried(t, name, a) })
	}
}

func apiRetried(t *testing.T, name string, a api) {
	g := newRig(t, 1, 2)
	for _, body := range []string{a.whole(), a.stream()} {
		var broke atomic.Bool
		for _, id := range []string{"d0", "d1"} {
			g.chats(id, func(w http.ResponseWriter, r *http.Request, body string) {
				if broke.Swap(true) {
					says(w, r, body)
				} else {
					reset(w, r)
				}
			})
		}
		if resp, text := g.post(a.path, body); resp.StatusCode != 200 || strings.Contains(text, "error") && !strings.Contains(text, `"error":null`) {
			t.Errorf("%s: %d %s", name, resp.StatusCode, text)
		}
	}
	refuse := func(status int, engine string, want int, kind, part string) {
		t.Helper()
		for _, id := range []string{"d0", "d1"} {
			g.chats(id, func(w http.ResponseWriter, _ *http.Request, _ string) {
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(status)
				io.WriteString(w, engine)
			})
		}
		for _, body := range []string{a.whole(), a.stream()} {
			g.refused(name, want, kind, part)(g.post(a.path, body))
		}
	}
	refuse(400, `{"error":{"message":"max_tokens is too many","type":"invalid_request_error","param":"max_tokens","code":null}}`, 400, "invalid_request_error", "too many")
	refuse(400, `{"object":"error","message":"no","type":"BadRequestError","code":400}`, 400, "invalid_request_error", "no")
	refuse(500, `{"error":{"message":"it broke","type":"server_error","param":null,"code":null}}`, 500, "api_error", "it broke")
	for _, id := range []string{"d0", "d1"} {
		g.chats(id, func(w http.ResponseWriter, _ *http.Request, _ string) {
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `{"whole":true}`)
		})
	}
	g.refused(name, 502, "api_error", "no chat completion")(g.post(a.path, a.whole()))
}

// refused checks that an answer is an error as an API has it.
func (g *rig) refused(name string, status int, kind, part string) func(*http.Response, string) {
	g.t.Helper()
	return func(resp *http.Response, text string) {
		g.t.Helper()
		if name == "responses" {
			if status == 529 {
				status = 503
			}
			if e := apiError(g.t, text); resp.StatusCode != status || !strings.Contains(e.Message, part) || e.Param != nil && *e.Param == "max_tokens" {
				g.t.Errorf("%d %s, want %d %s", resp.StatusCode, text, status, part)
			}
			return
		}
		var v struct {
			Type      string
			Error     struct{ Type, Message string }
			RequestID string `json:"request_id"`
		}
		if err := json.Unmarshal([]byte(text), &v); err != nil || resp.StatusCode != status || v.Type != "error" || v.Error.Type != kind || !strings.Contains(v.Error.Message, part) || v.RequestID != resp.Header.Get("x-request-id") {
			g.t.Errorf("%d %s, want %d %s %s", resp.StatusCode, text, status, kind, part)
		}
	}
}

// TestAPIsRefused: whoever refuses, it is in the API's shape.
func TestAPIsRefused(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "a", RequestsPerMinute: 1}, apikey.Key{Name: "b", Models: []string{"other"}}, apikey.Key{Name: "c"})
	g := newRig(t, 1, 1, f.config, func(c *router.Config) { c.MaxBodyBytes = 4 << 10 })
	g.chats("d0", says)
	for name, a := range apis {
		do := func(method, path, body string, header ...string) (*http.Response, string) {
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
			b, _ := io.ReadAll(resp.Body)
			return resp, string(b)
		}
		g.refused(name, 401, "authentication_error", "API key")(do("POST", a.path, a.whole()))
		g.refused(name, 401, "authentication_error", "API key")(do("POST", a.path, a.whole(), "x-api-key", "wrong"))
		g.refused(name, 404, "not_found_error", "does not exist")(do("POST", a.path, a.whole(), f.of("b")...))
		g.refused(name, 405, "invalid_request_error", "not allowed")(do("GET", a.path, "", f.of("c")...))
		g.refused(name, 413, "request_too_large", "larger than 4096")(do("POST", a.path, a.ask+`,"x":"`+strings.Repeat("x", 8<<10)+`"}`, f.of("c")...))
		g.refused(name, 400, "invalid_request_error", "not valid JSON")(do("POST", a.path, a.ask, f.of("c")...))
		g.refused(name, 400, "invalid_request_error", "may not set it")(do("POST", a.path, a.ask+`,"kv_transfer_params":{}}`, f.of("c")...))
		g.refused(name, 400, "invalid_request_error", "media_hosts")(do("POST", a.path, map[string]string{
			"responses": `{"model":"m","input":[{"role":"user","content":[{"type":"input_image","image_url":"http://10.0.0.1/"}]}]}`,
			"messages":  `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}]}]}`}[name], f.of("c")...))
		g.refused(name, 400, "invalid_request_error", "milliseconds")(do("POST", a.path, a.whole(), append(f.of("c"), "x-request-timeout-ms", "soon")...))
		if name == "messages" {
			g.refused(name, 404, "not_found_error", "there is no")(do("GET", "/v1/messages/batches", "", f.of("c")...))
			g.refused(name, 400, "invalid_request_error", "anthropic-version")(do("POST", a.path, a.whole(), append(f.of("c"), "anthropic-version", "latest")...))
			if resp, text := do("POST", a.path, a.whole(), "x-api-key", f.secrets["c"], "anthropic-version", "2023-06-01"); resp.StatusCode != 200 {
				t.Errorf("by x-api-key: %d %s", resp.StatusCode, text)
			}
		} else if resp, _ := do("POST", a.path, a.whole(), "x-api-key", f.secrets["c"]); resp.StatusCode != 401 {
			t.Errorf("OpenAI's path takes x-api-key: %d", resp.StatusCode)
		}
	}
	g.post("/v1/responses", apis["responses"].whole(), f.of("a")...) // the one of this minute
	for name, a := range apis {
		resp, text := g.post(a.path, a.whole(), f.of("a")...)
		if resp.Header.Get("Retry-After") == "" {
			t.Errorf("%v", resp.Header)
		}
		g.refused(name, 429, "rate_limit_error", "requests a minute")(resp, text)
	}
	if code := g.adminJSON("POST", "/admin/v1/instances/d0/drain", `{"force":true}`, nil); code != 200 {
		t.Fatal(code)
	}
	for name, a := range apis {
		resp, text := g.post(a.path, a.whole(), f.of("c")...)
		if resp.Header.Get("Retry-After") == "" {
			t.Errorf("%v", resp.Header)
		}
		g.refused(name, 529, "overloaded_error", "no decode worker")(resp, text)
	}
	if n := g.counted("/v1/messages", 529); n != 1 {
		t.Errorf("%v", n)
	}
}

// TestAPIsLeft: a client that leaves, or reads nothing, ends its legs.
func TestAPIsLeft(t *testing.T) {
	t.Parallel()
	for name, a := range apis {
		t.Run(name, func(t *testing.T) { apiLeft(t, name, a) })
	}
}

func apiLeft(t *testing.T, name string, a api) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.StallTimeout = 300 * time.Millisecond })
	started, ended := make(chan time.Time, 2), make(chan time.Time, 2)
	g.chats("d0", func(w http.ResponseWriter, r *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, saidStream(false, 0)[0])
		w.(http.Flusher).Flush()
		hold(started, ended)(w, r)
	})
	send := func() io.ReadCloser {
		conn := g.dial()
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", a.path, len(a.stream()), a.stream())
		return conn
	}
	conn := send()
	if _, err := io.ReadAtLeast(conn, make([]byte, 4096), 100); err != nil {
		t.Fatal(err)
	}
	<-started
	conn.Close()
	<-ended
	g.until("it to be over", g.idle)
	if n := g.counted(a.path, 499); n != 1 {
		t.Errorf("%s: %v", name, n)
	}
	var sent atomic.Int64
	over := make(chan struct{})
	g.chats("d0", func(w http.ResponseWriter, r *http.Request, _ string) {
		defer close(over)
		flood(`data: {"choices":[{"delta":{"content":"`+strings.Repeat("x", 4<<10)+"\"}}]}\n\n", &sent)(w, r)
	})
	conn = send()
	<-over
	if n := sent.Load(); n > 64<<20 {
		t.Errorf("%s: %d bytes went somewhere", name, n)
	}
	conn.Close()
	g.until("the client to be let go", g.idle)
}

// TestAPIsForeign: in front of engines of other dialects an answer has the text of their chat.
func TestAPIsForeign(t *testing.T) {
	for _, name := range []string{"openai", "vllm-nixl", "sglang"} {
		t.Run(name, func(t *testing.T) { apiForeign(t, name) })
	}
}

func apiForeign(t *testing.T, name string) {
	g, _, _ := foreignRig(t, name)
	resp, text := g.post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_completion_tokens":5}`)
	want, _ := read(t, text)
	if resp.StatusCode != 200 || want == "" {
		t.Fatalf("%s: %d %s", name, resp.StatusCode, text)
	}
	for _, stream := range []bool{false, true} {
		_, text := g.post("/v1/responses", fmt.Sprintf(`{"model":"m","input":"hi","max_output_tokens":5,"stream":%t}`, stream))
		if !strings.Contains(text, fmt.Sprintf(`"output_text","text":%q`, want)) || !strings.Contains(text, `"reason":"max_output_tokens"`) || !strings.Contains(text, `"input_tokens":9`) {
			t.Errorf("%s: %s, want %q", name, text, want)
		}
		_, text = g.post("/v1/messages", fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"stream":%t}`, stream))
		got := ""
		for _, m := range regexp.MustCompile(`"text":"([^"]*)"`).FindAllStringSubmatch(text, -1) {
			got += m[1]
		}
		if got != want || !strings.Contains(text, `"stop_reason":"max_tokens"`) {
			t.Errorf("%s: %s, want %q", name, text, want)
		}
	}
}

// foreignRig is a router in front of mocks of a dialect.
func foreignRig(t *testing.T, name string) (*rig, []*fake.Engine, []*fake.Engine) {
	if !fake.Alone(name) {
		return pairRig(t, name, 1, 1)
	}
	ds, list := engines(t, name, fleet.Decode, 1)
	g := newRig(t, 0, 0, func(c *router.Config) { c.Static = list })
	g.allProbed(1)
	return g, nil, ds
}

// TestCountTokens: a worker's tokenizer counts.
func TestCountTokens(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	answer := func(status int, body string) {
		d.on(&d.other, func(w http.ResponseWriter, r *http.Request) {
			d.mu.Lock()
			got := string(d.body)
			d.mu.Unlock()
			if want := `{"model":"m","tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"}]}`; r.URL.Path != "/tokenize" || got != want {
				t.Errorf("the worker got %s %s", r.URL.Path, got)
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			io.WriteString(w, body)
		})
	}
	const ask, path = `{"model":"m","system":"s","messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","input_schema":{}}]}`, "/v1/messages/count_tokens"
	answer(200, `{"count":21,"max_model_len":512,"tokens":[1]}`)
	if resp, text := g.post(path, ask); resp.StatusCode != 200 || text != `{"input_tokens":21}` {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	answer(400, `{"error":{"message":"no template","type":"invalid_request_error","param":null,"code":null}}`)
	g.refused("messages", 400, "invalid_request_error", "no template")(g.post(path, ask))
	answer(200, `{"tokens":[1]}`)
	g.refused("messages", 502, "api_error", "did not say")(g.post(path, ask))
	g.refused("messages", 404, "not_found_error", "does not exist")(g.post(path, strings.Replace(ask, `"m"`, `"n"`, 1)))
	g.refused("messages", 400, "invalid_request_error", "messages is required")(g.post(path, `{}`))
	if n := g.counted(path, 200); n != 1 {
		t.Errorf("%v", n)
	}
}
