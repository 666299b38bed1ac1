package console

import (
	"net/http"
	"slices"
	"strconv"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

// serveCache serves /admin/v1/cache and what is below it: every worker is asked,
// and the answer has what each of them said. What only reports is a 200; what
// changes something has a status of all of them.
func (c *Console) serveCache(ctx *fasthttp.RequestCtx, verb, below string) {
	const workers = "/xpyd/v1/cache"
	switch {
	case verb == http.MethodGet && (below == "" || below == "/pin"):
		said, _ := c.everyWorker(verb, workers+below, nil)
		reply(ctx, 200, said)
	case verb == http.MethodPost && below == "/flush":
		if string(ctx.QueryArgs().Peek("store")) == "true" {
			below += "?store=true"
		}
		c.changeEvery(ctx, verb, workers+below, nil)
	case below == "/pin" && (verb == http.MethodPost || verb == http.MethodDelete):
		// What is wrong for every worker is said once, and changes none.
		if _, err := openai.ParsePin(ctx.PostBody(), verb == http.MethodDelete); err != nil {
			h1.WriteError(ctx, err)
			return
		}
		c.changeEvery(ctx, verb, workers+below, ctx.PostBody())
	default:
		h1.WriteError(ctx, openai.NotFound("there is no %s %s", h1.Clip(verb), h1.Clip(string(ctx.Path()))))
	}
}

// changeEvery has every worker do something. Scripts look at the status only, so
// it is a 200 only if all have done it that can.
func (c *Console) changeEvery(ctx *fasthttp.RequestCtx, verb, path string, body []byte) {
	said, statuses := c.everyWorker(verb, path, body)
	if len(statuses) == 0 {
		h1.WriteError(ctx, openai.Unavailable("there is no live worker of xpyd's own to do it: start one, then ask again"))
		return
	}
	status := together(statuses)
	reply(ctx, status, said)
	if s := h1.RetryAfter(status); s > 0 {
		ctx.Response.Header.Set("Retry-After", strconv.Itoa(s))
	}
}

// together is the status of several workers' answers: 200 if all accepted; what all
// refused with; of different refusals that are the client's fault the greatest; else 502,
// also where some accepted. Where one accepted, those do not count that have no host memory
// to pin in (409), or no such pin (404).
func together(statuses []int) int {
	refused := slices.DeleteFunc(slices.Clone(statuses), func(s int) bool { return s < 400 })
	accepted := len(refused) < len(statuses)
	if accepted {
		refused = slices.DeleteFunc(refused, func(s int) bool { return s == http.StatusNotFound || s == http.StatusConflict })
	}
	if len(refused) == 0 {
		return http.StatusOK
	}
	least, most := slices.Min(refused), slices.Max(refused)
	if !accepted && (least == most || most < 500) {
		return most
	}
	return http.StatusBadGateway
}
