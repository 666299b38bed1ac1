package flight

import (
	"cmp"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/kept"
	"github.com/xpyd/xpyd/router/trace"
)

// Policy is what a request meets between its admission and its answer.
type Policy struct {
	// APIKeys, if there are any, are the bearer tokens that the public listener's /v1 and
	// tokenizer paths accept. APIKeysFile has more, with limits (package apikey), and is
	// read again when it changes.
	APIKeys     []string `key:"api_keys" secret:"true"`
	APIKeysFile string   `key:"api_keys_file"`
	// TenantHeader is the header in which a trusted gateway in front names whom a request
	// is for. Without keys anybody may set it, else those whose key has names_tenants. ""
	// is none.
	TenantHeader string `key:"tenant_header"`
	// MediaHosts are where engines may fetch images and the like that requests name by
	// address: host, host:port, *.domain, or * for anywhere.
	MediaHosts []string `key:"media_hosts"`
	// MaxResponseBytes bounds an answer that does not stream, which is held in memory until
	// it is whole.
	MaxResponseBytes int `key:"max_response_bytes" unit:"bytes"`
	// DecodeSilence is how long a foreign decode engine may stay silent after prefill's
	// answer: some wait in vain for minutes.
	DecodeSilence time.Duration `key:"decode_silence"`
	// Fallback lets decode serve alone what its dialect cannot split. Otherwise such
	// requests are refused.
	Fallback bool `key:"fallback"`
	// Attempts is how many pairs a request may be tried on.
	Attempts int `key:"attempts"`
	// RetryRatio is how many retries each request earns, RetryBurst how many can be saved
	// up, and RetryMin how many each second adds.
	RetryRatio float64 `key:"retry_ratio"`
	RetryBurst int     `key:"retry_burst"`
	RetryMin   float64 `key:"retry_min"`
	// Takeover lets another pair go on with a stream whose decode worker was lost or is drained.
	Takeover bool `key:"takeover"`
	// TakeoverReplay lets it also go on with a foreign engine's, where the dialect can.
	TakeoverReplay bool `key:"takeover_replay"`
	// Balance has streams move from decode workers that are slower than their peers. It needs
	// Takeover.
	Balance Balance `key:"balance"`
	// Hedge configures second requests for slow ones; off by default.
	Hedge Hedge `key:"hedge"`
	// History is how many finished requests /debug/requests remembers, at most maxHistory.
	History int `key:"history"`
	// SessionHeader is the header in which clients say what belongs together, for the
	// policies session and consistent_hash.
	SessionHeader string `key:"session_header"`
	Limits        Limits `key:"limits"` // reloadable
	// Responses bounds what is kept of /v1/responses.
	Responses kept.Config `key:"responses"`
	// Tracing is where spans of requests go.
	Tracing trace.Config `key:"tracing"`
}

// DefaultPolicy is for one machine.
func DefaultPolicy() Policy {
	return Policy{
		MaxResponseBytes: openai.MaxAnswer, DecodeSilence: time.Minute, Fallback: true,
		Attempts: 3, RetryRatio: 0.2, RetryBurst: 256, RetryMin: 1, Takeover: true, Balance: DefaultBalance(), Hedge: DefaultHedge(), History: 1024, SessionHeader: "x-session-id",
		Limits: Limits{MaxInFlight: 1024, MaxQueue: 1024, MaxQueueBytes: 256 << 20, QueueWait: 30 * time.Second,
			PriorityWeights: Weights{High: 16, Normal: 4, Low: 1},
			PairWait:        time.Second, RequestTimeout: 10 * time.Minute},
		Responses: kept.DefaultConfig(),
		Tracing:   trace.DefaultConfig(),
	}
}

