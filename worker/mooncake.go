package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// mooncakeRank is a data-parallel rank in Mooncake's bootstrap, as vLLM's MooncakeConnector speaks
// it. Prefill serves GET /query: its engine id and KV listener, by rank. Decode asks for it, then
// claims the transfer id that the proxy gave to both. We have one rank, and a new engine_id with
// every epoch.
type mooncakeRank struct {
	EngineID   string                       `json:"engine_id"`
	WorkerAddr map[string]map[string]string `json:"worker_addr"` // tp rank -> pp rank -> tcp://host:port
}

const (
	mooncakeTimeout = 2 * time.Second
	maxQueryBytes   = 1 << 20
)

func (w *Worker) serveQuery(*fasthttp.RequestCtx) (any, error) {
	return map[string]mooncakeRank{"0": {
		EngineID:   engineID(w.identity.PeerID),
		WorkerAddr: map[string]map[string]string{"0": {"0": "tcp://" + w.kvAddr}},
	}}, nil
}

// mooncakeOrigin asks prefill's bootstrap where to dial it.
func (w *Worker) mooncakeOrigin(ctx context.Context, p *transferParams) (*origin, error) {
	u, err := url.Parse(p.RemoteBootstrapAddr)
	if err != nil || u.Scheme != w.scheme() || u.Host == "" {
		return nil, openai.BadRequest(fieldTransfer, "remote_bootstrap_addr %q is no %s URL", p.RemoteBootstrapAddr, w.scheme())
	}
	if err := w.allowPeer(u.Host); err != nil {
		return nil, openai.BadRequest(fieldTransfer, "%v", err)
	}
	from, err := w.bootstrapOrigin(ctx, u, p.RemoteEngineID)
	if err != nil {
		return nil, err
	}
	from.leaseID = prefill.EarlyClaim + p.TransferID
	return from, w.checkOrigin(from)
}

// bootstrapOrigin asks the worker that answers at u where its KV listener is; engine, if not nil, must
// be its id. The origin is not checked yet.
func (w *Worker) bootstrapOrigin(ctx context.Context, u *url.URL, engine *string) (*origin, error) {
	ranks, err := w.queryBootstrap(ctx, u)
	switch {
	case scarce.Ours(err):
		return nil, failed(ticket.NoSpace, fmt.Errorf("ask %s: %w", u.Host, err))
	case err != nil:
		return nil, failed(ticket.Dead, fmt.Errorf("ask %s: %w", u.Host, err))
	}
	for _, r := range ranks {
		if engine != nil && *engine != r.EngineID {
			continue
		}
		from := &origin{link: ticket.NewLink(), addr: strings.TrimPrefix(r.WorkerAddr["0"]["0"], "tcp://")}
		var ok bool
		if from.peer, ok = parseEngineID(r.EngineID); !ok {
			return nil, openai.BadRequest(fieldTransfer, "%s has engine_id %q, which is none of ours", u.Host, r.EngineID)
		}
		return from, nil
	}
	return nil, failed(ticket.Dead, fmt.Errorf("%s does not have the requested engine: it restarted, or the proxy's knowledge is old", u.Host))
}

func (w *Worker) queryBootstrap(ctx context.Context, u *url.URL) (map[string]mooncakeRank, error) {
	ctx, cancel := context.WithTimeout(ctx, mooncakeTimeout)
	defer cancel()
	resp, err := w.askBootstrap(ctx, u.JoinPath("/query").String())
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized:
		return nil, errors.New("it does not accept this worker's fleet secret")
	default:
		return nil, fmt.Errorf("status %d", resp.StatusCode)
	}
	var ranks map[string]mooncakeRank
	err = json.NewDecoder(io.LimitReader(resp.Body, maxQueryBytes)).Decode(&ranks)
	return ranks, err
}

// askBootstrap tries a token of each of the fleet's secrets, as it does not know which one the
// other worker has. The tokens are good for this query alone: a proxy's client named the address,
// and whoever listens there learns them.
func (w *Worker) askBootstrap(ctx context.Context, url string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	var secrets []trust.Secret
	if w.ring != nil {
		secrets = w.ring.Secrets()
	}
	for i := 0; ; i++ {
		if i < len(secrets) {
			req.Header.Set(trust.Header, secrets[i].Token(trust.Query, ""))
		}
		resp, err := w.client.Do(req)
		if err != nil || resp.StatusCode != http.StatusUnauthorized || i+1 >= len(secrets) {
			return resp, err
		}
		_ = resp.Body.Close() // a refusal; its text is not read
	}
}

// newClient is for requests to other workers. It follows no redirect: only the first host was
// checked.
func newClient(t *trust.TLS, dial fleet.Dial) *http.Client {
	return &http.Client{
		Transport:     &http.Transport{MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute, DialContext: dial, TLSClientConfig: t.Client()},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
