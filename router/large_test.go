package router_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router"
)

// TestAnswerTooLargeBlamesNobody: an answer too large for the router is not asked for
// again, and does not count against the worker.
func TestAnswerTooLargeBlamesNobody(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 2, func(c *router.Config) { c.MaxResponseBytes = 1 << 16 })
	large := strings.Repeat("x", 1<<17)
	event := "data: " + strings.Repeat("x", 2*openai.MaxEvent) + "\n\n"
	first := "data: {\"n\":0}\n\n"
	f := func(name, ask string, status int, want string, answer http.HandlerFunc) {
		t.Helper()
		for _, id := range []string{"d0", "d1"} {
			g.workers[id].on(&g.workers[id].decode, answer)
		}
		before := g.workers["d0"].calls.Load() + g.workers["d1"].calls.Load()
		const often = 8 // as often as opens a breaker, and more
		for range often {
			resp, text := g.post("/v1/completions", ask)
			if resp.StatusCode != status || !strings.Contains(text, `"code":"answer_too_large"`) || !strings.Contains(text, want) {
				t.Fatalf("%s: %d %.300s", name, resp.StatusCode, text)
			}
		}
		if n := g.workers["d0"].calls.Load() + g.workers["d1"].calls.Load() - before; n != often {
			t.Errorf("%s: %d legs for %d requests", name, n, often)
		}
		if open := g.breakers(); len(open) > 0 {
			t.Errorf("%s: breakers %v", name, open)
		}
		for _, m := range g.watcher.Snapshot().Members {
			if m.State != fleet.Live {
				t.Errorf("%s: %s is %s: %s", name, m.ID, m.State, m.Reason)
			}
		}
	}
	const whole, stream = `{"model":"m","prompt":"x","n":2}`, `{"model":"m","prompt":"x","stream":true,"logprobs":3}`
	f("announced", whole, 400, `"param":"n"`, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", fmt.Sprint(len(large)))
		fmt.Fprint(w, large)
	})
	f("in chunks", whole, 400, `"param":"n"`, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.(http.Flusher).Flush()
		fmt.Fprint(w, large)
	})
	f("first event", stream, 400, `"param":"logprobs"`, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, event)
	})
	f("later event", stream, 200, `"param":"logprobs"`, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, first)
		w.(http.Flusher).Flush()
		fmt.Fprint(w, event)
	})
}

// TestSurelyTooLarge: a request whose answer would be too large for every worker is not
// sent. Workers are told how large an answer the router takes.
func TestSurelyTooLarge(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	p, d := g.workers["p0"], g.workers["d0"]
	f := func(path, body, param string) {
		t.Helper()
		resp, text := g.post(path, body)
		if resp.StatusCode != 400 || !strings.Contains(text, `"param":"`+param+`","code":"answer_too_large"`) {
			t.Errorf("%s: %d %.300s", body, resp.StatusCode, text)
		}
	}
	prompts := "[" + strings.Repeat(`"a",`, 31) + `"a"]`
	f("/v1/completions", `{"model":"m","n":128,"max_tokens":200,"logprobs":20,"prompt":`+prompts+`}`, "logprobs")
	f("/v1/completions", `{"model":"m","n":128,"max_tokens":2147483647,"logprobs":20,"prompt":`+prompts+`}`, "logprobs")
	f("/v1/chat/completions", `{"model":"m","n":128,"max_tokens":500,"logprobs":true,"top_logprobs":20,"messages":[{"role":"user","content":"x"}]}`, "top_logprobs")
	if n := p.calls.Load() + d.calls.Load(); n != 0 {
		t.Errorf("%d legs", n)
	}
	if resp, text := g.post("/v1/completions", `{"model":"m","n":128,"max_tokens":200,"logprobs":20,"stream":true,"prompt":`+prompts+`}`); resp.StatusCode != 200 {
		t.Errorf("a stream: %d %.300s", resp.StatusCode, text)
	}
	g.inOrder(story)
	if resp, text := g.post("/v1/completions", `{"model":"m","prompt":"x","max_tokens":4}`); resp.StatusCode != 200 {
		t.Errorf("%d %.300s", resp.StatusCode, text)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if h := d.last.Get("x-xpyd-max-answer"); h != fmt.Sprint(openai.MaxAnswer) {
		t.Errorf("the worker was told %q", h)
	}
}
