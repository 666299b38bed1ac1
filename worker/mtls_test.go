package worker_test

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/trust/trusttest"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/worker"
)

// credentials are a certificate of one CA that trusts another.
func credentials(t testing.TB, by, trusts *trusttest.Authority) *trust.TLS {
	t.Helper()
	cert, key, _ := by.Member(t, "member")
	c, err := trust.NewTLS(cert, key, trusts.CA(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// secured gives a worker a secret and certificates, for HTTP and KV.
func secured(t testing.TB, ring *trust.Ring, creds *trust.TLS) func(*worker.Deps) {
	t.Helper()
	tr := tcp.New(creds)
	return func(d *worker.Deps) { d.Ring, d.TLS, d.Ways = ring, creds, []way.Kind{way.Network(tr)} }
}

// over is a client with those certificates; nil: with none.
func over(t testing.TB, conf *tls.Config) *http.Client {
	t.Helper()
	tr := &http.Transport{TLSClientConfig: conf}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: patience}
}

// TestMTLS: with certificates a worker is reached by members of its CA alone, and
// they still show a token; workers reach each other so, in all exchanges.
func TestMTLS(t *testing.T) {
	ca, other := trusttest.New(t), trusttest.New(t)
	ring, secret := newRing(t)
	p := start(t, func(c *worker.Config) { c.Role = "prefill" }, secured(t, ring, credentials(t, ca, ca)))
	d := start(t, nil, secured(t, ring, credentials(t, ca, ca)))
	if !strings.HasPrefix(d.URL(), "https://") || d.Instance().URL != d.URL() {
		t.Fatalf("announced as %s", d.Instance().URL)
	}
	member := over(t, credentials(t, ca, ca).Client())
	for name, c := range map[string]*http.Client{
		"no certificate":  over(t, &tls.Config{InsecureSkipVerify: true}),
		"of another CA":   over(t, credentials(t, other, ca).Client()),
		"trusts another":  over(t, credentials(t, ca, other).Client()),
		"without any TLS": client,
	} {
		url := d.URL()
		if c == client {
			url = "http" + strings.TrimPrefix(url, "https")
		}
		for _, path := range []string{"/health", "/metrics", "/v1/models"} {
			if resp, err := c.Get(url + path); err == nil {
				resp.Body.Close()
				t.Errorf("%s: GET %s: %d", name, path, resp.StatusCode)
			}
		}
	}
	do := func(w *worker.Worker, verb, path string, header map[string]string, body string) (int, string) {
		t.Helper()
		resp, b := sendBy(t, member, verb, w.URL()+path, header, body)
		return resp.StatusCode, string(b)
	}
	if code, body := do(d, "GET", "/v1/models", nil, ""); code != 401 {
		t.Errorf("a certificate alone: %d %s", code, body)
	}
	const fields = `"prompt":"Once upon a time, there was","max_tokens":12,"temperature":0`
	code, body := do(d, "POST", "/v1/completions", token(d, secret), "{"+fields+"}")
	var want answer
	if err := json.Unmarshal([]byte(body), &want); err != nil || code != 200 {
		t.Fatalf("alone: %d %s", code, body)
	}
	got := func(how string, code int, body string) {
		t.Helper()
		var a answer
		if err := json.Unmarshal([]byte(body), &a); err != nil || code != 200 {
			t.Errorf("%s: %d %s", how, code, body)
			return
		}
		same(t, how, &a, &want)
	}
	var legs sync.WaitGroup
	link := ticket.NewLink().String()
	legs.Go(func() {
		if code, body := do(p, "POST", "/xpyd/v1/prefill", token(p, secret), `{"link":"`+link+`"}`); code != 200 {
			t.Errorf("prefill's leg: %d %s", code, body)
		}
	})
	header := linked(p, link)
	for k, v := range token(d, secret) {
		header[k] = v
	}
	code, body = do(d, "POST", "/v1/completions", header, "{"+fields+"}")
	got("native", code, body)
	legs.Wait()

	legs.Go(func() {
		if code, body := do(p, "POST", "/v1/completions", token(p, secret), "{"+fields+`,"kv_transfer_params":{"do_remote_decode":true,"transfer_id":"m"}}`); code != 200 {
			t.Errorf("Mooncake's prefill: %d %s", code, body)
		}
	})
	bootstrap := fmt.Sprintf("{%s"+`,"kv_transfer_params":{"do_remote_prefill":true,"transfer_id":"m","remote_bootstrap_addr":%q}}`, fields, p.URL())
	code, body = do(d, "POST", "/v1/completions", token(d, secret), bootstrap)
	got("Mooncake", code, body)
	legs.Wait()
	code, body = do(d, "POST", "/v1/completions", token(d, secret), strings.Replace(bootstrap, "https:", "http:", 1))
	if code != 400 || !strings.Contains(body, "is no https URL") {
		t.Errorf("a bootstrap without TLS: %d %s", code, body)
	}

	// A third worker fetches from decode what that has of a prompt.
	third := start(t, func(c *worker.Config) { c.KV.LoadTimeout, c.KV.MinLoadTokens = patience, 16 }, secured(t, ring, credentials(t, ca, ca)))
	long := fmt.Sprintf(`{"prompt":%q,"max_tokens":4,"temperature":0}`, stories(1)[0])
	code, body = do(d, "POST", "/v1/completions", token(d, secret), long)
	if code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	header = peerHeader(d, 192)
	for k, v := range token(third, secret) {
		header[k] = v
	}
	code, body = do(third, "POST", "/v1/completions", header, long)
	var a answer
	if err := json.Unmarshal([]byte(body), &a); err != nil || code != 200 || a.Usage.Details.Cached < 16 {
		t.Errorf("from a peer: %d %s", code, body)
	}
}

// TestBootstrapLearnsNothing: the owner of an API key may name any address of this machine for
// Mooncake's query, even his own. The token that he sees there opens that query and nothing
// else.
func TestBootstrapLearnsNothing(t *testing.T) {
	ring, _ := newRing(t)
	keys, key := keysFile(t, nil)
	d := start(t, func(c *worker.Config) { c.APIKeysFile = keys }, func(d *worker.Deps) { d.Ring = ring })
	p := start(t, nil, func(d *worker.Deps) { d.Ring = ring })
	shown := make(chan string, 4)
	thief := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		shown <- r.Header.Get(trust.Header)
		w.WriteHeader(404)
	}))
	defer thief.Close()
	i := p.Instance()
	resp, b := ask(t, d.URL()+"/v1/completions", map[string]string{"Authorization": "Bearer " + key},
		fmt.Sprintf(`{"prompt":"x","kv_transfer_params":{"do_remote_prefill":true,"transfer_id":"m","remote_engine_id":"%s@%d","remote_bootstrap_addr":%q}}`, i.ID, i.Epoch, thief.URL))
	if resp.StatusCode != 502 {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
	stolen := map[string]string{trust.Header: <-shown}
	for _, w := range []*worker.Worker{p, d} {
		for _, route := range append(append([]string{}, publicRoutes...), controlRoutes...) {
			if got, body := status(t, w, route, stolen); route != "GET /query" && got != 401 {
				t.Errorf("%s: %d %s", route, got, body)
			}
		}
	}
}
