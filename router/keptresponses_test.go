package router_test

import (
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/apikey"
)

// TestKeptResponses: a response is there for its key, to be asked for and to be gone on with.
func TestKeptResponses(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "a"}, apikey.Key{Name: "b"})
	g := newRig(t, 1, 1, f.config, func(c *router.Config) { c.Responses.Entries = 4 })
	var got atomic.Pointer[string]
	g.chats("d0", func(w http.ResponseWriter, r *http.Request, body string) {
		got.Store(&body)
		says(w, r, body)
	})
	ask := func(body, key string) (int, string, string) {
		t.Helper()
		resp, text := g.post("/v1/responses", body, f.of(key)...)
		id := regexp.MustCompile(`"id":"(resp_[0-9a-f]{48})"`).FindStringSubmatch(text)
		if id == nil {
			return resp.StatusCode, "", text
		}
		return resp.StatusCode, id[1], text
	}
	do := func(method, path, key string) (int, string) {
		t.Helper()
		req, _ := http.NewRequest(method, g.url+path, nil)
		req.Header.Set("Authorization", "Bearer "+f.secrets[key])
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	missing := func(status int, text, part string) {
		t.Helper()
		if e := apiError(t, text); status != 404 || e.Code == nil || *e.Code != "response_not_found" || !strings.Contains(e.Message, part) {
			t.Errorf("%d %s", status, text)
		}
	}
	_, first, text := ask(`{"model":"m","input":"one","instructions":"s"}`, "a")
	if code, same := do("GET", "/v1/responses/"+first, "a"); code != 200 || same != text {
		t.Errorf("%d %s, want %s", code, same, text)
	}
	var code int
	_, second, text := ask(`{"model":"m","input":[{"type":"function_call_output","call_id":"c1","output":"x"}],"previous_response_id":"`+first+`","stream":true}`, "a")
	want := `"messages":[{"role":"user","content":"one"},{"role":"assistant","content":"Hello \"ä\"","reasoning_content":"think","tool_calls":[{"type":"function","id":"c1","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"c1","content":"x"}]`
	if !strings.Contains(*got.Load(), want) || !strings.Contains(text, `"previous_response_id":"`+first+`"`) {
		t.Errorf("the worker got %s, the client %s", *got.Load(), text)
	}
	if ask(`{"model":"m","input":"three","previous_response_id":"`+second+`"}`, "a"); !strings.Contains(*got.Load(), strings.TrimSuffix(want, "]")+`,{"role":"assistant","content":"Hello`) || !strings.Contains(*got.Load(), `"three"`) {
		t.Errorf("the worker got %s", *got.Load())
	}
	item := "msg_" + strings.TrimPrefix(first, "resp_") + "01"
	if code, _, text = ask(`{"model":"m","input":[{"role":"user","content":"a"},{"type":"item_reference","id":"`+item+`"},{"role":"user","content":"b"}],"store":false}`, "a"); code != 200 ||
		!strings.Contains(*got.Load(), `{"role":"user","content":"a"},{"role":"assistant","content":"Hello \"ä\""},{"role":"user","content":"b"}`) {
		t.Errorf("%d %s, the worker got %s", code, text, *got.Load())
	}
	code, _, text = ask(`{"model":"m","input":[{"type":"item_reference","id":"`+item+`"}]}`, "b")
	missing(code, text, "another API key's")
	if code, _, text = ask(`{"model":"m","input":[{"type":"item_reference","id":"`+strings.TrimSuffix(item, "01")+`09"}]}`, "a"); code != 404 || !strings.Contains(text, "the item msg_") {
		t.Errorf("%d %s", code, text)
	}
	if code, list := do("GET", "/v1/responses/"+second+"/input_items?order=asc&limit=1", "a"); code != 200 || !strings.Contains(list, `"call_id":"c1"`) || !strings.Contains(list, `"has_more":false`) {
		t.Errorf("%d %s", code, list)
	}
	code, text = do("GET", "/v1/responses/"+first, "b")
	missing(code, text, "another API key's")
	code, text = do("DELETE", "/v1/responses/"+first, "b")
	missing(code, text, "another API key's")
	code, _, text = ask(`{"model":"m","input":"x","previous_response_id":"`+first+`"}`, "b")
	missing(code, text, "another router's")
	code, text = do("GET", "/v1/responses/resp_x/input_items", "a")
	missing(code, text, "resp_x")
	for _, c := range []struct {
		method, path string
		status       int
		part         string
	}{{"POST", first + "/cancel", 400, "Cannot cancel a synchronous response."}, {"POST", "resp_x/cancel", 404, "resp_x"}, {"POST", first, 405, "GET, DELETE"}, {"DELETE", first + "/cancel", 405, "POST"},
		{"POST", first + "/input_items", 405, "GET"}, {"GET", first + "/nothing", 404, "there is no"}, {"GET", first + "/input_items?limit=0", 400, "limit"}, {"GET", first + "/input_items?limit=x", 400, "limit"},
		{"GET", first + "/input_items?after=x", 400, "after"}, {"GET", first + "?stream=true", 400, "not streamed again"}} {
		if code, text := do(c.method, "/v1/responses/"+c.path, "a"); code != c.status || !strings.Contains(apiError(t, text).Message, c.part) {
			t.Errorf("%+v: %d %s", c, code, text)
		}
	}
	if code, text := do("GET", "/v1/responses/"+first, "none"); code != 401 {
		t.Errorf("%d %s", code, text)
	}
	if code, text := do("DELETE", "/v1/responses/"+first, "a"); code != 200 || text != `{"id":"`+first+`","object":"response","deleted":true}` {
		t.Errorf("%d %s", code, text)
	}
	code, text = do("GET", "/v1/responses/"+first, "a")
	missing(code, text, first)
	code, _, text = ask(`{"model":"m","input":"x","previous_response_id":"`+second+`"}`, "a")
	missing(code, text, "goes on with '"+first)
	_, unkept, text := ask(`{"model":"m","input":"x","store":false}`, "a")
	if code, _ := do("GET", "/v1/responses/"+unkept, "a"); code != 404 || !strings.Contains(text, `"store":false`) {
		t.Errorf("%d %s", code, text)
	}
	for range 4 {
		ask(`{"model":"m","input":"x"}`, "a")
	}
	g.chats("d0", func(w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, "{\"choices\":[{\"message\":{\"content\":\"a\xff\"}}]}")
	})
	code, unkept, _ = ask(`{"model":"m","input":"x"}`, "a")
	if gone, _ := do("GET", "/v1/responses/"+unkept, "a"); code != 200 || gone != 404 {
		t.Errorf("what cannot be read again: %d, then %d", code, gone)
	}
	code, text = do("GET", "/v1/responses/"+second, "a")
	missing(code, text, "dropped to make room")
	if n := g.gauge("xpyd_router_responses_kept"); n != 4 {
		t.Errorf("%v are kept", n)
	}
	if n := g.metric(`xpyd_router_responses_dropped_total{reason="full"}`); n < 1 {
		t.Errorf("%v were dropped", n)
	}
}

