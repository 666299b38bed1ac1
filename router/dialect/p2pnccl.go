package dialect

import (
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// p2pNccl is vLLM's P2pNcclConnector, which left vLLM in mid-2026: the request's id holds the
// addresses of both engines, and must be the same on both legs. Bootstrap is an engine's ZMQ
// address.
var p2pNccl = Dialect{
	Rules: Rules{
		Order:   PrefillFirst,
		Splits:  vllmSplits,
		Watched: true, Usage: true, Replays: true,
		Hint: "decode waits without end for tensors of another request id: " +
			"start both engines with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1",
	},
	Prefill: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		p2pHeader(h, x)
		e := openai.NewEdit(x.Body, x.Top)
		e.Set(openai.MaxTokens, "1")
		e.Replace(openai.MaxCompletionTokens, "1")
		e.Remove(openai.ReturnTokenIDs)
		return e.Parts()
	},
	Decode: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		p2pHeader(h, x)
		return [][]byte{x.Body}
	},
	Result: status,
}

func p2pHeader(h *fasthttp.RequestHeader, x *Exchange) {
	foreign(h, x)
	h.Set(ticket.HeaderRequestID, "___prefill_addr_"+x.Prefill.Bootstrap+"___decode_addr_"+x.Decode.Bootstrap+"_"+x.Link.String())
}