// Validate returns a *config.KeyError.
func (c *Policy) Validate() error {
	for i, key := range c.APIKeys {
		if key == "" {
			return config.Bad(fmt.Sprintf("api_keys[%d]", i), "an empty key lets nobody in")
		}
	}
	for i, h := range c.MediaHosts {
		if !validHost(h) {
			return config.Bad(fmt.Sprintf("media_hosts[%d]", i), "%q is not host, host:port, *.domain or *, in lower case", h)
		}
	}
	switch {
	case strings.EqualFold(c.TenantHeader, "authorization") || strings.ContainsAny(c.TenantHeader, ": \r\n"):
		return config.Bad("tenant_header", "%q is no name of a header for this", c.TenantHeader)
	case c.TakeoverReplay && !c.Takeover:
		return config.Bad("takeover_replay", "nothing is taken over with takeover: false")
	case c.History > maxHistory:
		return config.Bad("history", "%d is above %d", c.History, maxHistory)
	case !(c.RetryMin >= 0 && c.RetryMin <= 1e6):
		return config.Bad("retry_min", "%v is not within 0 and 1000000", c.RetryMin)
	}
	return cmp.Or(config.AtLeast("max_response_bytes", c.MaxResponseBytes, 1024), config.AtLeast("attempts", c.Attempts, 1),
		config.Portion("retry_ratio", c.RetryRatio), config.AtLeast("retry_burst", c.RetryBurst, 0),
		config.AtLeast("history", c.History, 0), config.Positive("decode_silence", c.DecodeSilence),
		config.Within("balance", c.Balance.Validate()), config.Within("hedge", c.Hedge.Validate()), config.Within("limits", c.Limits.Validate()), config.Within("responses", c.Responses.Validate()), config.Within("tracing", c.Tracing.Validate()))
}

// maxHistory bounds what is remembered of requests to some GB.
const maxHistory = 1_000_000

// Limits is what Reload changes without dropping a request.
type Limits struct {
	// MaxInFlight requests run at once. Up to MaxQueue more, of MaxQueueBytes together,
	// wait, each for at most QueueWait (429 when full, 503 when late).
	MaxInFlight   int           `key:"max_in_flight"`
	MaxQueue      int           `key:"max_queue"`
	MaxQueueBytes int64         `key:"max_queue_bytes" unit:"bytes"`
	QueueWait     time.Duration `key:"queue_wait"`
	// PriorityWeights are the priorities' shares of places and of room in the queue.
	PriorityWeights Weights `key:"priority_weights"`
	// PairWait is how long a request waits for a pair when there is none.
	PairWait time.Duration `key:"pair_wait"`
	// RequestTimeout is a request's longest life; the header
	// x-request-timeout-ms can only shorten it.
	RequestTimeout time.Duration `key:"request_timeout"`
}

// Weights are shares of the priorities.
type Weights struct {
	High   float64 `key:"high"`
	Normal float64 `key:"normal"`
	Low    float64 `key:"low"`
}

// Validate returns the first *config.KeyError.
func (l Limits) Validate() error {
	for _, v := range []float64{l.PriorityWeights.High, l.PriorityWeights.Normal, l.PriorityWeights.Low} {
		if !(v >= 0.001 && v <= 1e6) {
			return config.Bad("priority_weights", "each must be within 0.001 and 1000000")
		}
	}
	return cmp.Or(config.AtLeast("max_in_flight", l.MaxInFlight, 1), config.AtLeast("max_queue", l.MaxQueue, 0),
		config.AtLeast("max_queue_bytes", l.MaxQueueBytes, 0), config.Positive("queue_wait", l.QueueWait),
		config.AtLeast("pair_wait", l.PairWait, 0), config.Positive("request_timeout", l.RequestTimeout))
}

// hosts are the machines that clients may have engines fetch images and the like from. An
// engine inside the network would otherwise fetch anything for anybody. Fields that say
// where prefill's blocks are get refused altogether (openai.Top.Link).
type hosts []string

// validHost reports whether s can be in the list.
func validHost(s string) bool {
	rest := strings.TrimPrefix(s, "*.")
	return s == "*" || rest != "" && s == strings.ToLower(s) && !strings.ContainsAny(rest, "*/ @?#")
}

// check refuses other addresses in the field param, and what it cannot parse, as engines
// may parse it differently.
func (h hosts) check(param string, urls ...string) *openai.Error {
	for _, s := range urls {
		u, err := url.Parse(s)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Contains(s, "\\") {
			return openai.BadRequest(param, "%q is no http or https address that is allowed here; send the content itself, as data:", openai.Clip(s))
		}
		if !h.has(u) {
			return openai.BadRequest(param, "engines may not fetch from %q: it is not in the router's media_hosts; send the content itself, as data:", openai.Clip(u.Host))
		}
	}
	return nil
}

func (h hosts) has(u *url.URL) bool {
	host, full := strings.ToLower(u.Hostname()), strings.ToLower(u.Host)
	for _, allowed := range h {
		domain, any := strings.CutPrefix(allowed, "*")
		switch {
		case allowed == "*", allowed == host, allowed == full:
			return true
		case any && strings.HasSuffix(host, domain):
			return true
		}
	}
	return false
}
