package router_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/h1"
)

// authority issues certificates for tests.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	ca   string // its PEM file
	next int64
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir(), next: 1}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: "authority"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	a.key = a.fresh()
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.ca = filepath.Join(a.dir, "ca.pem")
	a.write(a.ca, "CERTIFICATE", der)
	return a
}

func (a *authority) fresh() *ecdsa.PrivateKey {
	a.t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	return k
}

func (a *authority) write(path, kind string, der []byte) {
	a.t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// issue writes a certificate for 127.0.0.1 and name, over the one before of
// the same name; serial tells them apart.
func (a *authority) issue(name string) (cert, key string, serial int64) {
	a.t.Helper()
	a.next++
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{name},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	k := a.fresh()
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &k.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	pk, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, key = filepath.Join(a.dir, name+".pem"), filepath.Join(a.dir, name+".key")
	a.write(cert, "CERTIFICATE", der)
	a.write(key, "EC PRIVATE KEY", pk)
	return cert, key, a.next
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

func (a *authority) pair(name string) tls.Certificate {
	a.t.Helper()
	cert, key, _ := a.issue(name)
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		a.t.Fatal(err)
	}
	return pair
}

// TestMutualTLS: the listener shows its certificate, the newest, and takes
// clients only with one of theirs.
func TestMutualTLS(t *testing.T) {
	t.Parallel()
	server, clients, strangers := newAuthority(t), newAuthority(t), newAuthority(t)
	cert, key, first := server.issue("router")
	g := newRig(t, 1, 1, func(c *router.Config) { c.TLSCert, c.TLSKey, c.TLSClientCA = cert, key, clients.ca })
	try := func(conf *tls.Config) (serial int64, err error) {
		t.Helper()
		conf.RootCAs = server.pool()
		tr := &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true}
		resp, err := (&http.Client{Transport: tr}).Post(strings.Replace(g.url, "http:", "https:", 1)+"/v1/completions", "application/json", strings.NewReader(askStream))
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != 200 || string(b) != storyText {
			t.Errorf("%d %q %v", resp.StatusCode, b, err)
		}
		return resp.TLS.PeerCertificates[0].SerialNumber.Int64(), nil
	}
	known := []tls.Certificate{clients.pair("client")}
	if serial, err := try(&tls.Config{Certificates: known}); err != nil || serial != first {
		t.Errorf("%d %v", serial, err)
	}
	if _, err := try(&tls.Config{Certificates: known, MaxVersion: tls.VersionTLS12}); err != nil {
		t.Errorf("TLS 1.2: %v", err)
	}
	if _, err := try(&tls.Config{}); err == nil {
		t.Error("a client without a certificate")
	}
	if _, err := try(&tls.Config{Certificates: []tls.Certificate{strangers.pair("client")}}); err == nil {
		t.Error("a stranger")
	}
	if _, err := try(&tls.Config{Certificates: known, MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}); err == nil {
		t.Error("TLS 1.1")
	}
	_, _, second := server.issue("router")
	g.until("the new certificate", func() bool {
		serial, err := try(&tls.Config{Certificates: known})
		return err == nil && serial == second
	})
	// Half a change does not break what works.
	if err := os.WriteFile(key, []byte("no key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := g.r.Reload(router.DefaultConfig().Limits, "prefix"); err == nil || !strings.HasPrefix(err.Error(), "tls_cert: ") {
		t.Errorf("%v", err)
	}
	if serial, err := try(&tls.Config{Certificates: known}); err != nil || serial != second {
		t.Errorf("%d %v", serial, err)
	}
}

// secureMock is an engine behind https that wants the router's certificate.
func (g *rig) secureMock(id string, cert tls.Certificate, clients *x509.CertPool) *mock {
	return g.secured(id, fleet.Decode, "openai", &tls.Config{Certificates: []tls.Certificate{cert}, ClientCAs: clients, ClientAuth: tls.RequireAndVerifyClientCert})
}

// secured is an engine or worker behind https.
func (g *rig) secured(id string, role fleet.Role, dialect string, conf *tls.Config) *mock {
	m := &mock{id: id}
	m.on(&m.prefill, prefillDone)
	m.on(&m.decode, story)
	m.on(&m.other, whole)
	m.srv = httptest.NewUnstartedServer(m)
	m.srv.Config.ErrorLog = log.New(g.logs, "", 0)
	m.srv.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return conf, nil }} // StartTLS adds a certificate of its own
	m.srv.StartTLS()
	m.inst = fleet.Instance{ID: id, Epoch: 1, Role: role, URL: m.srv.URL, KVAddr: "127.0.0.1:1", Dialect: dialect, Model: "m", MaxModelLen: 512}
	g.workers[id] = m
	if err := g.watcher.AddStatic(m.inst, fleet.Static); err != nil {
		g.t.Fatal(err)
	}
	return m
}

