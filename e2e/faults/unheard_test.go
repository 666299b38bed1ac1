package faults

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// firewall carries connections to a NATS server. Once closed to workers it lets
// nothing of theirs through, and tells nobody.
type firewall struct {
	forwarder
	addr   string
	closed bool // guarded by mu
}

func newFirewall(t *testing.T, server string) *firewall {
	t.Helper()
	f := &firewall{}
	f.addr = f.start(t, "127.0.0.1:0", server, f.carry)
	return f
}

// carry carries one client's bytes; it says who it is in the first of them.
func (f *firewall) carry(client, server net.Conn) {
	var once sync.Once
	known := make(chan struct{})
	router := false
	pass := func(from, to net.Conn, look bool) {
		defer client.Close()
		defer server.Close()
		buf := make([]byte, 4096)
		for {
			n, err := from.Read(buf)
			if err != nil {
				once.Do(func() { close(known) })
				return
			}
			if look {
				once.Do(func() { router = bytes.Contains(buf[:n], []byte(`"name":"router"`)); close(known) })
			}
			if f.cut() {
				if <-known; !router {
					continue
				}
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
	}
	f.wg.Go(func() { pass(server, client, false) })
	pass(client, server, true)
}

func (f *firewall) cut() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.closed
}

func (f *firewall) set(closed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = closed
}

// TestFaultsUnheard: NATS is lost on the workers' side alone. Nobody dies and
// requests go on; one that is stopped meanwhile is found and ended as ever.
func TestFaultsUnheard(t *testing.T) {
	t.Parallel()
	nats := cluster.StartNATS(t)
	addr := nats.URL[strings.LastIndex(nats.URL, "@")+1:]
	f := newFirewall(t, addr)
	s := open(t, asks(60), "--nats", strings.Replace(nats.URL, addr, f.addr, 1))
	before, err := s.Fleet()
	if err != nil {
		t.Fatal(err)
	}
	all := func(state fleet.State) error {
		now, err := s.Fleet()
		if err != nil {
			return err
		}
		for i := range before.Instances {
			old := &before.Instances[i]
			if m := now.Get(old.ID); m == nil || m.State != state {
				return fmt.Errorf("%s is not %s: %+v", old.ID, state, m)
			}
		}
		return nil
	}

	const streams = 16 // nobody is to die of the load, either
	l := startLoad(t, s.Router, s.asks, streams)
	l.warmTo(t, streams)
	f.set(true)
	cluster.Wait(t, silence, "workers unheard", func() error { return all(fleet.Unheard) })
	s.survive(t, before, 10*time.Second)
	if out, _, _ := s.CLI(t, "status"); !contains(out, "NATS does not hear it, its HTTP answers") {
		t.Errorf("status says\n%s", out)
	}
	results := l.stop()
	for _, r := range results {
		if !r.Good() || r.Text != r.want {
			t.Errorf("%v\n got %q\nwant %q\n%s", r.Reply, r.Text, r.want, r.body)
		}
	}
	t.Logf("%d answered", len(results))

	victim := before.Get("decode-0")
	at := time.Now()
	if err := syscall.Kill(victim.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	known := s.awaitDeath(t, victim, at)
	if cluster.Late(known.Sub(at), silence+time.Second+slack) {
		t.Errorf("a stopped worker was known to be dead after %v", known.Sub(at))
	}
	cluster.Wait(t, silence+time.Second+slack, "it is killed", func() error {
		if cluster.Alive(victim.PID) {
			return errors.New("it lives")
		}
		return nil
	})
	if err := s.Ready(); err != nil {
		t.Error(err)
	}
	f.set(false)
	cluster.Wait(t, 3*readyAgain, "workers heard again", func() error { return errors.Join(all(fleet.Live), s.ServingIs(2, 2)) })
	cluster.Wait(t, afterKnown+slack, "ledgers empty", s.Idle)
}

// survive checks for d that the same processes serve as before.
func (s *scene) survive(t *testing.T, before *cluster.Fleet, d time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		now, err := s.Fleet()
		if err != nil {
			t.Fatal(err)
		}
		for i := range before.Instances {
			old := &before.Instances[i]
			if m := now.Get(old.ID); m == nil || m.Epoch != old.Epoch || m.State == fleet.Dead || m.State == fleet.Gone {
				t.Fatalf("%s did not survive: %+v", old.ID, m)
			}
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
	}
}
