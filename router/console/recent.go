package console

import (
	"bytes"
	"fmt"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/flight"
)

// asText reports whether a person asks, with curl or a browser, rather than a program.
func asText(ctx *fasthttp.RequestCtx) bool {
	if f := ctx.QueryArgs().Peek("format"); len(f) > 0 {
		return string(f) == "text"
	}
	return strings.HasPrefix(string(ctx.Request.Header.Peek("Accept")), "text/")
}

// serveRequests lists running and recent requests, the newest first: ?n=N of them, as text with
// ?format=text.
func (c *Console) serveRequests(ctx *fasthttp.RequestCtx, _ adminCall) *openai.Error {
	most := 100
	if n, err := ctx.QueryArgs().GetUint("n"); err == nil {
		most = n
	}
	list := c.Flights.Recent(most)
	if !asText(ctx) {
		return reply(ctx, 200, struct {
			Requests []*flight.Info `json:"requests"`
		}{list})
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%-12s %-8s %6s %10s %10s  %-28s %-20s %s\n", "start", "state", "status", "ttft ms", "took ms", "request", "pair", "path")
	for _, i := range list {
		pair := ""
		if n := len(i.Attempts); n > 0 {
			pair = i.Attempts[n-1].Prefill.ID + "/" + i.Attempts[n-1].Decode.ID
		}
		fmt.Fprintf(&b, "%-12s %-8s %6d %10.1f %10.1f  %-28s %-20s %s\n", i.Start.Format("15:04:05.000"), i.State, i.Status, i.TTFTMS, i.TookMS, i.ID, pair, i.Path)
	}
	return plain(ctx, b.Bytes())
}

func (c *Console) serveRequest(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	info := c.Flights.Find(a.part)
	switch {
	case info == nil:
		return openai.NotFound("there is no request %q, or it is too old", openai.Clip(a.part))
	case asText(ctx):
		return plain(ctx, info.Text())
	}
	return reply(ctx, 200, info)
}

func plain(ctx *fasthttp.RequestCtx, text []byte) *openai.Error {
	ctx.SetContentType("text/plain; charset=utf-8")
	ctx.SetBody(text)
	return nil
}

// briefly is what a list of requests in lines is asked for: those that ended after a moment, and how many at most.
func briefly(ctx *fasthttp.RequestCtx) (since time.Time, most int, _ *openai.Error) {
	most = 10000
	query := ctx.QueryArgs()
	if query.Has("n") {
		n, err := query.GetUint("n")
		if err != nil {
			return since, 0, openai.BadRequest("n", "n: want a number from 0 on, not %q", openai.Clip(string(query.Peek("n"))))
		}
		most = min(most, n)
	}
	if text := query.Peek("after"); len(text) > 0 {
		t, err := time.Parse(time.RFC3339Nano, string(text))
		if err != nil {
			return since, 0, openai.BadRequest("after", "after: want a time such as 2026-01-02T15:04:05.6Z, not %q", openai.Clip(string(text)))
		}
		since = t
	}
	return since, most, nil
}
