package dialect

import (
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// vllmSplits is what vLLM's connectors carry correctly. Of several choices or
// prompts only the first one's blocks are named and the rest leak until their
// lease ends; a prompt's log probabilities exist on prefill only.
var vllmSplits = []Shape{Chat, Logprobs}

// NIXLPull is vLLM's NixlConnector and NixlPullConnector: prefill's answer
// names the blocks it keeps, and decode reads them. Also what our own workers
// speak behind other routers.
type NIXLPull struct{}

var nixlPullRules = Rules{
	Order: PrefillFirst, Link: "kv_transfer_params, made by prefill",
	Splits: vllmSplits, Falls: true,
	// A lease of 30 s that decode renews from when its scheduler has the
	// request. Prefill that is cut off frees at once.
	Hold: 30 * time.Second, Gap: 10 * time.Second,
	Watched: true, Usage: true,
}

// Rules of the pull.
func (NIXLPull) Rules() *Rules { return &nixlPullRules }

// vllmParams is kv_transfer_params with all its fields, as vLLM's own proxy
// sends it to prefill.
type vllmParams struct {
	DoRemoteDecode  bool    `json:"do_remote_decode"`
	DoRemotePrefill bool    `json:"do_remote_prefill"`
	RemoteEngineID  *string `json:"remote_engine_id"`
	RemoteBlockIDs  *string `json:"remote_block_ids"`
	RemoteHost      *string `json:"remote_host"`
	RemotePort      *int    `json:"remote_port"`
}

// Prefill asks for one token and for the blocks to be kept.
func (NIXLPull) Prefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	pinned(h, x, x.Prefill)
	e := onlyPrefill(x)
	e.Add("kv_transfer_params", nixlKeep)
	return e.Parts()
}

var nixlKeep = string(encode(vllmParams{DoRemoteDecode: true}))

// Decode is the client's request with what prefill answered, verbatim.
func (NIXLPull) Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	pinned(h, x, x.Decode)
	e := openai.NewEdit(x.Body, x.Top)
	e.Add("kv_transfer_params", string(x.Kept.Params))
	return e.Parts()
}

// Result takes kv_transfer_params. Without them decode would silently compute
// the prompt itself.
func (NIXLPull) Result(_ *Exchange, a Answer) Result {
	r := statusAnd(a, "kv_transfer_params")
	if r.Outcome != ticket.Done {
		return r
	}
	if len(r.Kept.Params) < len(`{"a":1}`) || r.Kept.Params[0] != '{' {
		return Result{Outcome: ticket.Incompatible, Message: "prefill answered without kv_transfer_params: is its NIXL connector configured?"}
	}
	return r
}

// NIXLPush is vLLM's NixlPushConnector: decode registers with the prefill
// engine that the router names, and prefill writes. The legs are linked by
// X-Request-Id.
type NIXLPush struct{}

var nixlPushRules = Rules{
	Order: Together, Link: "X-Request-Id and prefill's coordinates",
	Splits: vllmSplits, Falls: true,
	Hold: 30 * time.Second, Watched: true, Usage: true,
	Hint: "a push that decode never gets does not fail there; check engine_id, bootstrap, tp and pp of the prefill engine",
}

// Rules of the push.
func (NIXLPush) Rules() *Rules { return &nixlPushRules }

// nixlPort is vLLM's VLLM_NIXL_SIDE_CHANNEL_PORT.
const nixlPort = 5600

// Prefill is as for the pull.
func (NIXLPush) Prefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	return NIXLPull{}.Prefill(h, x)
}

// Decode names the prefill engine; there are no block ids.
func (NIXLPush) Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	pinned(h, x, x.Decode)
	host, port := bootstrap(x.Prefill, nixlPort)
	engine := x.Prefill.EngineID
	if x.Prefill.DPRanks > 1 { // as vLLM names its ranks
		engine += "_dp" + strconv.Itoa(rank(x, x.Prefill))
	}
	return params(x, struct {
		DoRemoteDecode  bool   `json:"do_remote_decode"`
		DoRemotePrefill bool   `json:"do_remote_prefill"`
		RemoteEngineID  string `json:"remote_engine_id"`
		RemoteHost      string `json:"remote_host"`
		RemotePort      int    `json:"remote_port"`
		TPSize          int    `json:"tp_size"`
		PPSize          int    `json:"pp_size"`
		RemoteRequestID string `json:"remote_request_id"`
	}{false, true, engine, host, port + rank(x, x.Prefill), max(x.Prefill.TP, 1), max(x.Prefill.PP, 1), engineRequest(x)})
}

// Result needs nothing of prefill's answer but that it is one.
func (NIXLPush) Result(_ *Exchange, a Answer) Result { return status(a) }
