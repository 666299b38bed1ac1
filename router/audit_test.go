package router_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/console"
)

// as does a request at the admin listener with a token, and returns its status and
// answer.
func (g *rig) as(token, verb, path, body string) (int, string) {
	g.t.Helper()
	req, err := http.NewRequest(verb, g.admin+path, strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", token)
	}
	req.Header.Set("x-request-id", "audit-me")
	resp, err := g.client.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		g.t.Fatal(err)
	}
	return resp.StatusCode, b.String()
}

// TestReadOnlyToken: the read-only token may read everything but profiles, and change
// nothing.
func TestReadOnlyToken(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	f := func(token, verb, path string, want int) {
		t.Helper()
		code, text := g.as(token, verb, path, "")
		if code != want || code == 403 && (!strings.Contains(text, "this token only reads") || strings.Contains(text, "no profiles") != (verb == "GET")) {
			t.Errorf("%s %s %.8s: %d %.200s, want %d", verb, path, token, code, text, want)
		}
	}
	for _, path := range []string{"/admin/v1/instances", "/debug/ledger", "/debug/requests", "/admin/v1/history", "/admin/v1/events", "/admin/v1/requests", "/admin/v1/cache"} {
		f("Bearer reads", "GET", path, 200)
	}
	f("Bearer reads", "HEAD", "/admin/v1/instances", 200)
	f("Bearer reads", "GET", "/nothing", 404)
	for _, path := range []string{"/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/cmdline", "/admin/v1/profile", "/admin/v1/profile?instance=router"} {
		f("Bearer reads", "GET", path, 403)
	}
	for _, verb := range []string{"POST", "DELETE", "PUT", "PATCH", "OPTIONS", "ANY"} {
		for _, path := range []string{"/admin/v1/instances/d0/drain", "/admin/v1/instances/d0", "/admin/v1/instances", "/admin/v1/cache/flush", "/debug/requests", "/x"} {
			f("Bearer reads", verb, path, 403)
		}
	}
	for _, wrong := range []string{"", "Bearer", "Bearer ", "Bearer read", "Bearer readss", "Basic " + base64.StdEncoding.EncodeToString([]byte("reads:"))} {
		f(wrong, "GET", "/admin/v1/instances", 401)
	}
	if g.r.Members.DrainAsked("d0") {
		t.Error("d0 is drained")
	}
}

func auditLines(t *testing.T, path string) (out []console.Audited) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var a console.Audited
		if err := json.Unmarshal(s.Bytes(), &a); err != nil {
			t.Fatalf("%v in %q", err, s.Text())
		}
		out = append(out, a)
	}
	return out
}

// TestAudit: every change through the admin listener has a line in the log and in the
// file: who, what, before and after. Reads have none.
func TestAudit(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	g := newRig(t, 1, 2, func(c *router.Config) { c.AuditFile = path })
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", info, err)
	}
	const token = "Bearer secret"
	g.as(token, "GET", "/admin/v1/instances", "")
	g.as("Bearer reads", "GET", "/debug/ledger", "")
	for _, c := range []struct{ token, verb, path, body string }{
		{token, "POST", "/admin/v1/instances/d0/drain", `{"force":false}`},
		{token, "POST", "/admin/v1/instances/d0/undrain", ""},
		{token, "POST", "/admin/v1/instances/d9/drain", ""},
		{token, "POST", "/admin/v1/instances", `{"id":"e","role":"decode","url":"http://me:hunter2@h:1","model":"m"}`},
		{token, "POST", "/admin/v1/instances", `{"id":"e","role":"decode","url":"http://h:1","model":"m"}`},
		{token, "DELETE", "/admin/v1/instances/e?force=true", ""},
		{token, "POST", "/admin/v1/cache/pin", `{"prompt":"between you and me"}`},
		{token, "POST", "/admin/v1/instances", `{"id":"` + strings.Repeat("x", 5000) + `"}`},
		{"Bearer reads", "POST", "/admin/v1/instances/d0/drain", ""},
		{"Bearer reads", "GET", "/admin/v1/profile", ""},
		{"Bearer wrong", "GET", "/admin/v1/instances", ""},
	} {
		g.as(c.token, c.verb, c.path, c.body)
	}
	got := auditLines(t, path)
	type line struct {
		action, by     string
		status         int
		asked, was, is string
	}
	want := []line{
		{"POST /admin/v1/instances/d0/drain", "admin", 200, `{"force":false}`, "not drained", "drained"},
		{"POST /admin/v1/instances/d0/undrain", "admin", 200, "", "drained", "not drained"},
		{"POST /admin/v1/instances/d9/drain", "admin", 404, "", "", ""},
		{"POST /admin/v1/instances", "admin", 400, `{"id":"e","role":"decode","url":"http://me:********@h:1","model":"m"}`, "", ""},
		{"POST /admin/v1/instances", "admin", 201, `{"id":"e","role":"decode","url":"http://h:1","model":"m"}`, "", "decode http://h:1"},
		{"DELETE /admin/v1/instances/e", "admin", 204, "?force=true", "live decode http://h:1", "gone"},
		{"POST /admin/v1/cache/pin", "admin", 0, "31 bytes", "", ""},
		{"POST /admin/v1/instances", "admin", 400, "…", "", ""},
		{"POST /admin/v1/instances/d0/drain", "reader", 403, "", "", ""},
		{"GET /admin/v1/profile", "reader", 403, "", "", ""},
		{"GET /admin/v1/instances", "nobody", 401, "", "", ""},
	}
	if len(got) != len(want) {
		t.Fatalf("%d lines: %+v", len(got), got)
	}
	for i, w := range want {
		a := got[i]
		a.Was = strings.Replace(a.Was, "dead ", "live ", 1) // nobody is at h:1: a probe may have come to know
		if a.Action != w.action || a.By != w.by || w.status != 0 && a.Status != w.status || a.Was != w.was || a.Is != w.is ||
			w.asked != "…" && a.Asked != w.asked || len(a.Asked) > 600 {
			t.Errorf("line %d: %+v, want %+v", i, a, w)
		}
		if !strings.HasPrefix(a.Peer, "127.0.0.1:") || a.Request != "audit-me" || a.Time.IsZero() {
			t.Errorf("line %d: %+v", i, a)
		}
	}
	logged := g.logs.String()
	if n := strings.Count(logged, "msg=audit audit=true "); n != len(want) {
		t.Errorf("%d lines in the log", n)
	}
	if !strings.Contains(logged, `request_id=audit-me asked="{\"force\":false}" was="not drained" is=drained status=200`) {
		t.Error("the log says less than the file")
	}
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"secret", "reads\"", "hunter2", "Bearer", "between you"} {
		if strings.Contains(string(file), secret) || secret != "secret" && strings.Contains(logged, secret) {
			t.Errorf("%q shows", secret)
		}
	}
}

