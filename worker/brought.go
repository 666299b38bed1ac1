package worker

import (
	"context"
	"errors"
	"slices"
	"strconv"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// A stream that moves need not be computed again: the worker where it runs knows its KV, unit by
// unit, by prompt and answer. The router has the next worker bring that ahead, while the client is
// served from the old one, and then go on alone (ticket.HeaderBrought).

var errUnbrought = errors.New("the prompt's KV was brought here, and is gone")

// brought answers POST /xpyd/v1/bring.
type brought struct {
	Prompt bool `json:"prompt"` // all of it is here, but for a last part of a unit
	Tokens int  `json:"tokens"` // whose KV has come
}

// serveBring brings what a peer has of a stream: of its prompt, and of what each choice was given.
func (w *Worker) serveBring(ctx *fasthttp.RequestCtx) (any, error) {
	h := &ctx.Request.Header
	j, err := w.takeJob(ctx, kindOf(string(ctx.QueryArgs().Peek("chat")) == "true"))
	switch {
	case err != nil:
		return nil, err
	case j.given == nil:
		return nil, openai.BadRequest(ticket.HeaderGiven, "%s is required", ticket.HeaderGiven)
	case len(j.items) != 1:
		return nil, openai.BadRequest(j.source(), "one prompt at a time, not %d", len(j.items))
	}
	if err := j.checkGiven(); err != nil {
		return nil, err
	}
	ms, err := strconv.ParseInt(string(h.Peek(ticket.HeaderDeadline)), 10, 64)
	if err != nil || ms <= 0 {
		return nil, openai.BadRequest(ticket.HeaderDeadline, "%q is not a positive number of milliseconds", h.Peek(ticket.HeaderDeadline))
	}
	j.requestID = requestID(h)
	c, err := w.begin(ctx, w.requests, "bring", j.requestID)
	if err != nil {
		return nil, err
	}
	defer c.leave()
	within, cancel := context.WithTimeout(c, milliseconds(ms))
	defer cancel()
	return w.bringStream(within, j, w.resolvePeers(w.peerHint(h))), nil
}

func (w *Worker) bringStream(ctx context.Context, j *job, peers []tier.Peer) (b brought) {
	if w.peers == nil {
		return b
	}
	prompt := j.items[0].tokens
	for _, c := range j.given.Choices {
		if whole := slices.Concat(prompt, c.IDs); !c.Done { // its last token has no rows yet
			b.Tokens += w.peers.Follow(ctx, j.requestID, whole[:len(whole)-1], j.CacheSalt, peers)
		}
	}
	if b.Prompt = w.hasPrompt(prompt, j.CacheSalt); b.Prompt {
		w.engine.Expect(ctx)
	}
	return b
}

// hasPrompt reports whether all whole units of a prompt are here.
func (w *Worker) hasPrompt(tokens []int32, salt string) bool {
	chain, unit := w.cache.NewChain(salt), w.cache.UnitTokens()
	chain.Extend(tokens)
	var units []kvcache.Hash
	for at := unit; at <= len(tokens); at += unit {
		units = append(units, chain.Name(at))
	}
	return w.peers.Reach(units) == len(units)
}
