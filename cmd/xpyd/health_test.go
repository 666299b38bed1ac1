package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestHealth: a health check passes where the process says that it is well, and nowhere else.
func TestHealth(t *testing.T) {
	held := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no pair\x1b[2J", http.StatusServiceUnavailable)
	})
	mux.HandleFunc("GET /moved", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/ready", http.StatusFound) })
	mux.HandleFunc("GET /hangs", func(_ http.ResponseWriter, r *http.Request) { <-held })
	plain, secure := httptest.NewServer(mux), httptest.NewUnstartedServer(mux)
	secure.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	secure.StartTLS()
	defer plain.Close()
	defer secure.Close()
	defer close(held)
	gone := httptest.NewServer(mux)
	gone.Close()

	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	pair := secure.TLS.Certificates[0]
	der, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for path, b := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: pair.Certificate[0]}, key: {Type: "PRIVATE KEY", Bytes: der}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{plain.URL, exitDone, ""},
		{plain.URL + "/", exitDone, ""},
		{plain.URL + "/health", exitDone, ""},
		{plain.URL + "/ready", exitFailed, "503 Service Unavailable: no pair"},
		{plain.URL + "/moved", exitFailed, "503"},
		{plain.URL + "/none", exitFailed, "404"},
		{plain.URL + "/hangs --timeout 50ms", exitFailed, "deadline"},
		{gone.URL, exitFailed, "refused"},
		{secure.URL, exitFailed, "certificate"},
		{secure.URL + " --cert " + cert + " --key " + key, exitDone, ""},
		{secure.URL + " --cert " + cert, exitUsage, "--key"},
		{secure.URL + " --cert " + key + " --key " + key, exitFailed, "--cert"},
		{plain.URL + " --timeout 0s", exitUsage, "--timeout"},
		{"127.0.0.1:8000", exitUsage, "http://host:port"},
		{"unix:///run/x", exitUsage, "http://host:port"},
		{"", exitUsage, "accepts 1 arg"},
	} {
		out, errs, code := xpyd(t, append([]string{"health"}, strings.Fields(c.args)...)...)
		if code != c.code || !strings.Contains(errs, c.says) || out != "" || strings.Contains(errs, "\x1b") {
			t.Errorf("%s: code %d, says %q %q, want %d and %q", c.args, code, out, errs, c.code, c.says)
		}
	}
}
