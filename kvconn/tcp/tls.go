package tcp

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
)

// credentials are both halves of mutual TLS 1.3; nil: plain TCP.
type credentials struct {
	client, server *tls.Config
}

// loadCredentials reads the PEM files. The CA is the fleet's own: whoever has
// a certificate of it is a peer, wherever it runs, so names are not compared.
// Who a peer claims to be is checked by the sessions' handshake.
func loadCredentials(c Config) (*credentials, error) {
	if c.Cert == "" {
		return nil, nil
	}
	pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	if err != nil {
		return nil, fmt.Errorf("tcp: tls_cert: %w", err)
	}
	pem, err := os.ReadFile(c.CA)
	if err != nil {
		return nil, fmt.Errorf("tcp: tls_ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("tcp: tls_ca: no certificate in %s", c.CA)
	}
	// Both sides check the chain by this function alone; with ServerName unset
	// the library would refuse to.
	verify := func(usage x509.ExtKeyUsage) func(tls.ConnectionState) error {
		return func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 {
				return errors.New("peer has no certificate")
			}
			between := x509.NewCertPool()
			for _, c := range s.PeerCertificates[1:] {
				between.AddCert(c)
			}
			_, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{usage}})
			return err
		}
	}
	base := tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}}
	client, server := base.Clone(), base.Clone()
	client.InsecureSkipVerify, client.VerifyConnection = true, verify(x509.ExtKeyUsageServerAuth)
	server.ClientAuth, server.VerifyConnection = tls.RequireAnyClientCert, verify(x509.ExtKeyUsageClientAuth)
	server.SessionTicketsDisabled = true // every connection proves itself
	return &credentials{client, server}, nil
}

// secured is a TLS connection that closes at once. The library's Close waits
// for a peer to take its good-bye, which a stalled one does not; frames say
// themselves where they end.
type secured struct{ *tls.Conn }

func (s secured) Close() error { return s.NetConn().Close() }

// Private implements kvconn.PrivateConn: both sides have shown a certificate of
// the fleet's CA before a byte of theirs is read.
func (s secured) Private() bool { return true }

// secure wraps one end of a connection. The handshake runs with the first read
// or write, under the deadlines of whoever does that.
func (t *Transport) secure(c net.Conn, dialled bool) net.Conn {
	switch {
	case t.tls == nil:
		return c
	case dialled:
		return secured{tls.Client(c, t.tls.client)}
	}
	return secured{tls.Server(c, t.tls.server)}
}