// TestSecureEngines: engines at https addresses are used if their certificate is valid
// for their name; the router shows them its own and its API key.
func TestSecureEngines(t *testing.T) {
	engines, routers := newAuthority(t), newAuthority(t)
	cert, key, _ := routers.issue("router")
	g := newRig(t, 0, 0, func(c *router.Config) {
		c.Upstream = h1.Upstream{CA: engines.ca, Cert: cert, Key: key, APIKey: "engines-own"}
	})
	e := g.secureMock("e0", engines.pair("e0"), routers.pool())
	g.until("ready", g.r.Ready)
	for range 3 {
		resp, body := g.post("/v1/completions", askStream, "Authorization", "Bearer the-clients")
		if resp.StatusCode != 200 || body != storyText {
			t.Fatalf("%d %q", resp.StatusCode, body)
		}
	}
	large := strings.Replace(ask, "Once", strings.Repeat("Once ", 50_000), 1)
	e.on(&e.decode, whole)
	if resp, body := g.post("/v1/completions", large); resp.StatusCode != 200 {
		t.Fatalf("%d %q", resp.StatusCode, body)
	}
	e.mu.Lock()
	if got := e.last.Get("Authorization"); got != "Bearer engines-own" {
		t.Errorf("it saw %q", got)
	}
	if string(e.body) != large {
		t.Error("another body")
	}
	e.mu.Unlock()
	if e.probes.Load() == 0 {
		t.Error("no probe")
	}
	g.until("the connections to be kept", g.idle)
}

// TestSecureEnginesRefused: a wrong name, an unknown authority.
func TestSecureEnginesRefused(t *testing.T) {
	t.Parallel()
	engines, others := newAuthority(t), newAuthority(t)
	cert, key, _ := engines.issue("router")
	for what, up := range map[string]h1.Upstream{
		"is not valid for any names, but wanted to match": {CA: engines.ca, Cert: cert, Key: key, ServerName: "elsewhere"},
		"certificate signed by unknown authority":         {CA: others.ca, Cert: cert, Key: key},
	} {
		g := newRig(t, 0, 0, func(c *router.Config) { c.Upstream = up })
		g.secureMock("e0", engines.pair("e0"), engines.pool())
		g.until("a failed probe", func() bool {
			logs := g.logs.String()
			return strings.Contains(logs, "probe failed") && (strings.Contains(logs, "x509") || strings.Contains(logs, what))
		})
		if g.r.Ready() {
			t.Errorf("%s: ready", what)
		}
	}
	g := newRig(t, 0, 0, func(c *router.Config) {
		c.Upstream = h1.Upstream{Cert: cert, Key: key, InsecureSkipVerify: true}
	})
	g.secureMock("e0", others.pair("e0"), engines.pool())
	g.until("ready", g.r.Ready)
	if !strings.Contains(g.logs.String(), "insecure_skip_verify") {
		t.Error("nobody is warned")
	}
}

