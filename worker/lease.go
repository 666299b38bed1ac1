package worker

import (
	"encoding/json"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/prefill"
)

// renewed answers POST /xpyd/v1/lease.
type renewed struct {
	ExpiresMS   int64 `json:"expires_ms"`   // from now, unless renewed again
	RenewableMS int64 `json:"renewable_ms"` // from now, however often it is renewed
}

// serveRenew extends the lease of a prompt that a foreign proxy's decode has not collected
// yet. The proxy sends the kv_transfer_params of prefill's answer, or those with the
// transfer_id that it chose. vLLM's own connectors renew from decode, by messages of their
// transports, which we do not speak.
func (w *Worker) serveRenew(ctx *fasthttp.RequestCtx) {
	var p transferParams
	if err := json.Unmarshal(ctx.PostBody(), &p); err != nil {
		writeError(ctx, openai.BadRequest("", "%v", err))
		return
	}
	var id string
	switch {
	case (p.RemoteRequestID != nil) == (p.TransferID != ""):
		writeError(ctx, openai.BadRequest("remote_request_id", "want remote_request_id or transfer_id, one of them"))
		return
	case len(p.TransferID) > maxTransferID:
		writeError(ctx, openai.BadRequest("transfer_id", "transfer_id is over %d bytes", maxTransferID))
		return
	case p.TransferID != "":
		id = prefill.EarlyClaim + p.TransferID
	case strings.HasPrefix(*p.RemoteRequestID, prefill.EarlyClaim):
		writeError(ctx, openai.BadRequest("remote_request_id", "remote_request_id is none of ours"))
		return
	default:
		id = *p.RemoteRequestID
	}
	left, most, err := w.prefill.Renew(id)
	if err != nil {
		e := openai.NotFound("%v", err)
		e.Code = "no_lease"
		writeError(ctx, e)
		return
	}
	writeJSON(ctx, 200, mustJSON(renewed{left.Milliseconds(), most.Milliseconds()}))
}
