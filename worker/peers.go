package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// openPeers makes the tier that fetches from other workers, through decode.
func (w *Worker) openPeers() error {
	if w.cfg.KV.Peers == "off" {
		return nil
	}
	k := w.cfg.KV
	most := max(w.backend.Blocks()*3/4, 1)
	cfg := tier.PeersConfig{LoadTimeout: k.LoadTimeout, MinLoadTokens: k.MinLoadTokens, FetchBlocks: most, FetchQuota: int64(k.LoadQuota),
		GiveBlocks: most, GiveQuota: int64(k.PeerQuota), BlockBytes: int64(w.backend.Layout().BlockBytes())}
	var err error
	w.peers, err = tier.NewPeers(cfg, w.cache, w.tiers, collector{w}, w.log, w.registry)
	return err
}

func (w *Worker) self() ticket.Peer {
	return ticket.Peer{ID: w.identity.ID, Epoch: w.identity.Epoch, KV: w.kvAddr}
}

// bringPrefix loads what host memory, SSD, peers and the shared store have of a prompt into the
// pool before it is computed. What is in host memory the engine may load itself, from the returned
// source.
func (w *Worker) bringPrefix(ctx context.Context, p prefill.Wanted) engine.Source {
	ctx, cancel := context.WithTimeout(ctx, w.cfg.KV.LoadTimeout) // for all of them together
	defer cancel()
	var s source
	if w.peers != nil && len(p.Peers) > 0 {
		s.ahead = w.askPeers(ctx, p)
	}
	if w.tiers != nil && s.ahead == nil { // they have nothing that comes from the peer
		w.tiers.Stage(ctx, p.Tokens, p.Salt, len(p.Tokens)-1) // the last one is computed, for its logits
		s.tiers = w.tiers
	}
	if s == (source{}) {
		return nil
	}
	return s
}

// askPeers fetches what peers have of a prompt, or returns what one will bring once the request has
// its blocks.
func (w *Worker) askPeers(ctx context.Context, p prefill.Wanted) *tier.Ahead {
	list := w.resolvePeers(p.Peers)
	if len(list) == 0 {
		return nil
	}
	upto := len(p.Tokens) - 1 // the last one is computed, for its logits
	if w.cfg.KV.PeerBring == "on" {
		return w.peers.Stage(ctx, p.RequestID, p.Tokens, p.Salt, upto, list)
	}
	w.peers.Load(ctx, p.RequestID, p.Tokens, p.Salt, upto, list)
	return nil
}

func (w *Worker) resolvePeers(named []ticket.Peer) []tier.Peer {
	list := make([]tier.Peer, 0, len(named))
	for i := range named {
		if known, ok := w.resolvePeer(&named[i]); ok {
			list = append(list, known)
		}
	}
	return list
}

// resolvePeer finds a peer that a request names: at the address that the fleet knows, or without a
// fleet at one that allowPeer allows.
func (w *Worker) resolvePeer(p *ticket.Peer) (tier.Peer, bool) {
	out := tier.Peer(*p)
	if p.ID == w.identity.ID || w.revoked(p.ID) {
		return out, false
	}
	if w.fleet != nil && w.fleet.watcher != nil {
		m := w.fleet.member(p.ID)
		if m == nil || m.Epoch != p.Epoch || !m.Serves() {
			return out, false
		}
		if out.KV = m.KVAddr; out.URL != "" {
			out.URL = m.URL
		}
		return out, out.KV != ""
	}
	if w.allowPeer(p.KV) != nil {
		return out, false
	}
	if p.URL != "" {
		u, err := url.Parse(p.URL)
		if err != nil || u.Scheme != w.scheme() || w.allowPeer(u.Host) != nil {
			return out, false
		}
	}
	return out, true
}

// peerHint reads ticket.HeaderPeer; nil if it is absent or malformed, which fails no request.
func (w *Worker) peerHint(h *fasthttp.RequestHeader) []ticket.Peer {
	v := h.Peek(ticket.HeaderPeer)
	if len(v) == 0 || w.peers == nil {
		return nil
	}
	p, err := ticket.ParsePeer(string(v))
	if err != nil {
		w.log.Debug("header left out", "header", ticket.HeaderPeer, "error", err)
		return nil
	}
	return []ticket.Peer{*p}
}

// collector implements tier.Collector and tier.Bringer with decode's service.
type collector struct{ w *Worker }

// Collect implements tier.Collector.
func (c collector) Collect(ctx context.Context, f *tier.Fetch) (int, error) {
	n, err := c.w.decode.Collect(ctx, c.prefix(f))
	return n, tierError(f, err)
}

