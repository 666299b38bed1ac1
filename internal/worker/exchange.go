package worker

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/internal/engine"
	"github.com/xpyd/xpyd/internal/handoff"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// Headers by which our router links the two legs (ARCHITECTURE.md).
const (
	headerLink         = "x-xpyd-link"
	headerPrefill      = "x-xpyd-prefill"
	headerPrefillEpoch = "x-xpyd-prefill-epoch"
	headerPrefillKV    = "x-xpyd-prefill-kv"
	headerSeed         = "x-xpyd-seed"
	headerDeadline     = "x-xpyd-deadline-ms"
	headerRequestID    = "x-request-id"
	headerOutcome      = "x-xpyd-outcome"
)

// exchange is decode's side of a pair: where the prompt's KV comes from.
type exchange struct {
	addr      string
	peer      kvconn.PeerID
	link      ticket.Link
	leaseID   string
	requestID string
	deadline  time.Time
}

// claim is the ticket for prompt i of n.
func (ex *exchange) claim(r *engine.Request, i, n int) *decode.Claim {
	return &decode.Claim{
		Addr: ex.addr, Peer: ex.peer, Link: ex.link, LeaseID: ex.leaseID, RequestID: ex.requestID,
		Owner: r.Owner, Tokens: r.Prompt, Deadline: ex.deadline,
		Order: handoff.Order{Sampling: r.Sampling, N: max(r.N, 1), MinTokens: r.MinTokens, StopTokens: r.StopTokens,
			IgnoreEOS: r.IgnoreEOS, Logprobs: r.Logprobs, PromptLogprobs: r.PromptLogprobs, Salt: r.Salt, Index: i, Of: n},
	}
}

// nativeExchange reads our router's headers; nil when there are none.
func (w *Worker) nativeExchange(h *fasthttp.RequestHeader) (*exchange, *openai.Error) {
	raw := string(h.Peek(headerLink))
	if raw == "" {
		return nil, nil
	}
	link, err := ticket.ParseLink(raw)
	if err != nil {
		return nil, openai.BadRequest(headerLink, "%v", err)
	}
	ex := &exchange{link: link, addr: string(h.Peek(headerPrefillKV)),
		peer: kvconn.PeerID{ID: string(h.Peek(headerPrefill))}}
	if ex.peer.Epoch, err = strconv.ParseUint(string(h.Peek(headerPrefillEpoch)), 10, 64); err != nil {
		return nil, openai.BadRequest(headerPrefillEpoch, "%v", err)
	}
	if ms := string(h.Peek(headerDeadline)); ms != "" {
		n, err := strconv.ParseInt(ms, 10, 64)
		if err != nil || n <= 0 {
			return nil, openai.BadRequest(headerDeadline, "%q is not a positive number of milliseconds", ms)
		}
		ex.deadline = time.Now().Add(time.Duration(min(n, int64(24*time.Hour/time.Millisecond))) * time.Millisecond)
	}
	return ex, w.allowPeer(headerPrefillKV, ex.addr)
}

// allowPeer refuses addresses that a request has no business naming: only the
// fleet's own prefill workers, this machine, and the configured hosts.
func (w *Worker) allowPeer(param, addr string) *openai.Error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return openai.BadRequest(param, "%q is not host:port", addr)
	}
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() ||
		slices.Contains(w.cfg.AllowHosts, host) || w.fleet.knows(addr) {
		return nil
	}
	return openai.BadRequest(param, "%s is no worker of this fleet and not in allow_hosts", addr)
}

// transferParams is vLLM's kv_transfer_params as foreign proxies send it.
type transferParams struct {
	DoRemoteDecode      bool      `json:"do_remote_decode"`
	DoRemotePrefill     bool      `json:"do_remote_prefill"`
	RemoteEngineID      *string   `json:"remote_engine_id"`
	RemoteBlockIDs      [][]int32 `json:"remote_block_ids"`
	RemoteHost          *string   `json:"remote_host"`
	RemotePort          *int      `json:"remote_port"`
	RemoteRequestID     string    `json:"remote_request_id,omitempty"`
	TPSize              int       `json:"tp_size,omitempty"`
	RemoteNumTokens     int       `json:"remote_num_tokens,omitempty"`
	TransferMode        string    `json:"transfer_mode,omitempty"`
	TransferID          string    `json:"transfer_id,omitempty"`
	RemoteBootstrapAddr string    `json:"remote_bootstrap_addr,omitempty"`
}

// parseTransfer reads kv_transfer_params; nil when the request has none.
func parseTransfer(raw json.RawMessage) (*transferParams, *openai.Error) {
	if raw == nil {
		return nil, nil
	}
	var p transferParams
	if err := json.Unmarshal(raw, &p); err != nil {
		return nil, openai.BadRequest("kv_transfer_params", "%v", err)
	}
	if p.DoRemoteDecode && p.DoRemotePrefill {
		return nil, openai.BadRequest("kv_transfer_params", "do_remote_decode and do_remote_prefill exclude each other")
	}
	return &p, nil
}

// foreignExchange is decode's side behind a foreign proxy: the lease that
// prefill's answer named (prefill, then decode), or Mooncake's transfer id
// (both at once), for which prefill's GET /query says where to dial.
func (w *Worker) foreignExchange(p *transferParams) (*exchange, *openai.Error) {
	const field = "kv_transfer_params"
	if p.TransferID != "" && p.RemoteBootstrapAddr != "" {
		return w.mooncakeExchange(p)
	}
	if p.RemoteHost == nil || p.RemotePort == nil || p.RemoteRequestID == "" {
		return nil, openai.BadRequest(field, "do_remote_prefill needs remote_host, remote_port and remote_request_id")
	}
	ex := &exchange{link: ticket.NewLink(), leaseID: p.RemoteRequestID,
		addr: net.JoinHostPort(*p.RemoteHost, strconv.Itoa(*p.RemotePort))}
	if p.RemoteEngineID != nil {
		peer, ok := parseEngineID(*p.RemoteEngineID)
		if !ok {
			return nil, openai.BadRequest(field, "remote_engine_id %q is none of ours", *p.RemoteEngineID)
		}
		ex.peer = peer
	}
	return ex, w.allowPeer(field, ex.addr)
}

// engineID is what we call ourselves in vLLM's dialect: new with each epoch.
func engineID(p kvconn.PeerID) string { return fmt.Sprintf("%s@%d", p.ID, p.Epoch) }

func parseEngineID(s string) (kvconn.PeerID, bool) {
	for i := len(s) - 1; i > 0; i-- {
		if s[i] == '@' {
			epoch, err := strconv.ParseUint(s[i+1:], 10, 64)
			return kvconn.PeerID{ID: s[:i], Epoch: epoch}, err == nil
		}
	}
	return kvconn.PeerID{}, false
}

// keptParams tells the proxy how decode collects what prefill kept.
func (w *Worker) keptParams(k *prefill.Kept) *transferParams {
	id := engineID(w.identity.PeerID)
	host, portText, _ := net.SplitHostPort(w.kvAddr) // made by advertised, always well formed
	port, _ := strconv.Atoi(portText)
	return &transferParams{DoRemotePrefill: true, RemoteEngineID: &id, RemoteBlockIDs: [][]int32{k.Blocks},
		RemoteHost: &host, RemotePort: &port, RemoteRequestID: k.ID, TPSize: 1,
		RemoteNumTokens: k.Info.Tokens, TransferMode: "push"}
}
