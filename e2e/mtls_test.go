package e2e

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/trust/trusttest"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// TestMTLS: a router and a pair with certificates of one CA and one secret, over
// TLS between all of them, lifelines too; a worker of another CA is never used.
func TestMTLS(t *testing.T) {
	ca, other := trusttest.New(t), trusttest.New(t)
	of := func(a *trusttest.Authority, name string) *trust.TLS {
		t.Helper()
		cert, key, file := a.Member(t, name)
		c, err := trust.NewTLS(cert, key, file, testLog())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	ring, err := trust.NewRing(trust.NewSecret())
	if err != nil {
		t.Fatal(err)
	}
	secured := func(creds *trust.TLS) func(*worker.Deps) {
		t.Helper()
		tr := tcp.New(creds)
		return func(d *worker.Deps) { d.Ring, d.TLS, d.Ways = ring, creds, []way.Kind{way.Network(tr)} }
	}
	_, b := post(t, startWorker(t, fleet.Decode, nil).URL()+"/v1/completions", nil, `{"prompt":"Once upon a time","max_tokens":16,"temperature":0}`)
	var want answer
	if err := json.Unmarshal(b, &want); err != nil {
		t.Fatal(err)
	}
	watcher, natsURL := startFleet(t)
	p := startWorker(t, fleet.Prefill, func(c *worker.Config) { c.Fleet.URL = natsURL }, secured(of(ca, "p")))
	d := startWorker(t, fleet.Decode, func(c *worker.Config) { c.Fleet.URL = natsURL }, secured(of(ca, "d")))
	stranger := startWorker(t, fleet.Decode, func(c *worker.Config) { c.Fleet.URL = natsURL }, secured(of(other, "x")))
	creds := of(ca, "router")
	lifeline := fleet.WatchLifeline(watcher, fleet.LifelineConfig{TLS: creds.Client(), Ring: ring, Log: testLog()})
	t.Cleanup(lifeline.Close)
	url := startRouter(t, router.Deps{Fleet: watcher, Ring: ring, TLS: creds})
	for range 4 {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions",
			strings.NewReader(`{"model":"stories260k","prompt":"Once upon a time","max_tokens":16,"temperature":0}`))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var a answer
		err = json.NewDecoder(resp.Body).Decode(&a)
		resp.Body.Close()
		if err != nil || resp.StatusCode != 200 || a.Choices[0].Text != want.Choices[0].Text ||
			resp.Header.Get("x-xpyd-prefill") != p.ID() || resp.Header.Get("x-xpyd-decode") != d.ID() {
			t.Errorf("%d %v %+v by %s and %s", resp.StatusCode, err, a, resp.Header.Get("x-xpyd-prefill"), resp.Header.Get("x-xpyd-decode"))
		}
	}
	for _, w := range []*worker.Worker{p, d, stranger} {
		if !strings.HasPrefix(w.Instance().URL, "https://") {
			t.Errorf("%s is announced at %s", w.ID(), w.Instance().URL)
		}
	}
}
