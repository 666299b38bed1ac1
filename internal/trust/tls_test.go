package trust_test

import (
	"bytes"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/reread"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/trust/trusttest"
)

func TestTLSConfig(t *testing.T) {
	a := trusttest.New(t)
	cert, key, ca := a.Member(t, "worker")
	none := filepath.Join(t.TempDir(), "none")
	f := func(cert, key, ca, want string) {
		t.Helper()
		got, err := trust.NewTLS(cert, key, ca, slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q %q %q: %v, %v; want %q", cert, key, ca, got, err, want)
		}
	}
	f(cert, "", "", "go together")
	f(cert, key, "", "go together")
	f("", "", ca, "go together")
	f(cert, key, none, none)
	f(none, key, ca, none)
	f(cert, cert, ca, cert)
	f(cert, key, key, "no certificates")
	if got, err := trust.NewTLS("", "", "", nil); got != nil || err != nil {
		t.Errorf("no files: %v, %v", got, err)
	}
}

// shake connects the two, and says what each side has against the other.
func shake(t *testing.T, client, server *tls.Config) (c, s error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0") // a pipe has no room for alerts
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		defer far.Close()
		conn := tls.Server(far, server)
		err := conn.Handshake()
		if err == nil {
			_, err = conn.Write([]byte("x"))
		}
		done <- err
	}()
	conn := tls.Client(near, client)
	if c = conn.Handshake(); c == nil { // the server's word on our certificate comes behind
		_, c = io.ReadFull(conn, make([]byte, 1))
	}
	return c, <-done
}

func TestTLS(t *testing.T) {
	a, b := trusttest.New(t), trusttest.New(t)
	of := func(by *trusttest.Authority, trusts *trusttest.Authority) *trust.TLS {
		t.Helper()
		cert, key, _ := by.Member(t, "worker")
		c, err := trust.NewTLS(cert, key, trusts.CA(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	f := func(name string, client, server *tls.Config, ok bool) {
		t.Helper()
		c, s := shake(t, client, server)
		if ok != (c == nil && s == nil) || !ok && (c == nil || s == nil) {
			t.Errorf("%s: the client says %v, the server %v", name, c, s)
		}
	}
	good, stranger := of(a, a), of(b, a)
	f("members", good.Client(), of(a, a).Server(), true)
	f("a client of another CA", stranger.Client(), good.Server(), false)
	f("a server of another CA", good.Client(), stranger.Server(), false)
	f("a client without a certificate", &tls.Config{InsecureSkipVerify: true}, good.Server(), false)
	old := good.Client()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	f("TLS 1.2", old, good.Server(), false)
}

// TestTLSRenewed: what is renewed on disk is in force soon, also the CA; what
// cannot be read changes nothing.
func TestTLSRenewed(t *testing.T) { synctest.Test(t, renewed) }

func renewed(t *testing.T) {
	a, b := trusttest.New(t), trusttest.New(t)
	dir := t.TempDir()
	put := func(from ...string) {
		t.Helper()
		for i, name := range []string{"cert", "key", "ca"} {
			text, err := os.ReadFile(from[i])
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	copied := func(by *trusttest.Authority, name string) {
		t.Helper()
		cert, key, ca := by.Member(t, name)
		put(cert, key, ca)
	}
	copied(a, "worker")
	var log bytes.Buffer
	member, err := trust.NewTLS(filepath.Join(dir, "cert"), filepath.Join(dir, "key"), filepath.Join(dir, "ca"), slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	client, server := member.Client(), member.Server()
	peer := func(by *trusttest.Authority) *tls.Config {
		cert, key, ca := by.Member(t, "peer")
		c, err := trust.NewTLS(cert, key, ca, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return c.Client()
	}
	f := func(when string, client, server *tls.Config, ok bool) {
		t.Helper()
		c, s := shake(t, client, server)
		if ok != (c == nil && s == nil) {
			t.Errorf("%s: the client says %v, the server %v", when, c, s)
		}
	}
	f("before", peer(a), server, true)
	f("before", peer(b), server, false)
	copied(b, "worker")
	time.Sleep(reread.Every)
	f("renewed", peer(a), server, false)
	f("renewed", peer(b), server, true)
	f("with itself", client, server, true)
	put(filepath.Join(dir, "cert"), filepath.Join(dir, "cert"), filepath.Join(dir, "ca"))
	time.Sleep(reread.Every)
	f("broken", peer(b), server, true)
	if text := log.String(); strings.Count(text, "read again") != 1 || strings.Count(text, "stay in force") != 1 {
		t.Errorf("the log says %s", text)
	}
}
