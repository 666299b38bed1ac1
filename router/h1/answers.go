package h1

import (
	"bytes"
	crand "crypto/rand"
	"encoding/hex"
	"log/slog"
	"strconv"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
)

// WriteError answers with an error.
func WriteError(ctx *fasthttp.RequestCtx, e *openai.Error) {
	ctx.Response.ResetBody()
	ctx.SetStatusCode(e.Status)
	ctx.SetContentType("application/json")
	if s := max(e.RetryAfter, RetryAfter(e.Status)); s > 0 {
		ctx.Response.Header.Set("Retry-After", strconv.Itoa(s))
	}
	ctx.Response.SetBodyRaw(e.Append(nil))
}

// WriteJSON answers with a JSON body.
func WriteJSON(ctx *fasthttp.RequestCtx, status int, body []byte) {
	ctx.SetStatusCode(status)
	ctx.SetContentType("application/json")
	ctx.Response.SetBodyRaw(body)
}

// RetryAfter is in seconds; 0: no Retry-After.
func RetryAfter(status int) int {
	if status == 429 || status == 503 {
		return 1
	}
	return 0
}

// Method treats HEAD as GET: the server leaves out the body.
func Method(ctx *fasthttp.RequestCtx) string {
	if ctx.IsHead() {
		return "GET"
	}
	return string(ctx.Method())
}

// logAdapter logs what fasthttp says of broken connections: clients cause them, so it is no
// warning.
type logAdapter struct{ log *slog.Logger }

func (l logAdapter) Printf(format string, args ...any) {
	l.log.Debug("http", "text", strings.TrimSpace(format))
}

const idChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"

// RequestID is the client's if it is a plain name, else a new one.
func RequestID(client []byte) string {
	if n := len(client); n > 0 && n <= 128 && len(bytes.Trim(client, idChars)) == 0 {
		return string(client)
	}
	var b [14]byte
	crand.Read(b[:]) // never fails
	return "req-" + hex.EncodeToString(b[:])
}
