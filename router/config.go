package router

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/share"
	"github.com/xpyd/xpyd/router/trace"
)

// Config configures a Router.
type Config struct {
	// Listen is the public listener, host:port.
	Listen string `koanf:"listen"`
	// AdminListen is the admin listener; "" leaves it out.
	AdminListen string `koanf:"admin_listen"`
	// TLSCert and TLSKey are PEM files; both make the public listener TLS.
	// With TLSClientCA clients need a certificate that it vouches for. Changed
	// files are read again.
	TLSCert     string `koanf:"tls_cert"`
	TLSKey      string `koanf:"tls_key"`
	TLSClientCA string `koanf:"tls_client_ca"`
	// AdminTLSCert and AdminTLSKey do the same for the admin listener.
	AdminTLSCert string `koanf:"admin_tls_cert"`
	AdminTLSKey  string `koanf:"admin_tls_key"`
	// AuditFile gets a line of JSON for each change through the admin listener,
	// besides the log's; ReopenAudit opens it anew. "" is none.
	AuditFile string `koanf:"audit_file"`
	// APIKeys, when there are any, are the bearer tokens that the public
	// listener's /v1 and tokenizer paths take; APIKeysFile has more, with
	// limits (package apikey), and is read again when it changes.
	APIKeys     []string `koanf:"api_keys" secret:"true"`
	APIKeysFile string   `koanf:"api_keys_file"`
	// TenantHeader names the header by which a trusted gateway in front says
	// for whom a request is: anybody may set it while there are no keys, else
	// those whose key has names_tenants. "" is none.
	TenantHeader string `koanf:"tenant_header"`
	// MediaHosts is from where engines may fetch what requests name by
	// address, such as images: host, host:port, *.domain, or * for anywhere.
	MediaHosts []string `koanf:"media_hosts"`
	// PublicMetrics serves /metrics on the public listener too.
	PublicMetrics bool `koanf:"public_metrics"`

	// MaxConns bounds the client connections; more are answered 503 at once.
	MaxConns int `koanf:"max_conns"`
	// MaxBodyBytes and MaxHeaderBytes bound a request (413, 431).
	MaxBodyBytes   int `koanf:"max_body_bytes" unit:"bytes"`
	MaxHeaderBytes int `koanf:"max_header_bytes" unit:"bytes"`
	// MaxResponseBytes bounds an answer that does not stream, which is held
	// in memory until it is whole.
	MaxResponseBytes int `koanf:"max_response_bytes" unit:"bytes"`
	// ReadTimeout is how long a client may take to send one request (408).
	ReadTimeout time.Duration `koanf:"read_timeout"`
	// IdleTimeout is how long a kept-alive client connection may idle.
	IdleTimeout time.Duration `koanf:"idle_timeout"`
	// StallTimeout is how long a client may not read while its stream has
	// bytes for it.
	StallTimeout time.Duration `koanf:"stall_timeout"`

	// ConnectTimeout, WriteTimeout and FirstByteTimeout bound the phases of a
	// leg; ChunkTimeout is decode's longest silence within a stream.
	ConnectTimeout   time.Duration `koanf:"connect_timeout"`
	WriteTimeout     time.Duration `koanf:"write_timeout"`
	FirstByteTimeout time.Duration `koanf:"first_byte_timeout"`
	ChunkTimeout     time.Duration `koanf:"chunk_timeout"`
	// DecodeSilence is how long a foreign decode engine may say nothing after
	// prefill's answer: some wait in vain, and for minutes.
	DecodeSilence time.Duration `koanf:"decode_silence"`
	// Fallback lets decode serve alone what its dialect cannot split.
	// Otherwise such requests are refused.
	Fallback bool `koanf:"fallback"`
	// IdleConns is how many idle connections are kept to each worker.
	IdleConns int `koanf:"idle_conns"`

	// Attempts is how many pairs a request may be tried on.
	Attempts int `koanf:"attempts"`
	// RetryRatio is how many retries each request earns for all, RetryBurst
	// how many can be saved up, and RetryMin how many come with each second.
	RetryRatio float64 `koanf:"retry_ratio"`
	RetryBurst int     `koanf:"retry_burst"`
	RetryMin   float64 `koanf:"retry_min"`

	// Hedge is second requests for slow ones; off by default.
	Hedge Hedge `koanf:"hedge"`

	// ProbeTimeout bounds the one-token request that a worker must pass
	// before it gets users' requests.
	ProbeTimeout time.Duration `koanf:"probe_timeout"`
	// History is how many finished requests /debug/requests remembers.
	History int `koanf:"history"`

	// Static is workers and engines that do not announce themselves;
	// reloadable with SetStatic.
	Static []Static `koanf:"static"`

	// SessionHeader names the header by which clients say what belongs
	// together, for the policies session and consistent_hash.
	SessionHeader string `koanf:"session_header"`

	// Upstream is how engines are talked to.
	Upstream Upstream `koanf:"upstream"`

	Limits Limits      `koanf:"limits"` // reloadable
	Pick   pick.Config `koanf:"pick"`   // its policy is reloadable
	Events Events      `koanf:"kv_events"`
	// Share is what routers side by side tell each other.
	Share share.Config `koanf:"share"`
	// Tracing is where spans of requests go.
	Tracing trace.Config `koanf:"tracing"`
	// Discovery is how engines are found that do not announce themselves.
	Discovery discover.Config `koanf:"discovery"`
}

