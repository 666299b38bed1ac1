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

// ServerTLS is a listener's TLS; each handshake uses the latest files.
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

// Config uses what is loaded at the time of each handshake.
func (s *ServerTLS) Config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.now.Load(), nil }}
}

// Upstream is how engines are reached, beyond plain HTTP.
type Upstream struct {
	// CA is a PEM file of the CAs for engines whose URL is https; "": the system's. Cert
	// and Key are PEM files of the router's own certificate; "": none.
	CA   string `key:"ca"`
	Cert string `key:"cert"`
	Key  string `key:"key"`
	// ServerName is the name in the engines' certificates, if it is not their URL's host.
	ServerName string `key:"server_name"`
	// InsecureSkipVerify accepts any certificate.
	InsecureSkipVerify bool `key:"insecure_skip_verify"`
	// APIKey is sent to engines as a bearer token, also with probes.
	APIKey string `key:"api_key" secret:"true"`
	// PassAuthorization passes on the client's Authorization header in place of APIKey.
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

// LoadTLS reads the files of Upstream.
func (u *Client) LoadTLS() error {
	c := &u.upstream
	t := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, ServerName: c.ServerName,
		InsecureSkipVerify: c.InsecureSkipVerify, ClientSessionCache: tls.NewLRUClientSessionCache(256)}
	var err error
	if c.CA != "" {
		if t.RootCAs, err = trust.CertPool(c.CA); err != nil {
			return err
		}
	}
	if c.Cert != "" {
		pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
		if err != nil {
			return err
		}
		t.Certificates = []tls.Certificate{pair}
	}
	u.engineTLS.Store(t)
	return nil
}

// Marks of addresses that are reached by TLS, so that connections to engines and to the
// fleet's own workers are kept apart.
const (
	Secure = "tls:"
	Member = "member:"
)

// Bare is an address without its mark.
func Bare(addr string) string { return strings.TrimPrefix(strings.TrimPrefix(addr, Secure), Member) }

// handshake makes a connection a TLS one if its address is marked so.
func (u *Client) handshake(ctx context.Context, conn net.Conn, addr string) (net.Conn, error) {
	conf := u.memberTLS
	switch {
	case strings.HasPrefix(addr, Secure):
		if conf = u.engineTLS.Load(); conf.ServerName == "" {
			conf = conf.Clone()
			conf.ServerName, _, _ = net.SplitHostPort(Bare(addr)) // Address has checked it
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

// HTTPClient has h, which asks engines what they are, use the TLS and the key of legs.
func (u *Client) HTTPClient(h *http.Client) *http.Client {
	t, ok := h.Transport.(*http.Transport)
	if !ok {
		return h
	}
	t = t.Clone()
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		return u.Dial(ctx, network, addr)
	}
	t.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := t.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return u.handshake(ctx, conn, Secure+addr)
	}
	own := *h
	own.Transport = &withKey{u.upstream.APIKey, t}
	return &own
}

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
