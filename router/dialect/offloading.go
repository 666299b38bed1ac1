package dialect

import (
	"time"

	"github.com/valyala/fasthttp"
)

// offloading is the peer-to-peer tier of vLLM's OffloadingConnector: both legs at once,
// linked by kv_request_id.
var offloading = Dialect{
	Rules: Rules{
		Order:  Together,
		Splits: vllmSplits, Falls: true,
		Hold:    time.Minute, // as long as prefill's CPU cache has it
		Watched: true, Usage: true, Replays: true, Hedges: true,
	},
	Prefill: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		vllm(h, x, x.Prefill)
		type decoder struct {
			ID string `json:"kv_request_id"`
		}
		return withParams(onlyPrefill(x), struct {
			Decoder decoder `json:"remote_decoder"`
		}{decoder{x.Link.String()}})
	},
	Decode: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		vllm(h, x, x.Decode)
		type prefiller struct {
			ID   string `json:"kv_request_id"`
			Host string `json:"remote_host"`
			Port int    `json:"remote_port"`
		}
		host, port := bootstrap(x.Prefill, 5710) // VLLM_P2P_SIDE_CHANNEL_PORT
		return params(x, struct {
			Prefiller prefiller `json:"remote_prefiller"`
		}{prefiller{x.Link.String(), host, port}})
	},
	Result: status,
}
