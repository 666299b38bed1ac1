package fleet

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/xpyd/xpyd/internal/trust"
)

// ConnConfig says how to reach NATS. Only URL is required.
type ConnConfig struct {
	// URL is a comma-separated list of nats:// or tls:// URLs, maybe with user:password:
	// the servers of one cluster, used one at a time.
	URL string
	// Ring is the fleet's secrets, or nil. With one, a nats:// URL without user:password means
	// the door of a router's embedded server. Other servers are not shown secrets.
	Ring      *trust.Ring
	Name      string // shown in the server's connection list
	CredsFile string // NATS credentials (JWT and seed)
	// TLSCert, TLSKey and TLSCA are PEM files; setting any turns TLS on.
	TLSCert, TLSKey, TLSCA string
	// Insecure allows a URL off this machine without credentials or TLS. A server without
	// user:password then counts as external.
	Insecure bool
	Dial     Dial // opens the connections to doors; nil: a net.Dialer does
	Log      *slog.Logger
}

// Validate checks the URLs, and that NATS off this machine has credentials or TLS. Its errors
// show no password or token.
func (c *ConnConfig) Validate() error {
	_, _, err := c.urls()
	return err
}

// urls returns the servers; door reports whether they are embedded ones.
func (c *ConnConfig) urls() (out []string, door bool, err error) {
	doors := 0
	for _, raw := range strings.Split(c.URL, ",") {
		if raw = strings.TrimSpace(raw); raw == "" {
			continue
		}
		if !strings.Contains(raw, "://") {
			raw = "nats://" + raw
		}
		u, err := url.Parse(raw)
		if err != nil {
			return nil, false, errors.New("nats url: want nats://[user:password@]host:port")
		}
		if (u.Scheme != "nats" && u.Scheme != "tls") || u.Hostname() == "" {
			return nil, false, fmt.Errorf("nats url %s: want nats://[user:password@]host:port", u.Scheme+"://"+u.Host)
		}
		secured := c.Insecure || c.Ring != nil || u.User != nil || u.Scheme == "tls" || c.CredsFile != "" || c.tls()
		if !secured && !loopback(u.Hostname()) {
			return nil, false, fmt.Errorf("nats url %s: a server off this machine needs credentials or TLS, or insecure: true", u.Redacted())
		}
		out = append(out, raw)
		if c.Ring != nil && !c.Insecure && c.CredsFile == "" && u.User == nil && u.Scheme == "nats" {
			doors++
		}
	}
	if doors > 0 && doors < len(out) {
		return nil, false, errors.New("nats url: routers' own servers and others are mixed")
	}
	if len(out) == 0 {
		return nil, false, errors.New("nats url: none given")
	}
	return out, doors > 0, nil
}

func (c *ConnConfig) tls() bool { return c.TLSCert != "" || c.TLSCA != "" }

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Timing of the link. Three missed pings end it, and a server that is back is found, well
// before silence kills (deadAfter).
const (
	pingInterval = 500 * time.Millisecond
	maxPingsOut  = 2
	dialTimeout  = 2 * time.Second
	firstRetry   = 100 * time.Millisecond // then doubling
	lastRetry    = 1600 * time.Millisecond
	refusedRetry = 5 * time.Second // instead of lastRetry, at a server that refuses us
)

// retryDelay is the wait before the nth attempt in a row, up to a quarter more or less.
func retryDelay(n int, refused bool) time.Duration {
	limit := lastRetry
	if refused {
		limit = refusedRetry
	}
	d := limit
	if n < 16 {
		d = min(limit, firstRetry<<max(0, n-1))
	}
	return d*3/4 + rand.N(d/2)
}

// Conn is a process's connection to NATS. It reconnects for ever. While it is down it
// buffers nothing: old signs of life are worse than none.
type Conn struct {
	nc     *nats.Conn
	cfg    ConnConfig
	log    *slog.Logger
	closed chan struct{} // closed when the NATS client has ended

	mu         sync.Mutex
	link       Link
	wasUp      bool
	listeners  map[int]func(Link) // called in order, with mu held
	next       int
	complained time.Time
	hosts      string // of the URLs, for the log
	refused    int    // attempts in a row that were refused

	door  bool       // the servers are embedded ones
	outer *trust.TLS // around the pinned connection; nil: none
}

