package worker_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/apikey"
	"github.com/xpyd/xpyd/worker"
)

// newRing makes a fleet of one secret.
func newRing(t testing.TB) (*trust.Ring, trust.Secret) {
	t.Helper()
	s := trust.NewSecret()
	r, err := trust.NewRing(s)
	if err != nil {
		t.Fatal(err)
	}
	return r, s
}

// keysFile writes one API key's file, and returns the key.
func keysFile(t testing.TB, change func(*apikey.Key)) (path, secret string) {
	t.Helper()
	secret, k := apikey.New("proxy")
	if change != nil {
		change(&k)
	}
	path = filepath.Join(t.TempDir(), "keys.yaml")
	if err := apikey.Append(path, k); err != nil {
		t.Fatal(err)
	}
	return path, secret
}

// token is what the router shows w.
func token(w *worker.Worker, s trust.Secret) map[string]string {
	i := w.Instance()
	return map[string]string{trust.Header: s.Token(trust.HTTP, trust.Member(i.ID, i.Epoch))}
}

// routes are all of a worker's; the body is what gets an answer of any kind but
// 401.
var (
	publicRoutes = []string{"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "POST /tokenize", "POST /detokenize", "GET /version", "GET /query", "POST /xpyd/v1/lease",
		"POST /v1/embeddings", "GET /nowhere"}
	controlRoutes = []string{"GET /debug/ledger", "GET /debug/steps", "GET /xpyd/v1/lifeline", "POST /xpyd/v1/prefill", "POST /xpyd/v1/drain", "POST /xpyd/v1/undrain",
		"POST /xpyd/v1/role", "GET /xpyd/v1/log", "POST /xpyd/v1/log", "GET /xpyd/v1/cache", "POST /xpyd/v1/cache/flush", "POST /xpyd/v1/cache/reach", "GET /xpyd/v1/cache/pin", "POST /xpyd/v1/cache/pin",
		"DELETE /xpyd/v1/cache/pin", "GET /xpyd/v1/profile", "POST /xpyd/v1/profile", "DELETE /xpyd/v1/profile"}
)

// status asks a route and returns the answer's status and body.
func status(t testing.TB, w *worker.Worker, route string, header map[string]string) (int, string) {
	t.Helper()
	verb, path, _ := strings.Cut(route, " ")
	if path == "/xpyd/v1/lifeline" { // has no end
		return lifeline(t, w, header), ""
	}
	resp, b := send(t, verb, w.URL()+path, header, "")
	if resp.StatusCode == 401 && (resp.Header.Get("WWW-Authenticate") != "Bearer" || !strings.Contains(string(b), `"type":"authentication_error"`)) {
		t.Errorf("%s: %v %s", route, resp.Header, b)
	}
	return resp.StatusCode, string(b)
}

func lifeline(t testing.TB, w *worker.Worker, header map[string]string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.URL()+"/xpyd/v1/lifeline", nil)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

// TestStrangers: every route but /health wants the token of this run of this worker; the API's
// routes also accept a key.
func TestStrangers(t *testing.T) {
	ring, secret := newRing(t)
	keys, key := keysFile(t, nil)
	given := func(d *worker.Deps) { d.Ring = ring }
	bare := start(t, nil, given)
	keyed := start(t, func(c *worker.Config) { c.APIKeysFile = keys }, given)
	refused := func(w *worker.Worker, header map[string]string, routes ...string) {
		t.Helper()
		for _, r := range routes {
			if got, body := status(t, w, r, header); got != 401 {
				t.Errorf("%s with %v: %d %s", r, header, got, body)
			}
		}
	}
	accepted := func(w *worker.Worker, header map[string]string, routes ...string) {
		t.Helper()
		for _, r := range routes {
			if got, body := status(t, w, r, header); got == 401 || got == 403 {
				t.Errorf("%s with %v: %d %s", r, header, got, body)
			}
		}
	}
	bearer := map[string]string{"Authorization": "Bearer " + key}
	i := keyed.Instance()
	for _, wrong := range []map[string]string{
		nil,
		{trust.Header: ""},
		{trust.Header: trust.NewSecret().Token(trust.HTTP, trust.Member(i.ID, i.Epoch))}, // of another fleet
		{trust.Header: secret.Token(trust.HTTP, trust.Member(i.ID, i.Epoch-1))},          // for a run before
		token(bare, secret), // for another worker
		{trust.Header: secret.Token(trust.KV, "")},
		{"Authorization": "Bearer " + key + "x"},
		{"Authorization": "Basic " + key},
		{"Authorization": key},
	} {
		refused(keyed, wrong, publicRoutes...)
		refused(keyed, wrong, controlRoutes...)
	}
	refused(bare, nil, publicRoutes...)
	refused(bare, bearer, publicRoutes...)
	refused(bare, nil, controlRoutes...)
	refused(keyed, bearer, controlRoutes...)
	accepted(keyed, bearer, publicRoutes...)
	for _, w := range []*worker.Worker{bare, keyed} {
		accepted(w, token(w, secret), publicRoutes...)
		accepted(w, token(w, secret), controlRoutes...)
		if got, _ := status(t, w, "GET /health", nil); got != 200 {
			t.Errorf("/health: %d", got)
		}
	}
	query := map[string]string{trust.Header: secret.Token(trust.Query, "")}
	accepted(bare, query, "GET /query")
	refused(bare, query, publicRoutes[:6]...)
	refused(bare, query, controlRoutes...)
	everyone := start(t, nil)
	accepted(everyone, nil, publicRoutes...)
	accepted(everyone, nil, controlRoutes...)

	_, b := send(t, http.MethodGet, keyed.URL()+"/metrics", nil, "")
	for _, class := range []string{"public", "control", "query"} {
		if !strings.Contains(string(b), `xpyd_worker_unauthorized_total{class="`+class+`"} `) || strings.Contains(string(b), `{class="`+class+`"} 0`) {
			t.Errorf("no refusals of class %s are counted", class)
		}
	}
}

