package router_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

func TestStreamAndWhole(t *testing.T) {
	g := newRig(t, 1, 1)
	g.inOrder(story)
	resp, body := g.post("/v1/completions", askStream, "x-request-id", "my.id-1", "x-xpyd-explain", "1")
	if resp.StatusCode != 200 || body != storyText {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	h := resp.Header
	if h.Get("x-request-id") != "my.id-1" || h.Get("x-xpyd-prefill") != "p0" || h.Get("x-xpyd-decode") != "d0" ||
		!strings.HasPrefix(h.Get("Content-Type"), "text/event-stream") {
		t.Errorf("%v", h)
	}
	if !regexp.MustCompile(`^queue;dur=[0-9.]+, prefill;dur=1.5, kv;dur=0.5, ttft;dur=[0-9.]+$`).MatchString(h.Get("Server-Timing")) {
		t.Errorf("Server-Timing %q", h.Get("Server-Timing"))
	}
	var ex struct {
		Policy, Reason string
		Prefill        []struct{ ID string }
	}
	if err := json.Unmarshal([]byte(h.Get("x-xpyd-explain")), &ex); err != nil || ex.Policy != "prefix" || ex.Prefill[0].ID != "p0" || ex.Reason == "" {
		t.Errorf("explain %q, %v", h.Get("x-xpyd-explain"), err)
	}

	p, d := g.workers["p0"], g.workers["d0"]
	g.inOrder(whole)
	resp, body = g.post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}],"seed":3}`, "x-request-id", "no/slash")
	if resp.StatusCode != 200 || body != `{"whole":true}` || resp.Header.Get("x-xpyd-explain") != "" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	if id := resp.Header.Get("x-request-id"); !strings.HasPrefix(id, "req-") {
		t.Errorf("request id %q", id)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if string(d.body) != `{"model":"m","messages":[{"role":"user","content":"x"}],"seed":3}` {
		t.Errorf("decode got %q", d.body)
	}
	for name, want := range map[string]string{"x-xpyd-prefill": "p0", "x-xpyd-prefill-epoch": "1", "x-xpyd-prefill-kv": "127.0.0.1:1"} {
		if got := d.last.Get(name); got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	var leg struct {
		Link       string `json:"link"`
		DeadlineMS int    `json:"deadline_ms"`
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := json.Unmarshal(p.body, &leg); err != nil || leg.Link != d.last.Get("x-xpyd-link") || len(leg.Link) != 32 ||
		leg.DeadlineMS < 500000 {
		t.Errorf("prefill got %q", p.body)
	}
	if d.last.Get("x-xpyd-seed") == "" {
		t.Error("no seed")
	}
}

// TestAddAgain: an instance that was removed is added again on purpose, and by
// nobody else: not by what had found it before, nor by its connections.
func TestAddAgain(t *testing.T) {
	g := newRig(t, 1, 1)
	const path = "/admin/v1/instances"
	spec := `{"id":"e","role":"decode","dialect":"openai","model":"other","url":"` + g.workers["d0"].srv.URL + `"`
	add := func(more string, want int) (added fleet.Instance) {
		t.Helper()
		var to any = &added
		if want != 201 {
			to = nil
		}
		if got := g.adminJSON("POST", path, spec+more+"}", to); got != want {
			t.Errorf("add %q: %d, want %d", more, got, want)
		}
		return added
	}
	first := add("", 201)
	if first.Epoch >= 1<<53 {
		t.Errorf("epoch %d is more than JSON readers tell apart", first.Epoch)
	}
	remove := func() {
		t.Helper()
		if got := g.adminJSON("DELETE", path+"/e?force=true", "", nil); got != 204 {
			t.Errorf("remove: %d", got)
		}
	}
	remove()
	if err := g.watcher.AddStatic(first, fleet.Kube); err == nil || !strings.Contains(err.Error(), "it was taken out at epoch") {
		t.Errorf("what had found it brings it back: %v", err)
	}
	if g.watcher.ReportAlive("e", first.Epoch) {
		t.Error("a connection brings it back")
	}
	add(fmt.Sprintf(`,"epoch":%d`, first.Epoch), 400)
	if second := add("", 201); second.Epoch <= first.Epoch {
		t.Errorf("epoch %d after %d", second.Epoch, first.Epoch)
	}
	remove()
	add(`,"epoch":18000000000000000000`, 201)
	remove()
	add("", 201)
	remove()
}

// TestAddTaken: what is added does not push out a live worker that joined by itself, only what was
// added before.
func TestAddTaken(t *testing.T) {
	s, err := fleet.StartServer(fleet.ServerConfig{Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	conn, err := fleet.Connect(fleet.ConnConfig{URL: s.ClientURL(), Name: t.Name()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	watcher, err := fleet.Watch(fleet.WatcherConfig{Conn: conn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watcher.Close)
	inst := fleet.Instance{ID: "decode-0", Epoch: fleet.NewEpoch(), Role: fleet.Decode, URL: "http://127.0.0.1:1", Dialect: "native", Model: "m"}
	a, err := fleet.Announce(fleet.AnnouncerConfig{Conn: conn, Instance: inst})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close(context.Background()) })
	g := newRigOf(t, func(d *router.Deps) { d.Fleet = watcher }, 0, 0)
	joined := func() bool {
		m := watcher.Snapshot().Get("decode-0")
		return m != nil && m.Source == fleet.NATS && m.Serves()
	}
	g.until("it has joined", joined)
	add := func(id, more string) (int, string) {
		return g.as("Bearer secret", "POST", "/admin/v1/instances", `{"id":"`+id+`","role":"decode","url":"http://127.0.0.1:2","model":"m"`+more+`}`)
	}
	for _, more := range []string{"", `,"epoch":18000000000000000000`} {
		code, text := add("decode-0", more)
		var e struct {
			Error struct{ Message, Type, Param, Code string }
		}
		if err := json.Unmarshal([]byte(text), &e); err != nil || code != 409 || e.Error.Code != "id_taken" || e.Error.Param != "id" || e.Error.Type != "invalid_request_error" || !strings.Contains(e.Error.Message, "decode-0 is a live worker of the fleet") {
			t.Errorf("%d %s, %v", code, text, err)
		}
	}
	if !joined() {
		t.Error("it is gone")
	}
	for range 2 {
		if code, text := add("decode-1", ""); code != 201 {
			t.Errorf("%d %s", code, text)
		}
	}
}

// TestModels: a listed model can be served now. One that is known but cannot be served is
// unavailable, and an unknown one does not exist.
func TestModels(t *testing.T) {
	g := newRig(t, 1, 1)
	g.add("lone", fleet.Decode, func(i *fleet.Instance) { i.Model = "half" }) // has no prefill
	g.add("odd-p", fleet.Prefill, func(i *fleet.Instance) { i.Model, i.Numerics = "odd", "a" })
	g.add("odd-d", fleet.Decode, func(i *fleet.Instance) { i.Model, i.Numerics = "odd", "b" })
	engine := g.add("engine", fleet.Decode, func(i *fleet.Instance) { i.Model, i.Dialect = "alone", "openai" })
	g.until("the engine to be probed", func() bool { return g.r.Members.Serves(g.watcher.Snapshot().Get("engine")) })
	listed := func(want ...string) {
		t.Helper()
		_, body := g.get("/v1/models")
		for _, model := range []string{"m", "half", "odd", "alone", "none"} {
			there := slices.Contains(want, model)
			if strings.Contains(body, `"id":"`+model+`"`) != there {
				t.Errorf("%s is listed: %v, want %v", model, !there, there)
			}
			status := 503
			switch {
			case there:
				status = 200
			case model == "none":
				status = 404
			}
			if got, body := g.get("/v1/models/" + model); got != status {
				t.Errorf("%s: %d %s, want %d", model, got, body, status)
			}
			if resp, body := g.post("/v1/completions", `{"model":"`+model+`","prompt":"x"}`); resp.StatusCode != status {
				t.Errorf("%s: a request: %d %s, want %d", model, resp.StatusCode, body, status)
			}
		}
	}
	listed("m", "alone")
	if got := g.adminJSON("POST", "/admin/v1/instances/p0/drain", `{"force":true}`, nil); got != 200 {
		t.Fatal(got)
	}
	engine.srv.CloseClientConnections() // for good
	engine.srv.Close()
	g.watcher.ReportDead("engine", 1, "test")
	listed()
	if got := g.adminJSON("POST", "/admin/v1/instances/p0/undrain", "", nil); got != 200 {
		t.Fatal(got)
	}
	g.watcher.Remove("lone", "test")
	listed("m")
}

func TestOwnPaths(t *testing.T) {
	g := newRig(t, 1, 1)
	f := func(path string, status int, want string) {
		t.Helper()
		if code, body := g.get(path); code != status || !strings.Contains(body, want) {
			t.Errorf("%s: %d %q", path, code, body)
		}
	}
	f("/health", 200, "ok")
	f("/ready", 200, "ready")
	f("/version", 200, `"version":"1.2.3"`)
	f("/v1/models", 200, `"id":"m"`)
	f("/v1/models/m", 200, `"max_model_len":512`)
	f("/v1/models/x", 404, "model_not_found")
	f("/metrics", 404, "not_found")
	f("/nothing", 404, "not_found")
	f("/v1/completions", 405, "method_not_allowed")
	if resp, body := g.post("/tokenize", `{"prompt":"x"}`); resp.StatusCode != 200 || body != `{"whole":true}` {
		t.Errorf("tokenize: %d %q", resp.StatusCode, body)
	}
	if resp, body := g.post("/detokenize", `{"model":"x","tokens":[1]}`); resp.StatusCode != 404 {
		t.Errorf("detokenize: %d %q", resp.StatusCode, body)
	}
	for _, path := range []string{"/ready", "/v1/models/m"} {
		resp, body := g.post(path, ``)
		if resp.StatusCode != 405 || resp.Header.Get("Allow") != "GET" {
			t.Errorf("POST %s: %d %q", path, resp.StatusCode, body)
		}
		apiError(t, body)
	}
}

// TestAnsweredAtOnce: what needs no worker has a line in the log and a count too, by its path if that is
// one of the router's: who asks for something else adds no metric. What monitoring asks again and
// again is logged for debugging only.
func TestAnsweredAtOnce(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.APIKeys = []string{"key"} })
	for i, c := range []struct {
		method, path, key string
		status            int
		counted, level    string
	}{
		{"GET", "/health", "", 200, "/health", "DEBUG"}, {"GET", "/ready", "", 200, "/ready", "DEBUG"}, {"GET", "/version", "", 200, "/version", "DEBUG"},
		{"GET", "/v1/models", "key", 200, "/v1/models", "DEBUG"}, {"GET", "/v1/models/m", "key", 200, "/v1/models", "DEBUG"}, {"GET", "/v1/models/x", "key", 404, "/v1/models", "INFO"},
		{"GET", "/v1/models/m", "", 401, "/v1/models", "INFO"}, {"GET", "/v1/models", "", 401, "/v1/models", "INFO"}, {"POST", "/v1/completions", "", 401, "/v1/completions", "INFO"},
		{"GET", "/v1/completions", "key", 405, "/v1/completions", "INFO"}, {"POST", "/version", "", 405, "/version", "INFO"}, {"GET", "/nothing", "", 404, "other", "INFO"}, {"POST", "/v1/models/m", "key", 405, "/v1/models", "INFO"},
		{"DELETE", "/v1/models/m", "", 401, "/v1/models", "INFO"},
	} {
		id := fmt.Sprintf("at-once-%d", i)
		req, err := http.NewRequest(c.method, g.url+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("x-request-id", id)
		if c.key != "" {
			req.Header.Set("Authorization", "Bearer "+c.key)
		}
		before := g.counted(c.counted, c.status)
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.status || resp.Header.Get("x-request-id") != id {
			t.Errorf("%s %s: %d, named %q", c.method, c.path, resp.StatusCode, resp.Header.Get("x-request-id"))
		}
		if n := g.counted(c.counted, c.status) - before; n != 1 {
			t.Errorf("%s %s: counted %v times as %s", c.method, c.path, n, c.counted)
		}
		want := fmt.Sprintf("level=%s msg=request request_id=%s method=%s path=%s status=%d\n", c.level, id, c.method, c.path, c.status)
		if !strings.Contains(g.logs.String(), want) {
			t.Errorf("the log lacks %q", want)
		}
	}
}

// counted is how many requests have been answered with a status, by the path in metrics.
func (g *rig) counted(path string, status int) float64 {
	g.t.Helper()
	families, err := g.reg.Gather()
	if err != nil {
		g.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if l := m.GetLabel(); f.GetName() == "xpyd_router_requests_total" && l[0].GetValue() == strconv.Itoa(status) && l[1].GetValue() == path {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// TestTokenizeWhileDrained: a worker that drains gets nothing more, also before its
// announcement says that it drains, or where it never will.
func TestTokenizeWhileDrained(t *testing.T) {
	g := newRig(t, 1, 1)
	f := func(status int, want string) {
		t.Helper()
		if resp, body := g.post("/tokenize", `{"prompt":"x"}`); resp.StatusCode != status || !strings.Contains(body, want) {
			t.Errorf("%d %q, want %d %q", resp.StatusCode, body, status, want)
		}
	}
	drain := func(id string) {
		t.Helper()
		if code := g.adminJSON("POST", "/admin/v1/instances/"+id+"/drain", `{"force":true}`, nil); code != 200 {
			t.Errorf("drain: %d", code)
		}
	}
	g.workers["d0"].on(&g.workers["d0"].other, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `"d0"`) })
	g.workers["p0"].on(&g.workers["p0"].other, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `"p0"`) })
	f(200, "d0")
	drain("d0")
	f(200, "p0")
	drain("p0")
	f(503, "every live worker is draining")
	g.adminJSON("POST", "/admin/v1/instances/d0/undrain", "", nil)
	f(200, "d0")
}

// TestTokenizeLate: once its time is over nobody else is asked.
func TestTokenizeLate(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.FirstByteTimeout = 200 * time.Millisecond })
	d := g.workers["d0"]
	d.on(&d.other, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	if resp, body := g.post("/tokenize", `{"prompt":"x"}`); resp.StatusCode != 504 || g.workers["p0"].calls.Load() > 0 {
		t.Errorf("%d %q, prefill was asked %d times", resp.StatusCode, body, g.workers["p0"].calls.Load())
	}
}

func TestReadyNeedsAProbedPair(t *testing.T) {
	g := newRig(t, 1, 1)
	p := g.workers["p0"]
	if n := p.probes.Load(); n != 1 {
		t.Errorf("%d probes", n)
	}
	g.watcher.ReportDead("p0", 1, "test")
	if code, body := g.get("/ready"); code != 503 {
		t.Errorf("%d %q", code, body)
	}
	resp, body := g.post("/v1/completions", ask)
	if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	apiError(t, body)
	next := p.inst
	next.Epoch = 2
	if err := g.watcher.AddStatic(next, fleet.Static); err != nil {
		t.Fatal(err)
	}
	g.until("ready again", func() bool { return g.r.Ready() })
	if n := p.probes.Load(); n != 2 {
		t.Errorf("%d probes after two epochs", n)
	}
}

// TestFailedProbesAreRepeated: a worker that breaks its first connections
// serves in the end, and is warned of meanwhile.
func TestFailedProbesAreRepeated(t *testing.T) {
	g := newRig(t, 0, 0)
	g.add("p0", fleet.Prefill)
	g.add("d0", fleet.Decode)
	g.until("ready", func() bool { return g.r.Ready() })
	other := g.add("p1", fleet.Prefill, func(i *fleet.Instance) { i.ModelFingerprint = "other" })
	g.addCutting("d1", func(n int64) bool { return n <= 4 })
	g.allProbed(3) // all but p1
	if n := strings.Count(g.logs.String(), `level=WARN msg="probe failed"`); n != 1 {
		t.Errorf("%d warnings, of the fourth failure only there is to be one\n%s", n, g.logs)
	}
	if other.probes.Load() != 0 {
		t.Error("an incompatible worker was probed")
	}
}

// addCutting adds a decode worker that breaks its n-th connection, from 1 on,
// where cut says so.
func (g *rig) addCutting(id string, cut func(n int64) bool) {
	var n atomic.Int64
	g.add(id, fleet.Decode, func(*fleet.Instance) {
		g.workers[id].raw.Store(&rawHandler{func(http.ResponseWriter, *http.Request) bool {
			if cut(n.Add(1)) {
				panic(http.ErrAbortHandler)
			}
			return false
		}})
	})
}

// TestLeavingIsNoWarning: there is no warning for the first probes that a worker cuts,
// nor for a later one if the worker has said that it leaves.
func TestLeavingIsNoWarning(t *testing.T) {
	g := newRig(t, 0, 0)
	g.add("p0", fleet.Prefill)
	g.addCutting("d0", func(n int64) bool {
		if n == 4 {
			leaving := g.workers["d0"].inst
			leaving.Draining = true
			if err := g.watcher.AddStatic(leaving, fleet.Static); err != nil {
				t.Error(err)
			}
		}
		return true
	})
	g.until("the fourth failed probe", func() bool { return strings.Count(g.logs.String(), `msg="probe failed"`) == 4 })
	if logs := g.logs.String(); strings.Contains(logs, "level=WARN") {
		t.Error(logs)
	}
}

// TestFullIsNoWarning: prefill says that it is full, or about to leave, after decode got
// what it needed without it. The probe has failed, but that is no reason to warn.
func TestFullIsNoWarning(t *testing.T) {
	g := newRig(t, 0, 0)
	full, answered := outcome(503, "no_space"), make(chan struct{})
	g.add("p0", fleet.Prefill, func(i *fleet.Instance) {
		g.workers["p0"].raw.Store(&rawHandler{func(w http.ResponseWriter, r *http.Request) bool {
			<-answered
			full(w, r)
			return true
		}})
	})
	var once sync.Once
	g.add("d0", fleet.Decode, func(i *fleet.Instance) {
		g.workers["d0"].raw.Store(&rawHandler{func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[]}`)
			http.NewResponseController(w).Flush()
			once.Do(func() { close(answered) })
			return true
		}})
	})
	g.until("a failed probe", func() bool { return strings.Contains(g.logs.String(), "probe failed") })
	if logs := g.logs.String(); strings.Contains(logs, "level=WARN") {
		t.Error(logs)
	}
}

