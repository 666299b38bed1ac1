package worker

import (
	"context"
	"errors"
	"strings"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/redis"
	"github.com/xpyd/xpyd/engine/tier/shared"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/engine/tier/store"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

func (w *Worker) openTiers(ctx context.Context) error {
	k := w.cfg.KV
	if k.HostMemory == 0 {
		return nil
	}
	numerics, pool := w.backend.Info().Numerics, w.poolBytes()
	cfg := tier.Config{Host: host.Config{Bytes: k.HostMemory.Of(pool), Eviction: host.Eviction(k.Eviction)},
		Identity: w.model.Fingerprint + " " + numerics, LoadTimeout: k.LoadTimeout, MinLoadTokens: k.MinLoadTokens,
		LoadBlocks: max(w.backend.Blocks()*3/4, 1), LoadQuota: int64(k.LoadQuota),
		Write: tier.WritePolicy(k.WritePolicy), WriteHits: k.WriteHits, TTL: k.TTL, PinShare: k.PinShare, TenantShare: k.TenantShare}
	if k.SSDDir != "" {
		cfg.Levels = append(cfg.Levels, ssd.Config{Dir: k.SSDDir, Bytes: int64(k.SSDSize), IO: ssd.IO(k.SSDIO)})
	}
	if k.Store != "" {
		st, err := w.openStore()
		if err != nil {
			return err
		}
		cfg.Levels = append(cfg.Levels, shared.Config{Store: st, Writes: k.StoreWrite})
	}
	if w.events != nil {
		cfg.Changed = w.events.tierChange
	}
	var err error
	if w.tiers, err = tier.New(ctx, cfg, w.backend, kvcache.UnitBlocks(w.cfg.BlockTokens), w.log, w.registry); err != nil {
		return settingError(err)
	}
	w.later("close the KV tiers", w.tiers.Close)
	return nil
}

// settingError names the key of a setting that this machine does not allow.
func settingError(err error) error {
	keys := map[string]string{host.SettingBytes: "kv.host_memory", ssd.SettingDir: "kv.ssd_dir", ssd.SettingBytes: "kv.ssd_size", ssd.SettingIO: "kv.ssd_io"}
	var e *level.SettingError
	if !errors.As(err, &e) {
		return err
	}
	return bad(keys[e.Setting], "%s", strings.TrimPrefix(e.Error(), "tier: "))
}

// openStore makes the client of the shared store. It does not connect yet, so a worker starts even
// if the store is down.
func (w *Worker) openStore() (store.Store, error) {
	k := w.cfg.KV
	addr, err := redis.ParseURL(k.Store)
	if err != nil {
		return nil, err
	}
	return redis.New(redis.Config{Address: addr, Timeout: k.StoreTimeout, TTL: k.StoreTTL, ReadOnly: !k.StoreWrite,
		MaxValue: shared.ValueBytes(w.backend.Layout())})
}

// source implements engine.Source with the tiers, or with a peer.
type source struct {
	tiers *tier.Tiers
	ahead *tier.Ahead
}

// Bring implements engine.Source.
func (s source) Bring(chain kvcache.Chain, tokens, table []int32, from, upto int, ended func()) (engine.Arriving, bool) {
	if s.ahead != nil {
		c, busy := s.ahead.Bring(table, from, ended)
		if c == nil {
			return nil, busy
		}
		return c, false
	}
	a, busy := s.tiers.Bring(chain, tokens, table, from, upto, ended)
	if a == nil {
		return nil, busy
	}
	return a, false
}

// submitRequest loads what the tiers and these peers have of a request's prompt, then submits it to
// the engine.
func (w *Worker) submitRequest(ctx context.Context, r *engine.Request, requestID string, peers []ticket.Peer) (*engine.Handle, error) {
	tokens := r.Resumed()
	if tokens == nil && r.Prefilled == nil && r.PromptLogprobs < 0 && r.Pooling != engine.PoolMean {
		tokens = r.Prompt
	}
	if tokens != nil {
		r.Source = w.bringPrefix(ctx, prefill.Wanted{RequestID: requestID, Tokens: tokens, Salt: r.Salt, Peers: peers})
	}
	h, err := w.engine.Submit(ctx, r)
	if errors.Is(err, engine.ErrQueueFull) {
		w.vllm.rejected.Inc()
	}
	return h, err
}

// listeners pass each change of the prefix index to all.
type listeners []kvcache.Listener

// KVEvent implements kvcache.Listener.
func (l listeners) KVEvent(ev kvcache.Event) {
	for _, one := range l {
		one.KVEvent(ev)
	}
}

// listener is the cache's listener; nil if there is none.
func (w *Worker) listener() kvcache.Listener {
	var all listeners
	if w.events != nil {
		all = append(all, w.events)
	}
	if w.tiers != nil {
		all = append(all, w.tiers)
	}
	if len(all) == 0 {
		return nil
	}
	return all
}
