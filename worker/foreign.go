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

// transferParams is the part of vLLM's kv_transfer_params that we read.
type transferParams struct {
	DoRemoteDecode      bool    `json:"do_remote_decode"`
	DoRemotePrefill     bool    `json:"do_remote_prefill"`
	RemoteEngineID      *string `json:"remote_engine_id"`
	RemoteHost          *string `json:"remote_host"`
	RemotePort          *int    `json:"remote_port"`
	RemoteRequestID     *string `json:"remote_request_id"`
	TransferID          string  `json:"transfer_id"`
	RemoteBootstrapAddr string  `json:"remote_bootstrap_addr"`
	RemoteNumTokens     int     `json:"remote_num_tokens"`
	RemoteURL           string  `json:"remote_url"`
}

const maxTransferID = 256 // bytes

func parseTransfer(raw json.RawMessage) (*transferParams, error) {
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

// reusedPrompt is a chat's prompt as prefill tokenised it, which a proxy may pass on to decode; nil if it
// does not. An echo needs the messages themselves.
func reusedPrompt(c *openai.Chat) ([]int32, error) {
	if c.KVTransferParams == nil {
		return nil, nil
	}
	var p struct {
		IDs *[]int32 `json:"prompt_token_ids"`
	}
	err := json.Unmarshal(c.KVTransferParams, &p)
	switch {
	case err != nil:
		return nil, openai.BadRequest(fieldTransfer, "%v", err)
	case p.IDs == nil || c.Echo:
		return nil, nil
	case len(*p.IDs) == 0:
		return nil, openai.BadRequest(fieldTransfer, "kv_transfer_params.prompt_token_ids must not be empty")
	}
	return *p.IDs, nil
}

// keptParams is the kv_transfer_params of an answer, in the form of vLLM's NIXL connector: of prefill's,
// how decode collects the prompt; of decode's, how the prefill of the conversation's next turn does what
// it has of that.
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
	RemoteURL        string    `json:"remote_url,omitempty"` // ours: where to ask how far it reaches
}

func (w *Worker) keptParams(k *prefill.Kept) *keptParams {
	p := w.transferParams(k.ID, k.Blocks, k.Info.Tokens)
	p.DoRemotePrefill = true
	return p
}

func (w *Worker) transferParams(id string, blocks []int32, tokens int) *keptParams {
	host, portText, _ := net.SplitHostPort(w.kvAddr) // well formed: made by advertised
	port, _ := strconv.Atoi(portText)
	return &keptParams{RemoteBlockIDs: [][]int32{blocks}, RemoteEngineID: engineID(w.identity.PeerID),
		RemoteRequestID: id, RemoteHost: host, RemotePort: port, TPSize: 1, RemoteNumTokens: tokens, TransferMode: "pull"}
}

// serveKeep is prefill's side behind a foreign proxy: it runs the prompt, keeps its blocks under a
// lease, and answers how decode collects them. With a transfer id decode knows that already, and
// may be waiting.
func (w *Worker) serveKeep(c context.Context, j *job, p *transferParams, enc *openai.Encoder, id string, seed uint64) (any, error) {
	if j.Stream {
		return nil, openai.BadRequest("stream", "do_remote_decode answers once, without a stream")
	}
	lease := ""
	if p.TransferID != "" {
		lease = prefill.EarlyClaim + p.TransferID
	}
	kept, err := w.prefill.Keep(c, w.request(j, 0, id, seed), lease, w.lastTurn(p)...)
	if err != nil {
		return nil, keepFailure(err)
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
		body = openai.With(body, [2]string{fieldTransfer, string(mustJSON(w.keptParams(kept)))})
	}
	return body, nil
}

type renewed struct {
	ExpiresMS   int64 `json:"expires_ms"`   // from now, unless renewed again
	RenewableMS int64 `json:"renewable_ms"` // from now, however often it is renewed
}

