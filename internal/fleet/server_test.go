package fleet_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
)

// selfSigned writes a certificate for 127.0.0.1, which is its own authority.
func selfSigned(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "xpyd test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "EC PRIVATE KEY", secret)
}

// TestGivenListener: a server on a socket that another one had is found by the same URL.
func TestGivenListener(t *testing.T) {
	noLeak(t)
	ring, err := trust.NewRing(trust.NewSecret())
	if err != nil {
		t.Fatal(err)
	}
	first, err := fleet.StartServer(fleet.ServerConfig{Ring: ring})
	if err != nil {
		t.Fatal(err)
	}
	url := first.ClientURL()
	file, err := first.Listener().(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	c, err := fleet.Connect(fleet.ConnConfig{URL: url, Ring: ring})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	up := func() {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !c.Link().Up; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("not connected")
			}
		}
	}
	up()
	first.Close()
	ln, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	second, err := fleet.StartServer(fleet.ServerConfig{Ring: ring, Listener: ln, Listen: "127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if second.ClientURL() != url {
		t.Errorf("%s, was %s", second.ClientURL(), url)
	}
	for end := time.Now().Add(10 * time.Second); c.Link().Reconnects == 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if c.Link().Reconnects == 0 {
		t.Error("it did not reconnect")
	}
}

// TestTakenPorts: the error names the setting.
func TestTakenPorts(t *testing.T) {
	noLeak(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	taken := ln.Addr().String()
	for _, c := range []struct {
		key, why string
		cfg      fleet.ServerConfig
	}{
		{"fleet.listen: ", "in use", fleet.ServerConfig{Listen: taken}},
		{"fleet.listen: ", "in use", fleet.ServerConfig{Listen: taken, Ring: ring(t, trust.NewSecret())}},
		{"fleet.cluster_listen: ", "in use", fleet.ServerConfig{ClusterListen: taken}},
		{"nats listen", "insecure: true", fleet.ServerConfig{Listen: "0.0.0.0:0"}},
	} {
		s, err := fleet.StartServer(c.cfg)
		if err == nil {
			s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), c.key) || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s%v, want %s", c.key, err, c.why)
		}
	}
}

func TestMutualTLS(t *testing.T) {
	noLeak(t)
	cert, key := selfSigned(t)
	cfg := fleet.ServerConfig{TLSCert: cert, TLSKey: key, TLSCA: cert, ClusterListen: "127.0.0.1:0", ClusterUser: "r", ClusterPassword: "s"}
	a := startServer(t, cfg)
	cfg.ClusterRoutes = []string{a.ClusterURL()}
	b := startServer(t, cfg)
	dial := func(cfg fleet.ConnConfig) *fleet.Conn {
		c, err := fleet.Connect(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Close(t.Context()); err != nil && t.Context().Err() == nil {
				t.Error(err)
			}
		})
		return c
	}
	secured := func(s *fleet.Server) *fleet.Conn {
		return dial(fleet.ConnConfig{URL: s.ClientURL(), TLSCert: cert, TLSKey: key, TLSCA: cert})
	}
	if !strings.HasPrefix(a.ClientURL(), "tls://") {
		t.Fatal(a.ClientURL())
	}
	w := watch(t, fleet.WatcherConfig{Conn: secured(a)})
	announce(t, secured(b), instance("p", fleet.Prefill))
	eventually(t, w, "join over two servers", is("p", fleet.Live))
	stranger := dial(fleet.ConnConfig{URL: a.ClientURL(), TLSCA: cert})
	time.Sleep(200 * time.Millisecond)
	if stranger.Link().Up {
		t.Fatal("connected without a certificate")
	}
}

// clusterHeals restarts the server that the other one's route leads to.
func clusterHeals(t *testing.T) {
	cfg := fleet.ServerConfig{User: "u", Password: "p", ClusterListen: "127.0.0.1:0", ClusterUser: "r", ClusterPassword: "s"}
	a, err := fleet.StartServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	client, route := hostOf(t, a.ClientURL()), hostOf(t, a.ClusterURL())
	withRoute := cfg
	withRoute.ClusterRoutes = []string{a.ClusterURL()}
	b := startServer(t, withRoute)
	w := watch(t, fleet.WatcherConfig{Conn: connect(t, a.ClientURL())})
	announce(t, connect(t, b.ClientURL()), instance("p", fleet.Prefill))
	eventually(t, w, "join", is("p", fleet.Live))

	a.Close()
	eventually(t, w, "link down", linked(false))
	cfg.Listen, cfg.ClusterListen = client, route
	if a, err = fleet.StartServer(cfg); err != nil {
		t.Fatal(err)
	}
	eventually(t, w, "link up", linked(true))
	at := w.Snapshot().Get("p").Heard
	within(t, "the route does not heal", func() bool { return w.Snapshot().Get("p").Heard.After(at) })
	if m := w.Snapshot().Get("p"); m.State != fleet.Live {
		t.Fatalf("%+v", m)
	}
}

func hostOf(t *testing.T, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u.Host
}

func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}
