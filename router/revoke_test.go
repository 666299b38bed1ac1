package router_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

// revoker is a fleet's, which can fail to keep what it did.
type revoker struct {
	*fleet.Watcher
	fail error
}

func (r *revoker) Revoke(id string) error { return errors.Join(r.Watcher.Revoke(id), r.fail) }

// TestRevoke: a revoked worker loses its requests, gets no more and cannot be added;
// after unrevoke it comes back.
func TestRevoke(t *testing.T) {
	var who *revoker
	g := newRigOf(t, func(d *router.Deps) {
		who = &revoker{Watcher: d.Fleet}
		d.Revoker = who
	}, 1, 2, func(c *router.Config) { c.Pick.Policy = "round_robin" })
	f := func(verb, path string, status int) (out struct {
		Revoked []struct {
			ID    string
			Since time.Time
		}
		Error struct{ Param, Code string }
	}) {
		t.Helper()
		code, text := g.as("Bearer secret", verb, "/admin/v1/revocations"+path, "")
		if code != status {
			t.Errorf("%s %s: %d %s, want %d", verb, path, code, text, status)
		}
		_ = json.Unmarshal([]byte(text), &out)
		return out
	}
	if list := f("GET", "", 200); list.Revoked == nil || len(list.Revoked) > 0 {
		t.Errorf("%+v", list)
	}
	f("POST", "/fleet-secret-0a0b0c0d", 400) // `xpyd secret` is for those
	d := g.workers["d0"]
	begun, ended := make(chan struct{}, 8), make(chan struct{}, 8)
	for _, id := range []string{"d0", "d1"} {
		g.workers[id].on(&g.workers[id].decode, func(w http.ResponseWriter, r *http.Request) {
			begin(w)
			begun <- struct{}{}
			if id == "d1" {
				return
			}
			<-r.Context().Done()
			ended <- struct{}{}
		})
	}
	answers := make(chan string, 2)
	for range 2 { // one of them is d0's
		go func() { _, text := g.post("/v1/completions", askStream); answers <- text }()
	}
	<-begun
	<-begun
	if list := f("POST", "/d0", 200); len(list.Revoked) != 1 || list.Revoked[0].ID != "d0" || time.Since(list.Revoked[0].Since) > time.Minute {
		t.Errorf("%+v", list)
	}
	<-ended
	<-answers
	<-answers
	d.on(&d.decode, whole)
	for range 4 {
		resp, _ := g.post("/v1/completions", ask)
		if by := resp.Header.Get("x-xpyd-decode"); by != "d1" {
			t.Errorf("by %q", by)
		}
	}
	if m := g.watcher.Snapshot().Get("d0"); m.State != fleet.Gone || !m.Revoked {
		t.Errorf("%+v", m)
	}
	if code, text := g.as("Bearer secret", "POST", "/admin/v1/instances", `{"id":"d0","role":"decode","url":"http://h:1","model":"m"}`); code != 400 {
		t.Errorf("%d %s", code, text)
	}
	f("POST", "/d0", 200)
	f("DELETE", "/d9", 404)
	f("POST", "", 405)
	f("PUT", "/d0", 405)
	if e := f("POST", "/d%200", 400); e.Error.Param != "id" {
		t.Errorf("%+v", e)
	}
	if list := f("DELETE", "/d0", 200); len(list.Revoked) > 0 {
		t.Errorf("%+v", list)
	}
	g.until("d0 is back", func() bool { m := g.watcher.Snapshot().Get("d0"); return m.State == fleet.Live })
	who.fail = errors.New("the disk is full")
	if e := f("POST", "/d0", 500); e.Error.Code == "" {
		t.Errorf("%+v", e)
	}
}

func TestNoRevoker(t *testing.T) {
	g := newRig(t, 1, 1)
	if code, text := g.as("Bearer secret", "POST", "/admin/v1/revocations/d0", ""); code != 400 {
		t.Errorf("%d %s", code, text)
	}
}
