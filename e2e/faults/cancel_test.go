package faults

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

const slowPrompt = 1000 // tokens

// slowBody is a request whose prefill takes seconds; n tells requests apart,
// so that no prefix is cached.
func slowBody(r *cluster.Router, stream bool, n int) string {
	ids := make([]string, slowPrompt)
	for i := range ids {
		ids[i] = fmt.Sprint(3 + (i*i+7*n)%500)
	}
	return fmt.Sprintf(`{"model":"slow","prompt":[%s],"max_tokens":8,"temperature":0,"cache_salt":"%d","stream":%v}`, strings.Join(ids, ","), n, stream)
}

// certificate writes a self-signed pair for 127.0.0.1.
func certificate(t *testing.T) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "xpyd test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	pool.AddCert(parsed)
	return cert, key, pool
}

// TestCancel: a client that leaves during a prefill of seconds is noticed by
// both workers at once, streaming or not, plain or TLS.
func TestCancel(t *testing.T) {
	cert, key, pool := certificate(t)
	path := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(path, fmt.Appendf(nil, "tls_cert: %s\ntls_key: %s\n", cert, key), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := slowModel(t)
	for _, c := range []struct {
		name string
		args []string
	}{{"plain", nil}, {"tls", []string{"--config", path}}} {
		t.Run(c.name, func(t *testing.T) {
			r := cluster.Up(t, append([]string{"--model", dir}, c.args...)...)
			n := 0
			for _, stream := range []bool{true, false} {
				var took []time.Duration
				for range 3 {
					n++
					took = append(took, leave(t, r, pool, stream, n))
				}
				slices.Sort(took)
				t.Logf("stream %v: both workers were rid of it after %v (median), %v (most)", stream, took[len(took)/2], took[len(took)-1])
				if cluster.Late(took[len(took)/2], 250*time.Millisecond) {
					t.Errorf("stream %v: %v", stream, took)
				}
			}
			if a := cluster.Post(t.Context(), tlsClient(t, pool), r.URL+"/v1/completions", `{"prompt":"Once upon a time","max_tokens":8}`); !a.Good() {
				t.Errorf("undisturbed: %v", a)
			}
		})
	}
}

func tlsClient(t *testing.T, pool *x509.CertPool) *http.Client {
	c := cluster.NewClient(t)
	c.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: pool}
	return c
}

// leave sends a request, leaves while its prompt is computed, and returns how
// long the workers went on holding something for it.
func leave(t *testing.T, r *cluster.Router, pool *x509.CertPool, stream bool, n int) time.Duration {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan *cluster.Reply, 1)
	client := tlsClient(t, pool)
	go func() { done <- cluster.Post(ctx, client, r.URL+"/v1/completions", slowBody(r, stream, n)) }()
	// Prefill is computing once decode holds a ticket; then some time into it.
	cluster.Wait(t, 10*time.Second, "prefill under way", func() error {
		l, err := r.Ledger()
		if err != nil {
			return err
		}
		if len(l.Fleet["prefill-0"].Blocks) == 0 || len(l.Fleet["decode-0"].Tickets) == 0 {
			return fmt.Errorf("nothing held")
		}
		return nil
	})
	time.Sleep(200 * time.Millisecond)
	select {
	case a := <-done:
		t.Fatalf("answered before the client could leave: %v", a)
	default:
	}
	at := time.Now()
	cancel()
	cluster.Wait(t, 5*time.Second, "ledgers empty", r.Idle)
	took := time.Since(at)
	if a := <-done; a.Err == nil {
		t.Errorf("the client got an answer: %v", a)
	}
	return took.Round(time.Millisecond)
}
