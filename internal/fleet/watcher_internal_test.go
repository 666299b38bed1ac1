package fleet

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// TestTickTells: whoever waits for a change hears of one that a tick makes, also
// when loads have changed since the last one.
func TestTickTells(t *testing.T) {
	w, err := Watch(WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.AddStatic(*worker("a", 1), Static); err != nil {
		t.Fatal(err)
	}
	changed := w.Changed()
	w.change(func(now time.Time) {
		w.reg.end(w.reg.members["a"], Suspect, causeSilence, "", now)
		w.reg.stale = true
		w.tick(now)
	})
	select {
	case <-changed:
	default:
		t.Error("nobody was told")
	}
}

// TestProbesGoOn: a member that NATS does not hear is probed for as long as it answers, at most once
// in a second.
func TestProbesGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		probes := 0
		w, err := Watch(WatcherConfig{Probe: func(_ context.Context, i *Instance) error {
			if probes++; i.ID != "a" {
				t.Errorf("%s is probed", i.ID)
			}
			return nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		w.change(func(now time.Time) {
			w.reg.link.Up, w.reg.witnessed = true, time.Hour
			w.reg.announce(worker("a", 1), NATS, now)
			w.reg.announce(worker("static", 1), Static, now)
			w.reg.members["a"].heard = w.reg.witnessed - suspectAfter/2 - 1
		})
		const seconds = 2 * probesAtOnce
		time.Sleep(seconds * suspectAfter)
		w.Close()
		if probes < seconds-2 || probes > seconds+1 {
			t.Errorf("%d probes in %d seconds", probes, seconds)
		}
		if m := w.Snapshot().Get("a"); len(w.slots) != 0 || m == nil || m.State != Live {
			t.Errorf("%d are under way, a is %+v", len(w.slots), m)
		}
	})
}

// TestCloseAwaitsProbes: when a watcher is closed no probe is under way any more.
func TestCloseAwaitsProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		over := false
		w, err := Watch(WatcherConfig{Probe: func(ctx context.Context, _ *Instance) error {
			<-ctx.Done()
			time.Sleep(time.Second)
			over = true
			return ctx.Err()
		}})
		if err != nil {
			t.Fatal(err)
		}
		w.change(func(now time.Time) {
			w.reg.link.Up, w.reg.witnessed = true, time.Hour
			w.reg.announce(worker("a", 1), NATS, now)
			w.reg.members["a"].heard = w.reg.witnessed - suspectAfter/2 - 1
		})
		time.Sleep(suspectAfter / 2)
		if w.Close(); !over {
			t.Error("a probe is under way")
		}
	})
}

// TestProbePatience: an answer to a probe counts if it comes within 0.8 s.
func TestProbePatience(t *testing.T) {
	for takes, counts := range map[time.Duration]bool{790 * time.Millisecond: true, 810 * time.Millisecond: false} {
		synctest.Test(t, func(t *testing.T) {
			w, err := Watch(WatcherConfig{Probe: func(ctx context.Context, _ *Instance) error {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(takes):
					return nil
				}
			}})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			start := time.Now()
			w.change(func(now time.Time) {
				w.reg.link.Up, w.reg.witnessed = true, time.Hour
				w.reg.announce(worker("a", 1), NATS, now)
				w.reg.members["a"].heard = w.reg.witnessed - suspectAfter/2 - 1
			})
			time.Sleep(2 * suspectAfter)
			if m := w.Snapshot().Get("a"); m == nil || m.Heard.After(start) != counts {
				t.Errorf("an answer that takes %v: %+v", takes, m)
			}
		})
	}
}

// TestApplyNothing: that nobody heard a question is no bad message; another one without a word is.
func TestApplyNothing(t *testing.T) {
	w, err := Watch(WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	inst, err := json.Marshal(worker("a", 1))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		status, data string
		refused      float64
		members      int
	}{{noResponders, "", 0, 0}, {"", "", 1, 0}, {"100", "", 2, 0}, {noResponders, string(inst), 2, 1}} {
		m := &nats.Msg{Subject: subjectReply + "t", Data: []byte(c.data), Header: nats.Header{"Status": {c.status}}}
		w.change(func(now time.Time) { w.apply(m, now) })
		if n := testutil.ToFloat64(w.metrics.refused); n != c.refused || len(w.Snapshot().Members) != c.members {
			t.Errorf("status %q with %d bytes: %v refused, %d members", c.status, len(c.data), n, len(w.Snapshot().Members))
		}
	}
}