func TestAdmin(t *testing.T) {
	g := newRig(t, 2, 1)
	resp, err := http.Get(g.admin + "/admin/v1/instances")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 401 {
		t.Errorf("without a token: %d", resp.StatusCode)
	}
	var list struct {
		Ready     bool
		Instances []struct {
			ID               string
			Probed, Draining bool
		}
	}
	g.adminJSON("GET", "/admin/v1/instances", "", &list)
	if !list.Ready || len(list.Instances) != 3 || !list.Instances[0].Probed {
		t.Errorf("%+v", list)
	}
	if code := g.adminJSON("POST", "/admin/v1/instances/p0/drain", "", nil); code != 200 {
		t.Errorf("drain: %d", code)
	}
	for range 6 {
		if resp, _ := g.post("/v1/completions", ask); resp.Header.Get("x-xpyd-prefill") != "p1" {
			t.Error("a draining worker got a request")
		}
	}
	if code := g.adminJSON("POST", "/admin/v1/instances/p0/undrain", "", nil); code != 200 {
		t.Errorf("undrain: %d", code)
	}
	if code := g.adminJSON("POST", "/admin/v1/instances/p9/drain", "", nil); code != 404 {
		t.Errorf("unknown: %d", code)
	}
	if code := g.adminJSON("DELETE", "/admin/v1/instances/p0", "", nil); code != 204 {
		t.Errorf("delete: %d", code)
	}
	if code := g.adminJSON("POST", "/admin/v1/instances", `{"id":"p7","role":"prefill","url":"`+g.workers["p0"].srv.URL+`","model":"m","max_model_len":512}`, nil); code != 201 {
		t.Errorf("add: %d", code)
	}
	for body, field := range map[string]string{
		`{}`: "id", `{"id":"x"}`: "role", `{"id":"x","role":"cook"}`: "role", `{"id":"x","role":"decode"}`: "model",
		`{"id":"x","role":"decode","model":"m"}`: "url", `{"id":"x","role":"decode","model":"m","url":"a:1"}`: "url",
		`{"id":"x","role":"decode","model":"m","url":"http://a:1","dialect":"q"}`: "dialect", `{"weight":1}`: "weight", `{"epoch":"q"}`: "epoch",
	} {
		var e struct{ Error struct{ Param string } }
		if code := g.adminJSON("POST", "/admin/v1/instances", body, &e); code != 400 || e.Error.Param != field {
			t.Errorf("%s: %d, param %q", body, code, e.Error.Param)
		}
	}
	g.until("p7", func() bool {
		g.adminJSON("GET", "/admin/v1/instances", "", &list)
		for _, i := range list.Instances {
			if i.ID == "p7" && i.Probed {
				return true
			}
		}
		return false
	})
	for body, want := range map[string]int{`{`: 400, `{"id":"x","role":"cook","url":"http://a:1"}`: 400, `{"id":"x","what":1}`: 400, `{"id":"x","role":"prefill","url":"ftp://x"}`: 400} {
		if code := g.adminJSON("POST", "/admin/v1/instances", body, nil); code != want {
			t.Errorf("%s: %d", body, code)
		}
	}
	for path, want := range map[string]int{"profile?seconds=100000": 400, "trace?seconds=601": 400, "heap?seconds=x": 400, "heap": 200, "trace?seconds=1": 200} {
		if code := g.adminJSON("GET", "/debug/pprof/"+path, "", nil); code != want {
			t.Errorf("%s: %d", path, code)
		}
	}
	var ledger struct {
		Fleet map[string]any `json:"fleet"`
	}
	g.adminJSON("GET", "/debug/ledger?fleet=1", "", &ledger)
	if len(ledger.Fleet) < 3 {
		t.Errorf("%v", ledger.Fleet)
	}
	g.post("/v1/completions", ask, "x-request-id", "seen")
	var info struct {
		Status   int
		Attempts []struct{ Link string }
	}
	g.until("the request to be over", func() bool { // a stream's last byte is there before its request ends
		return g.adminJSON("GET", "/debug/requests/seen", "", &info) == 200 && info.Status == 200 && len(info.Attempts) == 1
	})
	if code := g.adminJSON("GET", "/debug/requests/unseen", "", nil); code != 404 {
		t.Errorf("%d", code)
	}
	resp, err = http.Get(g.admin + "/metrics")
	if err != nil || resp.StatusCode != 200 {
		t.Errorf("metrics: %v", err)
	}
	resp.Body.Close()
}

