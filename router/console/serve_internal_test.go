package console

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/router/h1"
)

// TestServe: what each token opens, what is answered to who has none, and which of it is in the audit log.
func TestServe(t *testing.T) {
	var log bytes.Buffer
	file, bounds := filepath.Join(t.TempDir(), "audit"), h1.DefaultBounds()
	bounds.MaxBodyBytes = 1024
	d := bareConsole(t, "e0").Deps
	d.Token, d.TokenRO, d.AuditFile, d.Log = "secret", "reads", file, slog.New(slog.NewTextHandler(&log, nil))
	d.Level = new(slog.LevelVar)
	d.Refuse = func(ctx *fasthttp.RequestCtx, err error) { h1.WriteError(ctx, bounds.Refusal(err)) }
	c, err := New(d)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	s := h1.NewServer(h1.ServerConfig{Bounds: bounds, Handler: c.Serve, Refuse: d.Refuse, Log: d.Log})
	s.Start(ln)
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	lines := 0
	for _, x := range []struct {
		verb, path, shown, body string
		status                  int
		says, asks              string // the body, and WWW-Authenticate
		by, was, is             string // in the audit log; by "": it is not there
	}{
		{verb: "GET", path: "/health", status: 200, says: `{"status":"ok"}`},
		{verb: "GET", path: "/metrics", status: 401, says: "missing or wrong", asks: "Bearer", by: "nobody"},
		{verb: "GET", path: "/dashboard", status: 200, says: "<title>xpyd"},
		{verb: "POST", path: "/dashboard", status: 405, says: "use GET"},
		{verb: "GET", path: "/dashboard/app.js", status: 200, says: "signedOut"},
		{verb: "GET", path: "/dashboard/none.js", status: 404, says: "there is no"},
		{verb: "GET", path: "/dashboard/session", status: 401, says: "nobody is signed in", by: "nobody"},
		{verb: "PUT", path: "/dashboard/session", status: 405, says: "use GET, POST or DELETE", by: "nobody"},
		{verb: "POST", path: "/dashboard/session", body: `{"token":"wrong"}`, status: 401, says: "not the admin token", by: "nobody"},
		{verb: "POST", path: "/dashboard/session", body: `{"tokens":"wrong"}`, status: 400, says: "no key", by: "nobody"},
		{verb: "POST", path: "/dashboard/session", body: strings.Repeat(" ", 4097), status: 413, says: "4096", by: "nobody"},
		{verb: "POST", path: "/dashboard/session", body: `{"token":"reads"}`, status: 200, says: `"as":"reader"`, by: "reader"},
		{verb: "POST", path: "/dashboard/session", body: `{"token":"secret"}`, status: 200, says: `"as":"admin"`, by: "admin"},
		{verb: "GET", path: "/admin/v1/history?after=x", shown: "reads", status: 400, says: "after"},
		{verb: "GET", path: "/admin/v1/events", shown: "reads", status: 200, says: `"next":`},
		{verb: "GET", path: "/admin/v1/events?after=-1", shown: "reads", status: 400, says: "after"},
		{verb: "GET", path: "/admin/v1/requests?n=x", shown: "reads", status: 400, says: `"n: want`},
		{verb: "GET", path: "/admin/v1/requests?after=now", shown: "reads", status: 400, says: "want a time"},
		{verb: "POST", path: "/admin/v1/try/completions", shown: "reads", status: 403, says: "only reads", by: "reader"},
		{verb: "GET", path: "/admin/v1/cache", shown: "wrong", status: 401, says: "missing or wrong", asks: "Bearer", by: "nobody"},
		{verb: "GET", path: "/admin/v1/cache", shown: "reads", status: 200, says: "{}"},
		{verb: "HEAD", path: "/admin/v1/cache", shown: "reads", status: 200},
		{verb: "GET", path: "/admin/v1/profile", shown: "reads", status: 403, says: "only reads, and no profiles", by: "reader"},
		{verb: "GET", path: "/admin/v1/profile/?instance=e0", shown: "reads", status: 403, says: "only reads, and no profiles", by: "reader"},
		{verb: "GET", path: "/debug/pprof/", shown: "reads", status: 403, says: "only reads, and no profiles", by: "reader"},
		{verb: "GET", path: "/debug/pprof/goroutine?debug=1", shown: "secret", status: 200, says: "goroutine profile"},
		{verb: "GET", path: "/debug/pprof/profile?seconds=x", shown: "secret", status: 400, says: "seconds"},
		{verb: "GET", path: "/admin/v1/profile", shown: "secret", status: 200, says: `"router":{"`},
		{verb: "GET", path: "/admin/v1/log", shown: "reads", status: 200, says: `"level":"info"`},
		{verb: "POST", path: "/admin/v1/log", shown: "reads", body: `{"level":"debug"}`, status: 403, says: "only reads", by: "reader"},
		{verb: "POST", path: "/admin/v1/log", shown: "secret", body: `{"level":"loud"}`, status: 400, says: "want debug, info, warn or error", by: "admin"},
		{verb: "POST", path: "/admin/v1/log", shown: "secret", body: `{"level":"warn"}`, status: 200, says: `"level":"warn"`, by: "admin", was: "log level info", is: "log level warn"},
		{verb: "GET", path: "/admin/v1/log", shown: "secret", status: 200, says: `"level":"warn"`},
		{verb: "POST", path: "/admin/v1/log", shown: "secret", body: `{"level":"info"}`, status: 200, says: `"level":"info"`, by: "admin", was: "log level warn", is: "log level info"},
		{verb: "GET", path: "/admin/v1/instances/nobody/log", shown: "reads", status: 404, says: "there is no instance"},
		{verb: "POST", path: "/admin/v1/instances/e0/log", shown: "secret", body: `{"level":"warn"}`, status: 400, says: "only native workers", by: "admin"},
		{verb: "POST", path: "/admin/v1/cache/flush", shown: "reads", status: 403, says: `this token only reads"`, by: "reader"},
		{verb: "POST", path: "/admin/v1/cache/flush", shown: "secret", status: 503, says: "no live worker", by: "admin"},
		{verb: "POST", path: "/admin/v1/instances/e0/drain", shown: "secret", body: strings.Repeat(" ", 1025), status: 413, says: "1024"},
		{verb: "POST", path: "/admin/v1/instances/e0/drain", shown: "secret", body: strings.Repeat(" ", 1024), status: 200, says: `"e0"`, by: "admin", was: "not drained"},
		{verb: "POST", path: "/admin/v1/instances", shown: "secret", body: "", status: 400, says: "the body is empty", by: "admin"},
		{verb: "POST", path: "/admin/v1/instances", shown: "secret", body: `{"id":"a/b","role":"decode","url":"http://10.0.0.1:1","dialect":"openai","model":"m"}`, status: 400, says: `"param":"id"`, by: "admin"},
		{verb: "POST", path: "/admin/v1/instances", shown: "secret", body: `{"id":"a","role":"decode","url":"10.0.0.1:1","dialect":"openai","model":"m"}`, status: 400, says: `"param":"url"`, by: "admin"},
		{verb: "POST", path: "/admin/v1/instances", shown: "secret", body: `{"id":"a","role":"prefill","url":"http://10.0.0.1:1","dialect":"openai","model":"m"}`, status: 400, says: "its role is decode", by: "admin"},
		{verb: "POST", path: "/admin/v1/instances", shown: "secret", body: `{"id":"a","role":"decode","url":"http://10.0.0.1:1","dialect":"openai","model":"m"}`, status: 201, says: `"id":"a"`, by: "admin", is: "decode http://10.0.0.1:1"},
		{verb: "DELETE", path: "/admin/v1/instances/a", shown: "secret", status: 204, by: "admin", was: "live decode http://10.0.0.1:1"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), x.verb, "http://"+ln.Addr().String()+x.path, strings.NewReader(x.body))
		if err != nil {
			t.Fatal(err)
		}
		if x.shown != "" {
			req.Header.Set("Authorization", "Bearer "+x.shown)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != x.status || !strings.Contains(string(body), x.says) || resp.Header.Get("WWW-Authenticate") != x.asks {
			t.Errorf("%s %s: %d %s, asks for %q", x.verb, x.path, resp.StatusCode, body, resp.Header.Get("WWW-Authenticate"))
		}
		all, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		list := strings.Split(strings.TrimSpace(string(all)), "\n")
		if more := len(all) > 0 && len(list) > lines; more != (x.by != "") {
			t.Errorf("%s %s: in the audit log %t", x.verb, x.path, more)
		} else if more {
			var e Audited
			lines = len(list)
			path, _, _ := strings.Cut(x.path, "?")
			if err := json.Unmarshal([]byte(list[lines-1]), &e); err != nil || e.By != x.by || e.Action != x.verb+" "+path || e.Status != x.status || e.Was != x.was || x.is != "" && e.Is != x.is || e.Peer == "" || e.Request == "" {
				t.Errorf("%s %s: %s, %v", x.verb, x.path, list[lines-1], err)
			}
		}
	}
	s.Cut()
	s.Wait()
	c.Gatherer = prometheus.NewRegistry()
	var ctx fasthttp.RequestCtx
	ctx.Request.SetRequestURI("/metrics")
	if c.Serve(&ctx); ctx.Response.StatusCode() != 200 {
		t.Errorf("metrics: %d", ctx.Response.StatusCode())
	}
	ctx.Request.SetRequestURI("/dashboard/")
	if c.Serve(&ctx); ctx.Response.StatusCode() != 308 || string(ctx.Response.Header.Peek("Location")) != "/dashboard" {
		t.Errorf("/dashboard/: %d to %q", ctx.Response.StatusCode(), ctx.Response.Header.Peek("Location"))
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	log.Reset()
	c.Audit("reload", "SIGHUP", "x") // after the end
	if !strings.Contains(log.String(), "action=reload by=SIGHUP") || strings.Contains(log.String(), "audit_file") {
		t.Errorf("%s", log.String())
	}
}

// TestDashboardFiles: each file of the page is served with its type, is not framed, stored or guessed at, tells nobody
// where it came from, asks for nothing from elsewhere, and the whole page is small.
func TestDashboardFiles(t *testing.T) {
	list, err := dashboard.ReadDir("dashboard")
	if err != nil {
		t.Fatal(err)
	}
	size := 0
	for _, f := range list {
		var ctx fasthttp.RequestCtx
		serveDashboard(&ctx, "GET", "/dashboard/"+f.Name())
		h, body := &ctx.Response.Header, ctx.Response.Body()
		size += len(body)
		if ctx.Response.StatusCode() != 200 || len(body) == 0 {
			t.Errorf("%s: %d", f.Name(), ctx.Response.StatusCode())
		}
		for name, want := range map[string]string{"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store", "Content-Type": dashboardTypes[filepath.Ext(f.Name())]} {
			if got := string(h.Peek(name)); got != want {
				t.Errorf("%s: %s: %q", f.Name(), name, got)
			}
		}
		policy := string(h.Peek("Content-Security-Policy"))
		if !strings.HasPrefix(policy, "default-src 'none'; ") || strings.Contains(policy, "unsafe") || !strings.Contains(policy, "frame-ancestors 'none'") || !strings.Contains(policy, "form-action 'none'") {
			t.Errorf("%s: %s", f.Name(), policy)
		}
		if strings.HasPrefix(f.Name(), "uplot") {
			continue
		}
		text := strings.ReplaceAll(string(body), "http://www.w3.org/2000/svg", "")
		for _, foreign := range []string{`https?:`, `url\(`, `@import`, `innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b`, `<[^>]* (style|on\w+)=`} {
			if at := regexp.MustCompile(foreign).FindString(text); at != "" {
				t.Errorf("%s has %q", f.Name(), at)
			}
		}
	}
	if size > 250<<10 {
		t.Errorf("the page is %d bytes", size)
	}
}

// TestAuditFile: the audit file is one that nobody else can write, and may be moved away.
func TestAuditFile(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, mode := range map[string]os.FileMode{"open": 0o622, "group": 0o620, "mine": 0o600, "read": 0o644} {
		if err := os.WriteFile(at(name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(at(name), mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(at("mine"), at("link")); err != nil {
		t.Fatal(err)
	}
	for name, why := range map[string]string{"new": "", "mine": "", "read": "", "open": "has mode 0622", "group": "has mode 0620", "link": "is a symbolic link", ".": "audit_file: ", "none/x": "no such file"} {
		a, err := newAuditor(dir+"/"+name, slog.New(slog.DiscardHandler))
		if (err == nil) != (why == "") || err != nil && (!strings.Contains(err.Error(), why) || !strings.HasPrefix(err.Error(), "audit_file: ")) {
			t.Errorf("%s: %v", name, err)
		}
		if err := a.close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	c := &Console{}
	var err error
	if c.audit, err = newAuditor(at("log"), slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	c.Audit("first", "x", "")
	if err := os.Rename(at("log"), at("old")); err != nil {
		t.Fatal(err)
	}
	c.Audit("second", "x", "")
	if err := c.ReopenAudit(); err != nil {
		t.Error(err)
	}
	c.Audit("third", "x", "")
	if err := os.Rename(at("log"), at("older")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(at("mine"), at("log")); err != nil {
		t.Fatal(err)
	}
	if err := c.ReopenAudit(); err == nil {
		t.Error("a link is followed")
	}
	c.Audit("fourth", "x", "") // the old one stays in use
	if err := c.audit.close(); err != nil {
		t.Error(err)
	}
	for name, want := range map[string]string{"old": "first second", "older": "third fourth"} {
		b, err := os.ReadFile(at(name))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for line := range strings.Lines(string(b)) {
			var e Audited
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatal(err)
			}
			got = append(got, e.Action)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s has %v", name, got)
		}
	}
}