// Prepare implements tier.Bringer.
func (c collector) Prepare(ctx context.Context, f *tier.Fetch) (tier.Bring, error) {
	way, err := c.w.decode.Prepare(ctx, c.prefix(f))
	if way == nil {
		return nil, tierError(f, err)
	}
	return func(f *tier.Fetch, table []int32, from int, wake func(), ended func(int, error)) tier.Coming {
		coming := way.Bring(c.prefix(f), table, from, wake, func(n int, err error) { ended(n, tierError(f, err)) })
		if coming == nil {
			return nil
		}
		return coming
	}, nil
}

func (c collector) prefix(f *tier.Fetch) *decode.Prefix {
	p := &decode.Prefix{Addr: f.Peer.KV, Peer: kvconn.PeerID{ID: f.Peer.ID, Epoch: f.Peer.Epoch}, RequestID: f.RequestID, Owner: f.Owner,
		Tokens: f.Tokens, Salt: f.Salt, Chain: f.Chain, Upto: f.Upto, Least: f.Least, Most: f.Blocks, Deadline: f.Deadline}
	if f.Peer.URL != "" {
		p.Reach = func(ctx context.Context, chain *kvcache.Chain, unit, from, upto int) (int, error) {
			return c.w.askReach(ctx, &f.Peer, chain, unit, from, upto)
		}
	}
	return p
}

// tierError maps decode's errors to the tier's. A peer that refuses because it does not have a
// prefix has not failed, unless it just said that it has it (Fetch.Peer.URL).
func tierError(f *tier.Fetch, err error) error {
	var e *decode.Error
	switch {
	case err == nil || !errors.As(err, &e):
	case e.Outcome == ticket.Cancelled: // the request is over, whatever the reason
		err = fmt.Errorf("%w: %w", context.Canceled, err)
	case e.Outcome == ticket.Corrupt:
		err = fmt.Errorf("%w: %w", tier.ErrCorrupt, err)
	case e.Outcome == ticket.NoSpace:
		err = fmt.Errorf("%w: %w", tier.ErrBusy, err)
	case e.Outcome == ticket.Refused && f.Peer.URL == "":
		err = fmt.Errorf("%w: %w", tier.ErrAbsent, err)
	}
	return err
}

// askReach asks a peer how far beyond token from it has a chain. Whoever listens at the URL, the
// bearer token sent along is good for that run of that worker alone.
func (w *Worker) askReach(ctx context.Context, p *tier.Peer, chain *kvcache.Chain, unit, from, upto int) (int, error) {
	var units []kvcache.Hash
	for at := from + unit; at <= upto && len(units) < tier.ReachUnits; at += unit {
		units = append(units, chain.Name(at))
	}
	if len(units) == 0 {
		return from, nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL+"/xpyd/v1/cache/reach", bytes.NewReader(tier.AppendReach(nil, units)))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	secrets := "" // ids of those that the peer has
	if m := w.fleet.member(p.ID); m != nil {
		secrets = m.Secrets
	}
	if token := w.tokens.HTTP(p.ID, p.Epoch, secrets); token != "" {
		req.Header.Set(trust.Header, token)
	}
	resp, err := w.client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if err != nil {
		return 0, err
	}
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("reach: status %d", resp.StatusCode)
	}
	n, err := tier.ParseReached(b, len(units))
	return from + n*unit, err
}

func (w *Worker) serveReach(ctx *fasthttp.RequestCtx) (any, error) {
	units, err := tier.ParseReach(ctx.PostBody())
	if err != nil {
		return nil, openai.BadRequest("units", "%v", err)
	}
	n := 0
	if w.peers != nil {
		n = w.peers.Reach(units)
	}
	return tier.AppendReached(nil, n), nil
}

// givePrefix lends the cached blocks of a prefix that a ticket asks for.
func (w *Worker) givePrefix(ctx context.Context, a prefill.Asked) ([]int32, func(), error) {
	if w.peers == nil {
		return nil, nil, prefill.ErrNotCached
	}
	blocks, release, err := w.peers.Give(ctx, &tier.Asked{Peer: a.Peer.ID, Trusted: kvevents.OpenSalt(a.Salt) || a.Private && w.isMember(a.Peer),
		Tokens: a.Tokens, Salt: a.Salt, Bytes: a.Bytes})
	switch {
	case errors.Is(err, tier.ErrEnough):
		err = prefill.ErrGivesEnough
	case err != nil:
		err = prefill.ErrNotCached
	}
	return blocks, release, err
}

// isMember reports whether this run of a worker is in the fleet.
func (w *Worker) isMember(p kvconn.PeerID) bool {
	m := w.fleet.member(p.ID)
	return m != nil && m.Epoch == p.Epoch && (m.Serves() || m.State == fleet.Suspect)
}
