package router_test

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/apikey"
)

// keyFile is a file of keys that can be changed.
type keyFile struct {
	t       *testing.T
	path    string
	secrets map[string]string
}

func newKeyFile(t *testing.T, keys ...apikey.Key) *keyFile {
	f := &keyFile{t: t, path: filepath.Join(t.TempDir(), "keys.yaml"), secrets: map[string]string{}}
	f.add(keys...)
	return f
}

// add makes a secret for each key, unless it has one, and appends it.
func (f *keyFile) add(keys ...apikey.Key) {
	f.t.Helper()
	for _, k := range keys {
		secret, made := apikey.New(k.Name)
		f.secrets[k.Name], k.SHA256 = secret, made.SHA256
		if err := apikey.Append(f.path, k); err != nil {
			f.t.Fatal(err)
		}
	}
}

func (f *keyFile) of(name string) []string {
	return []string{"Authorization", "Bearer " + f.secrets[name]}
}

func (f *keyFile) config(c *router.Config) { c.APIKeysFile = f.path }

// usage answers with a usage of 10 and n tokens.
func usage(n int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":%d}}`, n)
	}
}

func TestKeyFile(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "all"}, apikey.Key{Name: "some", Models: []string{"other*"}},
		apikey.Key{Name: "old", Expires: time.Now().Add(-time.Hour)})
	g := newRig(t, 1, 1, f.config)
	d := g.workers["d0"]
	d.on(&d.decode, whole)
	refused := func(header ...string) {
		t.Helper()
		resp, body := g.post("/v1/completions", ask, header...)
		if resp.StatusCode != 401 || resp.Header.Get("WWW-Authenticate") != "Bearer" {
			t.Errorf("%v: %d %v", header, resp.StatusCode, resp.Header)
		}
		if e := apiError(t, body); e.Type != "authentication_error" || *e.Code != "invalid_api_key" {
			t.Errorf("%+v", e)
		}
	}
	served := func(header ...string) {
		t.Helper()
		if resp, body := g.post("/v1/completions", ask, header...); resp.StatusCode != 200 {
			t.Errorf("%v: %d %s", header, resp.StatusCode, body)
		}
	}
	refused()
	refused("Authorization", f.secrets["all"])
	refused("Authorization", "Bearer "+f.secrets["all"]+"x")
	refused("Authorization", "Bearer ")
	refused("Authorization", "Basic "+f.secrets["all"])
	refused(f.of("old")...)
	served(f.of("all")...)
	served("authorization", "bearer "+f.secrets["all"])

	if resp, body := g.post("/v1/completions", ask, f.of("some")...); resp.StatusCode != 404 || *apiError(t, body).Code != "model_not_found" {
		t.Errorf("another model: %d %s", resp.StatusCode, body)
	}
	if resp, body := g.post("/v1/completions", `{"prompt":"a"}`, f.of("some")...); resp.StatusCode != 400 || *apiError(t, body).Param != "model" {
		t.Errorf("no model, and none to use: %d %s", resp.StatusCode, body)
	}
	req, _ := http.NewRequest("GET", g.url+"/v1/models", nil)
	req.Header.Set("Authorization", "Bearer "+f.secrets["some"])
	resp, err := g.client.Do(req)
	if err != nil || resp.StatusCode != 200 || resp.ContentLength > 60 {
		t.Errorf("the models of others: %v %v", resp, err)
	}
	resp.Body.Close()

	for key, status := range map[string]int{"": 401, "all": 200, "some": 404, "old": 401} {
		req, _ := http.NewRequest("GET", g.url+"/v1/models/m", nil)
		if key != "" {
			req.Header.Set("Authorization", "Bearer "+f.secrets[key])
		}
		resp, err := g.client.Do(req)
		if err != nil || resp.StatusCode != status {
			t.Errorf("one model, by the key %q: %v %v", key, resp, err)
			continue
		}
		resp.Body.Close()
	}

	// A request that nobody may send is not read.
	huge := strings.NewReader(strings.Repeat("x", 1<<20))
	hreq, _ := http.NewRequest("POST", g.url+"/v1/completions", huge)
	hresp, err := g.client.Do(hreq)
	if err != nil || hresp.StatusCode != 401 {
		t.Errorf("%v %v", hresp, err)
	} else {
		hresp.Body.Close()
	}

	// Nor is one whose body nobody has a use for, or that an unknown holder of a token sends.
	for where, status := range map[[2]string]int{{g.r.Addr().String(), "POST /health"}: 405, {g.r.Addr().String(), "GET /health"}: 200,
		{g.r.Addr().String(), "POST /nowhere"}: 404, {g.r.Addr().String(), "DELETE /v1/models"}: 401, {g.r.AdminAddr().String(), "POST /admin/v1/instances"}: 401,
		{g.r.AdminAddr().String(), "GET /health"}: 200, {g.r.AdminAddr().String(), "POST /nowhere"}: 401} {
		conn, err := net.Dial("tcp", where[0])
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n%s", where[1], strings.Repeat("x", 16<<10))
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || resp.StatusCode != status || !resp.Close {
			t.Errorf("%s: %+v, %v, want %d", where[1], resp, err, status)
		}
		conn.Close()
	}

	// The file changes.
	f.add(apikey.Key{Name: "new"})
	refused(f.of("nobody")...)
	reload := func() error { return g.r.Reload(router.DefaultConfig().Limits, "prefix") }
	if err := reload(); err != nil {
		t.Fatal(err)
	}
	served(f.of("new")...)
	good, err := os.ReadFile(f.path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.path, []byte("keys: [{name: x}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := reload(); err == nil || !strings.Contains(err.Error(), "keys[0].sha256") || !strings.Contains(err.Error(), f.path+":1") {
		t.Errorf("%v", err)
	}
	served(f.of("new")...)
	if err := os.WriteFile(f.path, good[:strings.LastIndex(string(good), "- name")], 0o600); err != nil {
		t.Fatal(err)
	}
	g.until("the change to be seen", func() bool { // without a signal
		resp, _ := g.post("/v1/completions", ask, f.of("new")...)
		return resp.StatusCode == 401
	})
	served(f.of("all")...)
	audited := func() int { return strings.Count(g.logs.String(), "api_keys_file has changed and was read again") }
	g.until("both changes to be audited", func() bool { return audited() == 2 })
	if err := reload(); err != nil || audited() != 2 { // nothing has changed
		t.Errorf("%v, %d changes are audited", err, audited())
	}
	if err := os.WriteFile(f.path, []byte("keys: [{name: x}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	g.until("the log to say that the file is of no use", func() bool { return strings.Contains(g.logs.String(), "level=ERROR msg=files err=\"api_keys_file: ") })
	served(f.of("all")...)
	if err := os.Chmod(f.path, 0o666); err != nil {
		t.Fatal(err)
	}
	g.until("the log to say that others may change it", func() bool {
		return strings.Contains(g.logs.String(), "api_keys_file: configuration: "+f.path+" has mode 0666, so that others may change it")
	})
	served(f.of("all")...)
	if err := os.Chmod(f.path, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, said := range []string{": it has no keys", " is gone; the old ones stay in force"} {
		err := os.Truncate(f.path, 0)
		if strings.Contains(said, "gone") {
			err = os.Remove(f.path)
		}
		if err != nil {
			t.Fatal(err)
		}
		g.until("the log to say"+said, func() bool {
			return strings.Contains(g.logs.String(), "level=ERROR msg=files err=\"api_keys_file: "+f.path+said)
		})
		served(f.of("all")...)
	}

	d.mu.Lock()
	if d.last.Get("Authorization") != "" {
		t.Error("the engine saw the client's key")
	}
	d.mu.Unlock()
	if !strings.Contains(g.logs.String(), "tenant=all") {
		t.Error("the log does not say for whom a request was")
	}
	for name, secret := range f.secrets {
		if strings.Contains(g.logs.String(), secret) {
			t.Errorf("the key of %s is in the log", name)
		}
	}
	families, err := g.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if text := fmt.Sprint(families); !strings.Contains(text, `name:"xpyd_router_tenant_requests_total"`) || !strings.Contains(text, `value:"all"`) {
		t.Error("no metrics by tenant")
	}
}

