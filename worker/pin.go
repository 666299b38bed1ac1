package worker

import (
	"errors"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/openai"
)

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
	p, fail := openai.ParsePin(ctx.PostBody(), false)
	var j *job
	if fail == nil {
		j, fail = w.pinJob(ctx, p)
	}
	if fail != nil {
		writeError(ctx, fail)
		return
	}
	pin, err := w.tiers.Pin(j.items[0].tokens, j.CacheSalt, p.TTL)
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
	p, fail := openai.ParsePin(ctx.PostBody(), true)
	if fail == nil && p.ID == "" {
		var j *job
		if j, fail = w.pinJob(ctx, p); fail == nil {
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

// pinJob reads the prompt as the request to be served would have it.
func (w *Worker) pinJob(ctx *fasthttp.RequestCtx, p openai.Pin) (j *job, err *openai.Error) {
	if p.Chat {
		j, err = w.chatJob(ctx)
	} else {
		j, err = w.completionJob(ctx.PostBody())
	}
	if err == nil && len(j.items) != 1 {
		err = openai.BadRequest("prompt", "one prompt at a time, not %d", len(j.items))
	}
	return j, err
}