// Limits is what Reload changes without dropping a request.
type Limits struct {
	// MaxInFlight requests run at once; up to MaxQueue more, of MaxQueueBytes
	// together, wait, each at most QueueWait (429 when full, 503 when late).
	MaxInFlight   int           `koanf:"max_in_flight"`
	MaxQueue      int           `koanf:"max_queue"`
	MaxQueueBytes int64         `koanf:"max_queue_bytes" unit:"bytes"`
	QueueWait     time.Duration `koanf:"queue_wait"`
	// PriorityWeights are the shares of places, and of room in the queue, that
	// requests of each priority get while they wait.
	PriorityWeights Weights `koanf:"priority_weights"`
	// PairWait is how long a request waits for a pair when there is none.
	PairWait time.Duration `koanf:"pair_wait"`
	// RequestTimeout is a request's longest life; the header
	// x-request-timeout-ms can only shorten it.
	RequestTimeout time.Duration `koanf:"request_timeout"`
}

// Weights are shares of the priorities.
type Weights struct {
	High   float64 `koanf:"high"`
	Normal float64 `koanf:"normal"`
	Low    float64 `koanf:"low"`
}

// DefaultConfig is for one machine.
func DefaultConfig() Config {
	return Config{
		Listen: "127.0.0.1:8000", AdminListen: "127.0.0.1:8001",
		MaxConns: 16384, MaxBodyBytes: 32 << 20, MaxHeaderBytes: 16 << 10, MaxResponseBytes: openai.MaxAnswer,
		ReadTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute, StallTimeout: time.Minute,
		ConnectTimeout: 2 * time.Second, WriteTimeout: 10 * time.Second,
		FirstByteTimeout: 5 * time.Minute, ChunkTimeout: time.Minute, DecodeSilence: time.Minute, Fallback: true, IdleConns: 256,
		Attempts: 3, RetryRatio: 0.2, RetryBurst: 256, RetryMin: 1, Hedge: DefaultHedge(),
		ProbeTimeout: 10 * time.Second, History: 1024,
		Limits: Limits{MaxInFlight: 1024, MaxQueue: 1024, MaxQueueBytes: 256 << 20, QueueWait: 30 * time.Second,
			PriorityWeights: Weights{High: 16, Normal: 4, Low: 1},
			PairWait:        time.Second, RequestTimeout: 10 * time.Minute},
		SessionHeader: "x-session-id",
		Pick:          pick.DefaultConfig(), Events: DefaultEvents(),
		Discovery: discover.DefaultConfig(),
		Share:     share.DefaultConfig(),
		Tracing:   trace.DefaultConfig(),
	}
}

// bad is an error of Validate.
func bad(key, format string, args ...any) error {
	return &config.KeyError{Key: key, Msg: fmt.Sprintf(format, args...)}
}

