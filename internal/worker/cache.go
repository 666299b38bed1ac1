package worker

import (
	"encoding/json"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/tier"
)

// cacheInfo says what KV is kept, nearest first.
type cacheInfo struct {
	BlockTokens int          `json:"block_tokens"`
	UnitTokens  int          `json:"unit_tokens"`
	Pool        poolInfo     `json:"pool"`
	Tiers       []tier.Stats `json:"tiers,omitempty"`
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

func (w *Worker) serveCache(ctx *fasthttp.RequestCtx) {
	s := w.cache.Stats()
	b, err := json.Marshal(cacheInfo{BlockTokens: w.cache.BlockTokens(), UnitTokens: w.cache.UnitTokens(), Tiers: w.tiers.Stats(),
		Pool: poolInfo{s.Blocks, s.Free, s.Held, s.Cached, s.Quarantined, s.Evicted, s.HitTokens, s.AskTokens}})
	if err != nil {
		writeError(ctx, openai.Internal("%v", err))
		return
	}
	writeJSON(ctx, 200, b)
}

// serveFlush forgets every prefix that no running request holds, in the pool
// and in every tier.
func (w *Worker) serveFlush(ctx *fasthttp.RequestCtx) {
	w.cache.Clear()
	if err := w.tiers.Flush(); err != nil {
		writeError(ctx, openai.Internal("flush the SSD tier: %v", err))
		return
	}
	w.serveCache(ctx)
}
