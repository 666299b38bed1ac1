package router_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/apikey"
	"github.com/xpyd/xpyd/router/pick"
)

// TestCacheOfKeys: decode is told whose cache it is, by each attempt, also where another decode goes
// on or a gateway names the tenant; what a client says of it is dropped.
func TestCacheOfKeys(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "alice", NamesTenants: true}, apikey.Key{Name: "bob"}, apikey.Key{Name: "new", Cache: "alice"}, apikey.Key{Name: "open", Cache: apikey.CacheShared})
	for _, keyed := range []bool{true, false} {
		g := newRig(t, 1, 2, func(c *router.Config) {
			if keyed {
				f.config(c)
			}
			c.TenantHeader = "x-tenant"
		})
		ask := g.askTold("x-xpyd-cache-salt", "bob")
		if !keyed {
			ask("")
			ask("", "x-tenant", "someone")
			continue
		}
		ask("alice", f.of("alice")...)
		ask("alice", append(f.of("alice"), "x-tenant", "someone")...)
		ask("bob", f.of("bob")...)
		ask("alice", f.of("new")...)
		ask("", f.of("open")...)
	}
}

// TestCacheOfKeysMoves: who is to bring a stream's KV is told whose it is, and so is who goes on with it.
func TestCacheOfKeysMoves(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "alice"})
	told := make(chan string, 8)
	s := newStepper(t, 2, func(w http.ResponseWriter, r *http.Request) {
		told <- r.Header.Get("x-xpyd-cache-salt")
		io.WriteString(w, bringing(true, 112))
	}, f.config)
	s.auth = f.of("alice")[1]
	_, _, done := s.begin(t.Context())
	s.brought()
	s.ends(s.rest(done), 1)
	if bring, leg := <-told, (<-s.legs).Get("x-xpyd-cache-salt"); bring != "alice" || leg != "alice" {
		t.Errorf("told %q, then %q", bring, leg)
	}
}

// TestCacheOfKeysRouting: the router does not tell a key's owner of another's prompts either.
func TestCacheOfKeysRouting(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "alice"}, apikey.Key{Name: "bob"})
	g := newRig(t, 1, 1, f.config)
	d := g.workers["d0"]
	d.on(&d.decode, whole)
	body := `{"model":"m","prompt":"` + strings.Repeat("Once upon a time ", 200) + `"}`
	warm := func(name string) bool {
		t.Helper()
		resp, text := g.post("/v1/completions", body, append(f.of(name), "x-xpyd-explain", "1")...)
		var ex pick.Explain
		if err := json.Unmarshal([]byte(resp.Header.Get("x-xpyd-explain")), &ex); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%d %s: %v", resp.StatusCode, text, err)
		}
		return ex.Prefill[0].Match > 0
	}
	if warm("alice") || !warm("alice") || warm("bob") || !warm("bob") {
		t.Error("keys share what the router knows of prompts")
	}
}

// TestCacheOfKeysElsewhere: other engines are told nothing.
func TestCacheOfKeysElsewhere(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "alice"})
	g := newRig(t, 1, 1, f.config, func(c *router.Config) { c.Limits.PairWait = time.Minute }) // until the engine is probed
	e := g.add("e", fleet.Decode, func(i *fleet.Instance) { i.Dialect, i.Model = "openai", "other" })
	e.on(&e.decode, whole)
	if resp, text := g.post("/v1/completions", `{"model":"other","prompt":"x"}`, append(f.of("alice"), "x-xpyd-cache-salt", "bob")...); resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if got := e.last.Get("x-xpyd-cache-salt"); got != "" {
		t.Errorf("told %q", got)
	}
}
