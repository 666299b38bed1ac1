package dialect

import (
	"time"

	"github.com/valyala/fasthttp"
)

// Offloading is the peer-to-peer tier of vLLM's OffloadingConnector: both legs
// at once, linked by kv_request_id.
type Offloading struct{}

var offloadingRules = Rules{
	Order: Together, Link: "kv_request_id",
	Splits: vllmSplits, Falls: true,
	Hold:    time.Minute, // as long as prefill's CPU cache has it
	Watched: true, Usage: true, Hedges: true,
}

// Rules of the peer-to-peer tier.
func (Offloading) Rules() *Rules { return &offloadingRules }

// offloadingPort is VLLM_P2P_SIDE_CHANNEL_PORT.
const offloadingPort = 5710

// Prefill computes the prompt for the decoder of that id.
func (Offloading) Prefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	pinned(h, x, x.Prefill)
	type decoder struct {
		ID string `json:"kv_request_id"`
	}
	return withParams(onlyPrefill(x), struct {
		Decoder decoder `json:"remote_decoder"`
	}{decoder{x.Link.String()}})
}

// Decode collects from the prefiller of that id.
func (Offloading) Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	pinned(h, x, x.Decode)
	type prefiller struct {
		ID   string `json:"kv_request_id"`
		Host string `json:"remote_host"`
		Port int    `json:"remote_port"`
	}
	host, port := bootstrap(x.Prefill, offloadingPort)
	return params(x, struct {
		Prefiller prefiller `json:"remote_prefiller"`
	}{prefiller{x.Link.String(), host, port}})
}

// Result needs nothing of prefill's answer but that it is one.
func (Offloading) Result(_ *Exchange, a Answer) Result { return status(a) }
