package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

const fieldTransfer = "kv_transfer_params"

// transferParams is what we read of vLLM's kv_transfer_params; the rest is opaque, as it is
// to a proxy.
type transferParams struct {
	DoRemoteDecode      bool    `json:"do_remote_decode"`
	DoRemotePrefill     bool    `json:"do_remote_prefill"`
	RemoteEngineID      *string `json:"remote_engine_id"`
	RemoteHost          *string `json:"remote_host"`
	RemotePort          *int    `json:"remote_port"`
	RemoteRequestID     *string `json:"remote_request_id"`
	TransferID          string  `json:"transfer_id"`
	RemoteBootstrapAddr string  `json:"remote_bootstrap_addr"`
}

// parseTransfer reads kv_transfer_params; nil when the request has none.
func parseTransfer(raw json.RawMessage) (*transferParams, *openai.Error) {
	if raw == nil {
		return nil, nil
	}
	var p transferParams
	if err := json.Unmarshal(raw, &p); err != nil {
		return nil, openai.BadRequest(fieldTransfer, "%v", err)
	}
	switch {
	case p.DoRemoteDecode && p.DoRemotePrefill:
		return nil, openai.BadRequest(fieldTransfer, "do_remote_decode and do_remote_prefill exclude each other")
	case len(p.TransferID) > maxTransferID:
		return nil, openai.BadRequest(fieldTransfer, "transfer_id is over %d bytes", maxTransferID)
	}
	return &p, nil
}

const maxTransferID = 256 // bytes

// keptParams is the kv_transfer_params of prefill's answer, as vLLM's NIXL connector has
// them: how decode collects the prompt.
type keptParams struct {
	DoRemotePrefill  bool      `json:"do_remote_prefill"`
	DoRemoteDecode   bool      `json:"do_remote_decode"`
	RemoteBlockIDs   [][]int32 `json:"remote_block_ids"` // of each KV group
	RemoteEngineID   string    `json:"remote_engine_id"`
	RemoteRequestID  string    `json:"remote_request_id"`
	RemoteHost       string    `json:"remote_host"`
	RemotePort       int       `json:"remote_port"`
	TPSize           int       `json:"tp_size"`
	RemoteNumTokens  int       `json:"remote_num_tokens"`
	BlocksExpiryTime *float64  `json:"remote_blocks_expiry_time"` // null from prefill
	TransferMode     string    `json:"transfer_mode"`
}

func (w *Worker) keptParams(k *prefill.Kept) *keptParams {
	host, portText, _ := net.SplitHostPort(w.kvAddr) // made by advertised, always well formed
	port, _ := strconv.Atoi(portText)
	return &keptParams{DoRemotePrefill: true, RemoteBlockIDs: [][]int32{k.Blocks}, RemoteEngineID: engineID(w.identity.PeerID),
		RemoteRequestID: k.ID, RemoteHost: host, RemotePort: port, TPSize: 1, RemoteNumTokens: k.Info.Tokens, TransferMode: "pull"}
}

// serveKeep is prefill's side behind a foreign proxy: it runs the prompt, keeps its blocks
// under a lease, and answers how decode collects them. With a transfer id decode knows that
// already, and may be waiting.
func (w *Worker) serveKeep(ctx *fasthttp.RequestCtx, c context.Context, j *job, p *transferParams, enc *openai.Encoder, id string, seed uint64) {
	if j.Stream {
		writeError(ctx, openai.BadRequest("stream", "do_remote_decode answers once, without a stream"))
		return
	}
	lease := ""
	if p.TransferID != "" {
		lease = prefill.EarlyClaim + p.TransferID
	}
	kept, err := w.prefill.Keep(c, w.request(j, 0, id, seed), lease)
	if err != nil {
		writeFailure(ctx, keepFailure(err))
		return
	}
	j.items[0].info = &kept.Info
	choices := make([]openai.Choice, len(kept.First))
	for i := range kept.First {
		c := newChoice(w, j, &j.items[0], i)
		c.addToken(&kept.First[i])
		choices[i] = c.takeChunk()
	}
	body := enc.AppendFull(nil, choices, openai.Usage{Prompt: kept.Info.Tokens, Completion: len(choices), Cached: kept.Info.CachedTokens})
	if lease == "" {
		body = append(body[:len(body)-1], `,"kv_transfer_params":`...)
		body = append(append(body, mustJSON(w.keptParams(kept))...), '}')
	}
	writeJSON(ctx, 200, body)
}

// foreignOrigin is decode's side behind a foreign proxy: the lease that prefill's answer
// named (prefill, then decode), or Mooncake's transfer id (both at once).
func (w *Worker) foreignOrigin(ctx context.Context, p *transferParams) (*origin, *failure) {
	if p.TransferID != "" && p.RemoteBootstrapAddr != "" {
		return w.mooncakeOrigin(ctx, p)
	}
	if p.RemoteHost == nil || p.RemotePort == nil || p.RemoteRequestID == nil || *p.RemoteRequestID == "" {
		return nil, badRequest(fieldTransfer, "do_remote_prefill needs remote_host, remote_port and remote_request_id")
	}
	if *p.RemotePort < 1 || *p.RemotePort > 65535 {
		return nil, badRequest(fieldTransfer, "remote_port is %d, want 1 to 65535", *p.RemotePort)
	}
	if strings.HasPrefix(*p.RemoteRequestID, prefill.EarlyClaim) {
		return nil, badRequest(fieldTransfer, "remote_request_id is none of ours")
	}
	from := &origin{link: ticket.NewLink(), leaseID: *p.RemoteRequestID,
		addr: net.JoinHostPort(*p.RemoteHost, strconv.Itoa(*p.RemotePort))}
	if p.RemoteEngineID != nil {
		peer, ok := parseEngineID(*p.RemoteEngineID)
		if !ok {
			return nil, badRequest(fieldTransfer, "remote_engine_id %q is none of ours", *p.RemoteEngineID)
		}
		from.peer = peer
	}
	return w.checkOrigin(from)
}

// checkOrigin refuses an origin that a proxy's client has no business naming.
func (w *Worker) checkOrigin(from *origin) (*origin, *failure) {
	if f := w.refuseRevoked(from.peer.ID); f != nil {
		return nil, f
	}
	if err := w.allowPeer(fieldTransfer, from.addr); err != nil {
		return nil, &failure{Error: err}
	}
	return from, nil
}

// engineID is a worker's name in vLLM's dialect, new with each epoch.
func engineID(p kvconn.PeerID) string { return fmt.Sprintf("%s@%d", p.ID, p.Epoch) }

func parseEngineID(s string) (kvconn.PeerID, bool) {
	at := strings.LastIndexByte(s, '@')
	if at < 1 {
		return kvconn.PeerID{}, false
	}
	epoch, err := strconv.ParseUint(s[at+1:], 10, 64)
	return kvconn.PeerID{ID: s[:at], Epoch: epoch}, err == nil
}
