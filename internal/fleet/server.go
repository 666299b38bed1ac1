package fleet

import (
	"cmp"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/xpyd/xpyd/internal/trust"
)

// ServerConfig configures the NATS server that a router embeds. The zero value listens on a
// free loopback port with generated credentials. With a Ring, clients enter through a door, and
// routes prove that they have one of its secrets.
type ServerConfig struct {
	Listen string // host:port; default 127.0.0.1:0, any free port
	// Listener is used instead of Listen, with a Ring: another process has handed it over.
	Listener  net.Listener
	Advertise string      // the host in ClientURL when Listen binds every address
	Ring      *trust.Ring // the fleet's secrets; call Renew after a change
	// User and Password of workers and routers, without a Ring. By default they are
	// generated, unless Insecure.
	User, Password string
	// TLSCert, TLSKey and TLSCA are PEM files for clients and routes. With a CA, peers
	// must show a certificate.
	TLSCert, TLSKey, TLSCA string

	// ClusterListen is host:port for the servers of other routers, and ClusterRoutes their
	// URLs. Empty: no cluster.
	ClusterListen string
	ClusterRoutes []string
	// ClusterUser and ClusterPassword must be the same in every router. By default they
	// come from the Ring; without one they are generated, unless Insecure.
	ClusterUser, ClusterPassword string

	Insecure bool // allows a server without credentials, also off this machine
	Log      *slog.Logger
}

// Validate checks the addresses, and that a listener off this machine has credentials or TLS.
func (c *ServerConfig) Validate() error {
	check := func(what, addr string, secured bool) error {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			return fmt.Errorf("%s %q: want host:port", what, addr)
		}
		if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			return fmt.Errorf("%s %q: port is not in 0..65535", what, addr)
		}
		if !loopback(host) && !secured && c.Ring == nil && c.TLSCert == "" && !c.Insecure {
			return fmt.Errorf("%s %s: a listener off this machine needs credentials or TLS, or insecure: true", what, addr)
		}
		return nil
	}
	if err := check("nats listen", c.listen(), c.User != ""); err != nil {
		return err
	}
	if c.ClusterListen == "" {
		if len(c.ClusterRoutes) > 0 {
			return errors.New("nats cluster: routes need a cluster listener")
		}
		return nil
	}
	if err := check("nats cluster listen", c.ClusterListen, c.ClusterUser != ""); err != nil {
		return err
	}
	for _, r := range c.ClusterRoutes {
		if u, err := url.Parse(r); err != nil || u.Host == "" {
			return errors.New("nats cluster route: want nats-route://user:password@host:port")
		}
	}
	return nil
}

func (c *ServerConfig) listen() string { return cmp.Or(c.Listen, "127.0.0.1:0") }

// clusterTLSInsecureWarning is a text of nats-server, which does not export it.
const clusterTLSInsecureWarning = "TLS certificate chain and hostname of solicited routes will not be verified. DO NOT USE IN PRODUCTION!"

// Limits of the embedded server; the fleet's messages are small and few.
const (
	maxClients    = 16 << 10
	maxPayload    = 64 << 10
	maxPending    = 16 << 20
	maxGuests     = 512 // connections that have not yet shown the secret
	writeDeadline = 2 * time.Second
	startDeadline = 5 * time.Second
	clusterName   = "xpyd"
)

// Server is an embedded NATS server without JetStream and without files.
type Server struct {
	ns   *server.Server
	opts *server.Options
	cfg  ServerConfig
	gate *gate // nil without a Ring, and so are the door and ln
	door *door
	ln   net.Listener
}

// StartServer returns when the server accepts clients. The caller closes it last.
func StartServer(cfg ServerConfig) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	ln := cfg.Listener
	if cfg.Ring != nil && ln == nil {
		var err error
		if ln, err = net.Listen("tcp", cfg.listen()); err != nil {
			return nil, fmt.Errorf("embedded nats: fleet.listen: %w", err)
		}
	}
	s, err := startServer(cfg, ln)
	if err != nil {
		if ln != nil {
			ln.Close()
		}
		return nil, fmt.Errorf("embedded nats: %w", err)
	}
	return s, nil
}

// startServer owns ln, the door's listener, unless it fails.
func startServer(cfg ServerConfig, ln net.Listener) (*Server, error) {
	opts, err := cfg.options(ln)
	if err != nil {
		return nil, err
	}
	ns, err := server.NewServer(opts)
	if err != nil {
		return nil, err
	}
	said := &serverLog{log: logger(cfg.Log), door: ln != nil}
	ns.SetLoggerV2(said, false, false, false)
	ns.Start()
	s := &Server{ns: ns, opts: opts, cfg: cfg, ln: ln}
	for deadline := time.Now().Add(startDeadline); !s.ready(50 * time.Millisecond); {
		err := said.first()
		if err == nil && time.Now().After(deadline) {
			err = fmt.Errorf("not ready after %v", startDeadline)
		}
		if err != nil {
			s.Close()
			return nil, err
		}
	}
	if ln != nil {
		s.gate = opts.CustomClientAuthentication.(*gate)
		outer, err := trust.NewTLS(cfg.TLSCert, cfg.TLSKey, cfg.TLSCA, said.log)
		if err != nil {
			s.Close()
			return nil, err
		}
		s.door = openDoor(ln, ns, cfg.Ring, outer, said.log)
	}
	said.log.Info("embedded nats listens", "addr", s.addr().String())
	return s, nil
}

