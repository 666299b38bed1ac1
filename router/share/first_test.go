package share

import (
	"log/slog"
	"testing"
	"time"
)

// TestFirst: of routers that hear each other one is first, of those that are preferred if there are any.
func TestFirst(t *testing.T) {
	for range 50 {
		routers := make([]*Sharer, 3)
		for i := range routers {
			routers[i] = New(DefaultConfig(), nil, nil, slog.New(slog.DiscardHandler))
		}
		routers[1].Prefer()
		for _, a := range routers {
			for _, b := range routers {
				if a != b {
					a.peers.apply(&message{from: b.id, kind: kindHello, seq: 1}, time.Now())
				}
			}
		}
		if routers[0].First() || !routers[1].First() || routers[2].First() {
			t.Fatalf("%x %x %x", routers[0].id, routers[1].id, routers[2].id)
		}
		for _, r := range []*Sharer{routers[0], routers[2]} { // the preferred one is gone
			r.peers.forget(routers[1].id)
		}
		if routers[0].First() == routers[2].First() {
			t.Fatalf("of two both, or none: %x %x", routers[0].id, routers[2].id)
		}
	}
}