// TestMetricsOnFirstUse: a router that nobody has asked exports no series of its
// paths; one that was asked tells what tokens it took and how fast.
func TestMetricsOnFirstUse(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.PublicMetrics = true })
	metrics := func() string { _, text := g.get("/metrics"); return text }
	paths := func() (out []string) {
		for _, line := range strings.Split(metrics(), "\n") {
			if strings.HasPrefix(line, "xpyd_router_") && strings.Contains(line, `path="`) && !strings.Contains(line, "_bucket{") {
				out = append(out, line)
			}
		}
		return out
	}
	if list := paths(); len(list) > 0 {
		t.Errorf("before any request: %q", list)
	}
	if n := strings.Count(metrics(), "\nxpyd_router_"); n > 160 {
		t.Errorf("%d series", n)
	}
	d := g.workers["d0"]
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		begin(w)
		for range 4 {
			fmt.Fprint(w, "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n")
			w.(http.Flusher).Flush()
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	})
	g.post("/v1/completions", askStream)
	d.on(&d.decode, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"choices":[{"index":0,"text":"a"}],"usage":{"prompt_tokens":7,"completion_tokens":5}}`)
	})
	g.post("/v1/completions", `{"model":"m","prompt":"x"}`)
	g.until("it is counted", func() bool {
		return strings.Contains(metrics(), `xpyd_router_requests_total{code="200",path="/v1/completions"} 2`)
	})
	text := metrics()
	for name, want := range map[string]string{"requests_total": "2", "ttft_seconds_count": "2", "itl_seconds_count": "4", "tpot_seconds_count": "1",
		"generation_tokens_total": "10", "prompt_tokens_total": "12", "request_duration_seconds_count": "2"} {
		m := regexp.MustCompile(`(?m)^xpyd_router_` + name + `\{.*path="/v1/completions"\} (\S+)$`).FindStringSubmatch(text)
		if m == nil || m[1] != want {
			t.Errorf("%s: %q, want %s", name, m, want)
		}
	}
	if strings.Contains(text, `path="/v1/embeddings"`) {
		t.Error("a path that nobody asked for")
	}
}
