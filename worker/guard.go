package worker

import (
	"bytes"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/lobby"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/reread"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/apikey"
)

// access says who may use a route. The fleet's token for this run of the worker opens all.
type access uint8

const (
	forMembers  access = iota // the fleet's token alone
	forUsers                  // also the worker's own API keys
	forPeers                  // also workers that do not know this run's epoch yet
	forScrapers               // also this machine, and the scrape token
	forAnybody
)

// String is the metric's label.
func (a access) String() string {
	return [...]string{"control", "public", "query", "metrics", "open"}[a]
}

// guard checks access by a request's header alone: a stranger's body is not read.
type guard struct {
	members, peers, scrapers *trust.Gate                 // nil: everyone is trusted
	keys                     *reread.Value[*apikey.Ring] // nil: there are none
	model                    string
	log                      *slog.Logger
	refused                  *prometheus.CounterVec

	mu    sync.Mutex
	quiet time.Time // no log lines before
	since int       // refusals not logged yet
}

func newGuard(w *Worker) (*guard, error) {
	g := &guard{members: w.ring.Gate(trust.HTTP, trust.Member(w.identity.ID, w.identity.Epoch)),
		peers: w.ring.Gate(trust.Query, ""), scrapers: w.ring.Gate(trust.Scrape, ""), model: w.served, log: w.log,
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_worker_unauthorized_total",
			Help: "HTTP requests refused for what they showed, by who may use the route; link: an API key with what only the fleet may say."}, []string{"class"})}
	for _, a := range []access{forMembers, forUsers, forPeers, forScrapers} {
		g.refused.WithLabelValues(a.String())
	}
	g.refused.WithLabelValues(classLink)
	if err := w.registry.Register(g.refused); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	path := w.cfg.APIKeysFile
	switch {
	case path == "":
		return g, nil
	case w.ring == nil:
		return nil, bad("api_keys_file", "a worker that trusts everyone asks nobody for a key")
	}
	var err error
	g.keys, err = reread.New(func() (*apikey.Ring, error) {
		keys, err := apikey.Load(path)
		return apikey.NewRing(keys), err
	}, func(err error) {
		if err != nil {
			w.log.Error("api_keys_file has changed and cannot be used: the old keys stay in force", "error", err)
			return
		}
		w.log.Info("api_keys_file was read again")
	}, path)
	if err != nil {
		return nil, bad("api_keys_file", "%v", err)
	}
	return g, nil
}

const classLink = "link"

// linkHeaders say where to take KV from, what was drawn elsewhere, what is promised, or whose cache it is; only the fleet may set them.
var linkHeaders = []string{ticket.HeaderLink, ticket.HeaderPrefill, ticket.HeaderPrefillEpoch, ticket.HeaderPrefillKV, ticket.HeaderPeer, ticket.HeaderTokens, ticket.HeaderGiven, ticket.HeaderBrought, ticket.HeaderPromise, ticket.HeaderCacheSalt}

// check returns why a request may not use a route; nil if it may.
func (g *guard) check(ctx *fasthttp.RequestCtx, to access) *openai.Error {
	h := &ctx.Request.Header
	token := h.Peek(trust.Header)
	switch {
	case g.members.Accepts(token):
		lobby.Admit(ctx.Conn())
		return nil
	case to == forAnybody:
		return nil
	case to == forPeers && g.peers.Accepts(token), (to == forPeers || to == forUsers) && g.key(h):
		for _, name := range linkHeaders {
			if len(h.Peek(name)) > 0 {
				return g.refuse(ctx, classLink, &openai.Error{Status: 403, Type: openai.TypeAuth, Param: name, Code: "fleet_token_required",
					Message: name + " counts only from the fleet's router: an API key is not enough for it; leave it out"})
			}
		}
		lobby.Admit(ctx.Conn())
		h.Del(ticket.HeaderProbe) // set by routers that treat this worker as a foreign engine
		return nil
	case to == forScrapers && (ctx.RemoteIP().IsLoopback() || g.scrapers.Accepts(bearer(h))):
		return nil
	}
	say := "this is for the fleet, which shows a token of its secret as x-xpyd-fleet: ask the fleet's router"
	switch {
	case to == forScrapers:
		say = "from other machines /metrics wants the fleet's scrape token as Authorization: Bearer"
	case to != forMembers && g.keys != nil:
		say = "the API key is missing or wrong, it has expired, or it is not for this model: show one of the worker's api_keys_file as Authorization: Bearer"
	case to != forMembers:
		say += ", or give this worker API keys of its own (api_keys_file)"
	}
	ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
	return g.refuse(ctx, to.String(), openai.Unauthorized("%s", say))
}

// key reports whether a request shows a valid API key.
func (g *guard) key(h *fasthttp.RequestHeader) bool {
	if g.keys == nil {
		return false
	}
	k := g.keys.Get().Find(bearer(h))
	return k != nil && !k.Expired(time.Now()) && k.May(g.model)
}

// bearer is the token of Authorization: Bearer; nil if there is none.
func bearer(h *fasthttp.RequestHeader) []byte {
	scheme, shown, ok := bytes.Cut(h.Peek(fasthttp.HeaderAuthorization), []byte(" "))
	if !ok || !bytes.EqualFold(scheme, []byte("bearer")) {
		return nil
	}
	return bytes.TrimSpace(shown)
}

// sayEvery is the least time between log lines about refusals: strangers can cause them at will.
const sayEvery = time.Minute

// refuse counts a refusal, and logs it if none was logged lately.
func (g *guard) refuse(ctx *fasthttp.RequestCtx, class string, why *openai.Error) *openai.Error {
	g.refused.WithLabelValues(class).Inc()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.since++
	if now := time.Now(); now.After(g.quiet) {
		g.log.Warn("refused an HTTP request", "from", ctx.RemoteAddr().String(), "class", class, "path", openai.Clip(string(ctx.Path())), "status", why.Status, "refused", g.since)
		g.quiet, g.since = now.Add(sayEvery), 0
	}
	return why
}
