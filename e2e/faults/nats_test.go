package faults

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestFaultsNATS: an external NATS is killed, and stopped, for longer than the
// silence that kills a worker. Nobody dies, every request is answered rightly,
// the status says that the link is down, and afterwards all is as before.
func TestFaultsNATS(t *testing.T) {
	t.Parallel()
	nats := cluster.StartNATS(t)
	s := open(t, asks(60), "--nats", nats.URL)
	restart := func() { nats.Restart(t) } // the new process outlives a subtest
	for round := range half(rounds(t)) {
		t.Run(fmt.Sprintf("%d/killed", round), func(t *testing.T) { s.outage(t, nats.Kill, restart) })
		t.Run(fmt.Sprintf("%d/stopped", round), func(t *testing.T) {
			s.outage(t, func() { nats.Signal(syscall.SIGSTOP) }, func() { nats.Signal(syscall.SIGCONT) })
		})
	}
	t.Run("decode dies meanwhile", func(t *testing.T) {
		nats.Kill()
		cluster.Wait(t, silence, "link is down", func() error { return s.link(false) })
		s.fault(t, fleet.Decode, syscall.SIGKILL, restart)
	})
	s.settled(t)
}

func (s *scene) outage(t *testing.T, begin, end func()) {
	t.Helper()
	before, err := s.Fleet()
	if err != nil {
		t.Fatal(err)
	}
	const streams = 16 // nobody is to die of the load, either
	l := startLoad(t, s.Router, s.asks, streams)
	l.warmTo(t, streams)
	begin()
	at := time.Now()
	cluster.Wait(t, silence, "link is down", func() error { return s.link(false) })
	noticed := time.Since(at)
	s.hold(t, before, time.Until(at.Add(silence+time.Second)))
	out, _, code := s.CLI(t, "status")
	if want := "nats down for"; code != 0 || !contains(out, want) {
		t.Errorf("status: %d, no %q in\n%s", code, want, out)
	}
	end()
	back := time.Now()
	cluster.Wait(t, readyAgain, "link is up", func() error { return s.link(true) })
	took := time.Since(back)
	s.hold(t, before, silence+time.Second)
	results := l.stop()
	for _, r := range results {
		if !r.Good() || r.Text != r.want {
			t.Errorf("%v\n got %q\nwant %q\n%s", r.Reply, r.Text, r.want, r.body)
		}
	}
	cluster.Wait(t, afterKnown+slack, "ledgers empty", s.Idle)
	t.Logf("%d answered; link down noticed after %v, up again after %v", len(results), noticed.Round(time.Millisecond), took.Round(time.Millisecond))
}

func (s *scene) link(up bool) error {
	f, err := s.Fleet()
	if err == nil && f.Link.Up != up {
		err = fmt.Errorf("link up: %v", f.Link.Up)
	}
	return err
}

// hold checks for d that everybody who was there before lives.
func (s *scene) hold(t *testing.T, before *cluster.Fleet, d time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		now, err := s.Fleet()
		if err != nil {
			t.Fatal(err)
		}
		for i := range before.Instances {
			old := &before.Instances[i]
			if m := now.Get(old.ID); m == nil || m.Epoch != old.Epoch || m.State != fleet.Live && m.State != fleet.Suspect {
				t.Fatalf("%s did not survive: %+v", old.ID, m)
			}
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
	}
}