func TestPassAuthorization(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.Upstream.PassAuthorization, c.Upstream.APIKey = true, "engines-own" })
	d := g.workers["d0"]
	seen := func(want string) {
		t.Helper()
		d.mu.Lock()
		defer d.mu.Unlock()
		if got := d.last.Get("Authorization"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	g.post("/v1/completions", ask, "Authorization", "Bearer the-clients")
	seen("Bearer the-clients")
	g.post("/v1/completions", ask)
	seen("Bearer engines-own")
	if strings.Contains(g.logs.String(), "the-clients") {
		t.Error("it is in the log")
	}
}

func TestSecurityConfig(t *testing.T) {
	f := refuses(t)
	f("tls_client_ca", func(c *router.Config) { c.TLSClientCA = "ca" })
	f("admin_tls_cert", func(c *router.Config) { c.AdminTLSKey = "k" })
	f("api_keys[1]", func(c *router.Config) { c.APIKeys = []string{"x", ""} })
	f("media_hosts[0]", func(c *router.Config) { c.MediaHosts = []string{"http://x"} })
	f("media_hosts[0]", func(c *router.Config) { c.MediaHosts = []string{"X"} })
	f("tenant_header", func(c *router.Config) { c.TenantHeader = "Authorization" })
	f("upstream.cert", func(c *router.Config) { c.Upstream.Cert = "x" })
	f("upstream.insecure_skip_verify", func(c *router.Config) { c.Upstream.InsecureSkipVerify, c.Upstream.CA = true, "x" })
	f("upstream.api_key", func(c *router.Config) { c.Upstream.APIKey = "a\nb" })
	f("upstream.api_key", func(c *router.Config) { c.Upstream.APIKey, c.Discovery.P2PListen = "a", "127.0.0.1:1" })
	f("upstream.pass_authorization", func(c *router.Config) { c.Upstream.PassAuthorization, c.Discovery.P2PListen = true, "127.0.0.1:1" })
	f("limits.max_queue_bytes", func(c *router.Config) { c.Limits.MaxQueueBytes = -1 })
	f("limits.priority_weights", func(c *router.Config) { c.Limits.PriorityWeights.Low = 0 })
	absent := filepath.Join(t.TempDir(), "absent")
	g := func(key string, edit func(*router.Config)) {
		t.Helper()
		c := router.DefaultConfig()
		c.AdminListen = ""
		edit(&c)
		if _, err := router.New(c, router.Deps{}); err == nil || !strings.HasPrefix(err.Error(), key+": ") {
			t.Errorf("%s: %v", key, err)
		}
	}
	g("api_keys_file", func(c *router.Config) { c.APIKeysFile = absent })
	g("tls_cert", func(c *router.Config) { c.TLSCert, c.TLSKey = absent, absent })
	g("upstream", func(c *router.Config) { c.Upstream.CA = absent })
	g("upstream", func(c *router.Config) { c.Upstream.Cert, c.Upstream.Key = absent, absent })
}

// TestAdminTLS: the admin listener speaks TLS only, by a certificate of its own.
func TestAdminTLS(t *testing.T) {
	a := newAuthority(t)
	g := newRig(t, 0, 0, func(c *router.Config) { c.AdminTLSCert, c.AdminTLSKey, _ = a.issue("admin") })
	g.client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: a.pool()}
	plain := g.admin
	g.admin = strings.Replace(plain, "http:", "https:", 1)
	if code := g.adminJSON("GET", "/admin/v1/instances", "", nil); code != 200 {
		t.Errorf("status %d", code)
	}
	resp, err := g.client.Get(plain + "/health")
	if err == nil {
		resp.Body.Close()
		if resp.StatusCode == 200 {
			t.Error("it answers without TLS")
		}
	}
	if code, _ := g.get("/health"); code != 200 {
		t.Errorf("the public listener: %d", code)
	}
}
