package worker_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// TestCacheSaltOfKeys: what one API key's request had cached is not another's, alone or beside a
// cache_salt, and cannot be had by a client's own salt.
func TestCacheSaltOfKeys(t *testing.T) {
	w := start(t, nil)
	f := func(cache, own string, hit bool) {
		t.Helper()
		header := map[string]string{}
		if cache != "" {
			header["x-xpyd-cache-salt"] = cache
		}
		if got := complete(t, w, header, saltBody(own)).Usage.Details.Cached; got > 0 != hit {
			t.Errorf("key %q, salt %q: %d tokens were cached", cache, own, got)
		}
	}
	for _, c := range []struct{ cache, own string }{{"", ""}, {"alice", ""}, {"bob", ""}, {"alice", "s"}, {"bob", "s"}, {"", "s"}, {"alices", ""},
		{"", "alice"}, {"", "xpyd-key:alice"}, {"", "xpyd-both:alice"}, {"x", "xpyd-key:alice"}} {
		f(c.cache, c.own, false)
		f(c.cache, c.own, true)
	}
}

func saltBody(own string) string {
	rest := ""
	if own != "" {
		rest = fmt.Sprintf(`,"cache_salt":%q`, own)
	}
	return fmt.Sprintf(`{"prompt":%q,"max_tokens":2,"temperature":0%s}`, stories(1)[0], rest)
}

// TestCacheSaltOfPair: prefill keeps keys apart too, as decode's ticket says.
func TestCacheSaltOfPair(t *testing.T) {
	p, d := pair(t, nil)
	f := func(cache string, hit bool) {
		t.Helper()
		ask(t, d.URL()+"/xpyd/v1/cache/flush", nil, "") // else decode knows
		link := ticket.NewLink().String()
		report := leg(p, link)
		header := linked(p, link)
		header["x-xpyd-cache-salt"] = cache
		resp, b := send(t, http.MethodPost, d.URL()+"/v1/completions", header, saltBody(""))
		if resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, b)
		}
		<-report
		var prompt, cached int
		if _, err := fmt.Sscan(resp.Header.Get("x-xpyd-prompt"), &prompt, &cached); err != nil || cached > 0 != hit {
			t.Errorf("key %q: %q %v", cache, resp.Header.Get("x-xpyd-prompt"), err)
		}
	}
	f("alice", false)
	f("alice", true)
	f("bob", false)
	f("bob", true)
}
