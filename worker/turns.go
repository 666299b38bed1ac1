package worker

import (
	"net"
	"strconv"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// A proxy of several turns (vLLM's disagg_proxy_multiturn.py) keeps the kv_transfer_params of decode's
// answer, and shows them to the prefill of the conversation's next turn, which fetches from decode what
// it lacks of the prompt. Nothing is held for it: the KV stays in decode's prefix cache and the tiers
// below for as long as others do not need the room, and what is gone by then is computed. Nor is
// anything believed: what the next prompt has in common with what is cached, the chain of their tokens
// says.

// tellsTurn reports whether the proxy wants to know where the answer's KV is.
func (w *Worker) tellsTurn(j *job, p *transferParams) bool {
	return w.peers != nil && p != nil && p.DoRemotePrefill && p.TransferID == "" && len(j.items) == 1 && j.N == 1
}

// turnParams is the kv_transfer_params of an answer that has ended.
func (w *Worker) turnParams(c *choice) []byte {
	computed := len(c.item.tokens) + max(c.tokens-1, 0) // no KV is computed of the last token
	p := w.transferParams(c.j.requestID, []int32{}, computed)
	p.DoRemoteDecode, p.RemoteURL = true, w.url
	return mustJSON(p)
}

// lastTurn is the worker that answered the conversation's last turn, as a proxy shows it to prefill; nil
// if it does not, or not in a way that makes sense, which fails no request.
func (w *Worker) lastTurn(p *transferParams) []ticket.Peer {
	if w.peers == nil || p.RemoteHost == nil || p.RemotePort == nil || p.RemoteEngineID == nil || p.RemoteNumTokens < 1 {
		return nil
	}
	id, ok := parseEngineID(*p.RemoteEngineID)
	peer := ticket.Peer{ID: id.ID, Epoch: id.Epoch, URL: p.RemoteURL, KV: net.JoinHostPort(*p.RemoteHost, strconv.Itoa(*p.RemotePort)), Tokens: p.RemoteNumTokens}
	if err := peer.Validate(); !ok || err != nil {
		w.log.Debug("field left out", "field", fieldTransfer, "engine", openai.Clip(*p.RemoteEngineID), "error", err)
		return nil
	}
	return []ticket.Peer{peer}
}