// TestKeptNowhere: where nothing is kept, a response says so.
func TestKeptNowhere(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1, func(c *router.Config) { c.Responses.Entries = 0 })
	g.chats("d0", says)
	if _, text := g.post("/v1/responses", `{"model":"m","input":"x"}`); !strings.Contains(text, `"store":false`) {
		t.Error(text)
	}
	if code, text := g.get("/v1/responses/resp_1"); code != 404 || !strings.Contains(text, "no responses are kept here") {
		t.Errorf("%d %s", code, text)
	}
}

// TestKeptLost: a Redis that is away is no reason to fail a request that needs nothing of it.
func TestKeptLost(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1, func(c *router.Config) { c.Responses.Redis = "unix:///nowhere/at/all" })
	g.chats("d0", says)
	if resp, text := g.post("/v1/responses", `{"model":"m","input":"x"}`); resp.StatusCode != 200 {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	if resp, text := g.post("/v1/responses", `{"model":"m","input":"x","previous_response_id":"resp_1"}`); resp.StatusCode != 503 || !strings.Contains(apiError(t, text).Message, "cannot be looked up") {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	if n := g.metric(`xpyd_router_responses_dropped_total{reason="store"}`); n != 2 {
		t.Errorf("%v failed", n)
	}
	if !strings.Contains(g.logs.String(), "a response is not kept") {
		t.Error("nothing is logged")
	}
}

// TestKeptTogether: routers that name one Redis know each other's responses.
func TestKeptTogether(t *testing.T) {
	t.Parallel()
	url, id := redistest.StartFake(t).URL(), ""
	shared := func(c *router.Config) { c.Responses.Redis = url }
	t.Run("one", func(t *testing.T) {
		g := newRig(t, 1, 1, shared)
		g.chats("d0", says)
		_, text := g.post("/v1/responses", `{"model":"m","input":"one"}`)
		id = regexp.MustCompile(`resp_[0-9a-f]{48}`).FindString(text)
	})
	t.Run("another", func(t *testing.T) {
		g := newRig(t, 1, 1, shared)
		g.chats("d0", says)
		if code, same := g.get("/v1/responses/" + id); code != 200 || !json.Valid([]byte(same)) || !strings.Contains(same, id) {
			t.Errorf("%d %s", code, same)
		}
		if resp, text := g.post("/v1/responses", `{"model":"m","input":"two","previous_response_id":"`+id+`"}`); resp.StatusCode != 200 {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
		if code, text := g.get("/v1/responses/resp_1"); code != 404 || strings.Contains(text, "another router") {
			t.Errorf("%d %s", code, text)
		}
	})
}
