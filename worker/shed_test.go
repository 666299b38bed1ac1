package worker_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/worker"
)

// hopeless promises what nobody can keep.
func hopeless(c *worker.Config) { c.ShedLate, c.TTFTPromise = true, time.Nanosecond }

// shedAnswer checks the answer to a request that was shed.
func shedAnswer(t *testing.T, how string, resp *http.Response, b []byte) {
	t.Helper()
	var e struct {
		Error struct{ Code, Type, Message string }
	}
	if err := json.Unmarshal(b, &e); err != nil || resp.StatusCode != 503 || e.Error.Code != "shed" || e.Error.Type != "server_error" ||
		resp.Header.Get("Retry-After") != "1" || resp.Header.Get("x-xpyd-outcome") != string(ticket.Shed) || !strings.Contains(e.Error.Message, "cannot be kept") {
		t.Errorf("%s: %d %v %s", how, resp.StatusCode, resp.Header, b)
	}
}

// TestShedLate: what would be late is a 503 with a code of its own, streamed or not. Several prompts of one
// request are not shed, as one of them may have begun; nor is what is promised more, or a stream that
// another worker has begun.
func TestShedLate(t *testing.T) {
	ring, secret := newRing(t)
	w := start(t, hopeless, func(d *worker.Deps) { d.Ring = ring })
	fleet := token(w, secret)
	for _, body := range []string{
		`{"prompt":"Once","max_tokens":4}`,
		`{"prompt":"Once","max_tokens":4,"n":3}`,
		`{"prompt":"Once","max_tokens":4,"stream":true}`,
	} {
		resp, b := ask(t, w.URL()+"/v1/completions", fleet, body)
		shedAnswer(t, body, resp, b)
	}
	if n := counter(t, w, `xpyd_engine_requests_total{outcome="shed"}`); n != 3 {
		t.Errorf("%v are counted", n)
	}
	complete(t, w, fleet, `{"prompt":["Once","Lily"],"max_tokens":4}`)
	fleet["x-xpyd-probe"] = "1"
	complete(t, w, fleet, `{"prompt":"Once","max_tokens":4}`)
	delete(fleet, "x-xpyd-probe")
	fleet["x-xpyd-promise"] = "ttft=1h"
	complete(t, w, fleet, `{"prompt":"Once","max_tokens":4}`)
	empty(t, w)

	plain := start(t, func(c *worker.Config) { c.TTFTPromise = time.Nanosecond })
	complete(t, plain, nil, `{"prompt":"Once","max_tokens":4}`)
}

// TestShedLateOfPair: prefill sheds a prompt, decode says so and keeps nothing. A list of prompts is not shed.
func TestShedLateOfPair(t *testing.T) {
	p, d := pair(t, func(p, _ *worker.Config) { hopeless(p) })
	for _, body := range []string{`{"prompt":"Once upon a time","max_tokens":4}`, `{"prompt":"Once upon a time","max_tokens":4,"stream":true}`} {
		link := ticket.NewLink().String()
		report := leg(p, link)
		resp, b := ask(t, d.URL()+"/v1/completions", linked(p, link), body)
		shedAnswer(t, body, resp, b)
		if r := <-report; !strings.HasPrefix(r, "503 shed ") {
			t.Errorf("%s: the leg got %s", body, r)
		}
		empty(t, d)
		empty(t, p)
	}
	link := ticket.NewLink().String()
	report := leg(p, link)
	complete(t, d, linked(p, link), `{"prompt":["Once","Lily"],"max_tokens":4}`)
	if r := <-report; !strings.HasPrefix(r, "200 ") {
		t.Errorf("a list: the leg got %s", r)
	}
}
