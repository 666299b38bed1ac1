package h1

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/trust"
)

// ServerTLS is a listener's; each handshake uses what is in force.
type ServerTLS struct {
	Cert, Key, ClientCA string
	now                 atomic.Pointer[tls.Config]
}

// Load reads the files.
func (s *ServerTLS) Load() error {
	pair, err := tls.LoadX509KeyPair(s.Cert, s.Key)
	if err != nil {
		return err
	}
	c := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
	if s.ClientCA != "" {
		if c.ClientCAs, err = trust.CertPool(s.ClientCA); err != nil {
			return fmt.Errorf("tls_client_ca: %w", err)
		}
		c.ClientAuth = tls.RequireAndVerifyClientCert
	}
	s.now.Store(c)
	return nil
}

// Config uses what is in force at each handshake.
func (s *ServerTLS) Config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.now.Load(), nil }}
}

// Upstream is how engines are talked to, beyond plain HTTP.
type Upstream struct {
	// CA is a PEM file of who may vouch for engines whose URL is https; "" is
	// the system's. Cert and Key are PEM files by which the router shows who
	// it is, "" for not at all.
	CA   string `key:"ca"`
	Cert string `key:"cert"`
	Key  string `key:"key"`
	// ServerName is in the engines' certificates, if it is not the host of
	// their URL.
	ServerName string `key:"server_name"`
	// InsecureSkipVerify believes any certificate.
	InsecureSkipVerify bool `key:"insecure_skip_verify"`
	// APIKey is sent to engines as a bearer token, also with probes.
	APIKey string `key:"api_key" secret:"true"`
	// PassAuthorization sends the client's Authorization header on, in place
	// of APIKey.
	PassAuthorization bool `key:"pass_authorization"`
}

// Validate returns the first *config.KeyError.
func (u *Upstream) Validate() error {
	switch {
	case (u.Cert == "") != (u.Key == ""):
		return config.Bad("cert", "cert and key go together")
	case u.InsecureSkipVerify && (u.CA != "" || u.ServerName != ""):
		return config.Bad("insecure_skip_verify", "ca and server_name are not looked at with it; leave it out")
	case strings.ContainsAny(u.APIKey, "\r\n\x00"):
		return config.Bad("api_key", "it has a line break in it")
	}
	return nil
}

// clientTLS is for engines and workers whose URL is https.
type clientTLS struct {
	u       Upstream
	now     atomic.Pointer[tls.Config] // to engines
	members *tls.Config                // to the fleet's workers; nil: they have none
}

// LoadTLS reads the files of Upstream.
func (u *Client) LoadTLS() error { return u.tls.load() }

// HTTPClient makes h, which asks engines what they are, connect and name itself as
// legs do.
func (u *Client) HTTPClient(h *http.Client) *http.Client { return u.tls.client(h) }

func (c *clientTLS) load() error {
	t := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, ServerName: c.u.ServerName,
		InsecureSkipVerify: c.u.InsecureSkipVerify, ClientSessionCache: tls.NewLRUClientSessionCache(256)}
	var err error
	if c.u.CA != "" {
		if t.RootCAs, err = trust.CertPool(c.u.CA); err != nil {
			return err
		}
	}
	if c.u.Cert != "" {
		pair, err := tls.LoadX509KeyPair(c.u.Cert, c.u.Key)
		if err != nil {
			return err
		}
		t.Certificates = []tls.Certificate{pair}
	}
	c.now.Store(t)
	return nil
}

// Marks of the addresses that are connected to by TLS, so that the connections
// of each kind are kept apart: to engines, and to the fleet's own workers.
const (
	Secure = "tls:"
	Member = "member:"
)

// Bare is an address without a mark.
func Bare(addr string) string { return strings.TrimPrefix(strings.TrimPrefix(addr, Secure), Member) }

// shake makes a connection to addr a TLS one, if it is marked so.
func (c *clientTLS) shake(ctx context.Context, conn net.Conn, addr string) (net.Conn, error) {
	conf := c.members
	switch {
	case strings.HasPrefix(addr, Secure):
		if conf = c.now.Load(); conf.ServerName == "" {
			conf = conf.Clone()
			conf.ServerName, _, _ = net.SplitHostPort(Bare(addr)) // Address has looked
		}
	case !strings.HasPrefix(addr, Member):
		return conn, nil
	}
	t := tls.Client(conn, conf)
	if err := t.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	return t, nil
}

// under is the connection below TLS.
func under(conn net.Conn) net.Conn {
	if t, ok := conn.(*tls.Conn); ok {
		return t.NetConn()
	}
	return conn
}

func (c *clientTLS) client(h *http.Client) *http.Client {
	t, ok := h.Transport.(*http.Transport)
	if !ok {
		return h
	}
	t = t.Clone()
	t.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{Timeout: 2 * time.Second}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return c.shake(ctx, conn, Secure+addr)
	}
	own := *h
	own.Transport = &withKey{c.u.APIKey, t}
	return &own
}

// withKey adds a bearer token.
type withKey struct {
	key string
	*http.Transport
}

func (k *withKey) RoundTrip(req *http.Request) (*http.Response, error) {
	if k.key != "" {
		req = req.Clone(req.Context())
		req.Header.Set("Authorization", "Bearer "+k.key)
	}
	return k.Transport.RoundTrip(req)
}
