package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// TestDeadEnds: a text that can be read in more ways than are followed, where it may not end
// either, ends its request alone, with an error that says so: of a whole answer, and of a stream behind what
// has come. What runs beside it has the same tokens as undisturbed, and the pair goes on.
func TestDeadEnds(t *testing.T) {
	watcher, nats := startFleet(t)
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		startWorker(t, role, func(c *worker.Config) { c.Fleet.URL, c.KV.Transport = nats, "tcp" })
	}
	url := startRouter(t, router.Deps{Fleet: watcher}) + "/v1/completions"

	const beside = `{"prompt":"Once upon a time","max_tokens":300,"seed":5,"temperature":1,"ignore_eos":true,"regex":"[ -~\\n]*"}`
	// Its middle may be anywhere.
	const dead = `{"prompt":"A","max_tokens":400,"ignore_eos":true,"ebnf":"root ::= p\np ::= \"a\" p \"a\" | \"a\""%s}`
	text := func(body []byte) string {
		var a struct{ Choices []struct{ Text string } }
		if err := json.Unmarshal(body, &a); err != nil || len(a.Choices) != 1 {
			t.Errorf("%v: %s", err, body)
			return ""
		}
		return a.Choices[0].Text
	}
	_, body := post(t, url, nil, beside)
	want := text(body)

	var others sync.WaitGroup
	for range 3 {
		others.Go(func() {
			if status, body := post(t, url, nil, beside); status != http.StatusOK || text(body) != want {
				t.Errorf("beside a dead end: %d %s, want %q", status, body, want)
			}
		})
	}
	type failure struct {
		Error *struct{ Message, Type, Code string }
	}
	check := func(where string, data []byte) {
		var f failure
		if json.Unmarshal(data, &f) != nil || f.Error == nil || f.Error.Code != "unsatisfiable_constraint" ||
			f.Error.Type != "invalid_request_error" || !strings.Contains(f.Error.Message, "no token of the vocabulary can follow") {
			t.Errorf("%s: %s", where, data)
		}
	}
	status, body := post(t, url, nil, fmt.Sprintf(dead, ""))
	if status != http.StatusBadRequest {
		t.Errorf("a dead end is answered with %d", status)
	}
	check("whole", body)

	status, body = post(t, url, nil, fmt.Sprintf(dead, `,"stream":true`))
	var streamed strings.Builder
	failures := 0
	for line := range strings.Lines(string(body)) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		switch {
		case !ok || data == "[DONE]":
		case strings.HasPrefix(data, `{"error"`):
			failures++
			check("streamed", []byte(data))
		default:
			streamed.WriteString(text([]byte(data)))
		}
	}
	if status != http.StatusOK || failures != 1 || len(streamed.String()) < 200 || strings.Trim(streamed.String(), "a") != "" {
		t.Errorf("streamed %d, %d failures behind %q", status, failures, streamed.String())
	}
	others.Wait()
	if status, body := post(t, url, nil, beside); status != http.StatusOK || text(body) != want {
		t.Errorf("behind the dead ends: %d %s", status, body)
	}
}
