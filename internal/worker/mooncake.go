package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// Mooncake's bootstrap, as vLLM's MooncakeConnector speaks it: prefill serves
// GET /query, which says per data-parallel rank who it is and where its KV
// listener is; decode asks it, then claims the transfer id that the proxy gave
// to both. We have one rank, and a new engine_id with every epoch.
type mooncakeRank struct {
	EngineID   string                       `json:"engine_id"`
	WorkerAddr map[string]map[string]string `json:"worker_addr"` // tp rank -> pp rank -> tcp://host:port
}

const (
	mooncakeTimeout = 2 * time.Second
	maxQueryBytes   = 1 << 20
)

// appendQuery is prefill's answer to GET /query.
func (w *Worker) appendQuery(dst []byte) []byte {
	b, err := json.Marshal(map[string]mooncakeRank{"0": {
		EngineID:   engineID(w.identity.PeerID),
		WorkerAddr: map[string]map[string]string{"0": {"0": "tcp://" + w.kvAddr}},
	}})
	if err != nil {
		panic(err) // strings and maps
	}
	return append(dst, b...)
}

// mooncakeExchange asks prefill's bootstrap where to dial.
func (w *Worker) mooncakeExchange(p *transferParams) (*exchange, *openai.Error) {
	const field = "kv_transfer_params"
	u, err := url.Parse(p.RemoteBootstrapAddr)
	if err != nil || u.Scheme != "http" || u.Host == "" {
		return nil, openai.BadRequest(field, "remote_bootstrap_addr %q is no http URL", p.RemoteBootstrapAddr)
	}
	if e := w.allowPeer(field, u.Host); e != nil {
		return nil, e
	}
	ranks, err := w.queryBootstrap(u)
	if err != nil {
		return nil, openai.Upstream("ask %s: %v", u.Host, err)
	}
	for _, r := range ranks {
		if p.RemoteEngineID != nil && *p.RemoteEngineID != r.EngineID {
			continue
		}
		addr := strings.TrimPrefix(r.WorkerAddr["0"]["0"], "tcp://")
		peer, ok := parseEngineID(r.EngineID)
		if !ok {
			return nil, openai.BadRequest(field, "engine_id %q is none of ours", r.EngineID)
		}
		return &exchange{link: ticket.NewLink(), leaseID: prefill.EarlyClaim + p.TransferID, addr: addr, peer: peer},
			w.allowPeer(field, addr)
	}
	return nil, openai.Upstream("%s has no engine %q: it restarted, or the proxy's knowledge is old", u.Host, deref(p.RemoteEngineID))
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func (w *Worker) queryBootstrap(u *url.URL) (map[string]mooncakeRank, error) {
	ctx, cancel := context.WithTimeout(w.ctx, mooncakeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.JoinPath("/query").String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := w.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d", resp.StatusCode)
	}
	var ranks map[string]mooncakeRank
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxQueryBytes)).Decode(&ranks); err != nil {
		return nil, err
	}
	return ranks, nil
}
