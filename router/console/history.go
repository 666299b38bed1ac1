package console

import (
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/flight"
)

// The history has a point a second for the last quarter of an hour. What is a rate is of that second, what is a
// quantile or a share of the last 10.
const (
	historyStep   = time.Second
	historyPoints = 900
	smoothed      = 10 // points
)

// columns are what a point has, after its number and its time in milliseconds.
var columns = []string{"seq", "at_ms", "running", "waiting", "requests", "prompt_tokens", "output_tokens", "failed", "shed", "retries", "taken_over",
	"ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "good", "judged"}

type point [17]float64

// history is what points are kept in; one goroutine adds to it.
type history struct {
	ring[point]

	// Of the goroutine that adds: the readings that points are made of.
	latest []flight.Reading // the last smoothed+1, the oldest first
	at     time.Time        // of the last
}

// add makes a point of what has changed since the reading before; the first makes none.
func (h *history) add(r flight.Reading, now time.Time) {
	if n := len(h.latest); n > 0 {
		before, old := &h.latest[n-1], &h.latest[0]
		per := func(now, before int) float64 { return max(0, float64(now-before)) }
		seconds := max(now.Sub(h.at).Seconds(), 0.001)
		ttft, tpot := r.TTFT.Since(old.TTFT), r.TPOT.Since(old.TPOT)
		p := point{0, float64(now.UnixMilli()), float64(r.Running), float64(r.Waiting), per(r.Requests, before.Requests) / seconds,
			per(r.PromptTokens, before.PromptTokens) / seconds, per(r.OutputTokens, before.OutputTokens) / seconds,
			per(r.Failed, before.Failed), per(r.Shed, before.Shed), per(r.Retries, before.Retries), per(r.TakenOver, before.TakenOver),
			ttft.Quantile(.5), ttft.Quantile(.95), tpot.Quantile(.5), tpot.Quantile(.95),
			per(r.Good, old.Good), per(r.Judged, old.Judged)}
		h.put(historyPoints, func(seq int) point {
			p[0] = float64(seq)
			return p
		})
	}
	if len(h.latest) > smoothed {
		copy(h.latest, h.latest[1:])
		h.latest = h.latest[:smoothed]
	}
	h.latest, h.at = append(h.latest, r), now
}

// showHistory answers with the points after ?after=N.
func (c *Console) showHistory(ctx *fasthttp.RequestCtx, _ adminCall) *openai.Error {
	n, err := after(ctx)
	if err != nil {
		return err
	}
	points, next := c.history.after(n)
	return reply(ctx, 200, struct {
		Columns []string `json:"columns"`
		Next    int      `json:"next"` // what to ask for the next time
		StepMS  int64    `json:"step_ms"`
		TTFT    float64  `json:"ttft_promise_s,omitempty"` // what requests are to see; 0: anything
		TPOT    float64  `json:"tpot_promise_s,omitempty"`
		Points  []point  `json:"points"`
	}{columns, next, historyStep.Milliseconds(), c.Flights.Expect.TTFT.Seconds(), c.Flights.Expect.TPOT.Seconds(), points})
}

// after is what ?after= says, 0 if nothing.
func after(ctx *fasthttp.RequestCtx) (int, *openai.Error) {
	if !ctx.QueryArgs().Has("after") {
		return 0, nil
	}
	n, err := ctx.QueryArgs().GetUint("after")
	if err != nil {
		return 0, openai.BadRequest("after", "after: want a number from 0 on, not %q", openai.Clip(string(ctx.QueryArgs().Peek("after"))))
	}
	return n, nil
}

// Run keeps the history and the list of events until the router ends.
func (c *Console) Run() {
	tick := time.NewTicker(historyStep)
	defer tick.Stop()
	for {
		changed := c.Fleet.Changed()
		c.watchFleet(time.Now())
		select {
		case now := <-tick.C:
			r := c.Flights.Read()
			c.history.add(r, now)
			c.watchCounts(r, now)
		case <-changed:
		case <-c.Ctx.Done():
			return
		}
	}
}
