package dialect

import (
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
)

// Mooncake is vLLM's MooncakeConnector: both legs at once, linked by a
// transfer id; decode finds prefill at its bootstrap server.
type Mooncake struct{}

var mooncakeRules = Rules{
	Order: Together, Link: "transfer_id",
	Splits: vllmSplits, Falls: true,
	Hold: 480 * time.Second, Watched: true, Usage: true,
	Hint: "decode waits up to 480 s for a transfer that will not come",
}

// Rules of Mooncake.
func (Mooncake) Rules() *Rules { return &mooncakeRules }

// mooncakePort is VLLM_MOONCAKE_BOOTSTRAP_PORT.
const mooncakePort = 8998

func mooncakeURL(p *fleet.Instance) string {
	host, port := bootstrap(p, mooncakePort)
	return "http://" + net.JoinHostPort(host, strconv.Itoa(port))
}

// Ask is prefill's GET /query. The engine's id is new with each start, hence
// asked again after a failure.
func (Mooncake) Ask(p *fleet.Instance) string { return mooncakeURL(p) + "/query" }

// Learn reads {"<dp rank>":{"engine_id":…}}.
func (Mooncake) Learn(body []byte) (Facts, error) {
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
			return Facts{}, fmt.Errorf("read bootstrap's answer: rank %q has engine_id %q", clip(name), clip(r.EngineID))
		}
		f.Engines[n] = r.EngineID
	}
	if len(f.Engines) == 0 {
		return Facts{}, fmt.Errorf("bootstrap knows no engine yet")
	}
	return f, nil
}

func transferID(x *Exchange) string { return "xfer-" + x.Link.String() }

// Prefill computes the prompt and one token, whatever that is: prefill keeps
// its blocks only if the length ended it, so nothing else may.
func (Mooncake) Prefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	pinned(h, x, x.Prefill)
	e := onlyPrefill(x)
	e.Set(openai.IgnoreEOS, "true")
	e.Remove(openai.Stop)
	e.Remove(openai.StopTokenIDs)
	return withParams(e, struct {
		DoRemoteDecode  bool   `json:"do_remote_decode"`
		DoRemotePrefill bool   `json:"do_remote_prefill"`
		TransferID      string `json:"transfer_id"`
	}{true, false, transferID(x)})
}

// Decode names prefill's bootstrap and the engine of the rank.
func (Mooncake) Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	pinned(h, x, x.Decode)
	return params(x, struct {
		DoRemoteDecode      bool   `json:"do_remote_decode"`
		DoRemotePrefill     bool   `json:"do_remote_prefill"`
		RemoteBootstrapAddr string `json:"remote_bootstrap_addr"`
		RemoteEngineID      string `json:"remote_engine_id"`
		TransferID          string `json:"transfer_id"`
	}{false, true, mooncakeURL(x.Prefill), x.Facts.Engines[rank(x, x.Prefill)], transferID(x)})
}

// Result needs nothing of prefill's answer but that it is one.
func (Mooncake) Result(_ *Exchange, a Answer) Result { return status(a) }