// TestAuditRefusals: refused strangers get a few lines; the next line says how many were
// left out.
func TestAuditRefusals(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	g := newRig(t, 1, 2, func(c *router.Config) { c.AuditFile = path })
	const tries = 60
	for range tries {
		g.as("", "POST", "/admin/v1/scale", "{}")
	}
	refused := auditLines(t, path)
	if n := len(refused); n < 10 || n > tries/2 {
		t.Errorf("%d lines", n)
	}
	g.as("Bearer secret", "POST", "/admin/v1/instances/d0/drain", "")
	all := auditLines(t, path)
	sum := 0
	for _, a := range all {
		sum += 1 + a.LeftOut
	}
	if last := all[len(all)-1]; last.By != "admin" || sum != tries+1 {
		t.Errorf("%d in all; %+v", sum, last)
	}
}

// TestAuditFile: the file is opened again after it was moved away, and links are never
// followed.
func TestAuditFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "audit.jsonl")
	g := newRig(t, 1, 2, func(c *router.Config) { c.AuditFile = path })
	drain := func() { g.as("Bearer secret", "POST", "/admin/v1/instances/d0/drain", "") }
	drain()
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	drain()
	if err := g.r.Console.ReopenAudit(); err != nil {
		t.Fatal(err)
	}
	drain()
	if old, now := auditLines(t, path+".1"), auditLines(t, path); len(old) != 2 || len(now) != 1 {
		t.Errorf("%d and %d lines", len(old), len(now))
	}
	g.r.Console.Audit("reload", "SIGHUP", "limits.max_queue: 1 -> 2")
	if now := auditLines(t, path); len(now) != 2 || now[1].By != "SIGHUP" || now[1].Is != "limits.max_queue: 1 -> 2" {
		t.Errorf("%+v", now)
	}

	bad := func(name, why string) {
		t.Helper()
		_, err := router.New(func() router.Config {
			c := router.DefaultConfig()
			c.Listen, c.AdminListen, c.AuditFile = "127.0.0.1:0", "", filepath.Join(dir, name)
			return c
		}(), router.Deps{Fleet: g.watcher})
		if err == nil || !strings.Contains(err.Error(), "audit_file") || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, make := range map[string]func(string) error{
		"link":   func(p string) error { return os.Symlink(filepath.Join(dir, "victim"), p) },
		"folder": func(p string) error { return os.Mkdir(p, 0o700) },
		"open":   func(p string) error { return os.WriteFile(p, nil, 0o600) },
	} {
		if err := make(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "open"), 0o666); err != nil {
		t.Fatal(err)
	}
	bad("link", "symbolic link")
	bad("folder", "folder")
	bad("open", "chmod 600")
	bad(filepath.Join("none", "x"), "no such")
	if _, err := os.Lstat(filepath.Join(dir, "victim")); err == nil {
		t.Error("the link was followed")
	}
	// The file that is gone: the old one is written on.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("victim", path); err != nil {
		t.Fatal(err)
	}
	if err := g.r.Console.ReopenAudit(); err == nil {
		t.Error("a link was opened")
	}
	drain()
	if strings.Contains(g.logs.String(), "audit_file: the line") {
		t.Error("a line was lost")
	}
}
