package router

import (
	"bytes"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// CORS says which pages in browsers, other than those of the router's own address, may use the public
// listener.
type CORS struct {
	// Origins are such as https://chat.example.com; "*" is all. Without any no page may, which programs
	// do not notice.
	Origins []string `key:"origins"`
	// MaxAge is how long a browser may remember what a preflight said.
	MaxAge time.Duration `key:"max_age"`
}

const maxCORSAge = 24 * time.Hour

// Validate returns a *config.KeyError.
func (c CORS) Validate() error {
	for _, o := range c.Origins {
		u, err := url.Parse(o)
		if o != "*" && (err != nil || u.Scheme == "" || u.Host == "" || u.Scheme+"://"+u.Host != o) {
			return config.Bad("origins", "%q is no origin such as https://chat.example.com, and not *", o)
		}
	}
	if c.MaxAge < 0 || c.MaxAge > maxCORSAge {
		return config.Bad("max_age", "%v is not in 0s..%v", c.MaxAge, maxCORSAge)
	}
	return nil
}

func (c *CORS) allows(origin []byte) bool {
	return slices.Contains(c.Origins, "*") || slices.Contains(c.Origins, string(origin))
}

// asks handles what a browser tells and asks of a page's origin. It reports whether the request is
// answered or refused by that, with the error if it is one. methods are what the path has; nil: there is
// no such path.
func (c *CORS) asks(ctx *fasthttp.RequestCtx, methods []string) (answered bool, err *openai.Error) {
	origin := ctx.Request.Header.Peek("Origin")
	if len(origin) == 0 {
		return false, nil
	}
	h := &ctx.Response.Header
	if len(c.Origins) > 0 {
		h.Add("Vary", "Origin")
	}
	allowed := c.allows(origin)
	if allowed {
		if slices.Contains(c.Origins, "*") {
			origin = []byte("*")
		}
		h.SetBytesV("Access-Control-Allow-Origin", origin)
		h.Set("Access-Control-Expose-Headers", strings.Join([]string{ticket.HeaderRequestID, "Retry-After", "Server-Timing"}, ", "))
	}
	preflight := string(ctx.Method()) == "OPTIONS" && len(ctx.Request.Header.Peek("Access-Control-Request-Method")) > 0
	switch {
	case preflight && methods == nil:
		return false, nil
	case preflight && allowed:
		h.Set("Access-Control-Allow-Methods", strings.Join(methods, ", "))
		if asked := ctx.Request.Header.Peek("Access-Control-Request-Headers"); len(asked) > 0 && headerNames(asked) {
			h.SetBytesV("Access-Control-Allow-Headers", asked)
		}
		h.Set("Access-Control-Max-Age", strconv.Itoa(int(c.MaxAge.Seconds())))
		ctx.SetStatusCode(fasthttp.StatusNoContent)
		return true, nil
	case preflight, !allowed && !sameOrigin(ctx, origin) && unasked(ctx):
		return true, openai.BadRequest("", "pages of %s may not use this address; the operator can allow it by cors.origins", openai.Clip(string(origin))).
			WithStatus(fasthttp.StatusForbidden, "origin_not_allowed")
	}
	return false, nil
}

// sameOrigin reports whether a page is of the address that it asks.
func sameOrigin(ctx *fasthttp.RequestCtx, origin []byte) bool {
	_, host, ok := bytes.Cut(origin, []byte("://"))
	return ok && bytes.EqualFold(host, ctx.Host())
}

// unasked reports whether a browser sends such a request without a preflight: a form's. What is read
// only is not, since the page does not get the answer.
func unasked(ctx *fasthttp.RequestCtx) bool {
	if string(ctx.Method()) != "POST" {
		return false
	}
	kind, _, _ := bytes.Cut(ctx.Request.Header.ContentType(), []byte(";"))
	switch strings.ToLower(string(bytes.TrimSpace(kind))) {
	case "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data":
		return true
	}
	return false
}

// headerNames reports whether a list consists of names of headers.
func headerNames(list []byte) bool {
	return len(list) <= 1024 && !bytes.ContainsFunc(list, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != ',' && r != ' '
	})
}