func TestRateLimits(t *testing.T) {
	f := newKeyFile(t, apikey.Key{Name: "tokens", TokensPerMinute: 1000}, apikey.Key{Name: "requests", RequestsPerMinute: 2},
		apikey.Key{Name: "one", MaxInFlight: 1})
	g := newRig(t, 1, 1, f.config)
	d := g.workers["d0"]
	d.on(&d.decode, usage(20))
	want := func(status int, resp *http.Response, body string) {
		t.Helper()
		if resp.StatusCode != status {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
		if status == 429 {
			if after := resp.Header.Get("Retry-After"); after == "" || after == "0" {
				t.Errorf("Retry-After %q", after)
			}
			if e := apiError(t, body); e.Type != "rate_limit_error" || *e.Code != "rate_limit_exceeded" {
				t.Errorf("%+v", e)
			}
		}
	}
	// Tokens: 8 are estimated for the prompt and its JSON, 900 asked for; 30 used.
	large := strings.Replace(ask, `"max_tokens":8`, `"max_tokens":900`, 1)
	resp, body := g.post("/v1/completions", large, f.of("tokens")...)
	want(200, resp, body)
	h := resp.Header
	left, err := strconv.Atoi(h.Get("x-ratelimit-remaining-tokens")) // 92, and more when a slow machine answers late
	if err != nil || left < 92 || left > 999 || h.Get("x-ratelimit-limit-tokens") != "1000" || h.Get("x-ratelimit-limit-requests") != "" {
		t.Errorf("%v", h)
	}
	full := time.Minute * time.Duration(1000-left) / 1000
	if d, err := time.ParseDuration(h.Get("x-ratelimit-reset-tokens")); err != nil || (d-full).Abs() > time.Second {
		t.Errorf("reset %q, want %v", h.Get("x-ratelimit-reset-tokens"), full)
	}
	resp, body = g.post("/v1/completions", large, f.of("tokens")...) // it was settled
	want(200, resp, body)
	resp, body = g.post("/v1/completions", strings.Replace(ask, `"max_tokens":8`, `"max_tokens":1001`, 1), f.of("tokens")...)
	want(400, resp, body)
	if e := apiError(t, body); *e.Param != "max_tokens" {
		t.Errorf("%+v", e)
	}
	d.on(&d.decode, usage(math.MaxUint32)) // of 8 that were asked for
	for range 2 {
		resp, body = g.post("/v1/completions", ask, f.of("tokens")...)
		want(200, resp, body)
	}
	d.on(&d.decode, usage(500))
	resp, body = g.post("/v1/completions", open, f.of("tokens")...) // more than was estimated
	want(200, resp, body)
	resp, body = g.post("/v1/completions", large, f.of("tokens")...)
	want(429, resp, body)
	// Streams.
	d.on(&d.decode, story)
	for range 2 {
		resp, body = g.post("/v1/completions", askStream, f.of("requests")...)
		want(200, resp, body)
	}
	if resp.Header.Get("x-ratelimit-remaining-requests") != "0" {
		t.Errorf("%v", resp.Header)
	}
	resp, body = g.post("/v1/completions", ask, f.of("requests")...)
	want(429, resp, body)
	// At once.
	running, free := make(chan struct{}, 1), make(chan struct{})
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		running <- struct{}{}
		<-free
		story(w, r)
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		resp, body := g.post("/v1/completions", ask, f.of("one")...)
		if resp.StatusCode != 200 {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	})
	<-running
	resp, body = g.post("/v1/completions", ask, f.of("one")...)
	want(429, resp, body)
	// What was used survives a reload.
	if err := g.r.Reload(router.DefaultConfig().Limits, "prefix"); err != nil {
		t.Fatal(err)
	}
	resp, body = g.post("/v1/completions", ask, f.of("one")...)
	want(429, resp, body)
	close(free)
	wg.Wait()
	g.until("the place to be free", func() bool {
		resp, _ := g.post("/tokenize", `{"prompt":"x"}`, f.of("one")...)
		return resp.StatusCode == 200
	})
}

