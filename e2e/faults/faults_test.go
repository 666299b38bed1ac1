// Package faults tests that no fault makes a request hang, get a wrong
// answer or leave something behind: real processes are killed and stopped
// under load, and started, drained and ended in every way a user can.
package faults

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// How long things may take (ARCHITECTURE.md, "When something dies"), and what the load
// here may add; see cluster.Late.
const (
	silence    = 3 * time.Second // until a stopped worker is dead
	afterKnown = time.Second     // until all consequences have followed
	readyAgain = 5 * time.Second // after the death is known
	beat       = 250 * time.Millisecond
	slack      = 750 * time.Millisecond

	streams = 50
)

// rounds is how often each fault is injected.
func rounds(t *testing.T) int {
	n, err := strconv.Atoi(cmp.Or(os.Getenv("XPYD_FAULT_ROUNDS"), "2"))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// half is for tests whose rounds take long.
func half(rounds int) int { return (rounds + 1) / 2 }

// config writes a router configuration that keeps few idle connections, so
// that descriptors can be counted.
func config(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(path, []byte("idle_conns: 4\nlog: {level: info}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// scene is a cluster under test with its load.
type scene struct {
	*cluster.Router
	asks []*ask
	base map[string]cluster.Counts
}

// open starts 2 + 2 workers, counts what the processes hold at rest, records
// the right answers, and checks them under the load without a fault.
func open(t *testing.T, list []*ask, args ...string) *scene {
	t.Helper()
	s := &scene{Router: cluster.Up(t, append([]string{"--prefill", "2", "--decode", "2", "--config", config(t)}, args...)...), asks: list}
	s.WaitServing(t, 10*time.Second, 2, 2)
	var err error
	if s.base, err = s.Counts(); err != nil {
		t.Fatal(err)
	}
	record(t, s.Router, s.asks)
	l := startLoad(t, s.Router, s.asks, streams)
	l.answered(t, streams, nil)
	for _, r := range l.stop() {
		if !r.Good() || r.Text != r.want {
			t.Fatalf("without a fault: %v\n%s", r.Reply, r.body)
		}
	}
	cluster.Wait(t, time.Second+slack, "ledgers empty before any fault", s.Idle)
	return s
}

// settled checks that nothing was leaked since open, when no request had come yet:
// two peers may since have opened a session to a worker each, of five goroutines.
// Whoever leaks something a fault is found after forty or eighty of them. The HTTP
// servers keep idle goroutines for ten seconds, and the router idle connections for
// fifteen; after few rounds that wait is left out, and as much is allowed for.
func (s *scene) settled(t *testing.T) {
	t.Helper()
	allowed := 8 + 2*5
	if rounds(t) <= 2 {
		allowed += streams + 10
	}
	err := cluster.Poll(30*time.Second, func() error {
		now, err := s.Counts()
		if err != nil {
			return err
		}
		return cluster.Grown(s.base, now, allowed)
	})
	now, _ := s.Counts()
	for _, id := range slices.Sorted(maps.Keys(now)) {
		t.Logf("%s: %+v, before the faults %+v", id, now[id], s.base[id])
	}
	if err != nil {
		t.Errorf("leaked: %v\n%s", err, s.Goroutines())
	}
	l, err := s.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	if n := l.Quarantined(); n > 0 {
		t.Errorf("%d blocks are still quarantined", n)
	}
}

// figures of one round, for the log.
type figures struct {
	inFlight, done     int
	retries, continued int
	known, ready       time.Duration // after the fault, and after it is known
}

func (f figures) String() string {
	return fmt.Sprintf("%d in flight, %d answered in all, %d attempts repeated, %d streams taken over, known after %v, whole again %v later",
		f.inFlight, f.done, f.retries, f.continued, f.known.Round(time.Millisecond), f.ready.Round(time.Millisecond))
}

// TestFaults: kill -9 and kill -STOP of a prefill and of a decode worker under
// 50 concurrent requests. XPYD_FAULT_ROUNDS sets how often each (2).
func TestFaults(t *testing.T) {
	t.Parallel()
	s := open(t, asks(60))
	s.rounds(t, rounds(t))
	s.settled(t)
}

// TestFaultsPrefilling: the same on a larger model with longer prompts, where
// most requests have sent no byte when the fault comes.
func TestFaultsPrefilling(t *testing.T) {
	t.Parallel()
	s := open(t, promptAsks(24), "--model", mediumModel(t), "--threads", "1")
	s.rounds(t, half(rounds(t)))
	s.settled(t)
}

// rounds injects every fault of a worker, again and again.
func (s *scene) rounds(t *testing.T, n int) {
	for round := range n {
		for _, f := range []struct {
			role   fleet.Role
			signal syscall.Signal
		}{
			{fleet.Prefill, syscall.SIGKILL}, {fleet.Decode, syscall.SIGKILL},
			{fleet.Prefill, syscall.SIGSTOP}, {fleet.Decode, syscall.SIGSTOP},
		} {
			name := map[syscall.Signal]string{syscall.SIGKILL: "kill", syscall.SIGSTOP: "stop"}[f.signal]
			t.Run(fmt.Sprintf("%d/%s %s", round, name, f.role), func(t *testing.T) { s.fault(t, f.role, f.signal, nil) })
		}
	}
}

// fault injects one fault and checks all that must follow; later, if any, is
// called once the death is known, and without it nobody can come back.
func (s *scene) fault(t *testing.T, role fleet.Role, signal syscall.Signal, later func()) {
	t.Helper()
	victim := string(role) + "-0"
	before, err := s.Fleet()
	if err != nil {
		t.Fatal(err)
	}
	old := before.Get(victim)
	l := startLoad(t, s.Router, s.asks, streams)
	l.warm(t)
	var f figures
	f.inFlight, f.retries, f.continued = int(l.inFlight.Load()), -s.retried(t), -s.continued(t)
	ends := s.ends(t, role)
	at := time.Now()
	if err := syscall.Kill(old.PID, signal); err != nil {
		t.Fatal(err)
	}
	known := s.awaitDeath(t, old, at)
	if f.known = known.Sub(at); signal == syscall.SIGKILL {
		if cluster.Late(f.known, afterKnown+slack) || s.ends(t, role) == ends {
			t.Errorf("a killed worker was known to be dead after %v, by its end: %t", f.known, s.ends(t, role) > ends)
		}
		known = at // a death is known at once
	} else if cluster.Late(f.known, silence+beat+slack) {
		t.Errorf("a stopped worker was known to be dead after %v", f.known)
	}
	whole := known
	if later != nil {
		later()
		whole = time.Now()
	}
	s.awaitWhole(t, old, known, whole)
	f.ready = time.Since(whole)
	results := l.stop()
	f.done = len(results)
	f.retries += s.retried(t)
	f.continued += s.continued(t)
	for _, r := range results {
		if bad := judge(r); bad != "" {
			t.Errorf("%s: %v\n%s", bad, r.Reply, r.body)
		}
	}
	cluster.Wait(t, afterKnown+slack, "ledgers empty", s.Idle)
	t.Log(f)
}

// continued is how many streams were taken over so far.
func (s *scene) continued(t *testing.T) (n int) {
	t.Helper()
	for _, reason := range []string{"transport", "timeout", "dead", "silent", "error"} {
		v, err := s.Metric(fmt.Sprintf("xpyd_router_takeovers_total{outcome=\"continued\",reason=%q}", reason))
		if err != nil {
			t.Fatal(err)
		}
		n += int(v)
	}
	return n
}

// retried is how many attempts the router repeated so far.
func (s *scene) retried(t *testing.T) int {
	t.Helper()
	n, err := s.Metric("xpyd_router_retries_total")
	if err != nil {
		t.Fatal(err)
	}
	return int(n)
}

// ends is how many workers of a role were seen to end, or to be another run:
// at once, and not by their silence.
func (s *scene) ends(t *testing.T, role fleet.Role) (n float64) {
	t.Helper()
	for _, cause := range []string{"report", "replaced"} {
		v, err := s.Metric(fmt.Sprintf("xpyd_fleet_events_total{cause=%q,role=%q}", cause, role))
		if err != nil {
			t.Fatal(err)
		}
		n += v
	}
	return n
}

// awaitDeath returns when the router said first that old is not alive.
func (s *scene) awaitDeath(t *testing.T, old *cluster.Instance, at time.Time) time.Time {
	t.Helper()
	var known time.Time
	cluster.Wait(t, silence+3*time.Second, "death known", func() error {
		f, err := s.Fleet()
		if err != nil {
			return err
		}
		if m := f.Get(old.ID); m != nil && m.Epoch == old.Epoch && m.State != fleet.Dead && m.State != fleet.Gone {
			return fmt.Errorf("%s is %s", m.ID, m.State)
		} else if known = time.Now(); m != nil && m.Epoch == old.Epoch {
			known = m.Since // exact
		}
		return nil
	})
	if known.Before(at) {
		t.Fatalf("%s was dead %v before the fault", old.ID, at.Sub(known))
	}
	return known
}

// awaitWhole waits until the victim's successor serves and checks that
// everything that a survivor had with the victim is over in time.
func (s *scene) awaitWhole(t *testing.T, old *cluster.Instance, known, from time.Time) {
	t.Helper()
	err := cluster.PollSince(known, afterKnown+slack, func() error { return s.rid(old) })
	if err != nil {
		t.Errorf("%v after the death of %s: %v", time.Since(known), old.ID, err)
	}
	// All of 2 + 2, not only a pair: the successor's probe goes before the
	// users' prompts that wait.
	err = cluster.PollSince(from, readyAgain, func() error { return errors.Join(s.Ready(), s.ServingIs(2, 2)) })
	if err != nil {
		t.Errorf("%v after the death of %s: %v", time.Since(known), old.ID, err)
	}
}

// rid is nil when no survivor holds a ticket with old any more.
func (s *scene) rid(old *cluster.Instance) error {
	l, err := s.Ledger()
	if err != nil {
		return err
	}
	for id, w := range l.Fleet {
		for _, ticket := range w.Tickets {
			if ticket.Peer.ID == old.ID && ticket.Peer.Epoch == old.Epoch {
				return fmt.Errorf("%s holds a ticket: %+v", id, ticket)
			}
		}
	}
	return nil
}

// judge says what is wrong with an answer: another worker of the role is always there, so all must
// be whole.
func judge(r result) string {
	switch {
	case r.Good() && r.Text == r.want:
		return ""
	case r.Good():
		return fmt.Sprintf("wrong text\n got %q\nwant %q", r.Text, r.want)
	case !strings.HasPrefix(r.want, r.Text):
		return fmt.Sprintf("wrong text before the error\n got %q\nwant %q", r.Text, r.want)
	case r.First.IsZero() || r.Status != 200:
		return "failed though no byte had been sent"
	case r.Problem == "":
		return "stopped without an error event"
	}
	return "nobody went on with it"
}
