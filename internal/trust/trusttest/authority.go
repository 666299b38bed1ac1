// Package trusttest makes certificates for tests.
package trusttest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority is a CA, and a folder with what it has signed.
type Authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// New makes a CA that ends with t.
func New(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{dir: t.TempDir()}
	a.cert, a.key = a.sign(t, "ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// Member signs a certificate for both sides of a connection, and returns its files and the CA's.
func (a *Authority) Member(t testing.TB, name string) (cert, key, ca string) {
	t.Helper()
	return a.Sign(t, name, &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}})
}

// Sign signs a certificate that the caller has begun to fill in; without an end
// it is good for an hour.
func (a *Authority) Sign(t testing.TB, name string, c *x509.Certificate) (cert, key, ca string) {
	t.Helper()
	a.sign(t, name, c)
	return a.file(name + ".pem"), a.file(name + ".key"), a.CA()
}

// CA is the file of the CA's certificate.
func (a *Authority) CA() string { return a.file("ca.pem") }

func (a *Authority) file(name string) string { return filepath.Join(a.dir, name) }

// sign writes name.pem and name.key; the first certificate signs itself.
func (a *Authority) sign(t testing.TB, name string, c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(err)
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
	check(err)
	cert, err := x509.ParseCertificate(der)
	check(err)
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	check(err)
	check(os.WriteFile(a.file(name+".pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	check(os.WriteFile(a.file(name+".key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600))
	return cert, key
}