// open leaves it to the engine how much it generates.
const open = `{"model":"m","prompt":"Once upon a time"}`

// TestPriority: waiting requests are served by priority, which a key can cap.
func TestPriority(t *testing.T) {
	f := newKeyFile(t, apikey.Key{Name: "any", Priority: "high"}, apikey.Key{Name: "plain"})
	g := newRig(t, 1, 1, f.config, func(c *router.Config) { c.Limits.MaxInFlight = 1 })
	d := g.workers["d0"]
	running, free := make(chan string, 8), make(chan struct{})
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		d.mu.Lock()
		running <- string(d.body)
		d.mu.Unlock()
		<-free
		whole(w, r)
	})
	var wg sync.WaitGroup
	waiting := 0
	send := func(who, effective, member string, header ...string) {
		t.Helper()
		body := strings.Replace(ask, `"max_tokens"`, member+`"max_tokens"`, 1)
		wg.Go(func() {
			resp, text := g.post("/v1/completions", body, append(header, f.of(who)...)...)
			if resp.StatusCode != 200 || resp.Header.Get("x-xpyd-priority") != effective {
				t.Errorf("%s: %d %q %s", member, resp.StatusCode, resp.Header.Get("x-xpyd-priority"), text)
			}
		})
		g.until("it to wait", func() bool {
			var l struct{ Running, Waiting int }
			g.adminJSON("GET", "/debug/ledger", "", &l)
			return l.Running == 1 && l.Waiting == waiting
		})
		waiting++
	}
	next := func(want string) {
		t.Helper()
		if got := <-running; !strings.Contains(got, want) {
			t.Errorf("%s, want %s", got, want)
		}
		free <- struct{}{}
	}
	send("any", "", `"user":"0",`)
	send("any", "low", `"user":"1","service_tier":"flex",`)
	send("any", "low", `"user":"2","priority":-1,`, "x-xpyd-priority", "low") // the header wins
	send("plain", "normal", `"user":"3","priority":-7,`)
	send("any", "high", `"user":"4","priority":-7,`)
	next(`"0"`)
	next(`"user":"4","priority":-7`)
	next(`"user":"3","priority":0`) // the engine is told what the key may ask for
	next(`"1"`)
	next(`"2"`)
	wg.Wait()
	for _, bad := range [][]string{{"x-xpyd-priority", "urgent"}, {}} {
		body := ask
		if len(bad) == 0 {
			body = strings.Replace(ask, `"max_tokens"`, `"priority":"high","max_tokens"`, 1)
		}
		resp, text := g.post("/v1/completions", body, append(bad, f.of("any")...)...)
		if resp.StatusCode != 400 || !strings.Contains(*apiError(t, text).Param, "priority") {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
	}
}

