package flight

import (
	"bytes"
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/apikey"
	"github.com/xpyd/xpyd/router/limit"
)

// tenant is whom a request is for: the owner of its API key, or whom a trusted header
// names.
type tenant struct {
	name    string
	key     *apikey.Key    // never nil
	account *limit.Account // nil without limits
	stats   *tenantStats
	promise string  // ticket.HeaderPromise; "": what the workers promise
	gap     float64 // seconds between tokens, of that promise; 0: none
	cache   string  // ticket.HeaderCacheSalt; "": the cache that all share
}

// keyring holds the keys in force. While there are none and no header names tenants, nobody
// is asked who they are.
type keyring struct {
	path   string   // of the file of keys; "": none
	plain  []string // keys of the configuration
	header string   // that names tenants; "": none
	stats  *statsByName

	now atomic.Pointer[keys] // nil: no key is needed

	mu       sync.Mutex
	accounts map[string]*limit.Account // by tenant; they survive a reload
}

// keys is one immutable version of them.
type keys struct {
	ring    *apikey.Ring
	tenants map[string]*tenant
}

func newKeyring(cfg *Policy, stats *statsByName) (*keyring, error) {
	k := &keyring{path: cfg.APIKeysFile, plain: cfg.APIKeys, header: cfg.TenantHeader, stats: stats, accounts: map[string]*limit.Account{}}
	if k.path != "" {
		return k, nil // LoadKeys follows
	}
	return k, k.load()
}

// load reads the file and puts its keys in force; on an error nothing changes.
func (k *keyring) load() error {
	if k.path == "" && len(k.plain) == 0 {
		return nil
	}
	var list []apikey.Key
	if k.path != "" {
		var err error
		if list, err = apikey.Load(k.path); err != nil {
			return err
		}
	}
	for i, secret := range k.plain {
		list = append(list, apikey.Plain(fmt.Sprintf("api_keys/%d", i), secret))
	}
	next := &keys{ring: apikey.NewRing(list), tenants: make(map[string]*tenant, len(list))}
	now := time.Now()
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.accounts
	k.accounts = make(map[string]*limit.Account, len(list))
	for i := range list {
		key := &list[i]
		t := &tenant{name: key.Name, key: key, stats: k.stats.of(key.Name), promise: promiseOf(key), gap: gapOf(key), cache: key.CacheName()}
		if rates := key.Rates(); rates.Limits() {
			if t.account = old[key.Name]; t.account == nil {
				t.account = limit.NewAccount(now, rates)
			}
			t.account.Set(now, rates)
			k.accounts[key.Name] = t.account
		}
		next.tenants[key.Name] = t
	}
	k.now.Store(next)
	return nil
}

// promiseOf is what a key's requests are promised, as workers are told.
func promiseOf(k *apikey.Key) string {
	var parts []string
	if k.TTFTPromise > 0 {
		parts = append(parts, "ttft="+k.TTFTPromise.String())
	}
	if k.TPOTPromise > 0 {
		parts = append(parts, "tpot="+k.TPOTPromise.String())
	}
	if k.ITLPromise > 0 {
		parts = append(parts, "itl="+k.ITLPromise.String())
	}
	return strings.Join(parts, ",")
}

// gapOf is the shortest gap between tokens that a key's requests are promised, in seconds; 0: none is.
func gapOf(k *apikey.Key) float64 {
	gap := cmp.Or(k.TPOTPromise, k.ITLPromise)
	if k.ITLPromise > 0 {
		gap = min(gap, k.ITLPromise)
	}
	return gap.Seconds()
}

// anyone is the key of requests that need none.
var anyone = apikey.Key{Priority: "high", NamesTenants: true}

// identify finds out whom a request is for; nil if nobody asks. ok is false for a key that
// is missing, wrong or expired.
func (k *keyring) identify(h *fasthttp.RequestHeader) (t *tenant, ok bool) {
	now := k.now.Load()
	if now == nil && k.header == "" {
		return nil, true
	}
	key := &anyone
	if now != nil {
		secret, ok := Credentials(h, "bearer ")
		if !ok {
			return nil, false
		}
		if key = now.ring.Find(secret); key == nil || key.Expired(time.Now()) {
			return nil, false
		}
		t = now.tenants[key.Name]
	}
	if k.header == "" || !key.NamesTenants {
		return t, true
	}
	name := string(h.Peek(k.header))
	if !apikey.PlainName(name) {
		return t, true // nobody in particular
	}
	named := &tenant{name: name, key: key, stats: k.stats.of(name)}
	if t != nil {
		named.account, named.promise, named.cache = t.account, t.promise, t.cache
	}
	return named, true
}

// Credentials are what a request's Authorization has after a scheme, such as "bearer ".
func Credentials(h *fasthttp.RequestHeader, scheme string) ([]byte, bool) {
	v := h.Peek("Authorization")
	if len(v) <= len(scheme) || !strings.EqualFold(string(v[:len(scheme)]), scheme) {
		return nil, false
	}
	return bytes.TrimSpace(v[len(scheme):]), true
}

type tenantKey struct{}

// Keyed finds out whom the request is for; false if its key is not accepted.
func (s *Service) Keyed(ctx *fasthttp.RequestCtx) bool {
	t, ok := s.keys.identify(&ctx.Request.Header)
	if !ok && bringsKey(ctx) {
		t, ok = s.keys.identify(&ctx.Request.Header)
	}
	switch {
	case !ok:
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
		s.metrics.unauthorized.Inc()
	case t != nil:
		ctx.SetUserValue(tenantKey{}, t)
	}
	return ok
}

// tenantOf is the tenant that Keyed found; nil if nobody asked.
func tenantOf(ctx *fasthttp.RequestCtx) *tenant {
	t, _ := ctx.UserValue(tenantKey{}).(*tenant)
	return t
}

// cacheSalt is ticket.HeaderCacheSalt of a request; "" if nobody asked whom it is for.
func (q *request) cacheSalt() string {
	if q.tenant == nil {
		return ""
	}
	return q.tenant.cache
}

// headers tells the client its limits under OpenAI's header names.
func (t *tenant) headers(h *fasthttp.ResponseHeader, now time.Time) {
	requests, tokens := t.account.Levels(now)
	set := func(what string, l limit.Level) {
		if l.Limit == 0 {
			return
		}
		h.Set("x-ratelimit-limit-"+what, strconv.FormatInt(l.Limit, 10))
		h.Set("x-ratelimit-remaining-"+what, strconv.FormatInt(l.Left, 10))
		h.Set("x-ratelimit-reset-"+what, l.Full.Round(time.Millisecond).String())
	}
	set("requests", requests)
	set("tokens", tokens)
}

// over is the answer to a request that exceeds the tenant's limits.
func (t *tenant) over(o *limit.Over, tokens float64) *openai.Error {
	var e *openai.Error
	switch o.What {
	case limit.OverSize:
		return openai.BadRequest("max_tokens", "the request may take %.0f tokens, and %s has %d a minute; shorten the prompt or lower max_tokens",
			tokens, t.key.Name, o.Limit)
	case limit.OverInFlight:
		e = openai.TooMany("%s may have %d requests at once; try again when one is answered", t.key.Name, o.Limit)
	case limit.OverTokens:
		e = openai.TooMany("%s may use %d tokens a minute, and the request may take %.0f; try again in %v", t.key.Name, o.Limit, tokens, o.After.Round(time.Millisecond))
	default:
		e = openai.TooMany("%s may send %d requests a minute; try again in %v", t.key.Name, o.Limit, o.After.Round(time.Millisecond))
	}
	e.RetryAfter = seconds(o.After)
	return e
}
