package worker

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
)

type opens struct{}

func (opens) Open(context.Context, string, kvconn.PeerID) (*kvconn.Session, error) { return nil, nil }

// TestPathsOfTheGone: how a worker is reached is announced until it is gone, dead or another run
// of it, and no longer.
func TestPathsOfTheGone(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	watcher, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	w := &Worker{log: log, fleet: &membership{watcher: watcher}}
	ways, err := way.Open([]way.Kind{way.Network(tcp.New(nil))}, way.Auto, way.Pool{}, log)
	if err != nil {
		t.Fatal(err)
	}
	said := make(chan string, 1)
	if w.chooser, err = way.NewChooser(way.Config{Ways: ways, Recv: opens{}, Find: w.fleet.reachedBy, Publish: func(s string) { said <- s }, Log: log, Register: prometheus.NewRegistry()}); err != nil {
		t.Fatal(err)
	}
	w.fleet.begin(w)
	defer func() {
		if err := w.fleet.close(t.Context()); err != nil {
			t.Error(err)
		}
		w.chooser.Close()
	}()
	says := func(when, want string) {
		t.Helper()
		select {
		case got := <-said:
			if got != want {
				t.Errorf("%s: %q, want %q", when, got, want)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: nothing, want %q", when, want)
		}
	}
	p := fleet.Instance{ID: "p", Role: fleet.Prefill, URL: "http://127.0.0.1:1", KVAddr: "127.0.0.1:2", Dialect: "native", Model: "m"}
	add := func() {
		t.Helper()
		p.Epoch++
		if err := watcher.AddStatic(p, fleet.Static); err != nil {
			t.Fatal(err)
		}
	}
	for name, ends := range map[string]func(){
		"gone": func() { watcher.Remove("p", "test") }, "dead": func() { watcher.ReportDead("p", p.Epoch, "test") }, "another run": add,
	} {
		add()
		if _, err := w.chooser.Open(t.Context(), p.KVAddr, kvconn.PeerID{ID: "p", Epoch: p.Epoch}); err != nil {
			t.Error(err)
		}
		says("before it is "+name, "p tcp")
		ends()
		says(name, "")
	}
}

// TestIsMember: a peer is trusted with what is private as the run of a worker that the fleet has.
func TestIsMember(t *testing.T) {
	if (&Worker{}).isMember(kvconn.PeerID{ID: "p", Epoch: 1}) {
		t.Error("a worker without a fleet has members")
	}
	watcher, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Close()
	w := &Worker{fleet: &membership{watcher: watcher}}
	if err := watcher.AddStatic(fleet.Instance{ID: "p", Epoch: 2, Role: fleet.Prefill, URL: "http://127.0.0.1:1", KVAddr: "127.0.0.1:2", Dialect: "native", Model: "m"}, fleet.Static); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[kvconn.PeerID]bool{{ID: "p", Epoch: 2}: true, {ID: "p", Epoch: 1}: false, {ID: "p"}: false, {ID: "q", Epoch: 2}: false} {
		if w.isMember(id) != want {
			t.Errorf("%v is a member: %t", id, !want)
		}
	}
	watcher.ReportDead("p", 2, "test")
	if w.isMember(kvconn.PeerID{ID: "p", Epoch: 2}) {
		t.Error("a dead one is a member")
	}
}