// TestTenants: with one place, a tenant that has filled the queue does not keep another
// out. A trusted header names the tenants.
func TestTenants(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) {
		c.TenantHeader, c.Limits.MaxInFlight, c.Limits.MaxQueue = "x-tenant", 1, 4
	})
	d := g.workers["d0"]
	running, free := make(chan struct{}, 8), make(chan struct{})
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		running <- struct{}{}
		<-free
		whole(w, r)
	})
	status := map[string]chan int{"greedy": make(chan int, 8), "modest": make(chan int, 8)}
	var wg sync.WaitGroup
	send := func(who string) {
		wg.Go(func() {
			resp, body := g.post("/v1/completions", ask, "x-tenant", who)
			if resp.StatusCode == 429 {
				if after := resp.Header.Get("Retry-After"); after == "" {
					t.Errorf("%v", resp.Header)
				}
				apiError(t, body)
			}
			status[who] <- resp.StatusCode
		})
	}
	send("greedy")
	<-running
	for range 4 {
		send("greedy")
	}
	g.until("a full queue", func() bool {
		var l struct{ Waiting int }
		g.adminJSON("GET", "/debug/ledger", "", &l)
		return l.Waiting == 4
	})
	send("modest")
	if got := <-status["greedy"]; got != 429 { // the newest had to go
		t.Errorf("%d", got)
	}
	free <- struct{}{}
	<-running
	free <- struct{}{}
	<-running
	free <- struct{}{}
	if got := <-status["modest"]; got != 200 {
		t.Errorf("%d", got)
	}
	close(free)
	wg.Wait()
}

