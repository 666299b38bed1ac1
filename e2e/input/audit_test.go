package input

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/router/console"
)

// TestAudit: what commands, a reload and a scale change is in the audit file, also
// after it was moved away, with a configuration that is refused. The token that
// only reads changes nothing.
func TestAudit(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file, audit := filepath.Join(dir, "up.yaml"), filepath.Join(dir, "audit.jsonl")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte("audit_file: "+audit+"\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("")
	r := cluster.Up(t, "--config", file)
	read := func(path string) (out []console.Audited) {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil
		}
		for line := range strings.Lines(string(b)) {
			var a console.Audited
			if err := json.Unmarshal([]byte(line), &a); err != nil {
				t.Fatalf("%v in %q", err, line)
			}
			out = append(out, a)
		}
		return out
	}
	want := func(what string, ok func(a *console.Audited) bool) {
		t.Helper()
		cluster.Wait(t, 10*time.Second, what, func() error {
			lines := read(audit)
			for i := range lines {
				if ok(&lines[i]) {
					return nil
				}
			}
			return fmt.Errorf("%+v", lines)
		})
	}
	if _, stderr, code := r.CLI(t, "scale", "prefill=2"); code != 0 {
		t.Fatal(stderr)
	}
	want("a scale", func(a *console.Audited) bool {
		return a.Action == "POST /admin/v1/scale" && a.By == "admin" && a.Status == 200 && a.Was == "prefill=1" && a.Is == "prefill=2"
	})
	write("read_timeout: 7s\nlimits: {max_queue: 77}\n")
	r.Signal(syscall.SIGHUP)
	want("a reload", func(a *console.Audited) bool {
		return a.Action == "reload" && a.By == "SIGHUP" && strings.HasPrefix(a.Is, "limits.max_queue: ") && strings.HasSuffix(a.Is, " -> 77")
	})

	if err := os.Rename(audit, audit+".1"); err != nil {
		t.Fatal(err)
	}
	write("limits: {max_queue: -1}\n")
	r.Signal(syscall.SIGHUP)
	cluster.Wait(t, 10*time.Second, "the file is there again", func() error { _, err := os.Stat(audit); return err })
	if _, stderr, code := r.CLI(t, "secret", "rotate"); code != 0 {
		t.Fatal(stderr)
	}
	want("a rotation", func(a *console.Audited) bool {
		return a.Action == "POST /admin/v1/secret/rotate" && len(a.Was) == 8 && strings.HasSuffix(a.Is, "+"+a.Was)
	})
	if n := len(read(audit)); n != 1 {
		t.Errorf("%d lines in the new file", n)
	}

	path := filepath.Join(r.Data, "admin-token-ro")
	token, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
	looker := func(args ...string) (string, int) {
		p := cluster.Start(t, []string{"XPYD_ADMIN_TOKEN_RO=" + strings.TrimSpace(string(token))}, append(args, "--data", filepath.Join(dir, "none"), "--admin", r.Admin)...)
		code := p.Exit(t, time.Minute)
		return p.Stdout.String() + p.Stderr.String(), code
	}
	if out, code := looker("status"); code != 0 || !strings.Contains(out, "prefill-0") {
		t.Errorf("status: %d %s", code, out)
	}
	if out, code := looker("drain", "prefill-0"); code != 1 || !strings.Contains(out, "this token only reads") {
		t.Errorf("drain: %d %s", code, out)
	}
	want("a refusal", func(a *console.Audited) bool {
		return a.Action == "POST /admin/v1/instances/prefill-0/drain" && a.By == "reader" && a.Status == 403
	})
	for _, f := range []string{audit, audit + ".1"} {
		b, err := os.ReadFile(f)
		if err != nil || strings.Contains(string(b), r.Token) || strings.Contains(string(b), strings.TrimSpace(string(token))) {
			t.Errorf("%s: %v, or a token in it", f, err)
		}
	}
}