// ready waits a little for the server to accept clients and, in a cluster, routes.
func (s *Server) ready(wait time.Duration) bool {
	if s.opts.CustomClientAuthentication == nil || s.opts.DontListen {
		return s.ns.ReadyForConnections(wait)
	}
	if s.ns.ClusterAddr() != nil { // no listener for clients
		return true
	}
	time.Sleep(wait) // there is nothing to wait on
	return false
}

// options makes the server's options. With ln, the door's listener, the server itself
// does not listen for clients.
func (c *ServerConfig) options(ln net.Listener) (*server.Options, error) {
	token := rand.Text()
	o := &server.Options{
		ServerName: "xpyd-" + token[:12],
		NoSigs:     true,
		MaxConn:    maxClients, MaxPayload: maxPayload, MaxPending: maxPending,
		PingInterval: time.Second, MaxPingsOut: 2,
		WriteDeadline:         writeDeadline,
		DisableShortFirstPing: true,
	}
	o.Host, o.Port = splitListen(c.listen())
	if c.Ring == nil {
		o.Username, o.Password = c.credentials(c.User, c.Password)
	} else {
		g := &gate{routes: c.Ring.Gate(trust.Cluster, ""), user: c.ClusterUser, password: c.ClusterPassword}
		o.CustomClientAuthentication, o.CustomRouterAuthentication = g, g
		// DontListen would stop it listening for routes too. In a cluster it therefore gets the
		// door's port, where it cannot listen.
		o.DontListen = c.ClusterListen == ""
		o.Host, o.Port = splitListen(ln.Addr().String())
	}
	var conf *tls.Config
	if c.TLSCert != "" {
		var err error
		conf, err = server.GenTLSConfig(&server.TLSConfigOpts{
			CertFile: c.TLSCert, KeyFile: c.TLSKey, CaFile: c.TLSCA, Verify: c.TLSCA != "",
		})
		if err != nil {
			return nil, fmt.Errorf("embedded nats tls: %w", err)
		}
		if c.Ring == nil {
			o.TLSConfig, o.TLSVerify, o.TLSTimeout = conf, c.TLSCA != "", dialTimeout.Seconds()
		}
	}
	if c.ClusterListen == "" {
		return o, nil
	}
	o.Cluster = server.ClusterOpts{
		Name: clusterName, NoAdvertise: true,
		PingInterval: time.Second, MaxPingsOut: 2, WriteDeadline: writeDeadline,
		ConnectRetries: 1 << 30,
	}
	o.Cluster.Host, o.Cluster.Port = splitListen(c.ClusterListen)
	if c.Ring == nil {
		o.Cluster.Username, o.Cluster.Password = c.credentials(c.ClusterUser, c.ClusterPassword)
	}
	switch {
	case conf != nil:
		o.Cluster.TLSConfig = conf.Clone()
		o.Cluster.TLSConfig.RootCAs = conf.ClientCAs
	case c.Ring != nil:
		o.Cluster.TLSConfig = c.Ring.PinnedPeers()
	}
	o.Cluster.TLSTimeout = dialTimeout.Seconds()
	var err error
	o.Routes, err = c.routes()
	return o, err
}

// routes returns the other servers, with our credentials: of two secrets the older, as others
// may not have the newer yet.
func (c *ServerConfig) routes() (out []*url.URL, err error) {
	for _, r := range c.ClusterRoutes {
		u, err := url.Parse(r)
		if err != nil {
			return nil, errors.New("nats cluster route: not a url")
		}
		switch {
		case u.User != nil:
		case c.ClusterUser != "":
			u.User = url.UserPassword(c.ClusterUser, c.ClusterPassword)
		case c.Ring != nil:
			secrets := c.Ring.Secrets()
			s := secrets[len(secrets)-1]
			u.User = url.UserPassword(s.ID(), s.Token(trust.Cluster, ""))
		}
		out = append(out, u)
	}
	return out, nil
}

// Renew follows a change of the Ring: it disconnects clients whose secret is no longer in force,
// and makes routes with one that is.
func (s *Server) Renew() error {
	if s.cfg.Ring == nil {
		return nil
	}
	s.door.renew()
	if len(s.cfg.ClusterRoutes) == 0 {
		return nil
	}
	next := s.opts.Clone()
	if s.cfg.TLSCert == "" {
		next.Cluster.TLSConfig = s.cfg.Ring.PinnedPeers() // offers the ring's secrets
	}
	var err error
	if next.Routes, err = s.cfg.routes(); err == nil {
		err = s.ns.ReloadOptions(next)
	}
	if err != nil {
		return fmt.Errorf("embedded nats: %w", err)
	}
	return nil
}

