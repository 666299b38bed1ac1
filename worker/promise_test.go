package worker_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/worker"
)

// TestPromiseOfRequest: a request's own promise counts before the worker's, part by part; what is
// none is refused, and so is one from who is not the fleet.
func TestPromiseOfRequest(t *testing.T) {
	ring, secret := newRing(t)
	keys, key := keysFile(t, nil)
	w := start(t, func(c *worker.Config) { c.APIKeysFile, c.TPOTPromise, c.ITLPromise = keys, time.Hour, time.Hour }, func(d *worker.Deps) { d.Ring = ring })
	const body = `{"prompt":"Once upon a time","max_tokens":3,"temperature":0,"ignore_eos":true}`
	f := func(header map[string]string, promise string, want int, msg string) {
		t.Helper()
		all := map[string]string{"x-xpyd-promise": promise}
		for k, v := range header {
			all[k] = v
		}
		resp, b := ask(t, w.URL()+"/v1/completions", all, body)
		if resp.StatusCode != want || !strings.Contains(string(b), msg) {
			t.Errorf("%q: %d %s, want %d %s", promise, resp.StatusCode, b, want, msg)
		}
	}
	kept := func(ttftKept, ttftBroken, tpotKept, tpotBroken, itlKept, itlBroken float64) {
		t.Helper()
		for series, want := range map[string]float64{`outcome="kept",promise="ttft"`: ttftKept, `outcome="broken",promise="ttft"`: ttftBroken,
			`outcome="kept",promise="tpot"`: tpotKept, `outcome="broken",promise="tpot"`: tpotBroken,
			`outcome="kept",promise="itl"`: itlKept, `outcome="broken",promise="itl"`: itlBroken} {
			if got := counter(t, w, "xpyd_worker_promises_total{"+series+"}"); got != want {
				t.Errorf("%s: %v, want %v", series, got, want)
			}
		}
	}
	fleet := token(w, secret)
	kept(0, 0, 0, 0, 0, 0)
	f(fleet, "", 200, "")
	kept(0, 0, 1, 0, 1, 0)
	f(fleet, "ttft=1h0m0s", 200, "")
	kept(1, 0, 2, 0, 2, 0)
	f(fleet, "itl=1ms,tpot=1ms,ttft=1h", 200, "") // 1 ms is hardly kept, but may be
	if got := counter(t, w, `xpyd_worker_promises_total{outcome="kept",promise="ttft"}`); got != 2 {
		t.Errorf("%v first tokens in time", got)
	}
	for _, bad := range []string{"ttft", "ttft=", "ttft=1", "ttft=-1s", "ttft=0s", "ttft=999us", "ttft=1h0m0.001s", "tpot=soon", "ttft=1s,", ",", "ttft=1s,ttft=2s", "itl=1s,itl=1s", "itl=999us",
		"ttft=1s;tpot=1s", "ttft=1s, tpot=1s", "TTFT=1s", "max=1s", strings.Repeat("ttft=1s,", 100), "ttft=" + strings.Repeat("0", 96) + "1s"} {
		f(fleet, bad, 400, `"param":"x-xpyd-promise"`)
	}
	f(map[string]string{"Authorization": "Bearer " + key}, "ttft=1s", 403, `"param":"x-xpyd-promise"`)
	f(nil, "ttft=1s", 401, "")
}

// TestPromiseOfPair: what decode is told counts for the pair.
func TestPromiseOfPair(t *testing.T) {
	p, d := pair(t, nil)
	link := ticket.NewLink().String()
	report := leg(p, link)
	header := linked(p, link)
	header["x-xpyd-promise"] = "ttft=1h,tpot=1h,itl=1h"
	resp, b := send(t, http.MethodPost, d.URL()+"/v1/completions", header, `{"prompt":"Once upon a time","max_tokens":4,"ignore_eos":true}`)
	if resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	if r := <-report; !strings.HasPrefix(r, "200 ") {
		t.Error(r)
	}
	for _, promise := range []string{"ttft", "tpot", "itl"} {
		if got := counter(t, d, `xpyd_worker_promises_total{outcome="kept",promise="`+promise+`"}`); got != 1 {
			t.Errorf("%s: %v", promise, got)
		}
	}
}
