package router_test

import (
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/apikey"
)

// TestEmbeddingsToPrefill: of native workers a prefill answers embeddings. One that fails is tried no more;
// the tokens count for the key, whose cache the worker is told, and other paths go to decode.
func TestEmbeddingsToPrefill(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "alice", TokensPerMinute: 1_000_000})
	g := newRig(t, 2, 1, f.config, func(c *router.Config) { c.Pick.Policy = "round_robin" })
	const ask, vectors = `{"model":"m","input":"x"}`, `{"object":"list","data":[],"model":"m","usage":{"prompt_tokens":100000,"total_tokens":100000}}`
	good, bad, d := g.workers["p1"], g.workers["p0"], g.workers["d0"]
	good.on(&good.other, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, vectors)
	})
	bad.on(&bad.other, reset)
	d.on(&d.other, reset)
	begin := time.Now()
	for _, path := range []string{"/v1/embeddings", "/v2/embed"} { // each of the two workers comes first once
		resp, text := g.post(path, ask, f.of("alice")...)
		if resp.StatusCode != 200 || text != vectors || resp.Header.Get("x-xpyd-prefill") != "p1" || resp.Header.Get("x-xpyd-decode") != "" {
			t.Errorf("%d %s %v", resp.StatusCode, text, resp.Header)
		}
	}
	if bad.calls.Load() == 0 || d.calls.Load() != 0 {
		t.Errorf("the prefill that fails had %d calls, decode %d", bad.calls.Load(), d.calls.Load())
	}
	good.mu.Lock()
	if got := good.last.Get("x-xpyd-cache-salt"); got != "alice" || string(good.body) != ask {
		t.Errorf("told %q, %s", got, good.body)
	}
	good.mu.Unlock()
	g.until("it to be settled", g.idle)
	resp, _ := g.post("/v1/embeddings", ask, f.of("alice")...)
	left, err := strconv.Atoi(resp.Header.Get("x-ratelimit-remaining-tokens"))
	if gained := int(time.Since(begin)/time.Millisecond+1) * 17; err != nil || left > 800_000+gained {
		t.Errorf("%d tokens are left (%v)", left, err)
	}
	d.on(&d.other, whole)
	if resp, text := g.post("/v1/moderations", ask, f.of("alice")...); resp.StatusCode != 200 || resp.Header.Get("x-xpyd-decode") != "d0" {
		t.Errorf("%d %s %v", resp.StatusCode, text, resp.Header)
	}
}
