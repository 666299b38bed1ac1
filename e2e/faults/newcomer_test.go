package faults

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestNewcomerServes: workers that join under light load have answered a request
// 2 s after they are ready, though their share of the work has only begun to rise.
func TestNewcomerServes(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t)
	list := recorded(t, r, 8)
	time.Sleep(10 * time.Second) // pick.slow_start: among workers as new as itself nobody starts slowly
	l := startLoad(t, r, list, 4)
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		r.Worker(t, role, "--id", "late-"+string(role))
	}
	r.WaitServing(t, 20*time.Second, 2, 2)
	start := time.Now()
	for _, id := range []string{"late-prefill", "late-decode"} {
		l.answeredIn(t, 2*time.Second, 1, func(res result) bool { return res.Prefill == id || res.Decode == id })
		t.Logf("%s has answered a request %v after it began to serve", id, time.Since(start))
	}
	for _, res := range l.stop() {
		if !res.Good() || res.Text != res.want {
			t.Errorf("%v\n got %q\nwant %q", res.Reply, res.Text, res.want)
		}
	}
}
