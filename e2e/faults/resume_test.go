package faults

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestFaultsResume: a worker that nobody supervises is stopped until it is
// dead for everybody, and comes back with all that it was about to do. No
// answer is wrong, it serves again, and nothing stays in quarantine.
func TestFaultsResume(t *testing.T) {
	t.Parallel()
	r := cluster.Alone(t, "--config", config(t), "--nats", cluster.StartNATS(t).URL)
	procs := map[string]*cluster.Process{}
	model := mediumModel(t)
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		for i := range 2 {
			id := fmt.Sprintf("%s-%d", role, i)
			procs[id] = r.Worker(t, role, "--id", id, "--model", model)
		}
	}
	r.WaitServing(t, 30*time.Second, 2, 2)
	s := &scene{Router: r, asks: promptAsks(24)}
	record(t, r, s.asks)
	var err error
	if s.base, err = s.Counts(); err != nil {
		t.Fatal(err)
	}
	for _, victim := range []string{"prefill-0", "decode-0"} {
		t.Run(victim, func(t *testing.T) {
			before, err := s.Fleet()
			if err != nil {
				t.Fatal(err)
			}
			old := before.Get(victim)
			l := startLoad(t, r, s.asks, streams)
			l.warm(t)
			var f figures
			at := time.Now()
			f.inFlight, f.retries, f.continued = int(l.inFlight.Load()), -s.retried(t), -s.continued(t)
			procs[victim].Signal(syscall.SIGSTOP)
			known := s.awaitDeath(t, old, at)
			f.known = known.Sub(at)
			time.Sleep(time.Second)
			held, err := s.Ledger()
			if err != nil {
				t.Fatal(err)
			}
			procs[victim].Signal(syscall.SIGCONT)
			whole := time.Now()
			cluster.Wait(t, readyAgain, "resumed worker serves", func() error { return s.ServingIs(2, 2) })
			f.ready = time.Since(whole)
			time.Sleep(time.Second) // with it
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
			cluster.Wait(t, afterKnown+slack, "no quarantine", func() error {
				now, err := s.Ledger()
				if err == nil && now.Quarantined() > 0 {
					err = fmt.Errorf("%d blocks", now.Quarantined())
				}
				return err
			})
			t.Logf("%v; %d blocks were in quarantine meanwhile", f, held.Quarantined())
		})
	}
	s.settled(t)
}
