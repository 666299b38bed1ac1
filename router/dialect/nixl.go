package dialect

import (
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// vllmSplits are the shapes that vLLM's connectors carry correctly. Of several choices or
// prompts they name only the first one's blocks, and the rest leak until their lease ends; a
// prompt's log probabilities exist on prefill only.
var vllmSplits = []Shape{Chat, Logprobs}

// vllm sets the headers of a leg to a vLLM engine.
func vllm(h *fasthttp.RequestHeader, x *Exchange, to *fleet.Instance) {
	foreign(h, x)
	if to.DPRanks > 1 {
		h.Set(headerDPRank, strconv.Itoa(rank(x, to)))
	}
}

// nixlPull is vLLM's NixlConnector and NixlPullConnector: prefill's answer names the blocks
// it keeps, and decode reads them. Our own workers speak it too, behind other routers.
var nixlPull = Dialect{
	Rules: Rules{
		Order:  PrefillFirst,
		Splits: vllmSplits, Falls: true,
		// The lease of 30 s is renewed by decode once its scheduler has the request. A prefill
		// that is cut off frees at once.
		Hold: 30 * time.Second, Gap: 10 * time.Second,
		Watched: true, Usage: true, Replays: true,
	},
	Prefill: nixlPrefill,
	Decode: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		vllm(h, x, x.Decode)
		e := openai.NewEdit(x.Body, x.Top)
		e.Add("kv_transfer_params", string(x.Kept.Params)) // verbatim
		return e.Parts()
	},
	// Without kv_transfer_params decode would silently compute the prompt itself.
	Result: func(a Reply) Result {
		r := statusAnd(a, "kv_transfer_params")
		if r.Outcome == ticket.Done && (len(r.Kept.Params) < len(`{"a":1}`) || r.Kept.Params[0] != '{') {
			return Result{Outcome: ticket.Incompatible, Message: "prefill answered without kv_transfer_params: is its NIXL connector configured?"}
		}
		return r
	},
}

// nixlPrefill asks for one token and for the blocks to be kept.
func nixlPrefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	vllm(h, x, x.Prefill)
	e := onlyPrefill(x)
	e.Add("kv_transfer_params", nixlKeep)
	return e.Parts()
}

// nixlKeep has all fields, as vLLM's own proxy sends them.
const nixlKeep = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// nixlPush is vLLM's NixlPushConnector: decode registers with the prefill engine that the
// router names, and prefill writes. X-Request-Id links the legs.
var nixlPush = Dialect{
	Rules: Rules{
		Order:  Together,
		Splits: vllmSplits, Falls: true,
		Hold: 30 * time.Second, Watched: true, Usage: true, Replays: true,
		Hint: "a push that decode never gets does not fail there; check engine_id, bootstrap, tp and pp of the prefill engine",
	},
	Prefill: nixlPrefill,
	Decode: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		vllm(h, x, x.Decode)
		host, port := bootstrap(x.Prefill, 5600) // VLLM_NIXL_SIDE_CHANNEL_PORT
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
	},
	Result: status,
}