// Validate returns *config.KeyErrors.
func (c Config) Validate() error {
	for _, a := range []struct{ key, addr string }{{"listen", c.Listen}, {"admin_listen", c.AdminListen}} {
		if a.addr == "" && a.key == "admin_listen" {
			continue
		}
		if err := config.HostPort(a.addr); err != nil {
			return bad(a.key, "%v", err)
		}
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return bad("tls_cert", "tls_cert and tls_key go together")
	}
	if c.TLSClientCA != "" && c.TLSCert == "" {
		return bad("tls_client_ca", "it needs tls_cert and tls_key")
	}
	if (c.AdminTLSCert == "") != (c.AdminTLSKey == "") {
		return bad("admin_tls_cert", "admin_tls_cert and admin_tls_key go together")
	}
	for i, key := range c.APIKeys {
		if key == "" {
			return bad(fmt.Sprintf("api_keys[%d]", i), "an empty key lets nobody in")
		}
	}
	for i, h := range c.MediaHosts {
		if !validHost(h) {
			return bad(fmt.Sprintf("media_hosts[%d]", i), "%q is not host, host:port, *.domain or *, in lower case", h)
		}
	}
	if strings.EqualFold(c.TenantHeader, "authorization") || strings.ContainsAny(c.TenantHeader, ": \r\n") {
		return bad("tenant_header", "%q is no name of a header for this", c.TenantHeader)
	}
	if c.Discovery.P2PListen != "" {
		const why = "discovery.p2p_listen is set, and whoever registers there would be sent it"
		switch {
		case c.Upstream.APIKey != "":
			return bad("upstream.api_key", why)
		case c.Upstream.PassAuthorization:
			return bad("upstream.pass_authorization", why)
		}
	}
	for _, n := range []struct {
		key      string
		v, least int
	}{
		{"max_conns", c.MaxConns, 1}, {"max_body_bytes", c.MaxBodyBytes, 1024}, {"max_header_bytes", c.MaxHeaderBytes, 1024},
		{"max_response_bytes", c.MaxResponseBytes, 1024}, {"idle_conns", c.IdleConns, 0}, {"attempts", c.Attempts, 1},
		{"retry_burst", c.RetryBurst, 0}, {"history", c.History, 0},
	} {
		if n.v < n.least {
			return bad(n.key, "%d is below %d", n.v, n.least)
		}
	}
	if !(c.RetryRatio >= 0 && c.RetryRatio <= 1) {
		return bad("retry_ratio", "%v is not within 0 and 1", c.RetryRatio)
	}
	if !(c.RetryMin >= 0 && c.RetryMin <= 1e6) {
		return bad("retry_min", "%v is not within 0 and 1000000", c.RetryMin)
	}
	for _, d := range []struct {
		key string
		v   time.Duration
	}{
		{"read_timeout", c.ReadTimeout}, {"idle_timeout", c.IdleTimeout}, {"stall_timeout", c.StallTimeout},
		{"connect_timeout", c.ConnectTimeout}, {"write_timeout", c.WriteTimeout}, {"first_byte_timeout", c.FirstByteTimeout},
		{"chunk_timeout", c.ChunkTimeout}, {"decode_silence", c.DecodeSilence}, {"probe_timeout", c.ProbeTimeout},
	} {
		if d.v <= 0 {
			return bad(d.key, "%v is not a positive duration", d.v)
		}
	}
	return errors.Join(validStatics(c.Static), within("hedge", c.Hedge.Validate()), within("upstream", c.Upstream.Validate()),
		within("limits", c.Limits.Validate()), within("pick", c.Pick.Validate()),
		within("kv_events", c.Events.Validate()), within("discovery", c.Discovery.Validate()),
		within("share", c.Share.Validate()), within("tracing", c.Tracing.Validate()))
}

// within puts a section before the key of its error.
func within(section string, err error) error {
	var keyed interface {
		error
		ConfigKey() string
	}
	if !errors.As(err, &keyed) {
		return err
	}
	return bad(section+"."+keyed.ConfigKey(), "%s", strings.TrimPrefix(keyed.Error(), keyed.ConfigKey()+": "))
}

// Validate returns the first *config.KeyError.
func (l Limits) Validate() error {
	switch {
	case l.MaxInFlight < 1:
		return bad("max_in_flight", "%d is below 1", l.MaxInFlight)
	case l.MaxQueue < 0:
		return bad("max_queue", "%d is below 0", l.MaxQueue)
	case l.MaxQueueBytes < 0:
		return bad("max_queue_bytes", "%d is below 0", l.MaxQueueBytes)
	case !l.PriorityWeights.valid():
		return bad("priority_weights", "each must be within 0.001 and 1000000")
	case l.QueueWait <= 0:
		return bad("queue_wait", "%v is not a positive duration", l.QueueWait)
	case l.PairWait < 0:
		return bad("pair_wait", "%v is negative", l.PairWait)
	case l.RequestTimeout <= 0:
		return bad("request_timeout", "%v is not a positive duration", l.RequestTimeout)
	}
	return nil
}

func (w Weights) valid() bool {
	for _, v := range []float64{w.High, w.Normal, w.Low} {
		if !(v >= 0.001 && v <= 1e6) {
			return false
		}
	}
	return true
}