// Revoke turns away the clients of these names from now on, and only these. Without a
// Ring it only ends their connections.
func (s *Server) Revoke(names []string) error {
	if s.gate != nil {
		s.gate.revoked.Store(&names)
	}
	if len(names) == 0 {
		return nil
	}
	list, err := s.ns.Connz(&server.ConnzOptions{Limit: maxClients})
	if err != nil {
		return fmt.Errorf("embedded nats: %w", err)
	}
	for _, c := range list.Conns {
		if slices.Contains(names, c.Name) {
			_ = s.ns.DisconnectClientByID(c.Cid) // fails if it has left
		}
	}
	return nil
}

func (c *ServerConfig) credentials(user, password string) (string, string) {
	if user != "" || password != "" || c.Insecure {
		return user, password
	}
	return "xpyd", rand.Text()
}

// splitListen splits a valid address. For the server, any free port is -1.
func splitListen(addr string) (string, int) {
	host, port, _ := net.SplitHostPort(addr)
	n, _ := strconv.Atoi(port)
	if n == 0 {
		n = -1
	}
	return host, n
}

// ClientURL is the URL for ConnConfig. Without a Ring it holds credentials.
func (s *Server) ClientURL() string {
	scheme := "nats"
	if s.opts.TLSConfig != nil {
		scheme = "tls"
	}
	return s.url(scheme, s.addr(), s.opts.Username, s.opts.Password)
}

func (s *Server) url(scheme string, addr net.Addr, user, password string) string {
	host, port, _ := net.SplitHostPort(addr.String())
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = cmp.Or(s.cfg.Advertise, "127.0.0.1")
	}
	u := url.URL{Scheme: scheme, Host: net.JoinHostPort(host, port)}
	if user != "" {
		u.User = url.UserPassword(user, password)
	}
	return u.String()
}

// Routes counts the connections to other servers of the cluster.
func (s *Server) Routes() int { return s.ns.NumRoutes() }

// addr is where clients connect.
func (s *Server) addr() net.Addr {
	if s.door != nil {
		return s.door.ln.Addr()
	}
	return s.ns.Addr()
}

// Listener is where clients enter, for another process; nil without a Ring.
func (s *Server) Listener() net.Listener { return s.ln }

// Close disconnects everybody and waits for the server's end.
func (s *Server) Close() {
	if s.door != nil {
		s.door.close()
	}
	s.ns.Shutdown()
	s.ns.WaitForShutdown()
}

// serverLog passes on the server's log. It keeps a fatal error instead of ending the process.
type serverLog struct {
	log  *slog.Logger
	door bool // clients enter by a door: the server cannot listen for them

	mu    sync.Mutex
	fatal error
}

func (l *serverLog) first() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatal
}

func (l *serverLog) Fatalf(format string, v ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fatal != nil || l.door && keyOf(format) == "fleet.listen: " {
		return
	}
	l.fatal = fmt.Errorf("%s%s", keyOf(format), strings.ToLower(fmt.Sprintf(format, v...)))
	if n := len(v) - 1; n >= 0 {
		if cause, ok := v[n].(error); ok {
			l.fatal = &fatal{error: l.fatal, cause: cause}
		}
	}
}

// fatal is the server's words, which name the cause, with the cause for errors.Is.
type fatal struct {
	error
	cause error
}

func (f *fatal) Unwrap() error { return f.cause }

// keyOf names the setting behind a fatal error.
func keyOf(format string) string {
	switch {
	case strings.HasPrefix(format, "Error listening on port"):
		return "fleet.listen: "
	case strings.HasPrefix(format, "Error listening on router port"):
		return "fleet.cluster_listen: "
	}
	return ""
}

// Errorf leaves out refused clients: they are counted elsewhere, and revoked ones are expected.
func (l *serverLog) Errorf(format string, v ...any) {
	if text := fmt.Sprintf(format, v...); !strings.Contains(text, server.ErrAuthentication.Error()) {
		l.log.Error("nats", "says", text)
	}
}

// Warnf leaves out the advice to hash passwords (ours is random, and only in this
// process's memory) and to verify routes by a CA (they are pinned).
func (l *serverLog) Warnf(format string, v ...any) {
	if !strings.HasPrefix(format, "Plaintext passwords") && format != clusterTLSInsecureWarning {
		l.log.Warn("nats", "says", fmt.Sprintf(format, v...))
	}
}
func (l *serverLog) Noticef(format string, v ...any) {
	l.log.Debug("nats: " + fmt.Sprintf(format, v...))
}
func (l *serverLog) Debugf(string, ...any) {}
func (l *serverLog) Tracef(string, ...any) {}