// TestSecretsRotate: each of two secrets opens; a retired one does not, even if it just did.
func TestSecretsRotate(t *testing.T) {
	ring, old := newRing(t)
	w := start(t, nil, func(d *worker.Deps) { d.Ring = ring })
	next := trust.NewSecret()
	f := func(s trust.Secret, want int) {
		t.Helper()
		if got, body := status(t, w, "GET /version", token(w, s)); got != want {
			t.Errorf("%v: %d %s, want %d", s, got, body, want)
		}
	}
	f(old, 200)
	f(next, 401)
	if err := ring.Set(next, old); err != nil {
		t.Fatal(err)
	}
	f(old, 200)
	f(next, 200)
	if err := ring.Set(next); err != nil {
		t.Fatal(err)
	}
	f(old, 401)
	f(next, 200)
	if got := w.Instance().Secrets; got != old.ID() {
		t.Errorf("announces %q", got)
	}
}

// TestMetricsAccess: /metrics is this machine's; others show the scrape token.
func TestMetricsAccess(t *testing.T) {
	host := hostAddress(t)
	ring, secret := newRing(t)
	w := start(t, func(c *worker.Config) { c.Listen = net.JoinHostPort(host, "0") }, func(d *worker.Deps) { d.Ring = ring })
	f := func(header map[string]string, want int) {
		t.Helper()
		if got, body := status(t, w, "GET /metrics", header); got != want {
			t.Errorf("%v: %d %s", header, got, body)
		}
	}
	if host != "127.0.0.1" {
		f(nil, 401)
		f(map[string]string{"Authorization": "Bearer " + secret.Token(trust.KV, "")}, 401)
		f(map[string]string{trust.Header: secret.Token(trust.Scrape, "")}, 401)
	}
	scrape := map[string]string{"Authorization": "Bearer " + secret.Token(trust.Scrape, "")}
	f(scrape, 200)
	f(token(w, secret), 200)
	if got, _ := status(t, w, "GET /version", scrape); got != 401 {
		t.Errorf("the scrape token opens /version: %d", got)
	}
	near := start(t, nil, func(d *worker.Deps) { d.Ring = ring })
	if got, _ := status(t, near, "GET /metrics", nil); got != 200 {
		t.Errorf("from this machine: %d", got)
	}
}

// hostAddress is one of this machine's that is not loopback, if it has one.
func hostAddress(t testing.TB) string {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() && n.IP.To4() != nil {
			return n.IP.String()
		}
	}
	t.Log("no address but loopback: from elsewhere nothing is tried")
	return "127.0.0.1"
}

// TestKeyIsNoFleet: headers that link legs count only from the fleet: with an API key nobody can
// make a decode worker take KV from a place of his choice.
func TestKeyIsNoFleet(t *testing.T) {
	ring, secret := newRing(t)
	keys, key := keysFile(t, nil)
	d := start(t, func(c *worker.Config) { c.APIKeysFile = keys }, func(d *worker.Deps) { d.Ring = ring })
	stranger := start(t, func(c *worker.Config) { c.Role = string(fleet.Prefill) })
	const body = `{"prompt":"Once upon a time","max_tokens":2,"temperature":0}`
	f := func(header map[string]string, add map[string]string, want int, msg string) {
		t.Helper()
		all := map[string]string{}
		for _, m := range []map[string]string{header, add} {
			for k, v := range m {
				all[k] = v
			}
		}
		resp, b := ask(t, d.URL()+"/v1/completions", all, body)
		if resp.StatusCode != want || !strings.Contains(string(b), msg) {
			t.Errorf("with %v: %d %s, want %d %s", add, resp.StatusCode, b, want, msg)
		}
	}
	bearer := map[string]string{"Authorization": "Bearer " + key}
	links := linked(stranger, ticket.NewLink().String())
	f(nil, links, 401, "api_keys_file")
	f(bearer, links, 403, `"param":"x-xpyd-link"`)
	for _, name := range []string{"x-xpyd-link", "x-xpyd-prefill", "x-xpyd-prefill-epoch", "x-xpyd-prefill-kv", "x-xpyd-kv-peer", "x-xpyd-tokens", "x-xpyd-given", "x-xpyd-cache-salt"} {
		f(bearer, map[string]string{name: "x"}, 403, `"param":"`+name+`"`)
	}
	f(bearer, nil, 200, "")
	f(bearer, map[string]string{"x-xpyd-probe": "1", "x-xpyd-seed": "3"}, 200, "") // as of a router in front of any engine
	f(token(d, secret), map[string]string{"x-xpyd-link": "zz"}, 400, "x-xpyd-link")
	// A probe is not counted among the requests: that of the key was none.
	_, b := send(t, http.MethodGet, d.URL()+"/metrics", nil, "")
	if !strings.Contains(string(b), `vllm:request_success_total{engine="0",finished_reason="length",model_name="stories260k"} 2`) {
		t.Errorf("not two requests are counted:\n%s", grep(string(b), "request_success"))
	}
	if !strings.Contains(string(b), `xpyd_worker_unauthorized_total{class="link"} 9`) {
		t.Error(grep(string(b), "unauthorized"))
	}
}

