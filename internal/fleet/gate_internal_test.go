package fleet

import (
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/xpyd/xpyd/internal/trust"
)

// TestRoute: another router's server comes in by the user and password that are
// configured, else by the secret, and by nothing else.
func TestRoute(t *testing.T) {
	s, other := trust.NewSecret(), trust.NewSecret()
	ring, err := trust.NewRing(s)
	if err != nil {
		t.Fatal(err)
	}
	f := func(g *gate, user, password string, want bool) {
		t.Helper()
		if got := g.route(&server.ClientOpts{Username: user, Password: password}); got != want {
			t.Errorf("%s %s: %t", user, password, got)
		}
	}
	token, routes := s.Token(trust.Cluster, ""), ring.Gate(trust.Cluster, "")
	bySecret := &gate{routes: routes}
	f(bySecret, "", token, true)
	f(bySecret, "", other.Token(trust.Cluster, ""), false)
	f(bySecret, "", s.Token(trust.HTTP, ""), false)
	f(bySecret, "", "", false)
	byName := &gate{routes: routes, user: "u", password: "p"}
	f(byName, "u", "p", true)
	f(byName, "u", "q", false)
	f(byName, "v", "p", false)
	f(byName, "u\x00p", "", false)
	f(byName, "", "", false)
	f(byName, "", token, false)
	f(&gate{routes: routes, password: "p"}, "", "p", true)
	f(&gate{routes: routes, password: "p"}, "", "", false)
}
