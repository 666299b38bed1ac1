package tcp_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

// authority is a CA of a test.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	a := &authority{dir: t.TempDir()}
	a.cert, a.key = a.sign(t, "ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// sign writes name.pem and name.key; the first certificate signs itself.
func (a *authority) sign(t testing.TB, name string, c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	c.SerialNumber, c.Subject = big.NewInt(time.Now().UnixNano()), pkix.Name{CommonName: name}
	if c.NotAfter.IsZero() {
		c.NotAfter = time.Now().Add(time.Hour)
	}
	c.NotBefore = c.NotAfter.Add(-2 * time.Hour)
	parent, signer := c, key
	if a.cert != nil {
		parent, signer = a.cert, a.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	check(t, err)
	cert, err := x509.ParseCertificate(der)
	check(t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	check(t, err)
	check(t, os.WriteFile(filepath.Join(a.dir, name+".pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	check(t, os.WriteFile(filepath.Join(a.dir, name+".key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600))
	return cert, key
}

var bothUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}

// transport has the named certificate of a and trusts b.
func (a *authority) transport(t testing.TB, name string, b *authority) kvconn.Transport {
	t.Helper()
	cfg := tcp.DefaultConfig()
	cfg.Cert, cfg.Key, cfg.CA = filepath.Join(a.dir, name+".pem"), filepath.Join(a.dir, name+".key"), filepath.Join(b.dir, "ca.pem")
	tr, err := tcp.New(cfg)
	check(t, err)
	return tr
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The whole suite over mutual TLS: connections that are no sockets of their
// own, and whose good-byes nobody waits for.
func TestTLS(t *testing.T) {
	a := newAuthority(t)
	a.sign(t, "worker", &x509.Certificate{ExtKeyUsage: bothUsages})
	kvconntest.Run(t, kvconntest.Factory{
		New:    func(t testing.TB) (kvconn.Transport, string) { return a.transport(t, "worker", a), "127.0.0.1:0" },
		Shrink: 2, AtOnce: 48,
	})
}

// Whoever has no good certificate gets no session, on either side, and hears
// of it within the handshake's deadline.
func TestTLSRefused(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	for _, x := range []*authority{a, b} {
		x.sign(t, "worker", &x509.Certificate{ExtKeyUsage: bothUsages})
	}
	a.sign(t, "expired", &x509.Certificate{ExtKeyUsage: bothUsages, NotAfter: time.Now().Add(-time.Minute)})
	a.sign(t, "client", &x509.Certificate{ExtKeyUsage: bothUsages[1:]})
	good := a.transport(t, "worker", a)
	clock := kvconntest.NewClock(t)
	f := func(name string, server, client kvconn.Transport) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := kvconntest.NewWorld(t, &split{good, server, client}, "127.0.0.1:0", 4, nil)
			w.Clock = clock
			defer w.Close()
			start := clock.Now()
			if _, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{}); err == nil {
				t.Error("a session was opened")
			} else {
				t.Log(err)
			}
			if took, limit := clock.Since(start), w.RConfig.HandshakeTimeout+time.Second; took > limit {
				t.Errorf("known after %v, want at most %v", took, limit)
			}
			w.Empty(w.RConfig.PeerSilence)
		})
	}
	f("client of another CA", good, b.transport(t, "worker", a))
	f("server of another CA", b.transport(t, "worker", a), good)
	f("client trusts another CA", good, a.transport(t, "worker", b))
	f("expired client", good, a.transport(t, "expired", a))
	f("expired server", a.transport(t, "expired", a), good)
	f("a client's certificate as server", a.transport(t, "client", a), good)
	f("plain client", good, plain(t))
	f("plain server", plain(t), good)
}

// split listens with one transport and dials with another.
type split struct {
	kvconn.Transport
	server, client kvconn.Transport
}

func (s *split) Listen(addr string) (net.Listener, error) { return s.server.Listen(addr) }
func (s *split) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return s.client.Dial(ctx, addr)
}

func TestTLSConfig(t *testing.T) {
	a := newAuthority(t)
	pem, key := filepath.Join(a.dir, "ca.pem"), filepath.Join(a.dir, "ca.key")
	f := func(cert, key, ca string) {
		t.Helper()
		cfg := tcp.DefaultConfig()
		cfg.Cert, cfg.Key, cfg.CA = cert, key, ca
		if _, err := tcp.New(cfg); err == nil {
			t.Errorf("accepted %q %q %q", cert, key, ca)
		}
	}
	f(pem, "", "")
	f(pem, key, "")
	f("", "", pem)
	f(pem, key, filepath.Join(a.dir, "none"))
	f(pem, pem, pem)
	f(pem, key, key)
}