func TestMediaHosts(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.MediaHosts = []string{"img.example", "*.cdn.example", "h:8080"} })
	d := g.workers["d0"]
	d.on(&d.decode, whole)
	f := func(url string, status int) {
		t.Helper()
		body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":%q}}]}]}`, url)
		resp, text := g.post("/v1/chat/completions", body)
		if resp.StatusCode != status {
			t.Errorf("%s: %d %s", url, resp.StatusCode, text)
		}
		if status == 400 && *apiError(t, text).Param != "messages" {
			t.Error(text)
		}
	}
	f("data:image/png;base64,AAAA", 200)
	f("https://img.example/1.png", 200)
	f("http://IMG.example:99/1.png", 200)
	f("http://a.b.cdn.example/", 200)
	f("http://h:8080/", 200)
	f("http://h:8081/", 400)
	f("http://cdn.example/", 400)
	f("http://evilcdn.example/", 400)
	f("http://img.example.evil/", 400)
	f("http://img.example@evil/", 400)
	f(`http://img.example\\@evil/`, 400)
	f("http://169.254.169.254/latest/meta-data", 400)
	f("file:///etc/passwd", 400)
	f("//img.example/x", 400)
	f("ftp://img.example/x", 400)
	f("/etc/passwd", 400)
	f("", 400)
}

// TestLeavingIsNotFree: a client that leaves, or sets a deadline that passes, gets no tokens back that
// may have been computed. What the fleet fails at is free.
func TestLeavingIsNotFree(t *testing.T) {
	t.Parallel()
	const most = 6000 // of which 100 come back in a second
	keys := []apikey.Key{}
	for _, name := range []string{"whole", "late", "before", "stream", "other", "broken"} {
		keys = append(keys, apikey.Key{Name: name, TokensPerMinute: most})
	}
	f := newKeyFile(t, keys...)
	g := newRig(t, 1, 1, f.config)
	d := g.workers["d0"]
	started, ended := make(chan time.Time, 64), make(chan time.Time, 64)
	const costly = `{"model":"m","prompt":"Once","max_tokens":100,"n":50`
	leave := func(name, path, body, header string, started <-chan time.Time, read int) {
		t.Helper()
		conn := g.dial()
		defer conn.Close()
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
			path, f.secrets[name], header, len(body), body)
		if started != nil {
			<-started
		}
		if _, err := io.ReadAtLeast(conn, make([]byte, 4096), read); err != nil {
			t.Error(err)
		}
	}
	pays := func(name string, want bool) {
		t.Helper()
		g.until("it to be settled", g.idle)
		for len(started) > 0 {
			<-started
		}
		d.on(&d.decode, usage(1))
		resp, body := g.post("/v1/completions", ask, f.of(name)...)
		left, err := strconv.Atoi(resp.Header.Get("x-ratelimit-remaining-tokens"))
		if err != nil || left > most-2000 == want {
			t.Errorf("%s: %d tokens are left, %v; pays: %t; %d %s", name, left, err, want, resp.StatusCode, body)
		}
	}
	d.on(&d.decode, hold(started, ended))
	leave("whole", "/v1/completions", costly+"}", "", started, 0)
	pays("whole", true)
	d.on(&d.decode, hold(started, ended))
	leave("late", "/v1/completions", costly+"}", "x-request-timeout-ms: 2000\r\n", nil, 16)
	pays("late", true)
	d.on(&d.decode, hold(started, ended))
	leave("before", "/v1/completions", costly+`,"stream":true}`, "", started, 0)
	pays("before", true)
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		begin(w)
		<-r.Context().Done()
	})
	leave("stream", "/v1/completions", costly+`,"stream":true}`, "", nil, 150)
	pays("stream", false)
	d.on(&d.other, hold(started, ended))
	leave("other", "/v1/moderations", `{"model":"m","input":"x","max_output_tokens":5000}`, "", started, 0)
	pays("other", true)
	d.on(&d.decode, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) })
	if resp, text := g.post("/v1/completions", costly+"}", f.of("broken")...); resp.StatusCode < 500 {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	pays("broken", false)
}

