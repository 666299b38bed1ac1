package worker

import (
	"context"
	"errors"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/openai"
)

// cacheInfo answers GET /xpyd/v1/cache: what KV is kept, nearest first.
type cacheInfo struct {
	BlockTokens int              `json:"block_tokens"`
	UnitTokens  int              `json:"unit_tokens"`
	Pool        poolInfo         `json:"pool"`
	Tiers       []tier.Stats     `json:"tiers,omitempty"`
	Store       *tier.StoreStats `json:"store,omitempty"`
	Peers       *tier.PeerStats  `json:"peers,omitempty"`
	Purged      *int             `json:"store_purged_units,omitempty"` // by the flush that is answered
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

// flushTime bounds a flush; the router waits longer. Units that a shared store still has then
// are left to the next flush; an SSD deletes the rest when it answers.
const flushTime = 1500 * time.Millisecond

func (w *Worker) serveCache(ctx *fasthttp.RequestCtx) { w.writeCache(ctx, nil) }

func (w *Worker) writeCache(ctx *fasthttp.RequestCtx, purged *int) {
	s := w.cache.Stats()
	writeJSON(ctx, 200, mustJSON(cacheInfo{BlockTokens: w.cache.BlockTokens(), UnitTokens: w.cache.UnitTokens(), Tiers: w.tiers.Report(), Store: w.tiers.StoreStats(), Peers: w.peers.Stats(), Purged: purged,
		Pool: poolInfo{s.Blocks, s.Free, s.Held, s.Cached, s.Quarantined, s.Evicted, s.HitTokens, s.AskTokens}}))
}

// serveFlush forgets every prefix that no running request holds, in the pool and in this
// worker's own tiers. With ?store=true it also empties the shared store, for all workers,
// of this model, numerics and layout.
func (w *Worker) serveFlush(ctx *fasthttp.RequestCtx) {
	within, cancel := context.WithTimeout(context.Background(), flushTime)
	defer cancel()
	w.cache.Clear()
	flushed := make(chan error, 1)
	go func() { flushed <- w.tiers.Flush(within) }() // an SSD that hangs leaves the store its time
	var purged *int
	var err error
	if string(ctx.QueryArgs().Peek("store")) == "true" {
		var n int
		n, err = w.tiers.Purge(within)
		purged = &n
	}
	switch own := <-flushed; {
	case errors.Is(own, tier.ErrHung):
		fail := openai.Deadline("forgotten, but %v", own)
		fail.Code = "ssd_hung"
		writeError(ctx, fail)
	case errors.Is(own, tier.ErrClosed):
		writeFailure(ctx, closing())
	case own != nil:
		writeError(ctx, openai.Internal("flush the SSD tier: %v", own))
	case errors.Is(err, tier.ErrNoStore):
		writeError(ctx, openai.BadRequest("store", "%v", err))
	case err != nil:
		writeError(ctx, openai.Upstream("%d units purged, there may be more: %v", *purged, err))
	default:
		w.writeCache(ctx, purged)
	}
}
