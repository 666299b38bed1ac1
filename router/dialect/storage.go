package dialect

import (
	"time"

	"github.com/valyala/fasthttp"
)

// storage is engines that share a cache of blocks keyed by the prompt's tokens: LMCache,
// vLLM's ExampleConnector and the like. Prefill goes first and hands nothing over.
var storage = Dialect{
	Rules: Rules{
		Order:  PrefillFirst,
		Splits: vllmSplits, Falls: true,
		Gap:   time.Minute, // the cache's policy decides
		Usage: true, Replays: true, Hedges: true,
	},
	Prefill: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		vllm(h, x, x.Prefill)
		return onlyPrefill(x).Parts()
	},
	Decode: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		vllm(h, x, x.Decode)
		return [][]byte{x.Body}
	},
	Result: status,
}