// TestPassedTokens: the tokens of forwarded answers count for the key, under any name
// that the APIs have for them, however long the answer is.
func TestPassedTokens(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "a", TokensPerMinute: 1_000_000, Priority: "normal"})
	g := newRig(t, 1, 1, f.config)
	d := g.workers["d0"]
	left := func() int {
		resp, text := g.post("/v1/embeddings", `{"model":"m","input":"x"}`, f.of("a")...)
		n, err := strconv.Atoi(resp.Header.Get("x-ratelimit-remaining-tokens"))
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%d %s %v", resp.StatusCode, text, err)
		}
		return n
	}
	far := strings.Repeat("x", 100<<10)
	const used = 100_000 // and the bucket gains 17 a millisecond
	for _, c := range []struct{ kind, body string }{
		{"application/json", `{"usage": {"input_tokens": 60000, "output_tokens": 40000}, "max_output_tokens": 5}`},
		{"application/json", `{"data":"` + far + `","usage":{"prompt_tokens":100000,"total_tokens":100000}}`},
		{"application/json", `{"usage":{"total_tokens":100000,"prompt_tokens":100000},"results":"` + far + `"}`},
		{"text/event-stream", "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":60000,\"output_tokens\":40000}}}\n\n"},
		{"text/event-stream", "event: message_start\r\ndata: {\"message\":{\"usage\":{\"input_tokens\":60000,\"output_tokens\":1}}}\r\n\r\n" +
			"event: message_delta\r\ndata: {\"usage\":{\"output_tokens\":40000}}\r\n\r\n"},
	} {
		d.on(&d.other, whole)
		start := time.Now()
		before := left()
		d.on(&d.other, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", c.kind)
			fmt.Fprint(w, c.body)
		})
		if resp, text := g.post("/v1/moderations", `{"model":"m","input":"x","max_output_tokens":40000,"priority":-5}`, f.of("a")...); resp.StatusCode != 200 || text != c.body {
			t.Fatalf("%d %.90s", resp.StatusCode, text)
		}
		g.until("it to be settled", g.idle)
		d.on(&d.other, whole)
		taken := before - left()
		if gained := int(time.Since(start)/time.Millisecond+1) * 17; taken > used+500 || taken < used-gained-500 {
			t.Errorf("%.60s: took %d", c.body, taken)
		}
	}
	d.on(&d.other, whole)
	if resp, text := g.post("/v1/moderations", `{"model":"m","input":"x","max_output_tokens":900000000}`, f.of("a")...); resp.StatusCode != 400 {
		t.Errorf("an answer that can never fit: %d %s", resp.StatusCode, text)
	}
	if resp, text := g.post("/v1/moderations", `{"model":"m","input":"x","priority":"-5"}`, f.of("a")...); resp.StatusCode != 400 {
		t.Errorf("a priority in words: %d %s", resp.StatusCode, text)
	}
	if resp, _ := g.post("/v1/moderations", `{"model":"m","priority":-5}`, f.of("a")...); resp.Header.Get("x-xpyd-priority") != "normal" {
		t.Errorf("%v", resp.Header)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if got := string(d.body); got != `{"model":"m","priority": 0}` {
		t.Errorf("the engine got %s", got)
	}
}