// serveRenew extends the lease of a prompt that a foreign proxy's decode has not collected yet. The
// proxy sends the kv_transfer_params of prefill's answer, or the transfer_id that it chose. vLLM's
// own connectors renew from decode, by messages of their transports, which we do not speak.
func (w *Worker) serveRenew(ctx *fasthttp.RequestCtx) (any, error) {
	var p transferParams
	if err := json.Unmarshal(ctx.PostBody(), &p); err != nil {
		return nil, openai.BadRequest("", "%v", err)
	}
	id := prefill.EarlyClaim + p.TransferID
	switch {
	case (p.RemoteRequestID != nil) == (p.TransferID != ""):
		return nil, openai.BadRequest("remote_request_id", "want remote_request_id or transfer_id, one of them")
	case len(p.TransferID) > maxTransferID:
		return nil, openai.BadRequest("transfer_id", "transfer_id is over %d bytes", maxTransferID)
	case p.TransferID != "":
	case prefill.Early(*p.RemoteRequestID):
		return nil, openai.BadRequest("remote_request_id", "remote_request_id is none of ours")
	default:
		id = *p.RemoteRequestID
	}
	left, most, err := w.prefill.Renew(id)
	if err != nil {
		e := openai.NotFound("%v", err)
		e.Code = "no_lease"
		return nil, e
	}
	return &renewed{left.Milliseconds(), most.Milliseconds()}, nil
}

// foreignOrigin is decode's side behind a foreign proxy. It claims the lease that prefill's answer
// named (prefill, then decode), or Mooncake's transfer id (both at once).
func (w *Worker) foreignOrigin(ctx context.Context, p *transferParams) (*origin, error) {
	if p.TransferID != "" && p.RemoteBootstrapAddr != "" {
		return w.mooncakeOrigin(ctx, p)
	}
	if p.RemoteHost == nil || p.RemotePort == nil || p.RemoteRequestID == nil || *p.RemoteRequestID == "" {
		return nil, openai.BadRequest(fieldTransfer, "do_remote_prefill needs remote_host, remote_port and remote_request_id")
	}
	if *p.RemotePort < 1 || *p.RemotePort > 65535 {
		return nil, openai.BadRequest(fieldTransfer, "remote_port is %d, want 1 to 65535", *p.RemotePort)
	}
	if prefill.Early(*p.RemoteRequestID) {
		return nil, openai.BadRequest(fieldTransfer, "remote_request_id is none of ours")
	}
	from := &origin{link: ticket.NewLink(), leaseID: *p.RemoteRequestID,
		addr: net.JoinHostPort(*p.RemoteHost, strconv.Itoa(*p.RemotePort))}
	if p.RemoteEngineID != nil {
		var ok bool
		if from.peer, ok = parseEngineID(*p.RemoteEngineID); !ok {
			return nil, openai.BadRequest(fieldTransfer, "remote_engine_id %q is none of ours", *p.RemoteEngineID)
		}
	}
	return from, w.checkOrigin(from)
}

// checkOrigin refuses an origin that a proxy's client has no business naming.
func (w *Worker) checkOrigin(from *origin) error {
	if err := w.refuseRevoked(from.peer.ID); err != nil {
		return err
	}
	if err := w.allowPeer(from.addr); err != nil {
		return openai.BadRequest(fieldTransfer, "%v", err)
	}
	return nil
}

// engineID is a worker's name in vLLM's dialect; it changes with each epoch.
func engineID(p kvconn.PeerID) string { return fmt.Sprintf("%s@%d", p.ID, p.Epoch) }

func parseEngineID(s string) (kvconn.PeerID, bool) {
	at := strings.LastIndexByte(s, '@')
	if at < 1 {
		return kvconn.PeerID{}, false
	}
	epoch, err := strconv.ParseUint(s[at+1:], 10, 64)
	return kvconn.PeerID{ID: s[:at], Epoch: epoch}, err == nil
}
