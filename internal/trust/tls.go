package trust

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/xpyd/xpyd/internal/reread"
)

// TLS is mutual TLS 1.3 between the members of a fleet: each side shows a certificate of the fleet's
// CA, for server or client use, besides the fleet's secret. Names are not compared, since members
// move between hosts. The files are read again when they change; open connections stay. A nil *TLS
// is plain TCP.
type TLS struct{ files *reread.Value[*shownCert] }

// shownCert is what the three files hold.
type shownCert struct {
	pair tls.Certificate
	ca   *x509.CertPool
}

// TLSError names the setting that is wrong.
type TLSError struct {
	Key string // "tls_cert", "tls_key" or "tls_ca"
	Err error
}

func (e *TLSError) Error() string { return e.Err.Error() }
func (e *TLSError) Unwrap() error { return e.Err }

// ConfigKey is the key, for package config.
func (e *TLSError) ConfigKey() string { return e.Key }

// ValidTLS wants all or none of NewTLS's files. The error is a *TLSError that names a given one.
func ValidTLS(cert, key, ca string) error {
	if (cert == "") == (key == "") && (cert == "") == (ca == "") {
		return nil
	}
	e := &TLSError{Key: "tls_ca", Err: errors.New("tls_cert, tls_key and tls_ca go together")}
	switch {
	case cert != "":
		e.Key = "tls_cert"
	case key != "":
		e.Key = "tls_key"
	}
	return e
}

// NewTLS reads PEM files: this process's certificate and key, and the fleet's CA. Without files it
// returns nil. The error is a *TLSError.
func NewTLS(cert, key, ca string, log *slog.Logger) (*TLS, error) {
	if err := ValidTLS(cert, key, ca); err != nil || cert == "" {
		return nil, err
	}
	load := func() (*shownCert, error) {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, &TLSError{"tls_cert", fmt.Errorf("%s with key %s: %w", cert, key, err)}
		}
		pool, err := CertPool(ca)
		if err != nil {
			return nil, &TLSError{"tls_ca", err}
		}
		return &shownCert{pair, pool}, nil
	}
	told := func(err error) {
		if err != nil {
			log.Error("the fleet's TLS files have changed but cannot be used; the old ones stay in force", "error", err)
			return
		}
		log.Info("the fleet's TLS files have been read again")
	}
	files, err := reread.New(load, told, cert, key, ca)
	if err != nil {
		return nil, err
	}
	return &TLS{files}, nil
}

// Client is for dialled connections; a nil TLS has nil.
func (t *TLS) Client() *tls.Config {
	if t == nil {
		return nil
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // would compare names; verify checks the chain
		VerifyConnection:   t.verify(x509.ExtKeyUsageServerAuth),
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &t.files.Get().pair, nil
		},
	}
}

// Server is for accepted connections; a nil TLS has nil.
func (t *TLS) Server() *tls.Config {
	if t == nil {
		return nil
	}
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		ClientAuth:             tls.RequireAnyClientCert, // verify looks at the chain
		VerifyConnection:       t.verify(x509.ExtKeyUsageClientAuth),
		SessionTicketsDisabled: true, // every connection proves itself
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return &t.files.Get().pair, nil
		},
	}
}

// verify checks a peer's chain.
func (t *TLS) verify(usage x509.ExtKeyUsage) func(tls.ConnectionState) error {
	return func(s tls.ConnectionState) error {
		if len(s.PeerCertificates) == 0 {
			return errors.New("the peer has no certificate")
		}
		between := x509.NewCertPool()
		for _, c := range s.PeerCertificates[1:] {
			between.AddCert(c)
		}
		_, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: t.files.Get().ca, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{usage}})
		return err
	}
}

// maxPEM bounds a file of certificates.
const maxPEM = 4 << 20

// CertPool reads a PEM file of CA certificates.
func CertPool(path string) (*x509.CertPool, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxPEM+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxPEM {
		return nil, fmt.Errorf("%s: more than %d bytes", path, maxPEM)
	}
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s: no certificates in PEM", path)
	}
	return p, nil
}
