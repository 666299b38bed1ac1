package dialect

import (
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
)

// P2pNccl is vLLM's P2pNcclConnector, which left vLLM in the middle of 2026:
// the addresses of both engines stand in the request's id, which must be the
// same on both legs. Bootstrap is an engine's ZMQ address.
type P2pNccl struct{}

var p2pNcclRules = Rules{
	Order: PrefillFirst, Link: "both ZMQ addresses within X-Request-Id",
	Splits:  vllmSplits,
	Watched: true, Usage: true,
	Hint: "decode waits without end for tensors of another request id: " +
		"start both engines with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1",
}

// Rules of the legacy connector.
func (P2pNccl) Rules() *Rules { return &p2pNcclRules }

func p2pHeader(h *fasthttp.RequestHeader, x *Exchange) {
	foreign(h, x)
	h.Set(HeaderRequestID, "___prefill_addr_"+x.Prefill.Bootstrap+"___decode_addr_"+x.Decode.Bootstrap+"_"+x.Link.String())
}

// Prefill computes the prompt and one token.
func (P2pNccl) Prefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	p2pHeader(h, x)
	e := openai.NewEdit(x.Body, x.Top)
	e.Set(openai.MaxTokens, "1")
	e.Replace(openai.MaxCompletionTokens, "1")
	return e.Parts()
}

// Decode is the client's request under the same id.
func (P2pNccl) Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	p2pHeader(h, x)
	return [][]byte{x.Body}
}

// Result needs nothing of prefill's answer but that it is one.
func (P2pNccl) Result(_ *Exchange, a Answer) Result { return status(a) }
