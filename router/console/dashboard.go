package console

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/flight"
)

// dashboard is a page that only reads, from /admin/v1/instances and /metrics.
//
//go:embed dashboard.html
var dashboard []byte

const dashboardRealm = `Basic realm="xpyd: any name, and the admin token as password", charset="UTF-8"`

// dashboardReads reports whether a browser may show the token as a password: for the page,
// what it fetches, and the latest requests. A browser sends it by itself, also for other
// sites' pages, so nothing there changes anything or takes long.
func dashboardReads(verb, path string) bool {
	return verb == "GET" && (path == "/dashboard" || path == "/admin/v1/instances" ||
		path == "/debug/requests" || strings.HasPrefix(path, "/debug/requests/"))
}

// basic is the password that a request shows.
func basic(h *fasthttp.RequestHeader) ([]byte, bool) {
	text, ok := flight.Credentials(h, "basic ")
	pair, err := base64.StdEncoding.DecodeString(string(text))
	_, password, cut := bytes.Cut(pair, []byte(":"))
	return password, ok && cut && err == nil
}

func (c *Console) serveDashboard(ctx *fasthttp.RequestCtx, _ adminCall) *openai.Error {
	h := &ctx.Response.Header
	h.Set("Content-Security-Policy", dashboardPolicy(dashboard))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
	ctx.SetContentType("text/html; charset=utf-8")
	ctx.Response.SetBodyRaw(dashboard)
	return nil
}

// dashboardPolicy allows the page its own script and style, by their hashes, and fetching
// from where it came from; nothing else.
func dashboardPolicy(page []byte) string {
	hash := func(tag string) string {
		_, rest, _ := bytes.Cut(page, []byte("<"+tag+">"))
		text, _, _ := bytes.Cut(rest, []byte("</"+tag+">"))
		sum := sha256.Sum256(text)
		return base64.StdEncoding.EncodeToString(sum[:])
	}
	return fmt.Sprintf("default-src 'none'; script-src 'sha256-%s'; style-src 'sha256-%s'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
		hash("script"), hash("style"))
}
