package router_test

import (
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/trust/trusttest"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/dialect"
)

// eye records what is asked of a mock, and what it was shown.
type eye struct {
	mu   sync.Mutex
	seen map[string][]string // tokens by path; "probe " before it for the router's own
}

// on makes it watch m, which answers as before unless serve does.
func (e *eye) on(m *mock, serve func(http.ResponseWriter, *http.Request) bool) {
	e.seen = map[string][]string{}
	m.raw.Store(&rawHandler{serve: func(w http.ResponseWriter, r *http.Request) bool {
		e.mu.Lock()
		path := r.URL.Path
		if r.Header.Get("x-xpyd-probe") != "" {
			path = "probe " + path
		}
		e.seen[path] = append(e.seen[path], strings.Join(r.Header.Values(trust.Header), ","))
		e.mu.Unlock()
		return serve != nil && serve(w, r)
	}})
}

func (e *eye) paths() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Sorted(maps.Keys(e.seen))
}

// all reports tokens other than want.
func (e *eye) all(t *testing.T, who, want string) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	for path, tokens := range e.seen {
		for _, got := range tokens {
			if got != want {
				t.Errorf("%s %s: shown %q, want %q", who, path, got, want)
			}
		}
	}
}

func ringOf(t *testing.T, secrets ...trust.Secret) func(*router.Deps) {
	t.Helper()
	ring, err := trust.NewRing(secrets...)
	if err != nil {
		t.Fatal(err)
	}
	return func(d *router.Deps) { d.Ring = ring }
}

