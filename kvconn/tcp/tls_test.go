package tcp_test

import (
	"context"
	"crypto/x509"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/trust/trusttest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

var bothUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}

// secured is a transport with a certificate of one CA that trusts b's.
func secured(t testing.TB, cert, key string, b *trusttest.Authority) kvconn.Transport {
	t.Helper()
	creds, err := trust.NewTLS(cert, key, b.CA(), slog.New(slog.DiscardHandler))
	check(t, err)
	return tcp.New(creds)
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
	a := trusttest.New(t)
	cert, key, _ := a.Member(t, "worker")
	kvconntest.Run(t, kvconntest.Factory{
		New:    func(t testing.TB) (kvconn.Transport, string) { return secured(t, cert, key, a), "127.0.0.1:0" },
		Shrink: 2, AtOnce: 48,
	})
}

// Whoever has no good certificate gets no session, on either side, and hears
// of it within the handshake's deadline.
func TestTLSRefused(t *testing.T) {
	a, b := trusttest.New(t), trusttest.New(t)
	// made is a transport with a certificate by one CA that trusts another.
	made := func(name string, by, trusts *trusttest.Authority, c *x509.Certificate) kvconn.Transport {
		cert, key, _ := by.Sign(t, name, c)
		return secured(t, cert, key, trusts)
	}
	member := func() *x509.Certificate { return &x509.Certificate{ExtKeyUsage: bothUsages} }
	expired := func() *x509.Certificate {
		return &x509.Certificate{ExtKeyUsage: bothUsages, NotAfter: time.Now().Add(-time.Minute)}
	}
	good := made("worker", a, a, member())
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
	f("client of another CA", good, made("worker", b, a, member()))
	f("server of another CA", made("worker", b, a, member()), good)
	f("client trusts another CA", good, made("other", a, b, member()))
	f("expired client", good, made("expired", a, a, expired()))
	f("expired server", made("expired", a, a, expired()), good)
	f("a client's certificate as server", made("client", a, a, &x509.Certificate{ExtKeyUsage: bothUsages[1:]}), good)
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
