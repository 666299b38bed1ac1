package fleet_test

import (
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
)

func revoked(ids ...string) func(*fleet.Snapshot) bool {
	return func(s *fleet.Snapshot) bool { return slices.Equal(s.Revoked, ids) }
}

// TestRevocationsSpread: what one router is told all hear: the other router, those
// who are there, and who comes later. The embedded server lets go of who is shut out.
func TestRevocationsSpread(t *testing.T) {
	noLeak(t)
	ring, err := trust.NewRing(trust.NewSecret())
	if err != nil {
		t.Fatal(err)
	}
	s := startServer(t, fleet.ServerConfig{Ring: ring})
	named := func(name string) *fleet.Conn {
		c, err := fleet.Connect(fleet.ConnConfig{URL: s.ClientURL(), Name: name, Ring: ring})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close(t.Context()) })
		return c
	}
	first := watch(t, fleet.WatcherConfig{Conn: named("router"), Leads: true})
	second := watch(t, fleet.WatcherConfig{Conn: named("router"), Leads: true})
	bad := named("bad")
	announce(t, bad, instance("bad", fleet.Prefill))
	announce(t, named("good"), instance("good", fleet.Decode))
	there := watch(t, fleet.WatcherConfig{Conn: named("good")})
	for _, w := range []*fleet.Watcher{first, second, there} {
		eventually(t, w, "join", func(s *fleet.Snapshot) bool { return is("bad", fleet.Live)(s) && is("good", fleet.Live)(s) })
	}
	if err := first.Revoke("bad"); err != nil {
		t.Fatal(err)
	}
	for _, w := range []*fleet.Watcher{first, second, there} {
		eventually(t, w, "revoked", revoked("bad"))
		eventually(t, w, "gone", func(s *fleet.Snapshot) bool { m := s.Get("bad"); return m == nil || m.State == fleet.Gone && m.Revoked })
	}
	if err := s.Revoke([]string{"bad"}); err != nil {
		t.Fatal(err)
	}
	within(t, "its connection stays", func() bool { return !bad.Link().Up })

	later := named("later")
	w := watch(t, fleet.WatcherConfig{Conn: later})
	announce(t, later, instance("later", fleet.Decode))
	eventually(t, w, "a newcomer hears of it", revoked("bad"))

	if err := second.Unrevoke("bad"); err != nil { // whoever says so
		t.Fatal(err)
	}
	if err := s.Revoke(nil); err != nil {
		t.Fatal(err)
	}
	for _, w := range []*fleet.Watcher{first, second, there, w} {
		eventually(t, w, "not revoked", revoked())
		eventually(t, w, "back", is("bad", fleet.Live))
	}
}
