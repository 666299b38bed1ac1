package router_test

import (
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/apikey"
)

// askTold has a stream lose its first decode. The function it returns sends such a stream whose client says
// something in a header of our own, and checks what both decodes are told in it, and prefill is not.
func (g *rig) askTold(name, client string) func(want string, header ...string) {
	var mu sync.Mutex
	var told []string
	for _, id := range []string{"d0", "d1"} {
		g.tells(id, func(r *http.Request) *teller {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, strings.Join(r.Header.Values(name), "+"))
			if r.Header.Get("x-xpyd-given") == "" {
				return &teller{g: g, cut: 2, how: reset}
			}
			return &teller{g: g, cut: -1}
		})
	}
	return func(want string, header ...string) {
		g.t.Helper()
		mu.Lock()
		told = nil
		mu.Unlock()
		resp, text := g.post("/v1/completions", askPair, append(header, name, client)...)
		g.until("the ledger to be empty", g.idle)
		if resp.StatusCode != 200 || strings.Count(text, seam) != 1 {
			g.t.Errorf("%d %s", resp.StatusCode, text)
		}
		mu.Lock()
		defer mu.Unlock()
		if len(told) != 2 || told[0] != want || told[1] != want {
			g.t.Errorf("decode was told %q, want %q twice", told, want)
		}
		p := g.workers["p0"]
		p.mu.Lock()
		defer p.mu.Unlock()
		if got := p.last.Get(name); got != "" {
			g.t.Errorf("prefill's leg has the client's %q", got)
		}
	}
}

// TestKeyPromise: decode is told what the key's owner is promised, whether prefill helps, another
// decode goes on, or a gateway names the tenant; what a client says of it is dropped.
func TestKeyPromise(t *testing.T) {
	t.Parallel()
	const promise = "ttft=200ms,tpot=25ms,itl=50ms"
	f := newKeyFile(t, apikey.Key{Name: "fast", TTFTPromise: 200 * time.Millisecond, TPOTPromise: 25 * time.Millisecond, ITLPromise: 50 * time.Millisecond, NamesTenants: true},
		apikey.Key{Name: "first", TTFTPromise: 1500 * time.Millisecond}, apikey.Key{Name: "plain"})
	g := newRig(t, 1, 2, f.config, func(c *router.Config) { c.TenantHeader = "x-tenant" })
	ask := g.askTold("x-xpyd-promise", "ttft=1ms")
	ask(promise, f.of("fast")...)
	ask(promise, append(f.of("fast"), "x-tenant", "someone")...)
	ask("ttft=1.5s", f.of("first")...)
	ask("", f.of("plain")...)

	// The file changes.
	text, err := os.ReadFile(f.path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.path, []byte(strings.ReplaceAll(string(text), "ttft_promise: 200ms", "ttft_promise: 1m")), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := g.r.Reload(router.DefaultConfig().Limits, "prefix"); err != nil {
		t.Fatal(err)
	}
	ask("ttft=1m0s,tpot=25ms,itl=50ms", f.of("fast")...)
}

// TestPromiseElsewhere: other engines are told nothing.
func TestPromiseElsewhere(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "fast", TPOTPromise: 25 * time.Millisecond})
	g := newRig(t, 1, 1, f.config, func(c *router.Config) { c.Limits.PairWait = time.Minute }) // until the engine is probed
	e := g.add("e", fleet.Decode, func(i *fleet.Instance) { i.Dialect, i.Model = "openai", "other" })
	e.on(&e.decode, whole)
	resp, text := g.post("/v1/completions", `{"model":"other","prompt":"x"}`, append(f.of("fast"), "x-xpyd-promise", "ttft=1ms")...)
	if resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if got := e.last.Get("x-xpyd-promise"); got != "" {
		t.Errorf("told %q", got)
	}
}