// Connect connects in the background; only a bad configuration is an error. The caller
// closes the Conn after every Announcer and Watcher on it.
func Connect(cfg ConnConfig) (*Conn, error) {
	urls, door, err := cfg.urls()
	if err != nil {
		return nil, err
	}
	if cfg.Dial == nil {
		cfg.Dial = new(net.Dialer).DialContext
	}
	c := &Conn{
		log:       logger(cfg.Log),
		closed:    make(chan struct{}),
		link:      Link{Since: time.Now()},
		listeners: map[int]func(Link){},
		cfg:       cfg,
		door:      door,
		hosts:     hosts(urls),
	}
	opts := []nats.Option{
		nats.Name(cfg.Name),
		nats.MaxReconnects(-1),
		nats.RetryOnFailedConnect(true),
		nats.IgnoreAuthErrorAbort(),
		nats.CustomReconnectDelay(c.delay),
		nats.ReconnectBufSize(-1),
		nats.PingInterval(pingInterval),
		nats.MaxPingsOutstanding(maxPingsOut),
		nats.Timeout(dialTimeout),
		nats.FlusherTimeout(dialTimeout),
		nats.DrainTimeout(dialTimeout),
		nats.ConnectHandler(func(*nats.Conn) { c.set(true, nil) }),
		nats.ReconnectHandler(func(*nats.Conn) { c.set(true, nil) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { c.set(false, err) }),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { c.complain(err) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { c.complain(err) }),
		nats.ClosedHandler(func(*nats.Conn) { close(c.closed) }),
	}
	switch {
	case door:
		if c.outer, err = trust.NewTLS(cfg.TLSCert, cfg.TLSKey, cfg.TLSCA, c.log); err != nil {
			return nil, fmt.Errorf("connect to nats: %w", err)
		}
		opts = append(opts, nats.SetCustomDialer(c))
	case cfg.CredsFile != "":
		opts = append(opts, nats.UserCredentials(cfg.CredsFile))
	}
	if cfg.TLSCert != "" && !door {
		opts = append(opts, nats.ClientCert(cfg.TLSCert, cfg.TLSKey))
	}
	if cfg.TLSCA != "" && !door {
		opts = append(opts, nats.RootCAs(cfg.TLSCA))
	}
	if c.nc, err = nats.Connect(strings.Join(urls, ","), opts...); err != nil {
		return nil, fmt.Errorf("connect to nats: %w", err)
	}
	return c, nil
}

// refusal is the error of a server that does not know or accept our secret.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// Dial implements nats.CustomDialer, for doors. While two secrets are in force, it tries
// the other one after a refusal: a server may know only one of them.
func (c *Conn) Dial(_, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	c.mu.Lock()
	refused := c.refused
	c.mu.Unlock()
	secrets := c.cfg.Ring.Secrets()
	conn, err := c.enter(ctx, addr, secrets[refused%len(secrets)])
	var header tls.RecordHeaderError
	switch {
	case errors.As(err, &header):
		err = fmt.Errorf("%s is no xpyd router's NATS: another one needs user:password in its URL, tls://, a creds_file, or fleet.insecure: true", addr)
	case trust.Refused(err):
		err = &refusal{err}
	}
	return conn, err
}

// Rejoin follows a changed join line: it moves to these servers, unless it is at one of them,
// and tries again at once if it was refused.
func (c *Conn) Rejoin(url string) error {
	cfg := c.cfg
	cfg.URL = url
	urls, door, err := cfg.urls()
	if err == nil && door != c.door {
		err = errors.New("nats url: a change between a router's own server and another one takes a restart")
	}
	if err != nil {
		return err
	}
	at := c.nc.ConnectedUrl() // before the new pool changes it
	if err := c.nc.SetServerPool(urls); err != nil {
		return fmt.Errorf("nats url: %w", err)
	}
	c.mu.Lock()
	c.hosts, c.refused = hosts(urls), 0
	c.mu.Unlock()
	if at != "" && slices.ContainsFunc(urls, func(u string) bool { return sameServer(u, at) }) {
		return nil
	}
	if err := c.nc.ForceReconnect(); err != nil {
		return fmt.Errorf("reconnect to nats: %w", err)
	}
	return nil
}

// sameServer compares two valid URLs without their credentials.
func sameServer(a, b string) bool { return hosts([]string{a}) == hosts([]string{b}) }

// hosts lists the hosts of URLs, for logs.
func hosts(urls []string) string {
	var out []string
	for _, raw := range urls {
		if u, err := url.Parse(raw); err == nil {
			out = append(out, u.Host)
		}
	}
	return strings.Join(out, ",")
}

func (c *Conn) delay(n int) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return retryDelay(n, c.refused > 0)
}

// Link returns the state of the connection.
func (c *Conn) Link() Link {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.link
}

// listen calls f with the current state and then with every change, one at a time,
// until stop has returned. f must not block or call c.
func (c *Conn) listen(f func(Link)) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := c.next
	c.next++
	c.listeners[id] = f
	f(c.link)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.listeners, id)
	}
}

func (c *Conn) set(up bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if up == c.link.Up {
		return
	}
	if up && c.wasUp {
		c.link.Reconnects++
	}
	c.wasUp = c.wasUp || up
	c.link.Up, c.link.Since = up, time.Now()
	switch {
	case up:
		c.complained, c.refused = time.Time{}, 0
		c.log.Info("nats link is up")
	case err == nil: // closed by us or by the server
		c.log.Info("nats link is closed")
	default:
		c.log.Info("nats link is down", "err", err) // a warning follows if the first try does not find it again
	}
	for _, f := range c.listeners {
		f(c.link)
	}
}

// complain logs an error of the link, at most one per interval.
func (c *Conn) complain(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var away *refusal
	every, refused := complaints, errors.As(err, &away) || errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired)
	if refused {
		every = refusalLines
		c.refused++
	} else {
		c.refused = 0
	}
	now := time.Now()
	switch {
	case !c.complained.IsZero() && now.Sub(c.complained) < every:
		return
	case refused && c.cfg.Ring != nil:
		c.log.Warn("the router at " + c.hosts + " does not know this fleet secret (" + c.cfg.Ring.IDs() + "), or has revoked this worker; copy its join-url here again, for --join-file")
	default:
		c.log.Warn("nats", "err", err, "up", c.link.Up)
	}
	c.complained = now
}

// Close flushes, ends all subscriptions and closes, at the latest when ctx ends.
func (c *Conn) Close(ctx context.Context) error {
	if err := c.nc.Drain(); err != nil && !errors.Is(err, nats.ErrConnectionReconnecting) && !errors.Is(err, nats.ErrConnectionClosed) {
		c.nc.Close()
	}
	select {
	case <-c.closed:
		return nil
	case <-ctx.Done():
		c.nc.Close()
		<-c.closed
		return fmt.Errorf("drain nats: %w", ctx.Err())
	}
}

func logger(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}
