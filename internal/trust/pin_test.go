package trust_test

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/trust"
)

// meet connects two ends and returns what each says of it.
func meet(t *testing.T, client, server *tls.Config) (asked, answered error) {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	for _, c := range []net.Conn{a, b} {
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	go func() {
		s := tls.Server(b, server)
		err := s.Handshake()
		if err == nil {
			_, err = io.WriteString(s, "x")
		}
		done <- err
		b.Close()
	}()
	c := tls.Client(a, client)
	asked = c.Handshake()
	if asked == nil { // of a key that is refused it hears with the first byte
		_, asked = io.ReadFull(c, make([]byte, 1))
	}
	a.Close()
	return asked, <-done
}

// TestPinned: two ends of one secret meet, and nobody else.
func TestPinned(t *testing.T) {
	one, two, other := trust.NewSecret(), trust.NewSecret(), trust.NewSecret()
	ring, err := trust.NewRing(two, one)
	if err != nil {
		t.Fatal(err)
	}
	client := func(s trust.Secret) *tls.Config {
		c, err := trust.PinnedClient(s)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	server := ring.PinnedServer()
	for _, s := range []trust.Secret{one, two} {
		if a, b := meet(t, client(s), server); a != nil || b != nil {
			t.Errorf("%v: %v, %v", s, a, b)
		}
	}
	if a, b := meet(t, client(other), server); !trust.Refused(a) || !trust.Refused(b) {
		t.Errorf("a secret that is not the ring's: %v, %v", a, b)
	}
	if a, b := meet(t, &tls.Config{InsecureSkipVerify: true}, server); !trust.Refused(a) || !trust.Refused(b) {
		t.Errorf("no name: %v, %v", a, b)
	}
	// Who knows the ID alone is refused by his key, or for lack of one.
	knows := client(other)
	knows.ServerName, knows.VerifyConnection = one.ID()+".xpyd", nil
	if a, b := meet(t, knows, server); a == nil || !trust.Refused(b) {
		t.Errorf("another key: %v, %v", a, b)
	}
	knows.Certificates = nil
	if a, b := meet(t, knows, server); a == nil || b == nil {
		t.Errorf("no key: %v, %v", a, b)
	}
	// A server's own key is none of a client's.
	mirror, err := server.GetConfigForClient(&tls.ClientHelloInfo{ServerName: one.ID() + ".xpyd"})
	if err != nil {
		t.Fatal(err)
	}
	knows.Certificates = mirror.Certificates
	if a, b := meet(t, knows, server); a == nil || !trust.Refused(b) {
		t.Errorf("the server's own key: %v, %v", a, b)
	}
	// A server of another fleet.
	mirror.ClientAuth, mirror.VerifyConnection = tls.NoClientCert, nil
	if a, _ := meet(t, client(two), mirror); !trust.Refused(a) {
		t.Errorf("a server of the older secret alone, by the newer: %v", a)
	}
	if err := ring.Set(two); err != nil {
		t.Fatal(err)
	}
	if a, b := meet(t, client(one), server); !trust.Refused(a) || !trust.Refused(b) {
		t.Errorf("a retired secret: %v, %v", a, b)
	}
	if trust.Refused(nil) || trust.Refused(io.EOF) || trust.Refused(errors.New("x")) {
		t.Error("no refusal is one")
	}
}

// TestPinnedPeers: servers meet while a secret is replaced in one after the other.
func TestPinnedPeers(t *testing.T) {
	one, two, other := trust.NewSecret(), trust.NewSecret(), trust.NewSecret()
	f := func(want bool, dials, dialled []trust.Secret) {
		t.Helper()
		a, err := trust.NewRing(dials...)
		if err != nil {
			t.Fatal(err)
		}
		b, err := trust.NewRing(dialled...)
		if err != nil {
			t.Fatal(err)
		}
		asked, answered := meet(t, a.PinnedPeers(), b.PinnedPeers())
		if (asked == nil) != want || (answered == nil) != want {
			t.Errorf("%v to %v: %v, %v", dials, dialled, asked, answered)
		}
	}
	f(true, []trust.Secret{one}, []trust.Secret{one})
	f(true, []trust.Secret{one}, []trust.Secret{two, one})
	f(true, []trust.Secret{two, one}, []trust.Secret{one})
	f(true, []trust.Secret{two, one}, []trust.Secret{two, one})
	f(true, []trust.Secret{two}, []trust.Secret{two, one})
	f(false, []trust.Secret{one}, []trust.Secret{two})
	f(false, []trust.Secret{other}, []trust.Secret{two, one})
	f(false, []trust.Secret{other, two}, []trust.Secret{one})
}
