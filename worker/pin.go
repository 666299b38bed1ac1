package worker

import (
	"errors"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/openai"
)

// pinList answers GET /xpyd/v1/cache/pin.
type pinList struct {
	Pins      []tier.Pinned `json:"pins"`
	Units     int           `json:"units"`      // of all pins, each once
	MostUnits int           `json:"most_units"` // kv.pin_share of the tier
}

func (w *Worker) servePins(*fasthttp.RequestCtx) (any, error) {
	l := &pinList{Pins: append([]tier.Pinned{}, w.tiers.Pins()...)} // [] in JSON, not null
	l.Units, l.MostUnits = w.tiers.PinnedUnits()
	return l, nil
}

// servePin pins a prompt's prefix, or renews its pin.
func (w *Worker) servePin(ctx *fasthttp.RequestCtx) (any, error) {
	p, fail := openai.ParsePin(ctx.PostBody(), false)
	if fail != nil {
		return nil, fail
	}
	j, err := w.pinJob(ctx, p)
	if err != nil {
		return nil, err
	}
	pin, err := w.tiers.Pin(j.items[0].tokens, j.CacheSalt, p.TTL)
	switch {
	case errors.Is(err, tier.ErrPinned):
		e := openai.TooMany("%v: unpin something, wait, or raise kv.pin_share", err)
		e.Code = "pin_share_exceeded"
		err = e
	case errors.Is(err, tier.ErrShort):
		err = openai.BadRequest(j.source(), "%v of %d tokens", err, w.cache.UnitTokens())
	case errors.Is(err, tier.ErrNoTiers):
		err = &openai.Error{Status: 409, Type: openai.TypeInvalid, Code: "no_host_memory", Message: err.Error() + ": set kv.host_memory"}
	}
	return &pin, err
}

// serveUnpin ends the pin with an id, or that of a prompt.
func (w *Worker) serveUnpin(ctx *fasthttp.RequestCtx) (any, error) {
	p, fail := openai.ParsePin(ctx.PostBody(), true)
	if fail != nil {
		return nil, fail
	}
	if p.ID == "" {
		j, err := w.pinJob(ctx, p)
		if err != nil {
			return nil, err
		}
		p.ID = w.tiers.PinID(j.items[0].tokens, j.CacheSalt)
	}
	if !w.tiers.Unpin(p.ID) {
		return nil, openai.NotFound("there is no such pin")
	}
	return w.servePins(ctx)
}

// pinJob reads the prompt like the request that will use it.
func (w *Worker) pinJob(ctx *fasthttp.RequestCtx, p openai.Pin) (j *job, err error) {
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
