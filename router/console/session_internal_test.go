package console

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/valyala/fasthttp"
)

// TestSessions: a session opens what its token does, by both of its halves, for its time, from its own pages.
func TestSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Console{Deps: Deps{Token: "secret", TokenRO: "reads"}}
		cookie, key := c.sessions.open(admin, time.Now())
		looks, lookKey := c.sessions.open(reader, time.Now())
		shown := func(cookie, key, path string, more ...string) holder {
			var ctx fasthttp.RequestCtx
			ctx.Request.Header.SetHost("127.0.0.1:8001")
			ctx.Request.Header.SetCookie(cookieName, cookie)
			ctx.Request.Header.Set(headerSession, key)
			for i := 0; i+1 < len(more); i += 2 {
				ctx.Request.Header.Set(more[i], more[i+1])
			}
			return c.holder(&ctx, path)
		}
		const path = "/admin/v1/instances"
		for _, x := range []struct {
			name        string
			cookie, key string
			path        string
			more        []string
			want        holder
		}{
			{"both halves", cookie, key, path, nil, admin},
			{"a reader's", looks, lookKey, path, nil, reader},
			{"the cookie alone, as a foreign page makes the browser send it", cookie, "", path, nil, nobody},
			{"the key alone", "", key, path, nil, nobody},
			{"halves of two", cookie, lookKey, path, nil, nobody},
			{"the halves swapped", key, cookie, path, nil, nobody},
			{"a profile", cookie, key, "/debug/pprof/profile", nil, nobody},
			{"its own page", cookie, key, path, []string{"Origin", "http://127.0.0.1:8001"}, admin},
			{"a page of another port", cookie, key, path, []string{"Origin", "http://127.0.0.1:3000"}, nobody},
			{"no page's address", cookie, key, path, []string{"Origin", "null"}, nobody},
			{"a wrong bearer beside it", cookie, key, path, []string{"Authorization", "Bearer wrong"}, nobody},
			{"a bearer beside it", looks, lookKey, path, []string{"Authorization", "Bearer secret"}, admin},
		} {
			if got := shown(x.cookie, x.key, x.path, x.more...); got != x.want {
				t.Errorf("%s: %v, want %v", x.name, got, x.want)
			}
		}
		c.sessions.end([]byte(looks))
		if got := shown(looks, lookKey, path); got != nobody {
			t.Errorf("signed out: %v", got)
		}
		time.Sleep(sessionLife - time.Second)
		if got := shown(cookie, key, path); got != admin {
			t.Errorf("before its end: %v", got)
		}
		time.Sleep(time.Second)
		if got := shown(cookie, key, path); got != nobody {
			t.Errorf("at its end: %v", got)
		}
		first, firstKey := c.sessions.open(admin, time.Now())
		for range maxSessions - 1 {
			c.sessions.open(admin, time.Now())
		}
		if got := shown(first, firstKey, path); got != admin || len(c.sessions.list) != maxSessions {
			t.Errorf("%v, %d sessions", got, len(c.sessions.list))
		}
		c.sessions.open(admin, time.Now())
		if got := shown(first, firstKey, path); got != nobody || len(c.sessions.list) != maxSessions {
			t.Errorf("the oldest makes no way: %v, %d sessions", got, len(c.sessions.list))
		}
	})
}