func grep(text, word string) string {
	var out []string
	for line := range strings.SplitSeq(text, "\n") {
		if strings.Contains(line, word) {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}

// TestKeysOfAWorker: a key may have ended, be for other models, or be taken out of
// the file.
func TestKeysOfAWorker(t *testing.T) {
	ring, _ := newRing(t)
	f := func(change func(*apikey.Key), want int) {
		t.Helper()
		path, key := keysFile(t, change)
		w := start(t, func(c *worker.Config) { c.APIKeysFile = path }, func(d *worker.Deps) { d.Ring = ring })
		if got, body := status(t, w, "GET /v1/models", map[string]string{"Authorization": "bearer " + key}); got != want {
			t.Errorf("%d %s, want %d", got, body, want)
		}
	}
	f(nil, 200)
	f(func(k *apikey.Key) { k.Expires = time.Now().Add(-time.Hour) }, 401)
	f(func(k *apikey.Key) { k.Models = []string{"llama-*"} }, 401)
	f(func(k *apikey.Key) { k.Models = []string{"stories*"} }, 200)

	refused := func(want string, ring *trust.Ring, path string) {
		t.Helper()
		cfg := worker.DefaultConfig(fleet.Decode)
		cfg.Threads, cfg.KVMemory, cfg.APIKeysFile = 1, 1<<20, path
		_, err := worker.Start(t.Context(), cfg, worker.Deps{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Ring: ring})
		if e := (*config.KeyError)(nil); !errors.As(err, &e) || e.Key != "api_keys_file" || !strings.Contains(e.Msg, want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	path, _ := keysFile(t, nil)
	refused("trusts everyone", nil, path)
	refused("no such file", ring, path+"x")
	if err := os.WriteFile(path, []byte("keys:\n- name: a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(path+":2", ring, path)
	if err := os.Chmod(path, 0o620); err != nil {
		t.Fatal(err)
	}
	refused(path+" has mode 0620, so that others may change it", ring, path)
}

// TestStrangersBodiesAreNotRead: a stranger who announces 60 MiB is answered at once, whether he
// sends them or not. One who sends them all also gets his answer.
func TestStrangersBodiesAreNotRead(t *testing.T) {
	ring, _ := newRing(t)
	w := start(t, nil, func(d *worker.Deps) { d.Ring = ring })
	for path, status := range map[string]string{"POST /v1/completions": "401", "GET /health": "200", "GET /metrics": "200", "POST /nowhere": "401"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(w.URL(), "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, err := fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", path, 60<<20, bytes.Repeat([]byte("x"), 16<<10)); err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(conn)
		if err != nil || !bytes.HasPrefix(b, []byte("HTTP/1.1 "+status+" ")) || !bytes.Contains(b, []byte("Connection: close")) {
			t.Errorf("%s: %v: %.200s", path, err, b)
		}
		if took := time.Since(start); took > 20*time.Second { // the body would be waited for 30 s
			t.Errorf("%s took %v", path, took)
		}
	}
	for range 3 {
		resp, b := ask(t, w.URL()+"/v1/completions", nil, strings.Repeat("x", 512<<10))
		if resp.StatusCode != 401 {
			t.Errorf("%d %s", resp.StatusCode, b)
		}
	}
}

// TestRefusalsAreSaidOnce: strangers cannot fill the log.
func TestRefusalsAreSaidOnce(t *testing.T) {
	var log syncBuffer
	ring, _ := newRing(t)
	w := start(t, nil, func(d *worker.Deps) { d.Ring, d.Log = ring, slog.New(slog.NewTextHandler(&log, nil)) })
	status(t, w, "GET /"+strings.Repeat("ä", 150), nil)
	for range 20 {
		status(t, w, "GET /debug/ledger", nil)
	}
	if n := strings.Count(log.String(), "refused an HTTP request"); n != 1 || strings.Contains(log.String(), `\x`) { // half a character
		t.Errorf("said %d times:\n%s", n, log.String())
	}
}

// syncBuffer is a log that is read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
