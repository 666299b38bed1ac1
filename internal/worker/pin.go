package worker

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/tier"
)

// longestPin bounds ttl_s.
const longestPin = 31 * 24 * time.Hour

// pinRequest is what a pin's body has besides a completion's or a chat's
// fields: the prompt, or messages, and cache_salt name what is pinned.
type pinRequest struct {
	TTL      *float64        `json:"ttl_s"`
	ID       string          `json:"id"` // to unpin, instead of the prompt
	Messages json.RawMessage `json:"messages"`
}

// pinList answers GET.
type pinList struct {
	Pins      []tier.Pinned `json:"pins"`
	Units     int           `json:"units"`      // of all pins, each once
	MostUnits int           `json:"most_units"` // kv.pin_share of the tier
}

func (w *Worker) servePins(ctx *fasthttp.RequestCtx) {
	l := pinList{Pins: w.tiers.Pins()}
	if l.Pins == nil {
		l.Pins = []tier.Pinned{}
	}
	l.Units, l.MostUnits = w.tiers.PinnedUnits()
	writeJSON(ctx, 200, mustJSON(&l))
}

// servePin pins a prompt's prefix, or renews its pin.
func (w *Worker) servePin(ctx *fasthttp.RequestCtx) {
	p, fail := parsePin(ctx.PostBody())
	if fail == nil && (p.TTL == nil || !(*p.TTL > 0 && *p.TTL <= longestPin.Seconds())) {
		fail = openai.BadRequest("ttl_s", "ttl_s is required: seconds, above 0 and at most %d", int(longestPin.Seconds()))
	}
	var j *job
	if fail == nil {
		j, fail = w.pinJob(p, ctx.PostBody())
	}
	if fail != nil {
		writeError(ctx, fail)
		return
	}
	pin, err := w.tiers.Pin(j.items[0].tokens, j.CacheSalt, time.Duration(*p.TTL*float64(time.Second)))
	switch {
	case err == nil:
		writeJSON(ctx, 200, mustJSON(&pin))
	case errors.Is(err, tier.ErrPinned):
		e := openai.TooMany("%v: unpin something, wait, or raise kv.pin_share", err)
		e.Code = "pin_share_exceeded"
		writeError(ctx, e)
	case errors.Is(err, tier.ErrShort):
		writeError(ctx, openai.BadRequest(j.source(), "%v of %d tokens", err, w.cache.UnitTokens()))
	case errors.Is(err, tier.ErrNoTiers):
		writeError(ctx, &openai.Error{Status: 409, Type: openai.TypeInvalid, Code: "no_host_memory", Message: err.Error() + ": set kv.host_memory"})
	default:
		writeError(ctx, openai.Internal("%v", err))
	}
}

// serveUnpin ends the pin of an id or of a prompt.
func (w *Worker) serveUnpin(ctx *fasthttp.RequestCtx) {
	p, fail := parsePin(ctx.PostBody())
	if fail == nil && p.ID == "" {
		var j *job
		if j, fail = w.pinJob(p, ctx.PostBody()); fail == nil {
			p.ID = w.tiers.PinID(j.items[0].tokens, j.CacheSalt)
		}
	}
	if fail == nil && !w.tiers.Unpin(p.ID) {
		fail = openai.NotFound("there is no such pin")
	}
	if fail != nil {
		writeError(ctx, fail)
		return
	}
	w.servePins(ctx)
}

func parsePin(body []byte) (p pinRequest, _ *openai.Error) {
	if err := json.Unmarshal(body, &p); err != nil {
		return p, openai.BadRequest("", "%v", err)
	}
	return p, nil
}

// pinJob reads the prompt as the request to be served would have it.
func (w *Worker) pinJob(p pinRequest, body []byte) (*job, *openai.Error) {
	read := w.completionJob
	if p.Messages != nil {
		read = w.chatJob
	}
	j, err := read(body)
	if err == nil && len(j.items) != 1 {
		err = openai.BadRequest("prompt", "one prompt at a time, not %d", len(j.items))
	}
	return j, err
}
