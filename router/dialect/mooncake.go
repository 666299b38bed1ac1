package dialect

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
)

// mooncake is vLLM's MooncakeConnector: both legs at once, linked by a transfer id. Decode
// finds prefill at its bootstrap server.
var mooncake = Dialect{
	Rules: Rules{
		Order:  Together,
		Splits: vllmSplits, Falls: true,
		Hold: 480 * time.Second, Watched: true, Usage: true, Replays: true,
		Hint: "decode waits up to 480 s for a transfer that will not come",
	},
	// Prefill keeps its blocks only if the length ended it, so nothing else may.
	Prefill: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		vllm(h, x, x.Prefill)
		e := onlyPrefill(x)
		e.Set(openai.IgnoreEOS, "true")
		e.Remove(openai.Stop)
		e.Remove(openai.StopTokenIDs)
		return withParams(e, struct {
			DoRemoteDecode  bool   `json:"do_remote_decode"`
			DoRemotePrefill bool   `json:"do_remote_prefill"`
			TransferID      string `json:"transfer_id"`
		}{true, false, transferID(x)})
	},
	Decode: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		vllm(h, x, x.Decode)
		return params(x, struct {
			DoRemoteDecode      bool   `json:"do_remote_decode"`
			DoRemotePrefill     bool   `json:"do_remote_prefill"`
			RemoteBootstrapAddr string `json:"remote_bootstrap_addr"`
			RemoteEngineID      string `json:"remote_engine_id"`
			TransferID          string `json:"transfer_id"`
		}{false, true, mooncakeURL(x.Prefill), x.Facts.Engines[rank(x, x.Prefill)], transferID(x)})
	},
	Result: status,
	// The engine's id is new with each start, hence asked again after a failure.
	Ask:   func(p *fleet.Instance) string { return mooncakeURL(p) + "/query" },
	Learn: learnEngines,
}

func mooncakeURL(p *fleet.Instance) string {
	host, port := bootstrap(p, 8998) // VLLM_MOONCAKE_BOOTSTRAP_PORT
	return "http://" + net.JoinHostPort(host, strconv.Itoa(port))
}

func transferID(x *Exchange) string { return "xfer-" + x.Link.String() }

// learnEngines reads {"<dp rank>":{"engine_id":…}}.
func learnEngines(body []byte) (Facts, error) {
	var ranks map[string]struct {
		EngineID string `json:"engine_id"`
	}
	if err := json.Unmarshal(body, &ranks); err != nil {
		return Facts{}, fmt.Errorf("read bootstrap's answer: %w", err)
	}
	f := Facts{Engines: map[int]string{}}
	for name, r := range ranks {
		n, err := strconv.Atoi(name)
		if err != nil || n < 0 || r.EngineID == "" {
			return Facts{}, fmt.Errorf("read bootstrap's answer: rank %q has engine_id %q", openai.Clip(name), openai.Clip(r.EngineID))
		}
		f.Engines[n] = r.EngineID
	}
	if len(f.Engines) == 0 {
		return Facts{}, errors.New("bootstrap knows no engine yet")
	}
	return f, nil
}
