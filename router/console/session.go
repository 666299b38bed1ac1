package console

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"slices"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/lobby"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

// A session is what a browser has in place of the token: a cookie that scripts cannot read, and a key that the page
// keeps and shows in a header. Either alone opens nothing. Browsers send the cookie by themselves, also to other ports
// of this host and for other sites' pages; the key is in the storage of this address alone.
const (
	cookieName    = "xpyd-session"
	headerSession = "X-Xpyd-Session"
	sessionLife   = 12 * time.Hour
	maxSessions   = 64 // of each token
)

type session struct {
	cookie, key [32]byte // SHA-256 of what the browser has
	by          holder
	until       time.Time
}

// sessions are those of this router's dashboard.
type sessions struct {
	mu   sync.Mutex
	list []session // the oldest first
}

// open begins a session. The oldest one of the same token ends if there are too many.
func (s *sessions) open(by holder, now time.Time) (cookie, key string) {
	secret := func() string {
		var b [24]byte
		rand.Read(b[:])
		return base64.RawURLEncoding.EncodeToString(b[:])
	}
	cookie, key = secret(), secret()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = slices.DeleteFunc(s.list, func(x session) bool { return !now.Before(x.until) })
	if own := func(x session) bool { return x.by == by }; count(s.list, own) >= maxSessions {
		i := slices.IndexFunc(s.list, own)
		s.list = slices.Delete(s.list, i, i+1)
	}
	s.list = append(s.list, session{sha256.Sum256([]byte(cookie)), sha256.Sum256([]byte(key)), by, now.Add(sessionLife)})
	return cookie, key
}

func count(list []session, is func(session) bool) (n int) {
	for _, x := range list {
		if is(x) {
			n++
		}
	}
	return n
}

// find is whose session it is, and until when; nobody's if there is none.
func (s *sessions) find(cookie, key []byte, now time.Time) (holder, time.Time) {
	a, b := sha256.Sum256(cookie), sha256.Sum256(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.list {
		x := &s.list[i]
		if subtle.ConstantTimeCompare(a[:], x.cookie[:])&subtle.ConstantTimeCompare(b[:], x.key[:]) == 1 && now.Before(x.until) {
			return x.by, x.until
		}
	}
	return nobody, time.Time{}
}

// end ends a session.
func (s *sessions) end(cookie []byte) {
	a := sha256.Sum256(cookie)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = slices.DeleteFunc(s.list, func(x session) bool { return x.cookie == a })
}

// shownSession is the session that a request shows with both of its halves, for what sessions are enough.
func (c *Console) shownSession(ctx *fasthttp.RequestCtx, path string) (holder, time.Time) {
	h := &ctx.Request.Header
	cookie, key := h.Cookie(cookieName), h.Peek(headerSession)
	if len(cookie) == 0 || len(key) == 0 || !readable(path) || !ownOrigin(ctx) {
		return nobody, time.Time{}
	}
	return c.sessions.find(cookie, key, time.Now())
}

// ownOrigin reports whether a request comes from a page of this very address, or from no page.
func ownOrigin(ctx *fasthttp.RequestCtx) bool {
	origin := ctx.Request.Header.Peek("Origin")
	if len(origin) == 0 {
		return true
	}
	_, host, _ := bytes.Cut(origin, []byte("://"))
	return bytes.Equal(host, ctx.Request.Header.Host())
}

// signIn is the body of POST /dashboard/session.
type signIn struct {
	Token string `json:"token"`
}

// signedIn says who is signed in.
type signedIn struct {
	As    string    `json:"as"`            // admin or reader
	Key   string    `json:"key,omitempty"` // what the page shows as X-Xpyd-Session from now on
	Until time.Time `json:"until"`
}

// serveSession signs in (POST, by a token), says who is (GET), and signs out (DELETE). It is whose session it then is.
func (c *Console) serveSession(ctx *fasthttp.RequestCtx, verb string) holder {
	ctx.Response.Header.Set("Cache-Control", "no-store")
	by, until := c.shownSession(ctx, string(ctx.Path()))
	switch {
	case verb == "POST":
		return c.signIn(ctx)
	case verb != "GET" && verb != "DELETE":
		ctx.Response.Header.Set("Allow", "GET, POST, DELETE")
		h1.WriteError(ctx, openai.BadRequest("", "%s is not allowed here, use GET, POST or DELETE", openai.Clip(verb)).WithStatus(405, "method_not_allowed"))
	case by == nobody:
		h1.WriteError(ctx, openai.Unauthorized("nobody is signed in here, or not any more"))
	case verb == "GET":
		lobby.Admit(ctx.Conn())
		answer(ctx, signedIn{As: by.String(), Until: until})
	default:
		c.sessions.end(ctx.Request.Header.Cookie(cookieName))
		setCookie(ctx, "", -1)
		ctx.SetStatusCode(204)
	}
	return by
}

func (c *Console) signIn(ctx *fasthttp.RequestCtx) holder {
	if !ownOrigin(ctx) {
		h1.WriteError(ctx, openai.Unauthorized("sign in from the dashboard's own page"))
		return nobody
	}
	const most = 4096 // of a stranger's body
	if n := ctx.Request.Header.ContentLength(); n < 0 || n > most {
		h1.WriteError(ctx, openai.TooLarge("want at most %d bytes, and their length", most))
		ctx.SetConnectionClose()
		return nobody
	}
	body, err := h1.ConnOf(ctx.Conn()).ReadBody()
	if err != nil {
		c.Refuse(ctx, err)
		return nobody
	}
	ctx.Request.SetBodyRaw(body)
	var in signIn
	bad := ReadBody(ctx, &in, true)
	ctx.Request.ResetBody() // it shows in no log
	if bad != nil {
		h1.WriteError(ctx, bad)
		return nobody
	}
	by := c.holds([]byte(in.Token))
	if by == nobody {
		h1.WriteError(ctx, openai.Unauthorized("this is not the admin token: it is the text of admin-token, or to read only of admin-token-ro, in the data folder"))
		return nobody
	}
	lobby.Admit(ctx.Conn())
	cookie, key := c.sessions.open(by, time.Now())
	setCookie(ctx, cookie, int(sessionLife/time.Second))
	answer(ctx, signedIn{As: by.String(), Key: key, Until: time.Now().Add(sessionLife)})
	return by
}

func answer(ctx *fasthttp.RequestCtx, v any) {
	if err := reply(ctx, 200, v); err != nil {
		h1.WriteError(ctx, err)
	}
}

// setCookie gives the browser the session's cookie; with a negative age it forgets it.
func setCookie(ctx *fasthttp.RequestCtx, value string, age int) {
	var k fasthttp.Cookie
	k.SetKey(cookieName)
	k.SetValue(value)
	k.SetPath("/")
	k.SetHTTPOnly(true)
	k.SetSameSite(fasthttp.CookieSameSiteStrictMode)
	k.SetSecure(ctx.IsTLS())
	if age < 0 {
		k.SetExpire(fasthttp.CookieExpireDelete)
	} else {
		k.SetMaxAge(age)
	}
	ctx.Response.Header.SetCookie(&k)
}
