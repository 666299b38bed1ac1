package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/openai"
)

// cacheInfo answers GET /xpyd/v1/cache: the KV that is kept, nearest first.
type cacheInfo struct {
	BlockTokens int              `json:"block_tokens"`
	UnitTokens  int              `json:"unit_tokens"`
	Pool        poolInfo         `json:"pool"`
	Tiers       []tier.Stats     `json:"tiers,omitempty"`
	Store       *tier.StoreStats `json:"store,omitempty"`
	Peers       *tier.PeerStats  `json:"peers,omitempty"`
	Moved       *movedInfo       `json:"moved,omitempty"`
	Purged      *int             `json:"store_purged_units,omitempty"` // by this very request, a flush
}

// movedInfo is how many bytes of KV have gone to decode workers, and have come from prefill workers.
type movedInfo struct {
	Sent   int64 `json:"sent_bytes"`
	Stored int64 `json:"stored_bytes"`
	// From is what is stored of each prefill worker that there is a session with, since it began.
	From map[string]int64 `json:"from,omitempty"`
}

// poolInfo is the device pool, in blocks.
type poolInfo struct {
	Blocks      int    `json:"blocks"`
	Free        int    `json:"free"`
	Held        int    `json:"held"`
	Cached      int    `json:"cached"`
	Quarantined int    `json:"quarantined"`
	Evicted     uint64 `json:"evicted"`
	HitTokens   uint64 `json:"hit_tokens"`
	AskedTokens uint64 `json:"asked_tokens"`
}

// flushTime bounds a flush; the router waits longer. What a shared store still has then is left to
// the next flush. A slow level deletes the rest once it answers.
const flushTime = 1500 * time.Millisecond

func (w *Worker) serveCache(*fasthttp.RequestCtx) (any, error) { return w.cacheInfo(), nil }

func (w *Worker) cacheInfo() *cacheInfo {
	s := w.cache.Stats()
	var moved *movedInfo
	if w.moved != nil {
		moved = &movedInfo{}
		moved.Sent, moved.Stored = w.moved()
		moved.From = w.movedFrom()
	}
	return &cacheInfo{Moved: moved, BlockTokens: w.cache.BlockTokens(), UnitTokens: w.cache.UnitTokens(), Tiers: w.tiers.Report(), Store: w.tiers.StoreStats(), Peers: w.peers.Stats(),
		Pool: poolInfo{s.Blocks, s.Free, s.Held, s.Cached, s.Quarantined, s.Evicted, s.HitTokens, s.AskTokens}}
}

// serveFlush forgets every prefix that no running request holds, in the pool and in this worker's
// own tiers. With ?store=true it also empties the shared store of this model, numerics and layout,
// for all workers.
func (w *Worker) serveFlush(ctx *fasthttp.RequestCtx) (any, error) {
	within, cancel := context.WithTimeout(context.Background(), flushTime)
	defer cancel()
	w.cache.Clear()
	flushed := make(chan error, 1)
	go func() { flushed <- w.tiers.Flush(within) }() // a level that hangs leaves the store its time
	var purged *int
	var purge error
	if string(ctx.QueryArgs().Peek("store")) == "true" {
		purged = new(int)
		*purged, purge = w.tiers.Purge(within)
	}
	switch own := <-flushed; {
	case errors.Is(own, tier.ErrHung):
		e := openai.Deadline("forgotten, but %v", own)
		e.Code = "tier_hung"
		return nil, e
	case errors.Is(own, tier.ErrClosed):
		return nil, closing()
	case own != nil:
		return nil, fmt.Errorf("flush the KV tiers: %w", own)
	case errors.Is(purge, tier.ErrNoStore):
		return nil, openai.BadRequest("store", "%v", purge)
	case purge != nil:
		return nil, openai.Upstream("%d units purged, there may be more: %v", *purged, purge)
	}
	info := w.cacheInfo()
	info.Purged = purged
	return info, nil
}

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
	p, j, err := w.readPin(ctx, false)
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
	p, j, err := w.readPin(ctx, true)
	if err != nil {
		return nil, err
	}
	if j != nil {
		p.ID = w.tiers.PinID(j.items[0].tokens, j.CacheSalt)
	}
	if !w.tiers.Unpin(p.ID) {
		return nil, openai.NotFound("there is no such pin")
	}
	return w.servePins(ctx)
}

// readPin reads a pin, and its prompt like the request that will use it. There is no prompt if
// unpin names an id.
func (w *Worker) readPin(ctx *fasthttp.RequestCtx, unpin bool) (openai.Pin, *job, error) {
	p, fail := openai.ParsePin(ctx.PostBody(), unpin)
	if fail != nil {
		return p, nil, fail
	}
	if unpin && p.ID != "" {
		return p, nil, nil
	}
	j, err := w.readJob(ctx, kindOf(p.Chat), time.Now())
	if err == nil && len(j.items) != 1 {
		err = openai.BadRequest("prompt", "one prompt at a time, not %d", len(j.items))
	}
	if err == nil {
		j.CacheSalt = kvevents.CacheSalt(p.Cache, j.CacheSalt)
	}
	return p, j, err
}
