package worker

import (
	"context"
	"encoding/json"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// servePrefillLeg is the router's leg to prefill. It answers when the link's prompt has been pushed
// or has failed. When the router hangs up, the push ends too.
func (w *Worker) servePrefillLeg(ctx *fasthttp.RequestCtx) (any, error) {
	var leg struct {
		Link       string `json:"link"`
		RequestID  string `json:"request_id"`
		DeadlineMS int64  `json:"deadline_ms"` // from now; 0: none
	}
	if err := json.Unmarshal(ctx.PostBody(), &leg); err != nil {
		return nil, openai.BadRequest("", "%v", err)
	}
	link, err := ticket.ParseLink(leg.Link)
	if err != nil {
		return nil, openai.BadRequest("link", "%v", err)
	}
	if leg.DeadlineMS < 0 {
		return nil, openai.BadRequest("deadline_ms", "deadline_ms is %d", leg.DeadlineMS)
	}
	c, err := w.begin(ctx, w.requests, "prefill", leg.RequestID)
	if err != nil {
		return nil, err
	}
	defer c.leave()
	var wait context.Context = c
	if leg.DeadlineMS > 0 {
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeout(c, milliseconds(leg.DeadlineMS))
		defer cancel()
	}
	report := w.prefill.Await(wait, link)
	if report.Outcome == ticket.Done {
		return report, nil
	}
	ctx.Response.Header.Set(headerOutcome, string(report.Outcome))
	writeJSON(ctx, legStatus(report.Outcome), report)
	return nil, nil
}

func legStatus(o ticket.Outcome) int {
	switch o {
	case ticket.NoSpace:
		return 503
	case ticket.Late:
		return 504
	case ticket.Cancelled:
		return 499
	}
	return 502
}

// milliseconds is a duration that a peer named, cut to a day.
func milliseconds(n int64) time.Duration {
	return time.Duration(min(n, int64(24*time.Hour/time.Millisecond))) * time.Millisecond
}