// TestTokenShown: every request of the router to a worker of its fleet carries the token
// of that run of that worker, and no credentials of a client.
func TestTokenShown(t *testing.T) {
	older, newer := trust.NewSecret(), trust.NewSecret()
	g := newRigOf(t, ringOf(t, newer, older), 0, 0)
	var p, d eye
	g.add("p0", fleet.Prefill, func(i *fleet.Instance) {
		i.Secrets = newer.ID() + "+" + older.ID()
		p.on(g.workers["p0"], nil)
	})
	g.add("d0", fleet.Decode, func(i *fleet.Instance) {
		i.Epoch, i.Secrets = 7, older.ID() // it has not the newer one yet
		d.on(g.workers["d0"], nil)
	})
	g.until("ready", g.r.Ready)
	for i := 0; i < 2 || len(p.paths()) < 2; i++ { // a prefill leg may be cancelled before it is seen
		if resp, body := g.post("/v1/completions", askStream, trust.Header, "the-clients"); resp.StatusCode != 200 || body != storyText {
			t.Fatalf("%d %q", resp.StatusCode, body)
		}
	}
	g.post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}]}`, trust.Header, "the-clients")
	g.post("/tokenize", `{"model":"m","prompt":"x"}`, trust.Header, "the-clients")
	g.post("/v1/embeddings", `{"model":"m","input":"x"}`, trust.Header, "the-clients")
	for _, order := range []string{
		"POST /admin/v1/instances/d0/drain", "POST /admin/v1/instances/d0/undrain", "POST /admin/v1/instances/p0/drain",
		"GET /admin/v1/cache", "POST /admin/v1/cache/flush", "GET /admin/v1/cache/pin", "GET /admin/v1/profile", "GET /debug/ledger?fleet=1",
		"GET /admin/v1/profile?instance=d0",
	} {
		verb, path, _ := strings.Cut(order, " ")
		body := ""
		if strings.HasSuffix(path, "/drain") {
			body = `{"force":true}`
		}
		g.adminJSON(verb, path, body, nil)
	}
	g.adminJSON("POST", "/admin/v1/cache/pin", `{"prompt":"x"}`, nil)
	g.adminJSON("POST", "/admin/v1/instances/p0/role", `{"role":"prefill"}`, nil)
	p.all(t, "p0", newer.Token(trust.HTTP, trust.Member("p0", 1)))
	d.all(t, "d0", older.Token(trust.HTTP, trust.Member("d0", 7)))
	want := []string{"/debug/ledger", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/xpyd/v1/cache", "/xpyd/v1/cache/flush", "/xpyd/v1/cache/pin",
		"/xpyd/v1/drain", "/xpyd/v1/prefill", "/xpyd/v1/profile", "/xpyd/v1/role", "/xpyd/v1/undrain", "/tokenize", "probe /v1/completions", "probe /xpyd/v1/prefill"}
	asked := slices.Concat(p.paths(), d.paths())
	for _, path := range want {
		if !slices.Contains(asked, path) {
			t.Errorf("%s was not asked: the test shows nothing of it", path)
		}
	}
}

// TestTokenNotShown: engines of foreign dialects are shown no token: neither the
// router's nor a client's.
func TestTokenNotShown(t *testing.T) {
	g := newRigOf(t, ringOf(t, trust.NewSecret()), 0, 0, func(c *router.Config) { c.Upstream.PassAuthorization = true })
	eyes := map[string]*eye{}
	add := func(name string, role fleet.Role) {
		id := name + "-" + string(role[:1])
		eyes[id] = &eye{}
		g.add(id, role, func(i *fleet.Instance) {
			i.Dialect, i.Model = name, "m-"+name
			i.Bootstrap = strings.TrimPrefix(i.URL, "http://")
			eyes[id].on(g.workers[id], nil)
		})
	}
	for _, name := range dialect.Names() {
		if name == "native" {
			continue
		}
		if name != "openai" {
			add(name, fleet.Prefill)
		}
		add(name, fleet.Decode)
	}
	for id, e := range eyes {
		g.until(id+" to be asked", func() bool { return len(e.paths()) > 0 })
	}
	g.until("one to be ready", func() bool {
		resp, _ := g.post("/v1/completions", strings.Replace(ask, `"m"`, `"m-openai"`, 1), trust.Header, "the-clients")
		return resp.StatusCode == 200
	})
	for _, path := range []string{"/v1/embeddings", "/tokenize"} {
		if resp, body := g.post(path, `{"model":"m-openai","prompt":"x"}`, trust.Header, "the-clients"); resp.StatusCode != 200 {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
	for id, e := range eyes {
		e.all(t, id, "")
	}
	if got := eyes["openai-d"].paths(); !slices.Contains(got, "/v1/completions") || !slices.Contains(got, "/v1/embeddings") || !slices.Contains(got, "/tokenize") {
		t.Errorf("asked for %v", got)
	}
}

// refusing is a worker of another fleet.
func refusing(w http.ResponseWriter, _ *http.Request) bool {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(401)
	fmt.Fprint(w, `{"error":{"message":"says the mock","type":"authentication_error","param":null,"code":"invalid_api_key"}}`)
	return true
}

// TestWorkerRefusesUs: a worker that does not accept the router as a member of its fleet
// is listed as such, asked rarely, and never used for clients.
func TestWorkerRefusesUs(t *testing.T) {
	g := newRigOf(t, ringOf(t, trust.NewSecret()), 1, 1)
	var e eye
	g.add("d1", fleet.Decode, func(*fleet.Instance) { e.on(g.workers["d1"], refusing) })
	problem := func(id string) string {
		for _, i := range g.list().Instances {
			if i.ID == id && !i.Probed {
				return i.ProbeError
			}
		}
		return ""
	}
	const why = "does not accept this router's fleet secret"
	g.until("d1 to be shown", func() bool { return strings.Contains(problem("d1"), why) })
	for began := time.Now(); time.Since(began) < 500*time.Millisecond; { // probes that fail are repeated after 0.1, 0.2, 0.4 s
		if resp, body := g.post("/v1/completions", ask); resp.StatusCode != 200 || resp.Header.Get("x-xpyd-decode") != "d0" {
			t.Fatalf("%d by %s: %s", resp.StatusCode, resp.Header.Get("x-xpyd-decode"), body)
		}
	}
	e.mu.Lock()
	if n := len(e.seen["probe /v1/completions"]); n > 1 {
		t.Errorf("%d probes", n)
	}
	e.mu.Unlock()
	if p := problem("p0"); p != "" {
		t.Errorf("p0 is at fault: %s", p)
	}

	// One that served until now: its fleet's secret was changed.
	var f eye
	f.on(g.workers["d0"], refusing)
	for _, ask := range []string{ask, askStream} {
		resp, body := g.post("/v1/completions", ask)
		if resp.StatusCode != 503 {
			t.Errorf("%d %s, want 503", resp.StatusCode, body)
		}
	}
	g.until("d0 to be shown", func() bool { return strings.Contains(problem("d0"), why) })
	f.mu.Lock()
	if n := len(f.seen["/v1/completions"]); n != 1 {
		t.Errorf("%d requests went to a worker that had refused one", n)
	}
	f.mu.Unlock()
	if resp, body := g.post("/tokenize", `{"model":"m","prompt":"x"}`); resp.StatusCode == 401 {
		t.Errorf("/tokenize: %s", body)
	}
	if resp, body := g.post("/v1/embeddings", `{"model":"m","input":"x"}`); resp.StatusCode != 503 {
		t.Errorf("/v1/embeddings: %d %s", resp.StatusCode, body)
	}
	for _, order := range []string{"POST /admin/v1/instances/d0/undrain", "GET /admin/v1/profile?instance=d0"} {
		verb, path, _ := strings.Cut(order, " ")
		if code := g.adminJSON(verb, path, "", nil); code != 502 {
			t.Errorf("%s: %d", order, code)
		}
	}
	for _, i := range g.list().Instances {
		if i.State != string(fleet.Live) {
			t.Errorf("%s is %s", i.ID, i.State)
		}
	}
}

// TestSecureWorkers: with the fleet's certificates the router talks to workers at
// https addresses whose certificate is of its CA, whatever their names, and to none
// without; upstream.* is not theirs.
func TestSecureWorkers(t *testing.T) {
	ca, others := trusttest.New(t), trusttest.New(t)
	of := func(by, trusts *trusttest.Authority) *trust.TLS {
		t.Helper()
		cert, key, _ := by.Member(t, "nobody")
		c, err := trust.NewTLS(cert, key, trusts.CA(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	given := func(d *router.Deps) { d.TLS = of(ca, ca) }
	g := newRigOf(t, given, 0, 0, func(c *router.Config) { c.Upstream.CA = others.CA() })
	g.secured("p0", fleet.Prefill, "native", of(ca, ca).Server())
	d := g.secured("d0", fleet.Decode, "native", of(ca, ca).Server())
	g.until("ready", g.r.Ready)
	for range 3 {
		if resp, body := g.post("/v1/completions", askStream); resp.StatusCode != 200 || body != storyText {
			t.Fatalf("%d %q", resp.StatusCode, body)
		}
	}
	large := strings.Replace(ask, "Once", strings.Repeat("Once ", 50_000), 1)
	d.on(&d.decode, whole)
	if resp, body := g.post("/v1/completions", large); resp.StatusCode != 200 {
		t.Fatalf("%d %q", resp.StatusCode, body)
	}
	if resp, body := g.post("/v1/embeddings", `{"model":"m","input":"x"}`); resp.StatusCode != 200 {
		t.Errorf("passed on: %d %s", resp.StatusCode, body)
	}
	if code := g.adminJSON("GET", "/admin/v1/cache", "", nil); code != 200 {
		t.Errorf("cache: %d", code)
	}
	g.until("the connections to be kept", g.idle)

	says := func(name, want string, given func(*router.Deps), add func(g *rig)) {
		t.Helper()
		g := newRigOf(t, given, 0, 0)
		add(g)
		g.until(name+": "+want, func() bool {
			for _, i := range g.list().Instances {
				if i.ID == "d0" && !i.Probed && strings.Contains(i.ProbeError, want) {
					return true
				}
			}
			return false
		})
		if g.r.Ready() {
			t.Errorf("%s: ready", name)
		}
	}
	pair := func(role fleet.Role, id string, worker *trust.TLS) func(*rig) {
		return func(g *rig) { g.secured(id, role, "native", worker.Server()) }
	}
	both := func(worker *trust.TLS) func(*rig) {
		return func(g *rig) {
			pair(fleet.Prefill, "p0", worker)(g)
			pair(fleet.Decode, "d0", worker)(g)
		}
	}
	says("a worker of another CA", "certificate signed by unknown authority", given, both(of(others, ca)))
	says("a worker that trusts another CA", "tls: ", given, both(of(ca, others)))
	says("a router without certificates", "no fleet.tls_cert", nil, both(of(ca, ca)))
	says("a worker without TLS", "fleet.tls_cert asks for https", given, func(g *rig) {
		g.add("p0", fleet.Prefill)
		g.add("d0", fleet.Decode)
	})
}
